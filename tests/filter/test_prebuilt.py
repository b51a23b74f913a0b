"""Compiled code in the wheel: the best level of this CPU, checked, without a compiler; and how CPUs are told apart."""

import hashlib
import importlib.util
import json
import platform
import sys
import sysconfig
import types
from pathlib import Path

import pytest

from fresh_native import fresh_process, load
from membydesign.filter.native import build, cache, compiler, cpu, prebuilt

SOURCE = "diagonal.c"
V2 = frozenset(["pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "cx16", "lahf_lm"])
V3 = V2 | frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
V4 = V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])

on_x86_linux = pytest.mark.skipif(
    sys.platform != "linux" or "x86-64-v3" not in cpu.supported(), reason="runs code for x86-64-v3"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """One source for the two lower levels, as in a wheel."""
    folder, libraries = tmp_path_factory.mktemp("prebuilt"), {}
    for level in ("x86-64-v2", "x86-64-v3"):
        path = folder / compiler.prebuilt_name(SOURCE, "float", level)
        compiler.compile_portable(compiler.find(), SOURCE, "float", level, path)
        libraries[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = {"sources": compiler.sources_digest(), "libraries": libraries}
    (folder / compiler.MANIFEST).write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def wheel(built, monkeypatch, tmp_path):
    """The package as installed from a wheel with that code, on a machine without a compiler."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    for path in built.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("MEMBYDESIGN_CPU", raising=False)
    monkeypatch.delenv("MEMBYDESIGN_NATIVE", raising=False)
    return folder


def loaded_name() -> str:
    """Load the source without a warning, and return the name of the file."""
    (library,), warned = load(SOURCE)
    assert warned == []
    assert library is not None
    return Path(library._name).name


@on_x86_linux
def test_the_best_level_is_loaded_without_a_compiler(wheel):
    assert loaded_name() == "diagonal-float-x86-64-v3.so"


@on_x86_linux
@pytest.mark.parametrize(("limit", "level"), [("x86-64-v2", "x86-64-v2"), ("x86-64-v4", "x86-64-v3")])
def test_the_environment_can_only_lower_the_level(wheel, monkeypatch, limit, level):
    monkeypatch.setenv("MEMBYDESIGN_CPU", limit)
    assert loaded_name() == f"diagonal-float-{level}.so"


@on_x86_linux
def test_a_cpu_with_fewer_instructions_uses_a_lower_level(wheel, monkeypatch):
    monkeypatch.setattr(cpu, "features", lambda: V2)
    assert loaded_name() == "diagonal-float-x86-64-v2.so"


@on_x86_linux
@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("x86-64", "prebuilt code is for x86-64-v2, x86-64-v3, and at most x86-64 can be used"),
        ("avx2", "MEMBYDESIGN_CPU: expected one of x86-64, x86-64-v2, x86-64-v3, x86-64-v4, got 'avx2'"),
    ],
)
def test_without_a_level_torch_filters_and_one_warning_says_why(wheel, monkeypatch, limit, reason):
    monkeypatch.setenv("MEMBYDESIGN_CPU", limit)
    libraries, warned = load(SOURCE, "step.c")
    assert libraries == [None, None]
    assert len(warned) == 1
    assert "no C compiler was found" in warned[0]
    assert reason in warned[0]


@on_x86_linux
@pytest.mark.parametrize("damage", ["truncated library", "other sources", "truncated manifest"])
def test_damaged_or_outdated_code_is_not_loaded(wheel, damage):
    manifest, library = wheel / compiler.MANIFEST, wheel / "diagonal-float-x86-64-v3.so"
    if damage == "other sources":
        manifest.write_text(manifest.read_text().replace(compiler.sources_digest(), "0"))
    else:
        path = library if damage == "truncated library" else manifest
        path.write_bytes(path.read_bytes()[:100])
    libraries, warned = load(SOURCE)
    assert libraries == [None]
    assert ("of other sources" if damage == "other sources" else "is damaged") in warned[0]


@on_x86_linux
def test_code_is_compiled_here_on_request(built, monkeypatch, tmp_path):
    monkeypatch.setattr(prebuilt, "FOLDER", built)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert loaded_name() == "diagonal-float-x86-64-v3.so"
    monkeypatch.setenv("MEMBYDESIGN_NATIVE", "compile")
    name = loaded_name()
    assert [path.name for path in (tmp_path / "membydesign").iterdir()] == [name]


@on_x86_linux
def test_openmp_is_torchs_own(built):
    """A library that names a runtime would load the system's, or make auditwheel copy one into the wheel."""
    for path in built.glob("*.so"):
        assert b"libgomp" not in path.read_bytes()
        assert b"GOMP_parallel" in path.read_bytes()


@on_x86_linux
def test_a_library_is_refused_if_the_cpu_lacks_what_it_needs(built, monkeypatch):
    """As one from another machine, under whatever name it got here."""
    path = built / "diagonal-float-x86-64-v3.so"
    with fresh_process():
        prebuilt.provide_openmp()
        assert build._loaded(path) is not None
        monkeypatch.setattr(cpu, "features", lambda: V3 - {"avx2", "fma"})
        with pytest.raises(OSError, match=r"diagonal-float-x86-64-v3.so needs instructions .* lacks: fma avx2"):
            build._loaded(path)


@pytest.mark.parametrize(
    ("features", "level"),
    [
        (V4, "x86-64-v4"),
        (V4 - {"avx512vl"}, "x86-64-v3"),
        (V3, "x86-64-v3"),
        (V4 - {"fma"}, "x86-64-v2"),
        (V2, "x86-64-v2"),
        (frozenset(), "x86-64"),
        (None, "x86-64"),
    ],
)
def test_levels_of_a_cpu(monkeypatch, features, level):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu, "features", lambda features=features: features)
    assert cpu.supported()[-1] == level


def test_levels_of_other_architectures(monkeypatch):
    monkeypatch.setattr(cpu, "features", lambda: frozenset({"fp", "asimd", "sve"}))
    for machine, levels in (("aarch64", ("armv8-a",)), ("arm64", ("armv8-a",)), ("ppc64le", ())):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert cpu.supported() == levels


def test_compiled_code_stays_with_its_cpu(monkeypatch):
    """The name in the cache differs for another CPU; where CPUs cannot be told apart nothing is kept."""
    seen = []

    def library(name, build, keep):
        seen.append((name, keep))
        raise cache.CacheError("seen enough")

    monkeypatch.setattr(cache, "library", library)
    for features in (V2, V3, V3 | {"sha_ni"}, V3, None):
        with fresh_process():
            monkeypatch.setattr(cpu, "features", lambda features=features: features)
            with pytest.raises(cache.CacheError):
                build._compiled(SOURCE, "float")
    names, keeps = zip(*seen, strict=True)
    assert len(set(names[:4])) == 3
    assert names[1] == names[3]
    assert keeps == (True, True, True, True, False)


def test_the_identity_of_a_cpu_has_all_its_features(monkeypatch):
    identities = []
    for features in (V3, V3 | {"sha_ni"}):
        with fresh_process():
            monkeypatch.setattr(cpu, "features", lambda features=features: features)
            identities.append(cpu.identity())
    assert "sha_ni" in identities[1]
    assert identities[0] != identities[1]


def test_the_wheel_is_pure_unless_the_environment_says_otherwise(monkeypatch):
    hook, compiled = build_hook(monkeypatch)
    for variable, version in (("", "standard"), ("1", "editable")):
        monkeypatch.setenv("MEMBYDESIGN_PREBUILT", variable)
        build_data = {"force_include": {}}
        hook.initialize(version, build_data)
        assert build_data == {"force_include": {}}
    assert compiled == []


@on_x86_linux
def test_a_wheel_with_compiled_code_is_tagged_with_its_platform(monkeypatch):
    hook, compiled = build_hook(monkeypatch)
    monkeypatch.setenv("MEMBYDESIGN_PREBUILT", "1")
    build_data = {"force_include": {}}
    hook.initialize("standard", build_data)
    assert compiled == ["x86-64-v2", "x86-64-v3", "x86-64-v4"]
    ((folder, target),) = build_data.pop("force_include").items()
    assert target == "membydesign/filter/native/prebuilt"
    assert build_data == {"pure_python": False, "tag": f"py3-none-{sysconfig.get_platform().replace('-', '_')}"}
    assert Path(folder).is_dir()
    hook.finalize("standard", build_data, "")
    assert not Path(folder).exists()


def build_hook(monkeypatch):
    """Return the hook, with a stand-in for hatchling, which only a build has, and a list of the levels it compiles."""
    root, compiled = Path(__file__).resolve().parents[2], []
    for name in ("", ".builders", ".builders.hooks", ".builders.hooks.plugin", ".builders.hooks.plugin.interface"):
        monkeypatch.setitem(sys.modules, f"hatchling{name}", types.ModuleType(f"hatchling{name}"))
    sys.modules["hatchling.builders.hooks.plugin.interface"].BuildHookInterface = object  # pyright: ignore
    spec = importlib.util.spec_from_file_location("hatch_build", root / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hook = module.NativeCode()
    hook.root = str(root)
    load_module = hook._module

    def without_compiling(name):
        loaded = load_module(name)
        loaded.prebuild = lambda folder, levels: compiled.extend(levels)
        return loaded

    hook._module = without_compiling
    return hook, compiled
