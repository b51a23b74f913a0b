"""Replace layers of a pretrained Gated DeltaNet by Bayesian Layers."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from membydesign.design import Gate
from membydesign.layers import GatedDeltaNet, MemoryLayer
from membydesign.models import MemoryConfig, MemoryForCausalLM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from membydesign.layers import SequenceLayer

TransitionName = Literal["rotation", "rotation_real", "diagonal", "scalar"]
ProcessNoise = Literal["learned", "stationary"]
Convolution = Literal["keep", "drop"]
Start = Literal["teacher", "fresh"]
WriteNoise = Literal["softplus", "gate"]

TEACHER_RECURRENCE = ("a_proj", "b_proj", "A_log", "dt_bias")
"""Parameters of a Gated DeltaNet's decays and gates, which a Bayesian Layer does not inherit."""

SMALL_TURN = 0.01
"""Fraction of their usual initial values at which angles start if they cannot start at zero."""


def retrofit(
    teacher: Any,
    layers: Sequence[int],
    *,
    transition: TransitionName | None = None,
    convolution: Convolution = "keep",
    start: Start = "teacher",
    write_noise: WriteNoise = "softplus",
    process_noise: ProcessNoise = "learned",
) -> Any:
    r"""Copy a Gated DeltaNet and replace some layers by Bayesian Layers with a dense covariance.

    The new layers inherit $W_q, W_k, W_v, W_o$, the output gate $W_g$ and the norm's weight. Transition and noises are
    new. Everything else is copied, and the teacher is not changed. A Bayesian Layer does not divide queries by
    $\sqrt D$, so its norm gets D times the teacher's ε, which gives the same function. `membydesign.retrofit.freeze`
    selects the parameters to train.

    The teacher may also be a Qwen3-Next, Qwen3.5, OLMo-Hybrid or Kimi Linear model of Transformers. Its layers then
    keep *all* of their parts, decays and gates included, and only the delta rule gives way to the filter. The result is
    a model of the same kind, which `from_pretrained` reads after `import membydesign.integrations.transformers`
    (docs/howto/transformers.md).

    Args:
        teacher: model whose layers at these indices are Gated DeltaNets; on any device, in any floating-point type.
        layers: distinct layer indices, counted from 0.
        transition: transition of the memory; default "rotation", for Kimi Linear "diagonal". "rotation" rotates pairs
            of the D rows of the teacher's keys, and writes and reads all of them: D×D covariances. "rotation_real" puts
            those D entries on the real rows of 2D, with process noise only there: 2D×2D covariances. "diagonal" and
            "scalar" only decay.
        convolution: "keep" inherits the short convolutions and the SiLU after them (if the teacher has none, the SiLU
            alone, as convolutions of width one with weights of one). "drop" leaves both out.
        start: initial transition and noises. "teacher": the drift is the teacher's, $A_t = \alpha_t I$, and the write
            noise matches or approximates its gate (see `start_from`). "fresh": the usual initialisation of a Bayesian
            Layer, in which nothing depends on the input.
        write_noise: how $r_t^2$ depends on the input. "softplus": $\mathrm{softplus}(W x_t + b) + \epsilon$, as in the
            paper. "gate": $e^{-(W x_t + b)}$, which is large where a gate is closed.
        process_noise: $\ell_t^2$. "learned" from the input, as in the paper. "stationary", for models of Transformers:
            $1 - \alpha_t^2$, with which a memory that knows nothing stays as unsure as it began; with "gate", its first
            write is then exactly the teacher's.

    Examples:
        >>> config = MemoryConfig(vocab_size=99, hidden_size=32, layers=["gated_deltanet"] * 3, num_heads=2)
        >>> teacher = MemoryForCausalLM(config)
        >>> retrofit(teacher, [1]).config.layers
        ['gated_deltanet', 'bayesian_layer_rotating', 'gated_deltanet']
    """
    for name, value, known in (
        ("transition", "rotation" if transition is None else transition, TransitionName),
        ("convolution", convolution, Convolution),
        ("start", start, Start),
        ("write_noise", write_noise, WriteNoise),
        ("process_noise", process_noise, ProcessNoise),
    ):
        if value not in get_args(known):
            raise ValueError(f"{name}: expected one of {', '.join(get_args(known))}, got {value!r}")
    if not isinstance(teacher, MemoryForCausalLM):
        return _foreign(teacher, layers, transition, convolution, start, write_noise, process_noise)
    if process_noise != "learned":
        raise ValueError(f'process_noise: expected "learned" for a MemoryForCausalLM, got {process_noise!r}')
    transition = transition or "rotation"
    places = checked_places(teacher, layers, GatedDeltaNet)
    old: list[GatedDeltaNet] = [mixer_of(teacher, i) for i in places]
    name = "bayesian_layer_rotating" if transition.startswith("rotation") else "bayesian_layer"
    config = _config(teacher.config, places, name, _options(old[0], transition, convolution, write_noise))
    student = copy.deepcopy(teacher)
    student.config = student.model.config = config
    for i, mixer in zip(places, old, strict=True):
        like = mixer.q_proj.weight
        # Built on the meta device: this draws no random numbers, and a parameter that is neither inherited nor
        # initialised is noticed.
        blank = config.make_layer(name, device="meta")
        assert isinstance(blank, MemoryLayer)
        new = blank.to_empty(device=like.device).to(like.dtype).train(mixer.training)
        inherit(new, mixer)
        start_fresh(new)
        if start == "teacher":
            start_from(new, mixer)
        student.model.layers[i].mixer = new
    return student


def _foreign(
    teacher: Any,
    layers: Sequence[int],
    transition: TransitionName | None,
    convolution: Convolution,
    start: Start,
    write_noise: WriteNoise,
    process_noise: ProcessNoise,
) -> Any:
    """Retrofit a model of Transformers."""
    from membydesign.integrations.transformers.hybrids import is_teacher, retrofit_transformers, teachers

    if not is_teacher(teacher):
        raise ValueError(
            f"teacher: expected a MemoryForCausalLM, or one of Transformers' {', '.join(teachers())}, got "
            f"{type(teacher).__name__}"
        )
    for name, value, only in (("convolution", convolution, "keep"), ("start", start, "teacher")):
        if value != only:
            raise ValueError(f'{name}: expected "{only}" for a model of Transformers, got {value!r}')
    if transition == "rotation_real":
        raise ValueError(
            f"transition: expected rotation, diagonal or scalar for a model of Transformers, got {transition!r}"
        )
    return retrofit_transformers(teacher, layers, transition, process_noise=process_noise, write_noise=write_noise)


def mixer_of(model: MemoryForCausalLM, i: int) -> Any:
    """Return the sequence layer of a block."""
    return model.model.layers[i].mixer


def replaced_layers(teacher: MemoryForCausalLM, student: MemoryForCausalLM) -> list[int]:
    """Return the indices at which a student's layer differs from its teacher's."""
    ours, theirs = student.config.layers, teacher.config.layers
    if len(ours) != len(theirs):
        raise ValueError(f"student: expected {len(theirs)} layers, as the teacher has, got {len(ours)}")
    indices = [i for i, (new, old) in enumerate(zip(ours, theirs, strict=True)) if new != old]
    if not indices:
        raise ValueError("student: expected some layers that differ from the teacher's, got the same")
    return indices


def inherit(new: MemoryLayer, old: GatedDeltaNet) -> None:
    """Copy projections, output gate, norm and, where the new layer has them, convolutions."""
    shared = old.num_heads // old.num_key_heads

    def of_heads(weight: Tensor) -> Tensor:
        """Repeat the rows of key heads for the value heads that share them."""
        return weight.unflatten(0, (old.num_key_heads, -1)).repeat_interleave(shared, 0).flatten(0, 1)

    weights = {name: x for name, x in old.state_dict().items() if name.partition(".")[0] not in TEACHER_RECURRENCE}
    if not new.convolutions:
        weights = {name: x for name, x in weights.items() if "conv1d" not in name}
    weights = {name: of_heads(x) if name.startswith(("q_", "k_")) else x for name, x in weights.items()}
    if not old.convolutions:  # only their SiLU
        weights |= {name: torch.ones_like(x) for name, x in new.state_dict().items() if "conv1d" in name}
    missing, unexpected = new.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert all(name.startswith(("drift.", "noises.")) for name in missing), missing


def start_fresh(new: MemoryLayer) -> None:
    """Initialise transition and noises as in any Bayesian Layer: nothing depends on the input."""
    for module in (new.drift, *new.noises.values()):
        module.reset_parameters()  # pyright: ignore[reportCallIssue]


def start_from(new: MemoryLayer, old: GatedDeltaNet) -> None:
    r"""Initialise transition and write noise from the teacher's decay and gate.

    $$\Delta_t = \mathrm{softplus}(W_a x_t + b_{dt}), \qquad A_{\mathrm{radius}} = A_{\log}, \qquad
    A_{\mathrm{angle}} = 0, \qquad r_t^2 = e^{-W_b x_t} \text{ or } \mathrm{softplus}(-W_b x_t) + \epsilon$$

    The first three make $A_t = \alpha_t I$ exactly. A gate $\beta_t = \sigma(W_b x_t)$ corresponds to a write noise of
    $e^{-W_b x_t}$ at unit variance. Softplus approximates it where gates are open; where a gate is closed, softplus is
    far smaller and lets more be written. Process noise starts as in any Bayesian Layer. With noise on real rows only,
    the angles start small instead of at zero, where their gradient would vanish because no write ever reaches an
    imaginary row.
    """
    drift, write = new.drift, new.noises["write_noise"]
    with torch.no_grad():
        drift.W_A.copy_(old.a_proj.weight)
        drift.A_step.copy_(old.dt_bias)
        rates = old.A_log if drift.A_radius.ndim == 1 else old.A_log[:, None]
        drift.A_radius.copy_(rates.expand_as(drift.A_radius))
        if drift.A_angle is not None:
            on_real_rows = new.design.layer_key_size(new.key_dim) < new.key_dim
            drift.A_angle.mul_(SMALL_TURN if on_real_rows else 0)
        gate = isinstance(write.source, Gate)
        write.weight.copy_(old.b_proj.weight if gate else -old.b_proj.weight)  # pyright: ignore
        write.bias.zero_()  # pyright: ignore


def checked_places(model: MemoryForCausalLM, layers: Sequence[int], *kinds: type[SequenceLayer]) -> list[int]:
    """Return the sorted indices; raise an error for duplicates and for layers of other classes than `kinds`."""
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
    """Replace layers in the teacher's configuration; the remaining layers keep their options."""
    assert config.layer_options is not None
    names = [name if i in places else old for i, old in enumerate(config.layers)]
    if name in config.layers and config.layer_options.get(name, {}) != options:
        raise ValueError(
            f"teacher: expected no {name} among its layers, or one with options {options}, "
            f"got {config.layer_options.get(name, {})}"
        )
    kept = {old: more for old, more in config.layer_options.items() if old in names}
    return MemoryConfig.from_dict({**config.to_dict(), "layers": names, "layer_options": {**kept, name: options}})
