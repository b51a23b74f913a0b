"""Random cases: everything about one is drawn from a seed and a number, so that both name it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from fnmatch import fnmatch
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fuzzing.layouts import LAYOUTS, present, shared
from fuzzing.specs import EVERYDAY, SPECS, Spec

if TYPE_CHECKING:
    from collections.abc import Mapping

Mode = Literal["loop", "torch", "native-token", "native-chunk", "auto", "steps", "packed", "resumed", "triton"]
MODES: dict[Mode, float] = {
    "loop": 1,
    "torch": 3,
    "native-token": 2,
    "native-chunk": 3,
    "auto": 2,
    "steps": 2,
    "packed": 2,
    "resumed": 2,
    "triton": 0.03,  # Triton's interpreter takes a second for what others do in a millisecond
}
DTYPES = {torch.float32: 6, torch.float64: 3, torch.bfloat16: 2, torch.float16: 1}
KEYS = ("usual", "usual", "zero", "tiny", "large", "repeated", "mixed")
NOISES = ("usual", "usual", "usual", "small", "large", "mixed", "zero")
DECAYS = ("usual", "usual", "none", "strong", "mixed")
TARGETS = ("output", "mean", "kept", "variance", "evidence", "everything")
"""What is differentiated; a sum of everything would hide a wrong gradient of a small result behind a large one."""


@dataclass(frozen=True)
class Case:
    """All that is known of a case before any number is drawn.

    Attributes:
        seed: of the campaign.
        number: of the case.
        spec: the design.
        mode: how it is filtered.
        dtype: of q, k and v.
        parameter_dtype: of step parameters.
        initial_dtype: of the initial state; None starts from the prior.
        state_dtype: the argument of this name.
        sizes: B, T, H, D and M.
        target: what is differentiated, one of `TARGETS`; None for a run without gradients.
        keys: what write keys are like, one of `KEYS`.
        noises: what the variances of each name are like, one of `NOISES`.
        decays: what decays are like, one of `DECAYS`.
        options: chunk sizes, backends, boundaries and threads, as the mode needs them.
    """

    seed: int
    number: int
    spec: Spec
    mode: Mode
    dtype: torch.dtype
    parameter_dtype: torch.dtype
    initial_dtype: torch.dtype | None
    state_dtype: torch.dtype | None
    sizes: tuple[int, int, int, int, int]
    target: str | None
    keys: str
    noises: dict[str, str]
    decays: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Such as `dense-rotation/native-chunk/float32`: what `--only` is matched with."""
        return f"{self.spec.name}/{self.mode}/{str(self.dtype).removeprefix('torch.')}"

    @property
    def chunked(self) -> bool:
        """Whether any part of it is filtered in chunks."""
        return self.mode not in ("loop", "steps", "native-token")

    def matches(self, patterns: list[str]) -> bool:
        """Whether any pattern, such as `dense*/native*`, is that of its label; true without patterns."""
        return not patterns or any(fnmatch(self.label, pattern + "*") for pattern in patterns)

    def random(self, purpose: str) -> Random:
        """Random numbers for one purpose."""
        return Random(_seed(f"{self.seed}:{self.number}:{purpose}"))


@dataclass(frozen=True)
class Problem:
    """The arguments of a case.

    Attributes:
        tensors: q, k, v and step parameters as the library gets them: tensors of any layout, or numbers.
        initial: parts of the initial state by name, `mean` and `kept`; empty for the prior.
        layouts: the layout of each tensor.
        segments: boundaries of sequences packed into one row, or None.
    """

    tensors: dict[str, Tensor | float]
    initial: dict[str, Tensor]
    layouts: dict[str, str]
    segments: list[int] | None


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _weighted(random: Random, weights: Mapping[Any, float]) -> Any:
    return random.choices(list(weights), list(weights.values()))[0]


def draw(seed: int, number: int) -> Case:
    """A case without its numbers."""
    random = Random(_seed(f"{seed}:{number}"))
    mode: Mode = _weighted(random, MODES)
    dtype = torch.float32 if mode == "triton" else _weighted(random, DTYPES)
    specs = [s for s in EVERYDAY if s.kept == "dense"] if mode == "triton" else random.choice((EVERYDAY, SPECS))
    spec = random.choice(specs)
    while True:
        D, M = (random.choice((1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 33)) for _ in range(2))
        if spec.fits(D, M) and D * M < 300:
            break
    B, H = random.choice((1, 1, 2, 3)), random.choice((1, 2, 3, 5))
    T = random.choice((1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 12, 17, 33))
    if mode == "triton":
        B, T, H, D, M = 1, min(T, 17), 1, min(D, 8), min(M, spec.groups * 2)
    if mode == "packed":
        B = 1
    half = dtype in (torch.float16, torch.bfloat16)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    other = torch.float64 if random.random() < 0.1 and mode != "triton" else wide
    noises = {name: random.choice(NOISES) for name in ("process_noise", "write_noise", "prior_variance")}
    counts = spec.write == "count"
    return Case(
        seed,
        number,
        spec,
        mode,
        dtype,
        parameter_dtype=dtype if half and random.random() < 0.4 else other,
        initial_dtype=random.choice((None, wide, other)) if not counts else None,
        state_dtype=torch.float64 if random.random() < 0.1 and mode not in ("steps", "triton") else None,
        sizes=(B, T, H, D, M),
        target=random.choice(TARGETS) if random.random() < 0.6 else None,
        keys="usual" if counts else random.choice(KEYS),
        noises=noises,
        decays=random.choice(DECAYS[:3]) if counts else random.choice(DECAYS),
        options=_options(mode, T, random),
    )


def _options(mode: Mode, T: int, random: Random) -> dict[str, Any]:
    """How the mode filters: `calls` has the arguments of each call of `filter_sequence`."""
    threads = random.choice((1, 1, 2, 4))

    def chosen(kind: str) -> dict[str, Any]:
        size = random.choice((None, 2, 3, 7, 8, 16, 32, T, T + 1))
        match kind:
            case "loop":
                return {"method": "recurrent"}
            case "torch":
                return {"backend": "torch", "chunk_size": size or random.choice((None, 1))}
            case "native-token":
                return {"backend": "native", "chunk_size": 1}
            case "native-chunk":
                return {"backend": "native", "chunk_size": None if size == 1 else size}
            case "triton":
                return {"backend": "triton"}
            case _:
                return {"chunk_size": random.choice((None, None, size))}

    kinds = ("loop", "torch", "native-token", "native-chunk", "auto")
    match mode:
        case "packed":
            cuts = sorted(random.randrange(T + 1) for _ in range(random.randrange(4)))
            return {"threads": threads, "calls": [chosen(random.choice(kinds))], "segments": [0, *cuts, T]}
        case "resumed":
            cuts = sorted({random.randrange(1, T) for _ in range(random.choice((1, 1, 2, 5)))}) if T > 1 else []
            calls = [chosen(random.choice(kinds)) for _ in range(len(cuts) + 1)]
            return {"threads": threads, "calls": calls, "cuts": [0, *cuts, T]}
        case "steps":
            return {"threads": threads}
        case _:
            return {"threads": threads, "calls": [chosen(mode)]}


def problem(case: Case) -> Problem:
    """The numbers of a case."""
    generator = torch.Generator().manual_seed(_seed(f"{case.seed}:{case.number}:numbers"))
    random = case.random("layouts")
    B, T, H, D, M = case.sizes
    tensors: dict[str, Tensor | float] = {
        "q": _normal(generator, B, T, H, D),
        "k": _keys(case.keys, generator, B, T, H, D),
        "v": _normal(generator, B, T, H, M) * random.choice((1.0, 1.0, 1.0, 100.0)),
    }
    if case.spec.write == "count":
        tensors = {name: torch.as_tensor(x).abs() + 1e-3 for name, x in tensors.items()}
    tensors = {name: torch.as_tensor(x).to(case.dtype) for name, x in tensors.items()}
    for name, sizes in case.spec.parameters(D, M).items():
        tensors[name] = _parameter(case, name, (B, T, H, *sizes), generator, random)
    segments = case.options.get("segments")
    initial = {} if case.initial_dtype is None else _initial(case, generator, len(segments) - 1 if segments else B)
    layouts: dict[str, str] = {}
    negated = random.random() < 0.05
    for part in (tensors, initial):
        for name, x in part.items():
            if isinstance(x, Tensor):
                x, layout = _laid_out(x, random, negated and random.random() < 0.5)
                part[name], layouts[f"initial {name}" if part is initial else name] = x, layout
    return Problem(tensors, initial, layouts, segments)


def _laid_out(x: Tensor, random: Random, negated: bool) -> tuple[Tensor, str]:
    if x.ndim == 4 and random.random() < 0.1:
        axis = random.randrange(x.ndim - 1)  # all features alike would make most problems singular
        return shared(x, axis), f"stride 0 along axis {axis}"
    layout = "negated" if negated else random.choice(LAYOUTS)
    return present(x, layout, random), layout


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _uniform(generator: torch.Generator, low: float, high: float, shape: tuple[int, ...]) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)


def _mixture(generator: torch.Generator, shape: tuple[int, ...], kinds: list[Tensor]) -> Tensor:
    """One of several kinds at each token and head."""
    which = torch.randint(len(kinds), shape[:3], generator=generator).reshape(*shape[:3], *[1] * (len(shape) - 3))
    return sum((which == i) * kind for i, kind in enumerate(kinds)) + torch.zeros(shape, dtype=torch.float64)


def _keys(kind: str, generator: torch.Generator, B: int, T: int, H: int, D: int) -> Tensor:
    usual = _normal(generator, B, T, H, D) / math.sqrt(D)
    repeated = usual[:, :1].expand_as(usual)
    kinds = {"usual": usual, "zero": 0 * usual, "tiny": 1e-20 * usual, "large": 1e3 * usual, "repeated": repeated}
    if kind == "zero":  # some tokens write nothing
        return _mixture(generator, (B, T, H, D), [usual, kinds["zero"]])
    return _mixture(generator, (B, T, H, D), list(kinds.values())) if kind == "mixed" else kinds[kind]


def _parameter(
    case: Case, name: str, shape: tuple[int, ...], generator: torch.Generator, random: Random
) -> Tensor | float:
    """A step parameter: a tensor with all axes, without its optional ones, without any, or a number."""
    form = random.choice(("full", "full", "full", "shared", "scalar", "number"))
    if name == "write_noise" and len(shape) == 4 and form == "shared":
        shape = shape[:3]
    x = _values(case, name, shape, generator)
    if case.parameter_dtype in (torch.float16, torch.bfloat16):
        finite = torch.finfo(case.parameter_dtype)
        limits = (finite.tiny, finite.max) if name in ("write_noise", "prior_variance") else (finite.min, finite.max)
        x = x.clamp(*limits)
    x = x.to(case.parameter_dtype)
    if form == "scalar" and case.mode in ("steps", "resumed"):
        form = "number"  # autograd adds up the gradients of several calls in the type of the parameter
    if form in ("scalar", "number") and name not in ("removal", "removal_key", "erase_key"):
        x = x.flatten()[0].clone()
        return x.item() if form == "number" else x
    return x


def _values(case: Case, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    match name:
        case "log_decay":
            usual, none = _uniform(generator, -0.5, 0.0, shape), torch.zeros(shape, dtype=torch.float64)
            kinds = {"usual": usual, "none": none, "strong": _uniform(generator, -50.0, 0.0, shape)}
            return _mixture(generator, shape, list(kinds.values())) if case.decays == "mixed" else kinds[case.decays]
        case "angle":
            return _uniform(generator, -3.1, 3.1, shape)
        case "log_discount":
            return _uniform(generator, -0.2, 0.0, shape)
        case "retention" if case.spec.kept == "partial_reset":
            usual = _uniform(generator, 0.0, 1.0, shape)
            return _mixture(generator, shape, [usual, 0 * usual, usual**8, 0 * usual + 1])
        case "discount":
            return _uniform(generator, 0.3, 1.0, shape)
        case "retention" | "erase_rate" | "feedback":
            return _uniform(generator, 0.05, 1.0, shape)
        case "removal" | "removal_key" | "erase_key":
            return _normal(generator, *shape) / math.sqrt(shape[-1])
        case _:
            usual = _uniform(generator, -3.0, 0.7, shape).exp()
            name = "process_noise" if name == "stationary_variance" else name
            zero = 0 * usual if name == "process_noise" or case.spec.write == "latent" else usual
            if name == "prior_variance":
                zero = usual
            kinds = {"usual": usual, "small": 1e-6 * usual, "large": 1e6 * usual, "zero": zero}
            kind = case.noises[name]
            return _mixture(generator, shape, list(kinds.values())) if kind == "mixed" else kinds[kind]


def _initial(case: Case, generator: torch.Generator, B: int) -> dict[str, Tensor]:
    """A belief that somebody might hand over: a full mean and, where there is one, a full covariance."""
    _, _, H, D, M = case.sizes
    assert case.initial_dtype is not None
    parts = {"mean": _normal(generator, B, H, D, M).to(case.initial_dtype)}
    G, size = case.spec.groups, case.spec.size
    match case.spec.kept:
        case "dense" | "partial_reset" | "discounted":
            root = _normal(generator, B, H, G, D, D)
            parts["kept"] = root @ root.mT / D + 0.1 * torch.eye(D, dtype=torch.float64)
        case "diagonal":
            parts["kept"] = 0.1 + _normal(generator, B, H, G, D).square()
        case "block" | "example_block":
            root = _normal(generator, B, H, G, D // size, size, size)
            parts["kept"] = root @ root.mT / size + 0.1 * torch.eye(size, dtype=torch.float64)
    if "kept" in parts:
        kept = parts["kept"].to(case.initial_dtype)
        parts["kept"] = (kept + kept.mT) / 2 if case.spec.kept != "diagonal" else kept
    if case.spec.scaled:
        for name, least in (("shape", 1.1), ("rate", 0.1)):
            parts[name] = _uniform(generator, least, least + 3, (B, H, G)).to(case.initial_dtype)
    return parts
