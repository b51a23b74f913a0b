"""Some layers of a pretrained Gated DeltaNet become Bayesian Layers."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from membydesign.design import DampedRotation
from membydesign.layers import GatedDeltaNet, MemoryLayer
from membydesign.layers.parameters import Gate
from membydesign.models import MemoryConfig, MemoryForCausalLM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from membydesign.layers import SequenceLayer

TransitionName = Literal["rotation", "rotation_real", "diagonal", "scalar"]
Convolution = Literal["keep", "drop"]
Start = Literal["teacher", "fresh"]
WriteNoise = Literal["softplus", "gate"]

TEACHER_RECURRENCE = ("a_proj", "b_proj", "A_log", "dt_bias")
"""What a Gated DeltaNet has for its decays and gates, which a Bayesian Layer does not inherit."""

SMALL_TURN = 0.01
"""How far angles start from zero, as a part of where they usually start, if they cannot start at zero."""


def retrofit(
    teacher: MemoryForCausalLM,
    layers: Sequence[int],
    *,
    transition: TransitionName = "rotation",
    convolution: Convolution = "keep",
    start: Start = "teacher",
    write_noise: WriteNoise = "softplus",
) -> MemoryForCausalLM:
    r"""A copy of a Gated DeltaNet in which some layers are Bayesian Layers with a dense covariance.

    They inherit $W_q, W_k, W_v, W_o$, the output gate $W_g$ and the norm's weight. Transition and noises are new. All
    else is a copy, and the teacher stays as it is. Queries are not divided by $\sqrt D$ in a Bayesian Layer, so its
    norm gets D times the teacher's ε: the same function. What is trained of it, `membydesign.retrofit.freeze` says.

    Args:
        teacher: a model whose layers at these indices are Gated DeltaNets; on any device, in any floating-point type.
        layers: indices from 0, each once.
        transition: of the memory. "rotation" turns pairs of the D rows that the teacher's keys have, and writes and
            reads all of them: D×D covariances. "rotation_real" puts those D entries on the real rows of 2D, with
            process noise there alone: 2D×2D covariances. "diagonal" and "scalar" only fade.
        convolution: "keep" inherits the short convolutions and the SiLU behind them (the SiLU alone, as convolutions of
            width one with weights of one, if the teacher has no others). "drop" leaves both out.
        start: of transition and noises. "teacher": the drift is the teacher's own, $A_t = \alpha_t I$, and the write
            noise is that of its gate, or follows it (see `start_from`). "fresh": as any Bayesian Layer starts, and
            nothing depends on the input.
        write_noise: $r_t^2$ of the input. "softplus": $\mathrm{softplus}(W x_t + b) + \epsilon$, as in the paper.
            "gate": $e^{-(W x_t + b)}$, which is large where a gate is closed.

    Example:
        >>> config = MemoryConfig(vocab_size=99, hidden_size=32, layers=["gated_deltanet"] * 3, num_heads=2)
        >>> teacher = MemoryForCausalLM(config)
        >>> retrofit(teacher, [1]).config.layers
        ['gated_deltanet', 'bayesian_layer_rotating', 'gated_deltanet']
    """
    for name, value, known in (
        ("transition", transition, TransitionName),
        ("convolution", convolution, Convolution),
        ("start", start, Start),
        ("write_noise", write_noise, WriteNoise),
    ):
        if value not in get_args(known):
            raise ValueError(f"{name}: expected one of {', '.join(get_args(known))}, got {value!r}")
    if not isinstance(teacher, MemoryForCausalLM):
        raise ValueError(f"teacher: expected a MemoryForCausalLM, got {type(teacher).__name__}")
    places = checked_places(teacher, layers, GatedDeltaNet)
    old: list[GatedDeltaNet] = [mixer_of(teacher, i) for i in places]
    name = "bayesian_layer_rotating" if transition.startswith("rotation") else "bayesian_layer"
    config = _config(teacher.config, places, name, _options(old[0], transition, convolution, write_noise))
    student = copy.deepcopy(teacher)
    student.config = student.model.config = config
    for i, mixer in zip(places, old, strict=True):
        like = mixer.q_proj.weight
        # Without storage at first: nothing random is drawn, and what is neither inherited nor started is noticed.
        made = config.make_layer(name, device="meta")
        assert isinstance(made, MemoryLayer)
        new = made.to_empty(device=like.device).to(like.dtype).train(mixer.training)
        inherit(new, mixer)
        start_fresh(new)
        if start == "teacher":
            start_from(new, mixer)
        student.model.layers[i].mixer = new
    return student


def mixer_of(model: MemoryForCausalLM, i: int) -> Any:
    """The sequence layer of a block."""
    return model.model.layers[i].mixer


def replaced_layers(teacher: MemoryForCausalLM, student: MemoryForCausalLM) -> list[int]:
    """The indices at which a student has another layer than its teacher."""
    ours, theirs = student.config.layers, teacher.config.layers
    if len(ours) != len(theirs):
        raise ValueError(f"student: expected {len(theirs)} layers, as the teacher has, got {len(ours)}")
    found = [i for i, (new, old) in enumerate(zip(ours, theirs, strict=True)) if new != old]
    if not found:
        raise ValueError("student: expected some other layers than the teacher's, got the same")
    return found


def inherit(new: MemoryLayer, old: GatedDeltaNet) -> None:
    """Copy projections, output gate, norm and, where the new layer has them, convolutions."""
    shared = old.num_heads // old.num_key_heads

    def of_heads(weight: Tensor) -> Tensor:
        """Rows of key heads, repeated for the heads of values that share them."""
        return weight.unflatten(0, (old.num_key_heads, -1)).repeat_interleave(shared, 0).flatten(0, 1)

    found = {name: x for name, x in old.state_dict().items() if name.partition(".")[0] not in TEACHER_RECURRENCE}
    if not new.convolutions:
        found = {name: x for name, x in found.items() if "conv1d" not in name}
    found = {name: of_heads(x) if name.startswith(("q_", "k_")) else x for name, x in found.items()}
    if not old.convolutions:  # their SiLU alone
        found |= {name: torch.ones_like(x) for name, x in new.state_dict().items() if "conv1d" in name}
    missing, unexpected = new.load_state_dict(found, strict=False)
    assert not unexpected, unexpected
    assert all(name.startswith(("drift.", "noises.")) for name in missing), missing


def start_fresh(new: MemoryLayer) -> None:
    """The starting values that every Bayesian Layer has: nothing depends on the input."""
    for module in (new.drift, *new.noises.values()):
        module.reset_parameters()  # pyright: ignore[reportCallIssue]


def start_from(new: MemoryLayer, old: GatedDeltaNet) -> None:
    r"""Let transition and write noise begin with the teacher's.

    $$\Delta_t = \mathrm{softplus}(W_a x_t + b_{dt}), \qquad A_{\mathrm{radius}} = A_{\log}, \qquad
    A_{\mathrm{angle}} = 0, \qquad r_t^2 = e^{-W_b x_t} \text{ or } \mathrm{softplus}(-W_b x_t) + \epsilon$$

    The first three make $A_t = \alpha_t I$ exactly. A gate $\beta_t = \sigma(W_b x_t)$ is a write noise of
    $e^{-W_b x_t}$ beside a variance of one, which softplus follows where writes are sure; where a gate is closed,
    softplus is far smaller and lets more be written. Process noise starts as in any Bayesian Layer. With noise on real
    rows alone the angles start small instead: from zero no gradient would lead away, since nothing that was written
    ever reaches an imaginary row.
    """
    drift, write = new.drift, new.noises["write_noise"]
    with torch.no_grad():
        drift.W_A.copy_(old.a_proj.weight)
        drift.A_step.copy_(old.dt_bias)
        rates = old.A_log if drift.A_radius.ndim == 1 else old.A_log[:, None]
        drift.A_radius.copy_(rates.expand_as(drift.A_radius))
        if isinstance(drift.transition, DampedRotation):
            drift.A_angle.mul_(SMALL_TURN if drift.transition.noise == "real" else 0)
        gate = isinstance(write.source, Gate)
        write.weight.copy_(old.b_proj.weight if gate else -old.b_proj.weight)  # pyright: ignore
        write.bias.zero_()  # pyright: ignore


def checked_places(model: MemoryForCausalLM, layers: Sequence[int], *kinds: type[SequenceLayer]) -> list[int]:
    """Indices of layers of some classes, in order; refuses all others, and an index that comes twice."""
    count, places = len(model.model.layers), list(layers)
    if not places:
        raise ValueError("layers: expected at least one index, got none")
    for i in places:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < count:
            raise ValueError(f"layers: expected indices from 0 to {count - 1}, got {i!r}")
        if places.count(i) > 1:
            raise ValueError(f"layers: expected each index once, got {i} {places.count(i)} times")
        if not isinstance(mixer_of(model, i), kinds):
            known = " or a ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"layers: expected indices of a {known}, got {i}, where there is {model.config.layers[i]}")
    return sorted(places)


def _options(
    old: GatedDeltaNet, transition: TransitionName, convolution: Convolution, write_noise: WriteNoise
) -> dict[str, Any]:
    width = old.convolutions[0].width if old.convolutions else 1
    assert old.o_norm.eps is not None
    return {
        "transition": transition,
        "num_heads": old.num_heads,
        "head_dim": 2 * old.key_dim if transition == "rotation_real" else old.key_dim,
        "value_dim": old.value_dim,
        "short_convolution": width if convolution == "keep" else None,
        "output_gate": old.g_proj is not None,
        "norm_eps": old.key_dim * old.o_norm.eps,
        **({"write_noise": {"gate": 0.5}} if write_noise == "gate" else {}),
    }


def _config(config: MemoryConfig, places: list[int], name: str, options: dict[str, Any]) -> MemoryConfig:
    """The teacher's configuration with other layers; what is left of the teacher's own keeps its options."""
    assert config.layer_options is not None
    names = [name if i in places else old for i, old in enumerate(config.layers)]
    if name in config.layers and config.layer_options.get(name, {}) != options:
        raise ValueError(
            f"teacher: expected no {name} among its layers, or one with options {options}, "
            f"got {config.layer_options.get(name, {})}"
        )
    kept = {old: more for old, more in config.layer_options.items() if old in names}
    return MemoryConfig.from_dict({**config.to_dict(), "layers": names, "layer_options": {**kept, name: options}})
