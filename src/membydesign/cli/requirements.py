"""What some commands need beyond the package: Transformers, Accelerate, or the benchmarks of a checkout."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import membydesign
from membydesign.cli.output import fail
from membydesign.install import install_hint

PACKAGE = Path(membydesign.__file__).resolve().parent


def need_models(command: str) -> None:
    """Exit with an installation hint if Transformers is missing."""
    _need("membydesign.models", command, "models", "transformers", "safetensors", "tokenizers", "huggingface_hub")


def need_training(command: str) -> None:
    """Exit with an installation hint if Accelerate is missing."""
    _need("membydesign.training", command, "training,models", "accelerate", "safetensors")


def need_onnx(command: str) -> None:
    """Exit with an installation hint if a package of ONNX is missing."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        _need(package, command, "onnx", package)


def _need(module: str, command: str, extra: str, *packages: str) -> None:
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        raise fail(f"mbd {command} needs {error.name}, which is not installed: {install_hint(extra)}") from None


def need_benchmarks(command: str) -> None:
    """Make the packages in a checkout's `benchmarks` folder importable; exit with an explanation outside a checkout."""
    folder = benchmarks_folder()
    if folder is None:
        raise fail(
            f"mbd {command} needs a checkout of memory-by-design: benchmarks and kernel checks are not part of the "
            f"installed package ({PACKAGE}). In a checkout, run make {command.split()[0]}, which sets up everything, "
            f"or pip install --editable '.[dev]' and then mbd {command}"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def benchmarks_folder(package: Path = PACKAGE) -> Path | None:
    """Return the `benchmarks` folder of the checkout that contains this package, or None if there is no checkout.

    Only the location of the package that is running counts. The working directory does not: it may belong to somebody
    else, and code must not be loaded from it. In a checkout that is installed with `--editable` both give one answer.
    """
    root = package.parents[1]
    folder = root / "benchmarks"
    if package != root / "src" / "membydesign" or not (folder / "membydesign_bench" / "__init__.py").is_file():
        return None
    try:
        project = (root / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return None
    return folder if re.search(r'^name = "memory-by-design"$', project, re.MULTILINE) else None
