"""The Triton kernels compiled ahead of time for real targets, on a machine that has none of them.

Registers and spills are what ptxas says when Triton calls it (on AMD, those in the assembly); shared memory is in
Triton's metadata; occupancy is the share of a multiprocessor's warps that these three leave room for.
"""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any, NamedTuple

from membydesign.filter.triton import table
from membydesign.filter.triton.support import described

if TYPE_CHECKING:
    from collections.abc import Iterator


class Target(NamedTuple):
    """A GPU to compile for.

    Attributes:
        backend: "cuda" or "hip".
        arch: its name in Triton.
        warp: threads in a warp.
        shared: bytes of shared memory that a block may have.
        shared_all: bytes of shared memory of a multiprocessor.
        registers: 32-bit registers of a multiprocessor (on AMD of one SIMD unit, for all lanes).
        warps: that a multiprocessor (on AMD a SIMD unit) can hold.
    """

    backend: str
    arch: int | str
    warp: int
    shared: int
    shared_all: int
    registers: int
    warps: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024, 164 * 1024, 65536, 64),
    "sm_90": Target("cuda", 90, 32, 227 * 1024, 228 * 1024, 65536, 64),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024, 64 * 1024, 512 * 64, 8),
}
SIZES = tuple(table.FORWARD)
NO_SPILLS_UP_TO = 64
"""Up to this D a kernel must have a layout that spills nothing on NVIDIA's GPUs, for which the layouts were chosen."""


class Variant(NamedTuple):
    """What a kernel computes, and how.

    Attributes:
        turns: a damped rotation with noise in one row of each pair, or else a decay of each row.
        real: the type of all tensors, in Triton's words.
        precision: of matrix products.
    """

    turns: bool
    real: str = "fp32"
    precision: str = "ieee"

    @property
    def usual(self) -> bool:
        """Whether `backend="auto"` takes it: for the others one layout is compiled, and spills are allowed."""
        return self.real == "fp32" and self.precision == "ieee"


VARIANTS = {
    "decay": Variant(turns=False),
    "rotation": Variant(turns=True),
    "tf32x3": Variant(turns=True, precision="tf32x3"),
    "float64": Variant(turns=True, real="fp64"),
}
LARGEST = "rotation"
"""The variant with most registers of those that `backend="auto"` takes."""

KERNELS = {"forward": table.FORWARD, "backward": table.BACKWARD, "step": table.STEP}


class Job(NamedTuple):
    """A kernel to compile."""

    kernel: str
    D: int
    tiles: table.Tiles
    variant: str
    target: str

    @property
    def title(self) -> str:
        """What is being compiled, in a few words."""
        return f"{self.kernel}, D = {self.D}, {self.variant}, for {self.target}"


class Compiled(NamedTuple):
    """What the compiler made of a job: bytes, and registers of a thread; or why it failed."""

    job: Job
    registers: int = 0
    spills: int = 0
    shared: int = 0
    occupancy: float = 0.0
    failure: str | None = None

    @property
    def complaint(self) -> str | None:
        """Why this cannot run, or None."""
        most = TARGETS[self.job.target].shared
        if self.failure is not None:
            return f"{self.job.title}: does not compile: {self.failure}"
        if self.shared > most:
            return f"{self.job.title}: {self.shared} bytes of shared memory, and a block has {most}"
        return None

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        own = {**self.job._asdict(), "tiles": self.job.tiles._asdict()}
        return {**own, "registers": self.registers, "spills": self.spills, "shared": self.shared,
                "occupancy": self.occupancy, "complaint": self.complaint}  # fmt: skip


def complaints(results: list[Compiled]) -> list[str]:
    """What cannot run, and small kernels of which every layout spills."""
    said = [x.complaint for x in results if x.complaint]
    layouts: dict[tuple[str, int, str, str], list[Compiled]] = {}
    for x in results:
        if x.failure is None:
            layouts.setdefault((x.job.kernel, x.job.D, x.job.variant, x.job.target), []).append(x)
    for (_, D, variant, target), same in layouts.items():
        least = min(same, key=lambda x: x.spills)
        strict = D <= NO_SPILLS_UP_TO and VARIANTS[variant].usual and TARGETS[target].backend == "cuda"
        if least.spills and strict:
            said.append(f"{least.job.title}: {least.spills} bytes spilled, and up to D = {NO_SPILLS_UP_TO} none may be")
    return said


def targets() -> tuple[str, ...]:
    """Those that the installed Triton can compile for."""
    from triton.backends import backends

    installed = {"cuda": "nvidia" in backends, "hip": "amd" in backends}
    return tuple(name for name, target in TARGETS.items() if installed[target.backend])


def jobs(names: tuple[str, ...], sizes: tuple[int, ...], variants: tuple[str, ...]) -> Iterator[Job]:
    """Every kernel of the table for these targets, sizes and variants."""
    for target in names:
        for kernel, layouts in KERNELS.items():
            for D in sizes:
                for variant in variants:
                    if kernel == "step" and VARIANTS[variant].precision != "ieee":
                        continue  # it has no matrix products
                    for tiles in layouts[D] if VARIANTS[variant].usual else layouts[D][:1]:
                        yield Job(kernel, D, tiles, variant, target)


def compiled(job: Job) -> Compiled:
    """Compile one kernel; a failure is part of the result."""
    try:
        return _compiled(job)
    except Exception as error:  # Triton, LLVM and ptxas each have errors of their own
        return Compiled(job, failure=described(error))


def _compiled(job: Job) -> Compiled:
    """Compile with as many value columns as rows, training and asking for variance and evidence."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from membydesign.filter.triton.backward import backward_kernel
    from membydesign.filter.triton.forward import forward_kernel
    from membydesign.filter.triton.step import step_kernel

    target, variant = TARGETS[job.target], VARIANTS[job.variant]
    kernel: Any = {"forward": forward_kernel, "backward": backward_kernel, "step": step_kernel}[job.kernel]
    settings = {"ROTATES": variant.turns, "MIXED": variant.turns, "C": table.CHUNK, "PRECISION": variant.precision}
    settings |= dict.fromkeys(("VARIANCE", "EVIDENCE", "ERROR", "SAVE"), True)
    constants = {**settings, "D": job.D, "m": job.D, **table.constants(job.tiles, job.D, job.D)}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    counts, tensor = {"K": "i32", "G": "i32"}, f"*{variant.real}"
    signature = {name: "constexpr" if name in constants else counts.get(name, tensor) for name in kernel.arg_names}
    aligned: Any = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(signature.values()) if x == tensor}
    with knobs.compilation.scope(), knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as said:
        # Triton's own call of ptxas counts, with the options of its version; a kernel from the cache would say nothing.
        knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
        kernel_binary = triton.compile(
            ASTSource(kernel, signature, constants, aligned),
            target=GPUTarget(target.backend, target.arch, target.warp),
            options={"num_warps": job.tiles.warps, "num_stages": job.tiles.stages, "enable_fp_fusion": True},
        )
    registers, spills = (
        _of_nvidia(said.getvalue(), job) if target.backend == "cuda" else _of_amd(kernel_binary.asm["amdgcn"])
    )
    shared = kernel_binary.metadata.shared
    return Compiled(job, registers, spills, shared, _occupancy(target, registers, shared, job.tiles.warps))


def _of_nvidia(said: str, job: Job) -> tuple[int, int]:
    """Registers and bytes spilled, from what ptxas said when Triton called it."""
    registers, stores = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    if registers is None or stores is None:
        raise RuntimeError(f"ptxas did not say what {job.title} takes: {said}")
    return int(registers[1]), int(stores[1])


def _of_amd(assembly: str) -> tuple[int, int]:
    """Vector registers (with those of accumulators), and bytes spilled of one lane."""

    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s*(\d+)", assembly)
        return int(match[1]) if match else 0

    return number("vgpr_count"), 4 * number("vgpr_spill_count")


def _occupancy(target: Target, registers: int, shared: int, warps: int) -> float:
    """The share of all warps that registers and shared memory leave room for."""
    if target.backend == "hip":  # a block's warps are spread over four SIMD units
        each = min(target.registers // (target.warp * max(8, -(-registers // 8) * 8)), target.warps)
        blocks = min(4 * each // warps, target.shared_all // max(shared, 1))
        return min(1.0, blocks * warps / (4 * target.warps))
    each = -(-registers * target.warp // 256) * 256  # registers are handed out by 256
    blocks = min(target.registers // (each * warps), target.warps // warps, target.shared_all // (shared + 1024), 32)
    return blocks * warps / target.warps
