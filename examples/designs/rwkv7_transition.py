r"""RWKV-7's transition: rows fade, and memory forgets what it holds at a key of the model's own choice.

    A_t = diag(w_t) − b_t κ̂_tᵀ,        b_t = a_t ⊙ κ̂_t,   κ̂_t = κ_t / ‖κ_t‖
    S_t = A_t S_{t-1} + k_t v_tᵀ

With a_t = 1 and w_t = 1 the content at κ̂_t is erased before the write, as the delta rule does at its write key; a_t
between 0 and 1 erases some rows more than others. Since κ̂_t has length one and w_t and a_t are at most one, no product
of these matrices explodes where RWKV-7 lets w_t go (above 0.545).

You write the parameters of A_t with their bounds, `apply` (A_t x) and the equation. With that any write and covariance
filter it, and a `MemoryLayer` learns its parameters: bounds decide how (a sigmoid for [0, 1], a linear map for κ), and
`parameter_sources` where they start.

`row_drift` is optional: it tells the chunked kernels the same A_t as a decay of rows and a removal, so that whole
sequences run in chunks, in torch and in native code, with additive writes. Kernels accumulate decays in logarithms; the
user's `retention` becomes one here. Where it is 0, and has none, the kernels decline and the loop over tokens runs.
`idle` values make A_t = I, for the tokens that pad packed sequences.

    design = DesignModel(RWKV7Transition(), LatentInput(), MeanOnly())
    filter_sequence(design, q, k, v, retention=w, erase_key=κ, erase_rate=a, prior_variance=1.0, write_noise=0.0)

The library's own `DecayAndRemoval` takes log w, κ and b as they are, and gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from membydesign import Equation, Learned, Removal, RowDrift, StepParameter, Transition

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RWKV7Transition(Transition):
    r"""Rows fade and one direction is erased: $A_t = \mathrm{diag}(w_t) - (a_t \odot \hat\kappa_t)\,\hat\kappa_t^\top$.

    Step parameters, [B,T,H,D]: `retention` w in [0, 1]; `erase_key` κ, of any length; `erase_rate` a in [0, 1].
    """

    step_parameters = (
        StepParameter("retention", "w_t", axes=("D",), bound="[0, 1]", idle=1.0),
        StepParameter("erase_key", "κ_t", axes=("D",)),
        StepParameter("erase_rate", "a_t", axes=("D",), bound="[0, 1]", idle=0.0),
    )
    parameter_sources = {
        **Transition.parameter_sources,
        "retention": Learned(0.97),
        "erase_rate": Learned(0.5),
    }
    multiplications_per_entry = 3

    @property
    def matrix(self) -> Equation:
        """A_t = diag(w_t) − (a_t ⊙ κ̂_t) κ̂_tᵀ."""
        return Equation(
            "A_t = diag(w_t) − (a_t ⊙ κ̂_t) κ̂_tᵀ,  κ̂_t = κ_t / ‖κ_t‖",
            r"\mathbf{A}_t = \mathrm{diag}(\mathbf{w}_t) - "
            r"(\mathbf{a}_t \odot \hat{\boldsymbol{\kappa}}_t) \hat{\boldsymbol{\kappa}}_t^\top",
        )

    def apply(self, x: Tensor, step: Mapping[str, Tensor]) -> Tensor:
        """w ⊙ x − b (κ̂ᵀ x), with parameters [..., D]; x [..., D, n]."""
        removal = self._removal(step)
        erased = (removal.key[..., None] * x).sum(-2, keepdim=True)
        return step["retention"][..., None] * x - removal.direction[..., None] * erased

    def row_drift(self, parameters: Mapping[str, Tensor], k: Tensor) -> RowDrift:
        """The same for a whole sequence, [B,T,H,D]: log w, and what is removed."""
        return RowDrift(parameters["retention"].log(), removal=self._removal(parameters))

    @staticmethod
    def _removal(parameters: Mapping[str, Tensor]) -> Removal:
        """κ̂, which is 0 for κ = 0, and b."""
        key = parameters["erase_key"]
        key = key * (key.square().sum(-1, keepdim=True) + 1e-12).rsqrt()
        return Removal(key, parameters["erase_rate"] * key)
