"""Masks of trained parameters: names, each with a learning-rate multiplier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.layers import GatedDeltaNet, MemoryLayer
from membydesign.retrofit.replace import TEACHER_RECURRENCE, checked_places, mixer_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from membydesign.models import MemoryForCausalLM

MLP = ("gate_proj", "up_proj", "down_proj")
"""SwiGLU weights that Phase B trains. The paper names `gate_proj` and `down_proj` of a checkpoint whose `gate_proj`
holds both gate and up (docs/howto/checkpoints.md); here they are two tensors."""

_RECURRENCE = {GatedDeltaNet: TEACHER_RECURRENCE, MemoryLayer: ("drift", "noises")}
_SHARED = ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "o_norm")


def phase_a_mask(model: MemoryForCausalLM, layers: Sequence[int]) -> dict[str, float]:
    """Select what Phase A trains: recurrence, projections, output gate and norm of some sequence layers.

    As in the paper's list, short convolutions and the norms before layers are not trained.

    Args:
        model: student; or a Gated DeltaNet as a control, whose own recurrence (`a_proj`, `b_proj`, `A_log`, `dt_bias`)
            then replaces the Bayesian Layer's.
        layers: layer indices, counted from 0.

    Returns:
        Learning-rate multiplier, 1, by parameter name.
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
    """Select what Phase B trains, also for the control without replacement: as Phase A, plus the SwiGLU of the blocks.

    Args:
        model: student; or a Gated DeltaNet as a control.
        layers: layer indices, counted from 0.
        mlp: SwiGLU weights to train.
        mlp_multiplier: learning-rate multiplier of the SwiGLU.

    Returns:
        Learning-rate multipliers by parameter name.
    """
    mask = phase_a_mask(model, layers)
    for name in mlp:
        if name not in MLP:
            raise ValueError(f"mlp: expected names among {', '.join(MLP)}, got {name!r}")
    if not mlp_multiplier > 0:
        raise ValueError(f"mlp_multiplier: expected a number above 0, got {mlp_multiplier}")
    known = dict(model.named_parameters())
    names = [f"model.layers.{i}.mlp.{name}.weight" for i in sorted(layers) for name in mlp]
    return mask | {name: mlp_multiplier for name in names if name in known}


def freeze(model: nn.Module, mask: Mapping[str, float]) -> None:
    """Make exactly the parameters of a mask require gradients."""
    named = dict(model.named_parameters())
    unknown = [name for name in mask if name not in named]
    if unknown:
        raise ValueError(f"mask: expected names of parameters of the model, got {', '.join(unknown)}")
    for name, parameter in named.items():
        parameter.requires_grad_(name in mask)
