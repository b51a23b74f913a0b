"""Which parameters are trained: names, each with a multiplier of the learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.layers import GatedDeltaNet, MemoryLayer
from membydesign.retrofit.replace import TEACHER_RECURRENCE, checked_places, mixer_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from membydesign.models import MemoryForCausalLM

MLP = ("gate_proj", "up_proj", "down_proj")
"""What Phase B trains of a SwiGLU. The paper names `gate_proj` and `down_proj` of a checkpoint that has gate and up in
one tensor of that name (docs/checkpoints.md); here they are two."""

_RECURRENCE = {GatedDeltaNet: TEACHER_RECURRENCE, MemoryLayer: ("drift", "noises")}
_SHARED = ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "o_norm")


def phase_a_mask(model: MemoryForCausalLM, layers: Sequence[int]) -> dict[str, float]:
    """What Phase A trains: recurrence, projections, output gate and norm of the sequence layers at some indices.

    Short convolutions and the norms before layers are not among them: the paper's list does not have them.

    Args:
        model: a student; or a Gated DeltaNet, for a control, whose own recurrence (`a_proj`, `b_proj`, `A_log`,
            `dt_bias`) then stands for the Bayesian Layer's.
        layers: indices from 0.

    Returns:
        The multiplier of the learning rate, 1, by the names of the parameters.
    """
    mask: dict[str, float] = {}
    for i in checked_places(model, layers, *_RECURRENCE):
        mixer = mixer_of(model, i)
        trained = (*_RECURRENCE[type(mixer)], *_SHARED)
        names = (name for name, _ in mixer.named_parameters() if name.partition(".")[0] in trained)
        mask |= {f"model.layers.{i}.mixer.{name}": 1.0 for name in names}
    return mask


def phase_b_mask(
    model: MemoryForCausalLM, layers: Sequence[int], *, mlp: Sequence[str] = MLP, mlp_multiplier: float = 0.1
) -> dict[str, float]:
    """What Phase B trains, and the control on the unreplaced model: as in Phase A, and the same blocks' SwiGLU.

    Args:
        model: a student; or a Gated DeltaNet, for the control.
        layers: indices from 0.
        mlp: maps of the SwiGLU that are trained.
        mlp_multiplier: of their learning rate.

    Returns:
        Multipliers of the learning rate by the names of the parameters.
    """
    mask = phase_a_mask(model, layers)
    for name in mlp:
        if name not in MLP:
            raise ValueError(f"mlp: expected names among {', '.join(MLP)}, got {name!r}")
    if not mlp_multiplier > 0:
        raise ValueError(f"mlp_multiplier: expected a number above 0, got {mlp_multiplier}")
    known = dict(model.named_parameters())
    wanted = [f"model.layers.{i}.mlp.{name}.weight" for i in sorted(layers) for name in mlp]
    return mask | {name: mlp_multiplier for name in wanted if name in known}


def freeze(model: nn.Module, mask: Mapping[str, float]) -> None:
    """Let exactly the parameters of a mask require gradients."""
    named = dict(model.named_parameters())
    unknown = [name for name in mask if name not in named]
    if unknown:
        raise ValueError(f"mask: expected names of parameters of the model, got {', '.join(unknown)}")
    for name, parameter in named.items():
        parameter.requires_grad_(name in mask)
