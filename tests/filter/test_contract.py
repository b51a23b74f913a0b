"""The contract, for every rule with every transition that it can have, in every way that it can be filtered."""

import torch

from membydesign.filter.native import dense
from membydesign.testing import DesignContract
from problems import DESIGNS

assert dense.available(torch.float64, by_token=True), "these tests want a C compiler"

WAYS = {
    "Recurrent": {"method": "recurrent"},
    "Chunk": {"method": "chunk", "chunk_size": 4},  # so that a few tokens are several chunks, the last one ragged
    "Native": {"method": "chunk", "backend": "native"},
    "NativeChunk": {"method": "chunk", "backend": "native", "chunk_size": 4},
}

LONG_LOOPS = {
    "dense-diagonal",
    "dense_2_groups-rotation_real",
    "diagonal-diagonal",
    "reset-scalar",
    "per_column_reset-identity",
    "additive-identity",
    "additive_dense-rotation",
}
"""Designs that go through 65,536 tokens one by one, which takes a while; chunk by chunk they all do."""

OF_THE_LOOP = (
    "test_the_loop_equals_an_oracle",
    "test_every_kernel_equals_the_loop",
    "test_bad_arguments_are_refused_by_name",
)
"""What the contract tests once for each design, whatever the method."""

for _name, _design in DESIGNS.items():
    for _way, _options in WAYS.items():
        if _way == "Recurrent" and _name not in LONG_LOOPS:
            _options = {**_options, "test_65536_tokens_in_float32": None}
        if _way != "Recurrent":  # it tests every kernel already
            _options = {**_options, **dict.fromkeys(OF_THE_LOOP)}
        _title = f"Test{_way}" + "".join(part.capitalize() for part in _name.replace("-", "_").split("_"))
        globals()[_title] = type(_title, (DesignContract,), {"design": _design, **_options})
