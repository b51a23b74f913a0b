"""`import membydesign` and filtering need torch alone."""

import subprocess
import sys
import textwrap

import membydesign
from membydesign.install import install_hint

BLOCKED = """
    import importlib.metadata, re, sys

    def needed(name, seen):
        if name not in seen:
            seen.add(name)
            for line in importlib.metadata.requires(name) or ():
                if "extra ==" not in line:
                    dependency = re.match(r"[A-Za-z0-9_.-]+", line).group().lower().replace("_", "-")
                    try:
                        needed(dependency, seen)
                    except importlib.metadata.PackageNotFoundError:
                        pass
        return seen

    def modules(package):
        top = package.read_text("top_level.txt")
        files = [file for file in package.files or () if file.suffix == ".py"]
        return top.split() if top else {file.parts[0] if len(file.parts) > 1 else file.stem for file in files}

    allowed, owners = needed("torch", set()) | {"memory-by-design"}, {}
    for package in importlib.metadata.distributions():  # packages_distributions() of Python 3.10 sees only a part
        for module in modules(package):
            owners.setdefault(module, []).append(package.metadata["Name"].lower().replace("_", "-"))
    blocked = {module for module, names in owners.items() if not any(name in allowed for name in names)}
    assert {"matplotlib", "rich", "typer", "hypothesis", "numpy"} <= blocked, blocked

    def without(find_spec):
        return lambda name, *rest: None if name.partition(".")[0] in blocked else find_spec(name, *rest)

    class Finder:
        def __init__(self, finder):
            self.find_spec = without(finder.find_spec)

    sys.meta_path[:] = [Finder(finder) for finder in sys.meta_path]
"""


def run(code: str) -> str:
    program = textwrap.dedent(code)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_torch_alone_is_enough():
    """With every other package blocked, each catalogue design filters, each layer runs, and a problem is drawn."""
    out = run(
        BLOCKED
        + """
    import torch
    import membydesign as mbd

    for name, design in mbd.catalogue.items():
        within = {"> 0": 1.0, ">= 0": 0.1, "<= 0": -0.1, "[0, 1]": 0.5, "finite": 0.1}
        q, k, v = torch.rand(3, 1, 5, 2, 4).unbind()
        out = mbd.filter_sequence(design, q, k, v, **{p.name: within[p.bound] for p in design.step_parameters})
        assert out.output.shape == (1, 5, 2, 4)
        print(design.describe().title)
    for name in mbd.layers.LAYERS:
        y, belief = mbd.make_layer(name, 16, num_heads=2, head_dim=4)(torch.randn(1, 5, 16))
        assert y.shape == (1, 5, 16)

    from membydesign.testing import random_problem

    assert random_problem(mbd.catalogue["kda"]).filter().output.isfinite().all()
    """
    )
    assert len(out.splitlines()) == len(membydesign.catalogue)


def test_import_pulls_in_nothing_heavy():
    """Beyond torch, `import membydesign` loads its own modules and no experiment, command or plot."""
    out = run(
        """
    import sys
    import torch
    before = set(sys.modules)
    import membydesign
    print(*sorted({m for m in set(sys.modules) - before if not m.startswith(("torch", "_"))}))
    """
    )
    loaded = {name.partition(".")[0] for name in out.split()}
    assert loaded <= {"membydesign"} | set(sys.stdlib_module_names)
    assert "membydesign.cli" not in out
    assert "membydesign.experiments" not in out
    assert "membydesign.models" not in out


def test_the_command_without_its_extra_says_what_to_install():
    out = run(
        BLOCKED
        + """
    import contextlib, io
    from membydesign.cli import main
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        try:
            main()
        except SystemExit as stop:
            assert stop.code == 1
    print(error.getvalue())
    """
    )
    assert install_hint("command,figures") in out


def test_a_filter_imports_only_what_it_needs():
    """Designs beyond Table 1 cost no time before their first use."""
    out = run(
        """
        import sys, torch, membydesign as mbd
        x = torch.randn(1, 5, 1, 4)
        mbd.filter_sequence(mbd.catalogue["deltanet"], x, x, x, write_noise=1.0, prior_variance=1.0)
        print(*(name for name in sys.modules if name.startswith("membydesign.design.")))
        """
    )
    later = {"statistics", "penalty", "mlstm", "hidden_markov", "unknown_scale", "describe", "catalogue.relatives"}
    assert not {f"membydesign.design.{name}" for name in later} & set(out.split())


def test_every_public_name_is_where_it_says():
    from membydesign import design

    for module in (membydesign, design):
        assert len(set(module.__all__)) == len(module.__all__)
        for name in module.__all__:
            assert getattr(module, name) is not None
    assert set(design._MODULES) <= set(design.__all__)
    for name, row in membydesign.catalogue.items():
        assert row is membydesign.catalogue[name]
        assert isinstance(row, membydesign.Design)
