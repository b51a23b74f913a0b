"""The designs under test, each as plain words: the library's object is built from them, and so is the reference."""

from __future__ import annotations

import functools
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import membydesign as mbd

if TYPE_CHECKING:
    from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples" / "designs"

Drift = Literal["identity", "scalar", "diagonal", "rotation", "rotation_real", "removal", "rwkv7", "feedback"]
Write = Literal["observe", "latent", "student_t", "count"]
Kept = Literal[
    "dense",
    "diagonal",
    "block",
    "example_block",
    "reset",
    "column_reset",
    "partial_reset",
    "discounted",
    "nothing",
    "counts",
]


SCALE = (2.5, 1.25)
"""The prior of an unknown scale: τ ~ Gamma(shape, rate)."""


@dataclass(frozen=True)
class Spec:
    """A design in words.

    Attributes:
        drift: how memory drifts.
        write: what a write observes.
        kept: what is kept of the covariance.
        groups: G, noise groups of value columns.
        prior: the variance of every direction before anything is written.
        size: rows of a block, for `kept="block"` and `"example_block"`.
        nu: degrees of freedom, for `write="student_t"`.
        stationary: whether process noise returns memory to its prior, σ²(I − A Aᵀ), instead of ℓ² N.
        scaled: whether all variances have an unknown factor in common; its Gamma(shape, rate) starts at `SCALE`.
        discounted_scale: whether that belief is forgotten, at the rate `discount`.
    """

    drift: Drift
    write: Write
    kept: Kept
    groups: int = 1
    prior: float = 1.5
    size: int = 2
    nu: float = 4.0
    stationary: bool = False
    scaled: bool = False
    discounted_scale: bool = False

    @property
    def name(self) -> str:
        """Such as `dense2-rotation`."""
        observed = {"observe": "", "latent": "additive-", "student_t": "student-", "count": ""}[self.write]
        drift = f"stationary_{self.drift}" if self.stationary else self.drift
        scaled = "discounted-scale-" if self.discounted_scale else "scaled-" if self.scaled else ""
        return f"{scaled}{observed}{self.kept}{self.groups if self.groups > 1 else ''}-{drift}"

    @property
    def has_blocks(self) -> bool:
        """Whether what is kept of the covariance are blocks."""
        return self.kept in ("block", "example_block")

    @property
    def has_process_noise(self) -> bool:
        """Whether ℓ², or σ² of stationary noise, enters."""
        return (self.kept in ("dense", "diagonal") or self.has_blocks) and self.write != "latent"

    @property
    def keeps_matrix(self) -> bool:
        """Whether the whole covariance is kept."""
        return self.kept in ("dense", "partial_reset", "discounted")

    @property
    def has_variance(self) -> bool:
        """Whether reads have a variance."""
        return self.kept != "nothing"

    def variances(self, M: int) -> int:
        """How many variances a read has."""
        return M if self.kept in ("column_reset", "counts") else self.groups

    def fits(self, D: int, M: int) -> bool:
        """Whether the design can have keys of size D and values of size M."""
        even = not self.drift.startswith("rotation") or D % 2 == 0
        wide = not self.discounted_scale or 3 * self.groups <= M
        return even and wide and M % self.groups == 0 and not (self.has_blocks and D % self.size)

    def parameters(self, D: int, M: int) -> dict[str, tuple[int, ...]]:
        """The sizes that follow [B,T,H] of every step parameter, by name."""
        sizes: dict[str, tuple[int, ...]] = {}
        match self.drift:
            case "scalar":
                sizes["log_decay"] = ()
            case "diagonal":
                sizes["log_decay"] = (D,)
            case "rotation" | "rotation_real":
                sizes |= {"log_decay": (D // 2,), "angle": (D // 2,)}
            case "removal":
                sizes |= {"log_decay": (D,), "removal_key": (D,), "removal": (D,)}
            case "feedback":
                sizes |= {"log_decay": (), "feedback": ()}
            case "rwkv7":
                sizes |= {"retention": (D,), "erase_key": (D,), "erase_rate": (D,)}
            case "identity":
                pass
        if self.has_process_noise:
            sizes["stationary_variance" if self.stationary else "process_noise"] = ()
        if self.kept == "column_reset":
            sizes["prior_variance"] = (M,)
        elif self.kept in ("reset", "partial_reset") or self.write == "latent":
            sizes["prior_variance"] = ()
        if self.kept == "partial_reset":
            sizes["retention"] = ()
        elif self.kept == "discounted":
            sizes["log_discount"] = ()
        if self.write in ("observe", "student_t"):
            sizes["write_noise"] = (self.groups,)
        elif self.write == "latent":
            sizes["write_noise"] = ()
        if self.discounted_scale:
            sizes["discount"] = ()
        return sizes


@functools.cache
def example(name: str) -> ModuleType:
    """A file of examples/designs as a module."""
    location = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert location is not None
    assert location.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    return module


@functools.cache
def build(spec: Spec) -> Any:
    """The library's object."""
    if spec.write == "count":
        return example("count_memory").CountMemory(events=spec.prior, exposure=spec.prior)
    transitions = {
        "identity": mbd.Identity,
        "scalar": mbd.ScalarDecay,
        "diagonal": mbd.DiagonalDecay,
        "rotation": mbd.DampedRotation,
        "rotation_real": lambda: mbd.DampedRotation(noise="real"),
        "removal": mbd.DecayAndRemoval,
        "feedback": mbd.KeyFeedback,
        "rwkv7": lambda: example("rwkv7_transition").RWKV7Transition(),
    }
    writes = {
        "observe": lambda: mbd.ObserveMemory(groups=spec.groups),
        "latent": mbd.LatentInput,
        "student_t": lambda: example("student_t_write").StudentTWrite(nu=spec.nu, groups=spec.groups),
    }
    covariances = {
        "dense": lambda: mbd.Dense(prior=spec.prior),
        "diagonal": lambda: mbd.Diagonal(prior=spec.prior),
        "block": lambda: mbd.Block(spec.size, prior=spec.prior),
        "example_block": lambda: example("block_diagonal").BlockDiagonal(size=spec.size, prior=spec.prior),
        "reset": mbd.Reset,
        "column_reset": mbd.PerColumnReset,
        "partial_reset": lambda: mbd.PartialReset(prior=spec.prior),
        "discounted": lambda: mbd.Discounted(prior=spec.prior),
        "nothing": mbd.MeanOnly,
    }
    transition = transitions[spec.drift]()
    if spec.stationary:
        transition = mbd.Stationary(transition)
    design = mbd.DesignModel(transition, writes[spec.write](), covariances[spec.kept]())
    return mbd.UnknownScale(design, *SCALE, discount=spec.discounted_scale) if spec.scaled else design


def _every() -> tuple[Spec, ...]:
    plain: tuple[Drift, ...] = ("identity", "scalar", "diagonal", "rotation")
    specs = [
        Spec(drift, "observe", kept, groups)
        for kept in ("dense", "diagonal")
        for groups in (1, 2, 3)
        for drift in (*plain, "rotation_real")
    ]
    specs += [Spec(drift, "observe", "reset", groups) for groups in (1, 2) for drift in plain]
    specs += [Spec(drift, "observe", "column_reset") for drift in plain]
    specs += [Spec(drift, "observe", "partial_reset", groups) for groups in (1, 2) for drift in plain]
    specs += [Spec(drift, "observe", "discounted", groups) for groups in (1, 2) for drift in ("identity", "rotation")]
    specs += [Spec(drift, "latent", kept, prior=0.3) for kept in ("nothing", "dense") for drift in plain]
    specs += [Spec(drift, "latent", "nothing") for drift in ("removal", "rwkv7", "feedback")]
    specs += [Spec("removal", "observe", kept) for kept in ("dense", "reset")]
    specs += [
        Spec("removal", "latent", "dense"),
        Spec("rwkv7", "observe", "dense"),
        Spec("feedback", "latent", "dense"),
    ]
    specs += [
        Spec(drift, "observe", "example_block", groups) for groups in (1, 2) for drift in ("diagonal", "rotation")
    ]
    specs += [
        Spec(drift, "observe", "block", groups, size=size)
        for groups, size in ((1, 2), (2, 3), (1, 4))
        for drift in (*plain, "rotation_real")
    ]
    bases: tuple[tuple[Kept, Drift], ...] = (
        ("dense", "diagonal"),
        ("dense", "rotation"),
        ("diagonal", "scalar"),
        ("block", "diagonal"),
        ("partial_reset", "scalar"),
    )
    specs += [
        Spec(drift, "observe", kept, groups, scaled=True, discounted_scale=forgets)
        for groups, forgets in ((1, False), (2, False), (1, True), (2, True))
        for kept, drift in bases
    ]
    specs += [Spec("diagonal", "student_t", "dense", groups) for groups in (1, 2)]
    specs += [
        Spec(drift, "observe", kept, groups, stationary=True)
        for kept in ("dense", "diagonal")
        for groups in (1, 2)
        for drift in (*plain, "rotation_real")
    ]
    specs += [Spec("diagonal", "observe", kept, stationary=True) for kept in ("block", "example_block")]
    return (*specs, Spec("scalar", "count", "counts"))


SPECS = _every()
EVERYDAY = tuple(
    spec
    for spec in SPECS
    if spec.drift not in ("removal", "rwkv7", "feedback") and spec.kept in ("dense", "diagonal", "reset")
)
"""Designs with native kernels of several kinds, which are drawn more often."""
