"""The architectures of the paper's Table 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.design.model import DesignModel
from membydesign.design.reset import MeanOnly, PerColumnReset, Reset
from membydesign.design.transition import DiagonalDecay, Identity, ScalarDecay
from membydesign.design.write import LatentInput, ObserveMemory

if TYPE_CHECKING:
    from membydesign.design.protocol import Design

_DELTA_GATE = "a delta rule that states a gate has r_t² = λ_t (1/gate − ‖k_t‖²), see theory.write_noise_of_gate"
_UNIT_WRITE = "the usual unit-gain form is the noiseless write, r_t² = 0"

ROWS: dict[str, Design] = {
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
}
