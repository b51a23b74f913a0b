"""The Triton kernels compiled ahead of time for real targets, on a machine that has none of them.

Registers and spills are ptxas's own count on the PTX that Triton makes (on AMD, those in the assembly); shared memory
is in Triton's metadata; occupancy is the share of a multiprocessor's warps that these three leave room for.
"""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any, NamedTuple

from membydesign.ops.kalman import triton_table as table

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
"""Up to this D nothing may be spilled on NVIDIA's GPUs, for which the layouts were chosen."""

VARIANTS = {"decay": False, "rotation": True}
"""A decay of each row; and a damped rotation with noise in one row of each pair, the largest kernel there is."""

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
    """What the compiler made of a job: bytes, and registers of a thread."""

    job: Job
    registers: int
    spills: int
    shared: int
    occupancy: float

    @property
    def complaint(self) -> str | None:
        """Why this is not good enough, or None."""
        target = TARGETS[self.job.target]
        most = target.shared
        if self.shared > most:
            return f"{self.job.title}: {self.shared} bytes of shared memory, and a block has {most}"
        if self.spills and self.job.D <= NO_SPILLS_UP_TO and target.backend == "cuda":
            return f"{self.job.title}: {self.spills} bytes spilled, and up to D = {NO_SPILLS_UP_TO} none may be"
        return None

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        own = {**self.job._asdict(), "tiles": self.job.tiles._asdict()}
        return {**own, "registers": self.registers, "spills": self.spills, "shared": self.shared,
                "occupancy": self.occupancy, "complaint": self.complaint}  # fmt: skip


def targets() -> tuple[str, ...]:
    """Those that the installed Triton can compile for."""
    from triton.backends import backends

    there = {"cuda": "nvidia" in backends, "hip": "amd" in backends}
    return tuple(name for name, target in TARGETS.items() if there[target.backend])


def jobs(names: tuple[str, ...], sizes: tuple[int, ...], *, first_only: bool = False) -> Iterator[Job]:
    """Every kernel of the table for these targets and sizes; or only the first layout of each, the largest variant."""
    for target in names:
        for kernel, layouts in KERNELS.items():
            for D in sizes:
                for tiles in layouts[D][: 1 if first_only else None]:
                    for variant in ("rotation",) if first_only else VARIANTS:
                        yield Job(kernel, D, tiles, variant, target)


def compiled(job: Job) -> Compiled:
    """Compile one, with as many value columns as rows, training and asking for variance and evidence."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from membydesign.ops.kalman.triton_backward import backward_kernel
    from membydesign.ops.kalman.triton_forward import forward_kernel
    from membydesign.ops.kalman.triton_step import step_kernel

    target, turns = TARGETS[job.target], VARIANTS[job.variant]
    kernel: Any = {"forward": forward_kernel, "backward": backward_kernel, "step": step_kernel}[job.kernel]
    asked = {"ROTATES": turns, "MIXED": turns, "C": table.CHUNK, "PRECISION": "ieee"}
    asked |= dict.fromkeys(("VARIANCE", "EVIDENCE", "ERROR", "SAVE"), True)
    constants = {**asked, "D": job.D, "m": job.D, **table.constants(job.tiles, job.D, job.D)}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    counts = {"K": "i32", "G": "i32"}
    signature = {name: "constexpr" if name in constants else counts.get(name, "*fp32") for name in kernel.arg_names}
    aligned: Any = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(signature.values()) if x == "*fp32"}
    with knobs.compilation.scope(), knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as said:
        # Triton's own call of ptxas counts, with the options of its version; a kernel from the cache would say nothing.
        knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
        found = triton.compile(
            ASTSource(kernel, signature, constants, aligned),
            target=GPUTarget(target.backend, target.arch, target.warp),
            options={"num_warps": job.tiles.warps, "num_stages": job.tiles.stages, "enable_fp_fusion": True},
        )
    registers, spills = _of_nvidia(said.getvalue(), job) if target.backend == "cuda" else _of_amd(found.asm["amdgcn"])
    shared = found.metadata.shared
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
        found = re.search(rf"\.{name}:\s*(\d+)", assembly)
        return int(found[1]) if found else 0

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
