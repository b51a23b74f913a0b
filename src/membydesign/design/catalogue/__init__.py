"""Every row of the paper's Table 1, every ablation, and designs beyond them: `catalogue["gated_deltanet"]`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Literal, overload

from membydesign.design.protocol import Design

if TYPE_CHECKING:
    from membydesign.design.model import DesignModel
    from membydesign.design.unknown_scale import UnknownScale

_ROWS = {
    "bayesian_layer": (
        "bayesian_layer",
        "bayesian_layer_diagonal",
        "covariance_reset",
    ),
    "uncertainty": (
        "stationary_bayesian_layer",
        "partial_reset",
        "discounted",
        "unknown_scale",
        "robust_writes",
        "block_diagonal",
        "low_rank",
    ),
    "table_one": (
        "deltanet",
        "gated_deltanet",
        "kda",
        "longhorn",
        "linear_attention",
        "retnet",
        "gla",
        "mamba2",
    ),
    "relatives": (
        "mesa_net",
        "gated_kalmanet",
        "kla",
        "palimpsa",
        "kalman_delta_isotropic",
        "kalman_delta_diagonal",
        "vla",
    ),
    "recurrences": (
        "preconditioned_deltanet",
        "gated_deltanet_2",
        "deltaproduct",
        "comba",
        "rwkv7",
        "mlstm",
    ),
    "beliefs": (
        "count_memory",
        "categorical_memory",
        "hidden_markov",
    ),
}
"""The names of all rows by the module that has them, which is imported when one of its rows is requested."""
_MODULES = {name: module for module, names in _ROWS.items() for name in names}

LinearGaussian = Literal[
    "bayesian_layer",
    "bayesian_layer_diagonal",
    "covariance_reset",
    "stationary_bayesian_layer",
    "partial_reset",
    "discounted",
    "robust_writes",
    "block_diagonal",
    "low_rank",
    "deltanet",
    "gated_deltanet",
    "kda",
    "longhorn",
    "linear_attention",
    "retnet",
    "gla",
    "mamba2",
    "kalman_delta_isotropic",
    "kalman_delta_diagonal",
    "comba",
    "rwkv7",
]
"""The rows that are a `DesignModel`, for type checkers."""


class Catalogue(Mapping[str, Design]):
    """The designs of the paper's Table 1, its ablations, and designs beyond them, by name.

    A read-only mapping from name to `Design`. An unknown name is answered with the names that exist.

    Examples:
        >>> Catalogue()["kda"].exactness
        'covariance reset'
    """

    @overload
    def __getitem__(self, name: LinearGaussian) -> DesignModel: ...

    @overload
    def __getitem__(self, name: Literal["unknown_scale"]) -> UnknownScale: ...

    @overload
    def __getitem__(self, name: str) -> Design: ...

    def __getitem__(self, name: str) -> Design:
        if name not in _MODULES:
            raise KeyError(f"no design named {name!r} in the catalogue; it has {', '.join(_MODULES)}")
        return import_module(f"{__name__}.{_MODULES[name]}").ROWS[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)

    def __repr__(self) -> str:
        return f"Catalogue({', '.join(_MODULES)})"


catalogue = Catalogue()
"""Every row of the paper's Table 1, every ablation, and designs beyond them, by name."""
