"""Both phases as modules, tokens in and losses out, for the training loop on one device or many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from membydesign.retrofit.losses import phase_a_losses, phase_b_loss
from membydesign.retrofit.masks import freeze, phase_a_mask, phase_b_mask
from membydesign.retrofit.replace import mixer_of, replaced_layers
from membydesign.retrofit.schedule import LossWeights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.models import MemoryForCausalLM


class _Distillation(nn.Module):
    """A trained student and its teacher, which is not registered: it is neither saved, replicated nor sharded.

    Args:
        teacher: Gated DeltaNet; it is put into `eval()` mode and moves between devices with the module.
        student: model that `retrofit` made of it.
    """

    def __init__(self, teacher: MemoryForCausalLM, student: MemoryForCausalLM) -> None:
        super().__init__()
        self._both = (teacher.eval(), student)  # in a tuple, so that they are not registered

    @property
    def teacher(self) -> MemoryForCausalLM:
        """Model to learn from."""
        return self._both[0]

    @property
    def student(self) -> MemoryForCausalLM:
        """Model that learns."""
        return self._both[1]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for model in self._both:
            model._apply(fn, recurse)
        return super()._apply(fn, recurse)


class PhaseA(_Distillation):
    """Phase A for the training loop. Its parameters are those of the replaced layers only.

    The loss is the sum over layers, whose gradients are independent; with `clip_groups=PhaseA.layer_of` the loop also
    clips them separately, so that each layer is trained as if it were alone.

    Examples:
        >>> from membydesign.models import MemoryConfig, MemoryForCausalLM
        >>> import torch
        >>> from membydesign.retrofit import retrofit
        >>> config = MemoryConfig(vocab_size=9, hidden_size=8, layers=["gated_deltanet"] * 2, num_heads=2)
        >>> teacher = MemoryForCausalLM(config)
        >>> phase = PhaseA(teacher, retrofit(teacher, [1]))
        >>> phase(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2])
    """

    def __init__(self, teacher: MemoryForCausalLM, student: MemoryForCausalLM) -> None:
        super().__init__(teacher, student)
        places = replaced_layers(teacher, student)
        freeze(student, phase_a_mask(student, places))
        self.layers = nn.ModuleDict({str(i): mixer_of(student, i) for i in places})

    def forward(self, input_ids: Tensor) -> Tensor:
        """Sum NMSE + 0.05·(1 − cosine) over layers, for each row of a batch, [B,T] to [B]."""
        return phase_a_losses(self.teacher, self.student, {"input_ids": input_ids}).losses.sum(0)

    @staticmethod
    def layer_of(name: str) -> str:
        """Return the layer that a parameter belongs to, given the parameter's name."""
        return name.split(".")[1]


class PhaseB(_Distillation):
    """Phase B for the training loop. Its parameters are the student's, most of which are frozen.

    Args:
        teacher: Gated DeltaNet.
        student: model that `retrofit` made of it, trained in Phase A.
        matched: see `phase_b_loss`.
        mask: trained parameters with learning-rate multipliers; None for `phase_b_mask`.
    """

    def __init__(
        self,
        teacher: MemoryForCausalLM,
        student: MemoryForCausalLM,
        *,
        matched: Literal["tokens", "layer_inputs"] = "tokens",
        mask: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(teacher, student)
        self.matched: Literal["tokens", "layer_inputs"] = matched
        mask = phase_b_mask(student, replaced_layers(teacher, student)) if mask is None else mask
        freeze(student, mask)
        self.language_model = student
        self.multipliers = {f"language_model.{name}": multiplier for name, multiplier in mask.items()}

    def forward(self, input_ids: Tensor, weights: Tensor) -> Tensor:
        """Compute λ_KL·KL + λ_b·(mean NMSE over layers) for each row of a batch, [B].

        Args:
            input_ids: tokens, [B,T].
            weights: λ_KL and λ_b of the step, repeated in every row so that they can be part of the batch, [B,2].
        """
        step_weights = LossWeights(*weights[0].tolist())
        batch = {"input_ids": input_ids}
        return phase_b_loss(self.teacher, self.language_model, batch, step_weights, matched=self.matched).losses
