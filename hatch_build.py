"""Put compiled code into the wheel if the environment has MEMBYDESIGN_PREBUILT=1 (docs/internals/releasing.md).

Otherwise the wheel is pure Python with C sources, for every platform.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from types import ModuleType

NATIVE = "membydesign/filter/native"


class NativeCode(BuildHookInterface):
    """Compile all C sources for the levels of this machine's architecture."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into a temporary folder, include it, and tag the wheel with this platform."""
        if os.environ.get("MEMBYDESIGN_PREBUILT") != "1" or version != "standard":
            return
        compiler, cpu = self._module("compiler"), self._module("cpu")
        platform = sysconfig.get_platform()
        if sys.platform != "linux" or not cpu.levels():
            raise RuntimeError(f"MEMBYDESIGN_PREBUILT: expected Linux on x86-64 or aarch64, got {platform}")
        self._folder = tempfile.TemporaryDirectory()
        compiler.prebuild(Path(self._folder.name), [level for level in cpu.levels() if level != "x86-64"])
        build_data["force_include"][self._folder.name] = f"{NATIVE}/prebuilt"
        build_data["pure_python"] = False
        # Any Python 3 can load the libraries, since they are called through ctypes.
        build_data["tag"] = f"py3-none-{platform.replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the temporary folder."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    def _module(self, name: str) -> ModuleType:
        """Load a module of the package by itself, since the package imports torch, which a build does not have."""
        spec = importlib.util.spec_from_file_location(name, Path(self.root) / "src" / NATIVE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
