"""The contract, for every rule with every transition that it can have."""

from contract import DesignContract
from problems import DESIGNS

for _name, _design in DESIGNS.items():
    _title = "Test" + "".join(part.capitalize() for part in _name.replace("-", "_").split("_"))
    globals()[_title] = type(_title, (DesignContract,), {"design": _design})
