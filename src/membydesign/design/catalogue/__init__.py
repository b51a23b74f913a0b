"""Every row of the paper's Table 1, every ablation, and designs beyond them: `catalogue["gated_deltanet"]`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, overload

from membydesign.design.catalogue import bayesian_layer, beliefs, recurrences, relatives, table_one, uncertainty
from membydesign.design.protocol import Design

if TYPE_CHECKING:
    from membydesign.design.model import DesignModel
    from membydesign.design.unknown_scale import UnknownScale

_ROWS: dict[str, Design] = {
    **bayesian_layer.ROWS,
    **uncertainty.ROWS,
    **table_one.ROWS,
    **relatives.ROWS,
    **recurrences.ROWS,
    **beliefs.ROWS,
}

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
        try:
            return _ROWS[name]
        except KeyError:
            raise KeyError(f"no design named {name!r} in the catalogue; it has {', '.join(_ROWS)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(_ROWS)

    def __len__(self) -> int:
        return len(_ROWS)

    def __repr__(self) -> str:
        return f"Catalogue({', '.join(_ROWS)})"


catalogue = Catalogue()
"""Every row of the paper's Table 1, every ablation, and designs beyond them, by name."""
