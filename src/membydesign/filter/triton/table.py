"""What the Triton kernels are tried with on a GPU, and which of it is taken where nothing can be timed.

This table is what `triton.autotune` chooses from, and what `mbd kernels check` compiles.
"""

from __future__ import annotations

from typing import NamedTuple

CHUNK = 16
"""C: the in-chunk factor is a tile of 16×16, the smallest that matrix products take."""

LEAST = 16
"""The smallest side of a tile in a matrix product."""


class Tiles(NamedTuple):
    """How a kernel lays out its work.

    Attributes:
        panel: rows of P that are held at a time; 0 if all of P stays on chip.
        columns: the most value columns that are held at a time; the mean stays on chip if it has no more.
        warps: threads of a program, by 32.
        stages: how many chunks ahead inputs are fetched. Only 1 is sound: a belief that one chunk leaves in memory is
            read by the next, and Triton would fetch it too early.
    """

    panel: int
    columns: int
    warps: int
    stages: int = 1


FORWARD: dict[int, tuple[Tiles, ...]] = {
    16: (Tiles(0, 64, 2), Tiles(0, 64, 4)),
    32: (Tiles(0, 64, 4), Tiles(0, 64, 8)),
    64: (Tiles(0, 64, 8), Tiles(32, 32, 8)),  # the first spills on Triton 3.5 and 3.6, the second nowhere
    128: (Tiles(16, 32, 8), Tiles(32, 32, 8)),
    256: (Tiles(16, 16, 8),),
}
"""For each padded D; the first is the default."""

BACKWARD: dict[int, tuple[Tiles, ...]] = {
    16: (Tiles(0, 64, 8),),
    32: (Tiles(16, 16, 8),),
    64: (Tiles(32, 16, 8),),
    128: (Tiles(16, 16, 8),),
    256: (Tiles(16, 16, 8),),
}

STEP: dict[int, tuple[Tiles, ...]] = {
    16: (Tiles(0, 64, 1),),
    32: (Tiles(0, 64, 2),),
    64: (Tiles(0, 64, 4),),
    128: (Tiles(0, 64, 8),),
    256: (Tiles(32, 32, 8),),
}

LARGEST = max(FORWARD)
"""Key sizes beyond this are filtered by the torch form."""


def padded(size: int) -> int:
    """The side of the tile that holds `size` entries: a power of two, 16 at least."""
    return max(LEAST, 1 << (size - 1).bit_length())


def constants(tiles: Tiles, D: int, m: int) -> dict[str, int | bool]:
    """The compile-time sizes of a kernel for D rows and m value columns of a group."""
    columns = min(padded(m), tiles.columns)
    return {
        "BD": padded(D),
        "BM": columns,
        "BI": tiles.panel or padded(D),
        "P_RESIDENT": not tiles.panel,
        "M_RESIDENT": m <= columns,
    }
