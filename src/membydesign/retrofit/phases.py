"""Both phases as modules: tokens in, the loss out, so that one loop trains them on one device or many."""

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
    """A student that is trained and a teacher that is not a part of it: neither saved, nor replicated, nor sharded.

    Args:
        teacher: a Gated DeltaNet; it is put into `eval()`, and follows the module from device to device.
        student: what `retrofit` made of it.
    """

    def __init__(self, teacher: MemoryForCausalLM, student: MemoryForCausalLM) -> None:
        super().__init__()
        self._both = (teacher.eval(), student)  # a tuple: not registered

    @property
    def teacher(self) -> MemoryForCausalLM:
        """The model that is learned from."""
        return self._both[0]

    @property
    def student(self) -> MemoryForCausalLM:
        """The model that learns."""
        return self._both[1]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for model in self._both:
            model._apply(fn, recurse)
        return super()._apply(fn, recurse)


class PhaseA(_Distillation):
    """Phase A for the training loop: its parameters are those of the replaced layers, and nothing else of the student.

    Its loss is the sum over layers, each of which has its own gradients; with `clip_groups=PhaseA.layer_of` the loop
    clips them apart, so that each layer is trained as if alone.

    Example:
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
        """The sum over layers of NMSE + 0.05·(1 − cosine), for each row of a batch: from [B,T] to [B]."""
        return phase_a_losses(self.teacher, self.student, {"input_ids": input_ids}).losses.sum(0)

    @staticmethod
    def layer_of(name: str) -> str:
        """The layer that a parameter belongs to, by the parameter's name."""
        return name.split(".")[1]


class PhaseB(_Distillation):
    """Phase B for the training loop: its parameters are the student's, of which most are frozen.

    Args:
        teacher: a Gated DeltaNet.
        student: what `retrofit` made of it, and Phase A of that.
        matched: see `phase_b_loss`.
        mask: what is trained; None for `phase_b_mask`.
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
        """λ_KL·KL + λ_b·(mean NMSE over layers), for each row of a batch, [B].

        Args:
            input_ids: a batch, [B,T].
            weights: λ_KL and λ_b of the step, the same in every row, so that they come with the batch, [B,2].
        """
        of_step = LossWeights(*weights[0].tolist())
        batch = {"input_ids": input_ids}
        return phase_b_loss(self.teacher, self.language_model, batch, of_step, matched=self.matched).losses
