"""The Bayesian Layer, and any other design on the same scaffold."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from torch import Tensor, nn

from membydesign.design import DampedRotation, DesignModel, PerColumnReset, Reset, catalogue, real_rows
from membydesign.layers.base import unit
from membydesign.layers.filtered import StepInputs
from membydesign.layers.parameters import Drift, Gate, Learned, Source, Variance
from membydesign.layers.projected import ProjectedLayer, swish_gated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.ops.filtering import Backend, Method


@final
class MemoryLayer(ProjectedLayer):
    r"""A memory of any design behind the Bayesian Layer's scaffold.

    $$q, k = \mathrm{unit}(W_q x),\ \mathrm{unit}(W_k x), \quad v = W_v x, \quad
    y = W_o\,\bigl(\mathrm{RMSNorm}(\text{filter}(q, k, v)) \odot \mathrm{SiLU}(W_g x)\bigr)$$

    Keys have length one, so that a write's variance is that of one direction. Drift and noises come from the input, as
    `membydesign.layers.parameters` says. Every design of the catalogue runs on this scaffold, which makes comparisons
    between them fair: they differ in the update alone. The architectures that those designs come from, with their own
    gates and convolutions, are the other layers of this package.

    With `DampedRotation(noise="real")` keys and queries have head_dim/2 entries and are put on the real rows.

    Args:
        design: what the memory assumes: a `DesignModel`, or the name of a layer on this scaffold, which gives what
            `make_layer` makes of it: `bayesian_layer`, `kda_style`, ….
        hidden_size: the width of x and y.
        num_heads: H.
        head_dim: D, rows of each head's memory.
        value_dim: M, columns of each head's memory; default head_dim.
        short_convolution: width of a causal convolution on q, k and v; None for none.
        output_gate: whether SiLU(W_g x) is there.
        process_noise: ℓ², for designs that ask for it: `Learned(initial)` or a fixed number.
        write_noise: r²: `Learned(initial)`, `Gate(initial)` or a fixed number.
        prior_variance: λ, for reset and additive designs; likewise.
        norm_eps: ε of the RMSNorm.
        method: "chunk" or "recurrent", as `filter_sequence` takes it.
        backend: likewise; "torch" can be differentiated more than once.

    Noises that are not given: ℓ² and r² are learned where a covariance is kept; a reset has λ = 1 and a gate as its
    r² (r² = 1 and gates as its λ, if each column has its own); an additive write is noiseless, λ = 1 and r² = 0. The
    ablation named `covariance_reset` learns both, with λ in the place of the Bayesian Layer's ℓ².

    Example:
        >>> layer = MemoryLayer("bayesian_layer", hidden_size=64, num_heads=2, head_dim=32)
        >>> y, belief = layer(torch.randn(3, 100, 64))
        >>> y_next, belief = layer(torch.randn(3, 1, 64), belief)
        >>> layer.state_size()
        LayerStateSize(mean=2048, covariance=2048, convolution=0)
    """

    def __init__(
        self,
        design: DesignModel | str,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        short_convolution: int | None = None,
        output_gate: bool = True,
        process_noise: Source | None = None,
        write_noise: Source | None = None,
        prior_variance: Source | None = None,
        norm_eps: float = 1e-5,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        design, usual = scaffolded(design)
        transition = design.transition
        on_real_rows = isinstance(transition, DampedRotation) and transition.noise == "real"
        super().__init__(
            design,
            hidden_size,
            num_heads,
            head_dim,
            head_dim if value_dim is None else value_dim,
            short_convolution=short_convolution,
            mapped_key_dim=head_dim // 2 if on_real_rows else head_dim,
            method=method,
            backend=backend,
        )
        self.on_real_rows = on_real_rows
        self.drift = Drift(transition, hidden_size, num_heads, head_dim)
        given = {"process_noise": process_noise, "write_noise": write_noise, "prior_variance": prior_variance}
        self.noises = nn.ModuleDict(self._variances(given, usual))
        self.g_proj = nn.Linear(hidden_size, num_heads * self.value_dim, bias=False) if output_gate else None
        self.o_norm = nn.RMSNorm(self.value_dim, eps=norm_eps)

    def _variances(self, given: Mapping[str, Source | None], usual: Mapping[str, Source]) -> dict[str, Variance]:
        sizes = {"G": self.design.write.groups, "M": self.value_dim}
        asked = {p.name: p for p in self.design.step_parameters}
        for name, source in given.items():
            if source is not None and name not in asked:
                raise ValueError(f"{name}: expected None, since {self.design.title} has none, got {source!r}")
        variances = {}
        for name, default in usual.items():
            source = given[name]
            size = sizes.get(asked[name].last_axis, 1)
            shared = asked[name].last_axis == "" or (size == 1 and asked[name].optional_axis)
            shape = (self.num_heads,) if shared else (self.num_heads, size)
            variances[name] = Variance(name, default if source is None else source, self.hidden_size, shape)
        return variances

    def extra_repr(self) -> str:
        """Design, sizes, and where the noises come from."""
        noises = ", ".join(f"{name}={variance.source}" for name, variance in self.noises.items())
        return f"{super().extra_repr()}\n{noises}"

    def reset_parameters(self) -> None:
        """The starting values of drift, noises and convolutions."""
        super().reset_parameters()
        for module in (self.drift, *self.noises.values()):
            module.reset_parameters()  # pyright: ignore[reportCallIssue]

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Unit keys and queries, values, drifts and noises of x."""
        q, k, v, new = self.projected(x, tails, cu_seqlens)
        q, k = unit(q), unit(k)
        if self.on_real_rows:
            q, k = real_rows(q), real_rows(k)
        noises = {name: variance(x) for name, variance in self.noises.items()}
        return StepInputs(q, k, v, {**self.drift(x), **noises}), new

    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """Each head normalised, gated, and projected back to the width."""
        del inputs
        return self.o_proj(swish_gated(y, self.o_norm, self.g_proj, x))


class Scaffolded(NamedTuple):
    """A design, and where its noises come from if nobody says."""

    design: DesignModel
    noises: Mapping[str, Source]


def scaffolded(design: DesignModel | str) -> Scaffolded:
    """A design with its usual noises: itself, or by the name of a layer on this scaffold."""
    if isinstance(design, DesignModel):
        return Scaffolded(design, default_noises(design))
    if isinstance(design, str) and design in ON_SCAFFOLD:
        return ON_SCAFFOLD[design]
    if isinstance(design, str) and design in catalogue:
        raise ValueError(
            f"design: expected a DesignModel or the name of a layer on this scaffold, got {design!r}, the name of a "
            f"whole architecture: make_layer({design!r}, ...) makes that; for its update on this scaffold say "
            f"'{design}_style' or pass catalogue[{design!r}]"
        )
    raise ValueError(f"design: expected a DesignModel or one of {', '.join(ON_SCAFFOLD)}, got {design!r}")


def default_noises(design: DesignModel) -> dict[str, Source]:
    """Where a design's noises come from if nobody says."""
    if design.rule == "additive":
        return {"prior_variance": 1.0, "write_noise": 0.0}
    match design.covariance:
        case PerColumnReset():
            return {"prior_variance": Gate(), "write_noise": 1.0}
        case Reset():
            return {"prior_variance": 1.0, "write_noise": Gate()}
        case _:
            return {"process_noise": Learned(0.05), "write_noise": Learned(0.5)}


_BAYESIAN, _RESET = catalogue["bayesian_layer"], catalogue["covariance_reset"]
_OWN = {
    "bayesian_layer": scaffolded(_BAYESIAN),
    "bayesian_layer_rotating": scaffolded(_BAYESIAN.replace(transition=DampedRotation(noise="real"))),
    "bayesian_layer_diagonal": scaffolded(catalogue["bayesian_layer_diagonal"]),
    # the noises of the Bayesian Layer, and λ = ℓ²
    "covariance_reset": Scaffolded(_RESET, {"prior_variance": Learned(0.05), "write_noise": Learned(0.5)}),
}
_STYLES = {f"{name}_style": scaffolded(design) for name, design in catalogue.items() if name not in _OWN}
ON_SCAFFOLD: Mapping[str, Scaffolded] = {**_OWN, **_STYLES}
"""The layers that are a `MemoryLayer`, by name: the Bayesian Layer, its ablations, and the "-style" ones."""
