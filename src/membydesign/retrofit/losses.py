"""Distillation losses: distances of a student's layers and predictions from its teacher's."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from membydesign.layers.parameters import wide
from membydesign.models.token_losses import SLICE, model_inputs, token_divergences
from membydesign.retrofit.replace import mixer_of, replaced_layers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from membydesign.models import MemoryForCausalLM
    from membydesign.models.token_losses import Batch
    from membydesign.retrofit.schedule import LossWeights

COSINE_WEIGHT = 0.05
"""Weight of the cosine term in Phase A."""

VARIANCE_FLOOR = 1e-6
"""Added to the variance that an NMSE is divided by."""


class Boundary(NamedTuple):
    """Input and output of a sequence layer, without padding.

    Attributes:
        x: input, after the block's norm, [B,T,hidden_size].
        y: output, before it is added to the residual stream, [B,T,hidden_size].
        cu_seqlens: boundaries of packed sequences; None if not packed.
    """

    x: Tensor
    y: Tensor
    cu_seqlens: Tensor | None


@contextmanager
def recorded(model: MemoryForCausalLM, layers: Sequence[int]) -> Iterator[dict[int, Boundary]]:
    """Record input and output of the latest call of some sequence layers, inside this context."""
    boundaries: dict[int, Boundary] = {}

    def hook_of(i: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: tuple[Any, ...]) -> None:
            boundaries[i] = Boundary(args[0], out[0], kwargs.get("cu_seqlens"))

        return hook

    handles = [mixer_of(model, i).register_forward_hook(hook_of(i), with_kwargs=True) for i in layers]
    try:
        yield boundaries
    finally:
        for handle in handles:
            handle.remove()


def nmse(y: Tensor, target: Tensor) -> Tensor:
    r"""Compute $\mathrm{mean}\,(y - \hat y)^2 / (\mathrm{Var}(\hat y) + 10^{-6})$ for each row of a batch, [B].

    Mean and variance are over all entries of all tokens of a row, and the variance divides by their number, so that
    predicting the mean costs 1. Rows are independent: the mean over a batch does not depend on how the batch is
    distributed over processes or micro-batches.

    Args:
        y: student's output, [B,T,hidden_size].
        target: teacher's output, same shape.
    """
    y, target = wide(y).flatten(1), wide(target).flatten(1)
    return (y - target).square().mean(1) / (target.var(1, correction=0) + VARIANCE_FLOOR)


def mean_cosine(y: Tensor, target: Tensor) -> Tensor:
    """Average the cosine between two outputs [B,T,hidden_size] over the tokens of each row, [B]."""
    return F.cosine_similarity(wide(y), wide(target), dim=-1).mean(-1)


@dataclass(frozen=True)
class PhaseALosses:
    """Distance of each replaced layer from the teacher's, per row; a padded or packed batch counts as one row.

    Attributes:
        layers: indices of the n replaced layers.
        nmse: normalised mean square error, [n,B].
        cosine: mean cosine, [n,B].
    """

    layers: tuple[int, ...]
    nmse: Tensor
    cosine: Tensor

    @property
    def losses(self) -> Tensor:
        """NMSE + 0.05·(1 − cosine) of each layer, [n,B]."""
        return self.nmse + COSINE_WEIGHT * (1 - self.cosine)


def phase_a_losses(teacher: MemoryForCausalLM, student: MemoryForCausalLM, batch: Batch) -> PhaseALosses:
    """Compute the losses of Phase A: compare every replaced layer with the teacher's layer on the same input.

    The teacher runs once, without gradients. Each new layer receives the teacher's input of that layer, so that layers
    do not influence each other: the sum of their losses has the gradients that each would have alone.

    Args:
        teacher: Gated DeltaNet.
        student: model that `retrofit` made of it.
        batch: `input_ids` [B,T], and optionally `attention_mask` or `cu_seqlens`.
    """
    layers = replaced_layers(teacher, student)
    with torch.no_grad(), recorded(teacher, layers) as theirs:
        teacher.model(**model_inputs(batch), use_cache=False)
    ys = _on_inputs_of(theirs, student)
    pairs = [(ys[i], theirs[i].y) for i in layers]
    return PhaseALosses(
        tuple(layers), torch.stack([nmse(*p) for p in pairs]), torch.stack([mean_cosine(*p) for p in pairs])
    )


@dataclass(frozen=True)
class PhaseBLoss:
    """Distance of a hybrid from its teacher, per row; a padded or packed batch counts as one row.

    Attributes:
        layers: indices of the n replaced layers.
        weights: weights of the two terms.
        kl: KL(teacher ‖ student) of the next token, mean over tokens, [B].
        nmse: normalised mean square error of each replaced layer, [n,B].
    """

    layers: tuple[int, ...]
    weights: LossWeights
    kl: Tensor
    nmse: Tensor

    @property
    def losses(self) -> Tensor:
        """λ_KL·KL + λ_b·(mean NMSE over layers), [B]."""
        return self.weights.kl * self.kl + self.weights.boundary * self.nmse.mean(0)


def phase_b_loss(
    teacher: MemoryForCausalLM,
    student: MemoryForCausalLM,
    batch: Batch,
    weights: LossWeights,
    *,
    matched: Literal["tokens", "layer_inputs"] = "tokens",
    slice_size: int = SLICE,
) -> PhaseBLoss:
    """Compute the loss of Phase B: compare the whole hybrid with its teacher.

    Args:
        teacher: Gated DeltaNet.
        student: model that `retrofit` made of it.
        batch: `input_ids` [B,T], and optionally `attention_mask` or `cu_seqlens`.
        weights: weights of the step, from `PhaseBSchedule.weights`.
        matched: what teacher and student share where their layers are compared. "tokens": only the batch; each layer's
            output comes from its own model's forward pass, so the loss also sees, and corrects, errors of replaced
            layers below. "layer_inputs": the student's layers run a second time on the teacher's inputs, as in Phase A.
        slice_size: number of tokens whose logits are in memory at a time; the result does not depend on it.
    """
    if matched not in ("tokens", "layer_inputs"):
        raise ValueError(f'matched: expected "tokens" or "layer_inputs", got {matched!r}')
    layers, inputs = replaced_layers(teacher, student), model_inputs(batch)
    with torch.no_grad(), recorded(teacher, layers) as theirs:
        hidden = teacher.model(**inputs, use_cache=False).last_hidden_state
    with recorded(student, layers) as own:
        ours = student.model(**inputs, use_cache=False).last_hidden_state
    present = inputs.get("attention_mask")
    if present is not None:
        hidden, ours = hidden[present.bool()][None], ours[present.bool()][None]
    heads = teacher.lm_head.weight.detach(), student.lm_head.weight
    kl = token_divergences(hidden.flatten(0, 1), ours.flatten(0, 1), *heads, slice_size=slice_size)
    kl = kl.view(hidden.shape[:2]).mean(1)
    if matched == "tokens":
        ys = {i: own[i].y for i in layers}
        for i, y in ys.items():
            if torch.is_grad_enabled() and not y.requires_grad and _trained(student, i):
                raise ValueError(
                    f"student: expected outputs of layer {i} with gradients, got none: reentrant checkpointing hides "
                    'them; use gradient_checkpointing_enable({"use_reentrant": False}), which is the default'
                )
    else:
        ys = _on_inputs_of(theirs, student)
    return PhaseBLoss(tuple(layers), weights, kl, torch.stack([nmse(ys[i], theirs[i].y) for i in layers]))


def _trained(student: MemoryForCausalLM, i: int) -> bool:
    return any(p.requires_grad for p in mixer_of(student, i).parameters())


def _on_inputs_of(theirs: Mapping[int, Boundary], student: MemoryForCausalLM) -> dict[int, Tensor]:
    """Run a student's layers on the teacher's inputs."""
    return {i: mixer_of(student, i)(b.x, cu_seqlens=b.cu_seqlens)[0] for i, b in theirs.items()}
