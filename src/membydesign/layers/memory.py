"""The Bayesian Layer, and any other design on the same scaffold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple, final

from torch import Tensor, nn

from membydesign.design import DampedRotation, Design, Learned, Spectrum, catalogue
from membydesign.layers.base import unit
from membydesign.layers.filtered import StepInputs
from membydesign.layers.parameters import Drift, LearnedParameter, sources_of, wide
from membydesign.layers.projected import ProjectedLayer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.design import StepParameter
    from membydesign.design.sources import Source
    from membydesign.filter.api import Backend, Method


@final
class MemoryLayer(ProjectedLayer):
    r"""A memory of any design behind the Bayesian Layer's scaffold.

    $$q, k = \mathrm{unit}(W_q x),\ \mathrm{unit}(W_k x), \quad v = W_v x, \quad
    y = W_o\,\bigl(\mathrm{RMSNorm}(\text{filter}(q, k, v)) \odot \mathrm{SiLU}(W_g x)\bigr)$$

    Keys have length one, so that a write's variance is that of one direction. Drift and noises come from the input, as
    `membydesign.layers.parameters` says. Every design of the catalogue runs on this scaffold, which makes comparisons
    between them fair: they differ in the update alone. The architectures that those designs come from, with their own
    gates and convolutions, are the other layers of this package.

    With `DampedRotation(noise="real")` keys and queries have head_dim/2 entries and are placed on the real rows.

    Args:
        design: what the memory assumes: any `Design`, or the name of a layer on this scaffold, which gives what
            `make_layer` makes of it: `bayesian_layer`, `kda_style`, ….
        process_noise: ℓ², for designs that need it: `Learned(initial)` or a fixed number; or "stationary" for noise
            that returns memory to its prior (`Stationary`), with σ² = the prior variance unless `sources` has another
            "stationary_variance".
        write_noise: r²: `Learned(initial)`, `Gate(initial)` or a fixed number.
        prior_variance: λ, for reset and additive designs; likewise.
        sources: where any other step parameter comes from, by name.

    `FilterLayer` documents the arguments that all layers share.

    A step parameter without a source here has the one that its design names (`Design.sources`) or that of its bound.
    So ℓ² and r² are learned where a covariance is kept; a reset has λ = 1 and a gate as its r² (r² = 1 and gates as its
    λ, if each column has its own); an additive write is noiseless, λ = 1 and r² = 0. The ablation named
    `covariance_reset` learns both, with λ in the place of the Bayesian Layer's ℓ².

    Keys and queries of a design whose `key_bound` is ">= 0" are weights over the D rows (softmax); values of one whose
    `value_bound` is ">= 0" pass through softplus, or whatever its `layer_values` does.

    Examples:
        >>> layer = MemoryLayer("bayesian_layer", hidden_size=64, num_heads=2, head_dim=32)
        >>> y, belief = layer(torch.randn(3, 100, 64))
        >>> y_next, belief = layer(torch.randn(3, 1, 64), belief)
        >>> layer.state_size()
        LayerStateSize(mean=2048, covariance=2048, convolution=0)
    """

    def __init__(
        self,
        design: Design | str,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        short_convolution: int | None = None,
        output_gate: bool = True,
        process_noise: Source | Literal["stationary"] | None = None,
        write_noise: Source | None = None,
        prior_variance: Source | None = None,
        sources: Mapping[str, Source] | None = None,
        norm_eps: float = 1e-5,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        design, defaults = scaffolded(design)
        if isinstance(process_noise, str):
            design, process_noise = _stationary(design, process_noise), None
        super().__init__(
            design,
            hidden_size,
            num_heads,
            head_dim,
            head_dim if value_dim is None else value_dim,
            short_convolution=short_convolution,
            mapped_key_dim=design.layer_key_size(head_dim),
            method=method,
            backend=backend,
        )
        named = {"process_noise": process_noise, "write_noise": write_noise, "prior_variance": prior_variance}
        named = {name: source for name, source in {**named, **(sources or {})}.items() if source is not None}
        every = sources_of(design, {**defaults, **named})
        spectra = {source for source in every.values() if isinstance(source, Spectrum)}
        if len(spectra) > 1:
            raise ValueError(f"sources: expected one Spectrum at most, got {spectra}")
        spectrum = next(iter(spectra), None)
        shapes = {p.name: self._shape(p) for p in design.step_parameters}
        self.drift = Drift(spectrum, hidden_size, num_heads, () if spectrum is None else shapes[spectrum.decay][1:])
        self.noises = nn.ModuleDict(
            {
                p.name: LearnedParameter(p.name, every[p.name], hidden_size, shapes[p.name], p.bound)
                for p in design.step_parameters
                if not isinstance(every[p.name], Spectrum)
            }
        )
        self.add_read_out(output_gate, norm_eps)

    def _shape(self, parameter: StepParameter) -> tuple[int, ...]:
        """Return the axes of a step parameter after [B,T]; a single group has no axis."""
        own = parameter.sizes(self.key_dim, self.value_dim, self.design.groups)
        shared = parameter.optional_axes and math.prod(own) == 1
        return (self.num_heads,) if shared else (self.num_heads, *own)

    def extra_repr(self) -> str:
        """Show the design, the sizes, and the sources of the noises."""
        noises = ", ".join(f"{name}={parameter.source}" for name, parameter in self.noises.items())
        return f"{super().extra_repr()}\n{noises}"

    def reset_parameters(self) -> None:
        """Set the starting values of drift, noises and convolutions."""
        super().reset_parameters()
        for module in (self.drift, *self.noises.values()):
            module.reset_parameters()  # pyright: ignore[reportCallIssue]

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute unit keys and queries, values, drifts and noises of x."""
        q, k, v, new = self.projected(x, tails, cu_seqlens)
        if self.design.key_bound == "finite":
            q, k = unit(q), unit(k)
        else:
            q, k = wide(q).softmax(-1).to(q.dtype), wide(k).softmax(-1).to(k.dtype)
        v = self.design.layer_values(v)
        q, k = self.design.layer_keys(q), self.design.layer_keys(k)
        noises = {name: parameter(x) for name, parameter in self.noises.items()}
        return StepInputs(q, k, v, self.design.layer_parameters({**self.drift(x), **noises})), new


class Scaffolded(NamedTuple):
    """A design, and sources that differ from those that it names itself."""

    design: Design
    sources: Mapping[str, Source] = {}


def scaffolded(design: Design | str) -> Scaffolded:
    """Return a design, itself or by the name of a layer on this scaffold."""
    if isinstance(design, Design):
        return Scaffolded(design)
    if isinstance(design, str) and design in ON_SCAFFOLD:
        return ON_SCAFFOLD[design]
    if isinstance(design, str) and design in catalogue:
        raise ValueError(
            f"design: expected a Design or the name of a layer on this scaffold, got {design!r}, the name of a "
            f"whole architecture: make_layer({design!r}, ...) makes that; for its update on this scaffold say "
            f"'{design}_style' or pass catalogue[{design!r}]"
        )
    raise ValueError(f"design: expected a Design or one of {', '.join(ON_SCAFFOLD)}, got {design!r}")


def _stationary(design: Design, option: str) -> Design:
    """Return a design with the process noise that an option names: there is one name."""
    if option != "stationary":
        raise ValueError(
            f'process_noise: expected Learned(…), a variance of at least 0 or "stationary", got {option!r}'
        )
    stationary = design.with_stationary_noise()
    if stationary is None:
        raise ValueError(f"process_noise: expected None, since {design.title} has none, got {option!r}")
    return stationary


_BAYESIAN, _RESET = catalogue["bayesian_layer"], catalogue["covariance_reset"]
_OWN = {
    "bayesian_layer": Scaffolded(_BAYESIAN),
    "bayesian_layer_rotating": Scaffolded(_BAYESIAN.replace(transition=DampedRotation(noise="real"))),
    "bayesian_layer_diagonal": Scaffolded(catalogue["bayesian_layer_diagonal"]),
    "stationary_bayesian_layer": Scaffolded(catalogue["stationary_bayesian_layer"]),
    "unknown_scale": Scaffolded(catalogue["unknown_scale"]),
    **{name: Scaffolded(catalogue[name]) for name in ("partial_reset", "discounted")},
    **{name: Scaffolded(catalogue[name]) for name in ("robust_writes", "block_diagonal", "low_rank")},
    # the noises of the Bayesian Layer, and λ = ℓ²
    "covariance_reset": Scaffolded(_RESET, {"prior_variance": Learned(0.05), "write_noise": Learned(0.5)}),
    **{name: Scaffolded(catalogue[name]) for name in ("count_memory", "categorical_memory", "hidden_markov")},
}
_STYLES = {f"{name}_style": Scaffolded(design) for name, design in catalogue.items() if name not in _OWN}
ON_SCAFFOLD: Mapping[str, Scaffolded] = {**_OWN, **_STYLES}
"""The layers that are a `MemoryLayer`, by name: the Bayesian Layer, its ablations, other beliefs, the "-style" ones."""
