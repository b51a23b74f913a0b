r"""How long the dense filter would take on a GPU: estimates, and limits from counts. Nothing is timed.

    PYTHONPATH=benchmarks python -m membydesign_bench.roofline docs/figures/roofline.png

prints the tables of docs/internals/roofline.md and draws its figure.

`ESTIMATES` are times of the kernels as they were, from a model of the pipeline of a multiprocessor. The rest are
limits: time is at least operations / rate and at least bytes / bandwidth, for one token of one head with M = D. A
limit leaves out what decides today: the chain of dependent steps inside a chunk, and the torch operations around the
kernels.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from membydesign_bench.rate import chunk_operations

SIZES = (64, 128, 256)
CHUNKS = (16, 32, 64)
STATE_BYTES = 4
"""States, noises and decays are float32."""

ON_CHIP = 128
"""The largest D at which P and M of a head, 8 D² bytes, stay in an SM's registers and shared memory."""


class Device(NamedTuple):
    """Limits from the data sheets: dense products, in TFLOP/s and TB/s."""

    name: str
    float32: float
    tf32: float
    bfloat16: float
    bandwidth: float
    processors: int

    @property
    def tf32x3(self) -> float:
        """Three TF32 products for one that is almost as exact as float32's."""
        return self.tf32 / 3


A100 = Device("A100 80 GB", 19.5, 156, 312, 2.0, 108)
H100 = Device("H100 SXM", 67, 495, 990, 3.35, 132)


class Cost(NamedTuple):
    """Of one token of one head."""

    operations: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.operations / self.bytes

    def nanoseconds(self, rate: float, bandwidth: float) -> float:
        """The least time on a whole device, from TFLOP/s and TB/s."""
        return max(self.operations / rate, self.bytes / bandwidth) / 1e3


def dense(D: int, C: int, *, element: int = 2, backward: bool = False) -> Cost:
    """The dense filter in one fused kernel: inputs are read and outputs written once.

    Forward also writes the belief at every chunk's start, which the backward reads. The backward recomputes a chunk
    and then has two products for each one of the forward, so three times its operations. Beyond `ON_CHIP`, P and M (and
    in the backward their gradients too) are read twice and written once for every chunk.
    """
    belief = 2 * D * D * STATE_BYTES / C
    passes = 0 if D <= ON_CHIP else 3
    tokens = 4 * D * element + 3 * STATE_BYTES  # q, k, v, o; ℓ², r², log a
    forward = chunk_operations(D, D, C) / C
    if not backward:
        return Cost(forward, tokens + belief * (1 + passes))
    gradients = 7 * D * element + 6 * STATE_BYTES  # q, k, v, do in; dq, dk, dv out; the three scalars and theirs
    return Cost(3 * forward, gradients + belief * (1 + 2 * passes))


def delta_operations(D: int, M: int, C: int) -> float:
    """Useful operations of Gated DeltaNet's chunk form: one head, one chunk of C tokens, forward.

    W S, Kᵀ V and Q S are 6 C D M; K Kᵀ, Q Kᵀ, T K, T V and A V are triangles, C² (3 D + 2 M); T itself is C³/3.
    """
    return 6 * C * D * M + C * C * (3 * D + 2 * M) + C**3 / 3


def gated_deltanet(D: int, C: int = 64, *, element: int = 2, backward: bool = False) -> Cost:
    """Gated DeltaNet as flash-linear-attention runs it: three kernels, with what passes between them in global memory.

    Read and written: k, v, w, u and a row of T by the first, k, w, u, v' and a state for every chunk by the second, q,
    k, v', o and that state by the third. The backward recomputes these and has as many for each of two gradients.
    """
    elements = (4 * D + C) + (4 * D + D * D / C) + (4 * D + D * D / C)
    cost = Cost(delta_operations(D, D, C) / C, elements * element + 4 * STATE_BYTES)
    return Cost(3 * cost.operations, 3 * cost.bytes) if backward else cost


class Estimate(NamedTuple):
    """Milliseconds of a forward pass on a device, from the pipeline model.

    Attributes:
        scalar: our kernels and the torch operations around them, one decay for all rows.
        diagonal: the same with a decay of each row.
        gated_deltanet: flash-linear-attention's kernels.
    """

    scalar: float
    diagonal: float
    gated_deltanet: float


ESTIMATES = {
    64: (Estimate(6.0, 22, 0.6), Estimate(2.5, 12, 0.37)),
    128: (Estimate(16, 48, 1.15), Estimate(6.2, 25, 0.67)),
    256: (Estimate(46, 110, 3.2), Estimate(17, 55, 1.9)),
}
"""For each D on an A100 and an H100, B = 8, H = 16, T = 2,048, within 40 % or so. Commit 46a10ed, compiled by Triton
3.9.0: the control codes of its machine code give cycles for each chunk. Calibrated on fla's recurrent kernel."""

TOKENS = 8 * 16 * 2048
"""Of all heads, in `ESTIMATES`."""


def estimates() -> str:
    """`ESTIMATES` as Markdown, with how many times Gated DeltaNet's time each is."""
    lines = [
        ["D", "", "scalar decay: ms", "diagonal decay: ms", "Gated DeltaNet: ms", "scalar, times", "diagonal, times"]
    ]
    lines.append(["---"] * 2 + ["---:"] * 5)
    for D, devices in ESTIMATES.items():
        for device, x in zip((A100, H100), devices, strict=True):
            times = (f"{ours / x.gated_deltanet:.0f}" for ours in (x.scalar, x.diagonal))
            lines.append([str(D), device.name, *(f"{ms:g}" for ms in x), *times])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows() -> list[list[str]]:
    """A line for each size, chunk and direction of the dense filter, and for Gated DeltaNet."""
    lines_of_table = []
    for backward in (False, True):
        for D in SIZES:
            lines = {f"dense filter, C = {C}": (dense(D, C, backward=backward), "tf32x3") for C in CHUNKS}
            lines["Gated DeltaNet, C = 64"] = (gated_deltanet(D, backward=backward), "bfloat16")
            for what, (cost, fast) in lines.items():
                cells = [f"{cost.operations / 1e3:,.0f}", f"{cost.bytes / 1e3:.1f}", f"{cost.intensity:.0f}"]
                for device in (A100, H100):
                    rates = (device.float32, getattr(device, fast))
                    cells += [f"{cost.nanoseconds(rate, device.bandwidth):.2f}" for rate in rates]
                lines_of_table.append(["backward" if backward else "forward", str(D), what, *cells])
    return lines_of_table


HEADINGS = (
    *("", "D", "", "kFLOP", "kB", "FLOP/B"),
    *("A100, float32: ns", "A100, tensor cores: ns", "H100, float32: ns", "H100, tensor cores: ns"),
)


def table() -> str:
    """`rows` as Markdown."""
    lines = [HEADINGS, ["---"] * 3 + ["---:"] * (len(HEADINGS) - 3), *rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(path: str) -> None:
    """The two roofs of each device, the limits of the kernels on them, and how far below today's are estimated."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    intensities = [2 ** (i / 4) for i in range(8, 49)]
    colours = dict(zip(SIZES, ("tab:blue", "tab:orange", "tab:green"), strict=True))
    for i, (ax, device) in enumerate(zip(axes, (A100, H100), strict=True)):
        for name, style in (("float32", "-"), ("tf32x3", "--"), ("bfloat16", ":")):
            rate = getattr(device, name)
            roof = [min(rate, x * device.bandwidth) for x in intensities]
            ax.loglog(intensities, roof, style, color="0.35", label=f"roof in {name}")
        for D in SIZES:
            x = ESTIMATES[D][i]
            for cost, rate, ms, marker, what in (
                (dense(D, 16), device.float32, x.scalar, "o", "dense filter, C = 16"),
                (gated_deltanet(D), device.bfloat16, x.gated_deltanet, "s", "Gated DeltaNet, C = 64"),
            ):
                limit = min(rate, cost.intensity * device.bandwidth)
                reached = cost.operations * TOKENS / (ms * 1e9)
                ax.plot([cost.intensity] * 2, [reached, limit], ":", color=colours[D], linewidth=1)
                ax.plot(
                    cost.intensity, limit, marker, color=colours[D], fillstyle="none", label=f"limit: {what}, D = {D}"
                )
                ax.plot(cost.intensity, reached, marker, color=colours[D], label=f"estimate: {what}, D = {D}")
        ax.set_title(f"{device.name}: nothing measured")
        ax.set_xlabel("operations for each byte of global memory")
    axes[0].set_ylabel("TFLOP/s, forward")
    axes[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    print(estimates(), table(), sep="\n\n")
    for where in sys.argv[1:]:
        draw(where)
