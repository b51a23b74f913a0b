"""Every row of the paper's Table 1, every ablation, and designs beyond them: `catalogue["gated_deltanet"]`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, overload

from membydesign.design.categories import CategoricalMemory
from membydesign.design.counts import CountMemory
from membydesign.design.covariance import Dense
from membydesign.design.diagonal import Diagonal
from membydesign.design.hidden_markov import HiddenMarkov
from membydesign.design.model import DesignModel
from membydesign.design.protocol import Design
from membydesign.design.reset import MeanOnly, PerColumnReset, Reset
from membydesign.design.student_t import StudentTWrite
from membydesign.design.transition import DiagonalDecay, Identity, ScalarDecay
from membydesign.design.unknown_scale import UnknownScale
from membydesign.design.write import LatentInput, ObserveMemory

_THIS_PAPER = "Dowling, Jeon, Savin & Park, Memory by Design: Probabilistic Sequence Layers"
_DELTA_GATE = "a delta rule that states a gate has r_t² = λ_t (1/gate − ‖k_t‖²), see theory.write_noise_of_gate"
_UNIT_WRITE = "the usual unit-gain form is the noiseless write, r_t² = 0"

_BAYESIAN_LAYER = DesignModel(
    DiagonalDecay(),
    ObserveMemory(),
    Dense(),
    title="Bayesian Layer",
    citation=f"{_THIS_PAPER}, Proposition 1",
    note="the paper's A_t is diagonal or a damped rotation: use replace(transition=…) for the others",
)

_ROWS: dict[str, Design] = {
    "bayesian_layer": _BAYESIAN_LAYER,
    "bayesian_layer_diagonal": DesignModel(
        DiagonalDecay(),
        ObserveMemory(),
        Diagonal(),
        title="Bayesian Layer, diagonal covariance",
        citation=f"{_THIS_PAPER}, §4.1 (ablation)",
        note="the Bayesian Layer with every off-diagonal entry discarded after each update",
    ),
    "covariance_reset": DesignModel(
        DiagonalDecay(),
        ObserveMemory(),
        Reset(),
        title="Bayesian Layer, covariance reset",
        citation=f"{_THIS_PAPER}, Proposition 2 (ablation)",
        note="the paper's ablation resets to its process noise: prior_variance λ_t = ℓ_t²",
    ),
    "unknown_scale": UnknownScale(
        _BAYESIAN_LAYER,
        citation="West & Harrison, Bayesian Forecasting and Dynamic Models, 1997 (unknown observational variance)",
        note="for streams whose noise has an unknown size: reads and gains are the Bayesian Layer's, and its variances "
        "are scaled by how well values were predicted; UnknownScale(base, …) wraps other designs, with discount=True "
        "for a scale that drifts",
    ),
    "robust_writes": DesignModel(
        DiagonalDecay(),
        StudentTWrite(),
        Dense(),
        title="Bayesian Layer, robust writes",
        citation="Meinhold & Singpurwalla, Robustification of Kalman Filter Models, JASA 1989 (Student-t noise)",
        note="for streams with outliers: the more surprising a write, the less it is trusted; filtered token by token, "
        "since the effective noise depends on values",
    ),
    "deltanet": DesignModel(
        Identity(),
        ObserveMemory(),
        Reset(),
        title="DeltaNet",
        citation="Schlag, Irie & Schmidhuber, ICML 2021; Yang, Wang, Zhang, Shen & Kim, NeurIPS 2024",
        note=_DELTA_GATE,
    ),
    "gated_deltanet": DesignModel(
        ScalarDecay(),
        ObserveMemory(),
        Reset(),
        title="Gated DeltaNet",
        citation="Yang, Kautz & Hatamizadeh, ICLR 2025",
        note=_DELTA_GATE,
    ),
    "kda": DesignModel(
        DiagonalDecay(),
        ObserveMemory(),
        Reset(),
        title="KDA (Kimi Linear)",
        citation="Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, 2025",
        note=_DELTA_GATE,
    ),
    "longhorn": DesignModel(
        Identity(),
        ObserveMemory(),
        PerColumnReset(),
        title="Longhorn",
        citation="Liu, Wang, Wu, Feng, Stone & Liu, ICLR 2025",
        note="the closed form of Longhorn's objective, with λ_t,j / r_t² its β_t,j; to run as an elementwise scan, "
        "Longhorn itself keeps only the diagonal of k_t k_tᵀ",
    ),
    "linear_attention": DesignModel(
        Identity(),
        LatentInput(),
        MeanOnly(),
        title="Linear Attention",
        citation="Katharopoulos, Vyas, Pappas & Fleuret, ICML 2020",
        note=f"{_UNIT_WRITE}; without the normaliser of the 2020 paper",
    ),
    "retnet": DesignModel(
        ScalarDecay(),
        LatentInput(),
        MeanOnly(),
        title="RetNet",
        citation="Sun, Dong, Huang, Ma, Xia, Xue, Wang & Wei, 2023",
        note=f"log_decay is constant for each head; {_UNIT_WRITE}",
    ),
    "gla": DesignModel(
        DiagonalDecay(),
        LatentInput(),
        MeanOnly(),
        title="GLA (diagonal form)",
        citation="Yang, Wang, Shen, Panda & Kim, ICML 2024",
        note=_UNIT_WRITE,
    ),
    "mamba2": DesignModel(
        ScalarDecay(),
        LatentInput(),
        MeanOnly(),
        title="Mamba-2 / SSD",
        citation="Dao & Gu, ICML 2024",
        note=f"k_t = B_t, q_t = C_t, v_t = Δ_t x_t; {_UNIT_WRITE}",
    ),
    "count_memory": CountMemory(),
    "categorical_memory": CategoricalMemory(),
    "hidden_markov": HiddenMarkov(),
}


LinearGaussian = Literal[
    "bayesian_layer",
    "bayesian_layer_diagonal",
    "covariance_reset",
    "robust_writes",
    "deltanet",
    "gated_deltanet",
    "kda",
    "longhorn",
    "linear_attention",
    "retnet",
    "gla",
    "mamba2",
]
"""The rows that are a `DesignModel`, for type checkers."""


class Catalogue(Mapping[str, Design]):
    """The designs of the paper's Table 1, its ablations, and designs beyond them, by name.

    A read-only mapping from name to `Design`. An unknown name is answered with the names that exist.

    Example:
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
