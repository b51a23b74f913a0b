"""The framework stays open: outside `design/` only a kernel that says what it runs asks for the class of a part."""

import ast
from pathlib import Path

import membydesign
from membydesign.design import Covariance, Transition, Write

ROOT = Path(membydesign.__file__).parent
KERNELS = {
    "filter/linear.py",
    "filter/native/block.py",
    "filter/native/diagonal.py",
    "filter/native/forgetting.py",
    "filter/native/low_rank.py",
    "filter/native/step.py",
    "filter/torch/forgetting.py",
}
"""Where kernels say what they run: `why_not`, and what it shares with others."""


def concrete_parts() -> set[str]:
    names, kinds = set(), [Transition, Write, Covariance]
    while kinds:
        children = [child for child in kinds.pop().__subclasses__() if child.__module__.startswith("membydesign.")]
        names |= {child.__name__ for child in children}
        kinds += children
    return names


def class_tests(tree: ast.AST, parts: set[str]) -> list[int]:
    """Lines that test for one of these classes: isinstance, issubclass, `type(x) is …`, `case Part()`."""

    def mentions(node: ast.AST) -> bool:
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        return bool((names | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}) & parts)

    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kind]) if mentions(kind):
                lines.append(node.lineno)
            case ast.Compare(left=ast.Call(func=ast.Name(id="type"))) if any(map(mentions, node.comparators)):
                lines.append(node.lineno)
            case ast.MatchClass(cls=kind) if mentions(kind):
                lines.append(node.lineno)
    return lines


def test_the_search_finds_what_it_looks_for():
    text = "isinstance(x, (int, Dense))\ntype(x) is mbd.Reset\nmatch x:\n    case Identity():\n        pass\nDense()"
    assert class_tests(ast.parse(text), {"Dense", "Reset", "Identity"}) == [1, 2, 4]


def test_nothing_outside_asks_for_the_class_of_a_part():
    parts = concrete_parts()
    assert {"Dense", "Reset", "Identity", "DampedRotation", "ObserveMemory", "LatentInput"} <= parts
    outside = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in sorted(ROOT.rglob("*.py"))
        if file.relative_to(ROOT).parts[0] != "design" and str(file.relative_to(ROOT)) not in KERNELS
        for line in class_tests(ast.parse(file.read_text(encoding="utf-8")), parts)
    ]
    assert not outside
