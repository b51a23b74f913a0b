"""Relatives whose gain no covariance gives: delta rules with gates of their own, drifts that erase, normalised sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.design.delta_product import DeltaProduct
from membydesign.design.feedback import KeyFeedback
from membydesign.design.gated_delta_rule_2 import GatedDeltaRule2
from membydesign.design.mlstm import MLSTMMemory
from membydesign.design.model import DesignModel
from membydesign.design.preconditioned import PreconditionedDelta
from membydesign.design.reset import MeanOnly
from membydesign.design.transition import DecayAndRemoval
from membydesign.design.write import LatentInput

if TYPE_CHECKING:
    from membydesign.design.protocol import Design

ROWS: dict[str, Design] = {
    "preconditioned_deltanet": PreconditionedDelta(),
    "gated_deltanet_2": GatedDeltaRule2(),
    "deltaproduct": DeltaProduct(),
    "comba": DesignModel(
        KeyFeedback(),
        LatentInput(),
        MeanOnly(),
        title="Comba",
        citation="Hu, Pan, Du, Lan, Tang, Wen, Liang & Sun, Comba: Improving Bilinear RNNs with Closed-loop Control, "
        "NeurIPS 2025",
        note="the write β_t k_t v_tᵀ has r_t² = λ_t (1/β_t − 1), and memory is read at q_t − d k_t; exact for a memory "
        "whose feedback is a known drift: what is erased is chosen, not inferred from an error",
    ),
    "rwkv7": DesignModel(
        DecayAndRemoval(),
        LatentInput(),
        MeanOnly(),
        title="RWKV-7",
        citation="Peng et al., RWKV-7 Goose with Expressive Dynamic State Evolution, 2025",
        note="κ_t is the removal key, b_t = a_t ⊙ κ_t; the write is noiseless, r_t² = 0; exact for a memory whose "
        "removal is a known drift: what is erased is chosen, not inferred from an error",
    ),
    "mlstm": MLSTMMemory(),
}
