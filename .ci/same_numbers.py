"""Prove that a change of the code changed no numbers: save the results of two versions, then compare the files.

    PYTHONPATH=<old checkout>/src python .ci/same_numbers.py save old.pt
    PYTHONPATH=<new checkout>/src python .ci/same_numbers.py save new.pt
    python .ci/same_numbers.py compare old.pt new.pt

`save` computes the cases of `same_numbers_cases.py` on one thread and stores each tensor under
`kind/design/path/setting/tensor`. Both files must come from the same machine and version of torch. `compare` exits
with 1 if a tensor is missing or beyond the tolerance.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Generator, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 2.0**-7}
"""Largest accepted difference relative to a tensor's largest entry; tensors of other types must be equal."""


class Difference(NamedTuple):
    """How far two tensors are apart: relative to the largest entry, in units of the last place, and where."""

    relative: float
    ulps: float
    key: str


def save(path: str) -> None:
    """Compute every case and write its tensors; a case that fails is reported and left out."""
    from same_numbers_cases import filter_cases, layer_cases

    torch.set_num_threads(1)
    results: dict[str, Tensor] = {}
    start = time.perf_counter()
    for cases in (filter_cases, layer_cases):
        for name, compute, *arguments in cases():
            try:
                tensors = compute(Generator().manual_seed(zlib.crc32(name.encode())), *arguments)
            except Exception as error:
                print(f"no result for {name}: {error!r}", file=sys.stderr)
                continue
            results |= {f"{name}/{key}": x.detach().clone() for key, x in tensors.items() if x is not None}
        print(f"{cases.__name__}: {len(results)} tensors after {time.perf_counter() - start:.0f} s", file=sys.stderr)
    torch.save(results, path)


def compare(old: str, new: str) -> bool:
    """Print where two files differ; return whether no tensor is missing and every difference is within tolerance."""
    files = [torch.load(path, weights_only=True) for path in (old, new)]
    before, after = ({numbered(key): x for key, x in file.items()} for file in files)
    assert [len(before), len(after)] == [len(file) for file in files], "two tensors of one file have the same name"
    groups: dict[str, list[Difference | None]] = defaultdict(list)
    unequal: dict[str, list[Difference]] = defaultdict(list)
    too_large = []
    for key in sorted(before.keys() & after.keys()):
        kind, design, path, _ = key.split("/", 3)
        dtype = before[key].dtype
        difference = difference_of(key, before[key], after[key])
        groups[f"{kind}, {path}, {str(dtype).removeprefix('torch.')}"].append(difference)
        if difference is not None:
            unequal[f"{kind}, {design}, {path}"].append(difference)
            if difference.relative > TOLERANCES.get(dtype, 0.0):
                too_large.append(f"{key}: {difference.relative:.2g}")
    print(f"{'group':42} {'tensors':>8} {'equal':>8} {'last places':>12} {'relative':>9}")
    for group, rows in sorted(groups.items()):
        apart = [row for row in rows if row is not None]
        print(f"{group:42} {len(rows):8} {len(rows) - len(apart):8} {worst(apart)}")
    lines = (f"{name:64} {len(rows):6} {worst(rows)}  {max(rows).key}" for name, rows in unequal.items())
    print_list("not equal bit for bit (tensors, last places, relative, worst)", lines, most=200)
    first, second = ({numbered(key): key for key in file} for file in files)
    renamed = (f"{name} -> {second[key]}" for key, name in first.items() if second.get(key, name) != name)
    print_list("renamed parts of beliefs", renamed)
    print_list("only in the second file", after.keys() - before.keys())
    print_list("missing in the second file", before.keys() - after.keys())
    print_list("beyond the tolerance", too_large)
    return not too_large and before.keys() <= after.keys()


def numbered(key: str) -> str:
    """Drop the name of a belief's part, which follows its number, since versions may differ in it."""
    return key.partition(":")[0]


def difference_of(key: str, a: Tensor, b: Tensor) -> Difference | None:
    """Measure how far two tensors are apart; None if they are equal bit for bit.

    Last places are those of each entry, or of a thousandth of the largest one, below which sums cancel.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return Difference(float("inf"), float("inf"), f"{key}: {a.dtype} {list(a.shape)}, {b.dtype} {list(b.shape)}")
    if torch.equal(bits(a), bits(b)):
        return None
    wide_a, wide_b = a.double(), b.double()
    distance = torch.where(wide_a == wide_b, 0.0, (wide_a - wide_b).abs()).nan_to_num(float("inf"), float("inf"))
    if not a.is_floating_point():
        return Difference(float("inf"), distance.max().item(), key)
    limits = torch.finfo(a.dtype)
    size, largest = wide_a.abs(), wide_a.abs().max().clamp_min(limits.tiny)
    last_place = limits.eps * torch.frexp(torch.maximum(size, largest / 1000)).exponent.sub(1).double().exp2()
    return Difference((distance.max() / largest).item(), (distance / last_place).max().item(), key)


def bits(x: Tensor) -> Tensor:
    """View a tensor as bytes, so that 0 and -0 differ and a NaN equals itself."""
    return x.contiguous().flatten().view(torch.uint8)


def worst(differences: Sequence[Difference]) -> str:
    """Format the largest differences."""
    ulps = max((difference.ulps for difference in differences), default=0.0)
    return f"{ulps:12.4g} {max((difference.relative for difference in differences), default=0.0):9.2g}"


def print_list(title: str, lines: Iterable[str], most: int = 40) -> None:
    """Print how many lines there are, and the first of them."""
    ordered = sorted(lines)
    print(f"\n{title}: {len(ordered)}", *ordered[:most], *["..."][: len(ordered) > most], sep="\n  ")


def main() -> None:
    """Run the command that was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("save", help="compute every case and write FILE").add_argument("file", metavar="FILE")
    comparison = commands.add_parser("compare", help="report where the tensors of B differ from those of A")
    comparison.add_argument("old", metavar="A")
    comparison.add_argument("new", metavar="B")
    arguments = parser.parse_args()
    if arguments.command == "save":
        save(arguments.file)
    elif not compare(arguments.old, arguments.new):
        sys.exit(1)


if __name__ == "__main__":
    main()
