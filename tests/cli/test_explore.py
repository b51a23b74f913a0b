"""The explorer: the page's own scripts and kernel are run by node, and compared with `filter_step`."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from typing import Any

import pytest
from typer.testing import CliRunner

from explorer_reference import DESIGNS, PAPER, expected, random_requests
from membydesign.cli.app import app
from membydesign.explore import FOLDER, page, wasm

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node, to run what a browser would run")
needs_zig = pytest.mark.skipif(not wasm.has_compiler(), reason="needs ziglang, to compile for WebAssembly")


def in_node(script, kernel: str | None = None) -> Any:
    """Run the part of the page that computes, then a script, whose `result` comes back."""
    (engine,) = re.findall(r'<script id="engine">(.*?)</script>', page("0"), re.DOTALL)
    if kernel is not None:
        engine = re.sub(r'WASM_BASE64 = "[^"]*"', f'WASM_BASE64 = "{kernel}"', engine)
    assert NODE is not None
    program = (
        f"{engine}\nloadKernel(WASM_BASE64).then((kernel) => {{ {script}; console.log(JSON.stringify(result)); }});"
    )
    done = subprocess.run([NODE, "-"], input=program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def shown(requests, kernel=None):
    """What the page shows for each (design, settings, t)."""
    one = "([name, settings, t]) => numbers(simulate(kernel, name, { writes: '', ...settings }), t)"
    return in_node(f"const result = {json.dumps(requests)}.map({one})", kernel)


def assert_same(requests, kernel=None):
    for request, numbers in zip(requests, shown(requests, kernel), strict=True):
        reference = expected(*request)
        assert numbers.keys() == reference.keys()
        for name, value in reference.items():
            if value is None:
                assert numbers[name] is None, (request, name)
            else:
                assert numbers[name] == pytest.approx(value, rel=1e-9, abs=1e-9), (request, name)


@needs_node
def test_every_number_is_that_of_filter_step():
    assert_same(
        [*random_requests(36), *((name, PAPER, t) for name in DESIGNS for t in (0, 53)), (DESIGNS[0], PAPER, 112)]
    )


@needs_node
@needs_zig
@pytest.mark.slow
def test_the_kernel_built_now_gives_the_same_numbers(tmp_path):
    wasm.build(tmp_path / "step.wasm")
    kernel = base64.b64encode((tmp_path / "step.wasm").read_bytes()).decode()
    assert_same(list(random_requests(12)), kernel)


@needs_node
def test_the_numbers_of_the_paper():
    bayes, delta = shown([("bayesian_layer", PAPER, 112), ("gated_deltanet", PAPER, 112)])
    first = shown([("bayesian_layer", PAPER, 53)])[0]
    assert (round(bayes["retrieval"], 3), round(delta["retrieval"], 3)) == (0.723, 0.351)
    assert round(first["gain"], 3) == 0.907


@needs_node
def test_the_table_shows_every_number():
    rows = re.findall(r'\["(\w+)", "[^"]+"\]', (FOLDER / "view.js").read_text().split("const REACH")[0])
    assert rows == list(shown([("deltanet", PAPER, 1)])[0])


@needs_node
@pytest.mark.parametrize(
    "text",
    ["", "rho=0.3&t=20&designs=deltanet%2Clinear_attention", "l2=0.2&r2=3&p0=1&decay=0.9&writes=C2+B10+A5&t=7&story=2"],
)
def test_an_address_is_read_as_it_was_written(text):
    state = in_node(f"const result = fromHash({json.dumps(text)})")
    assert in_node(f"const result = fromHash(toHash({json.dumps(state)}))") == state
    for name, value in (part.split("=") for part in text.split("&") if part):
        got = {**state, **state["settings"]}[name]
        assert (",".join(got) if name == "designs" else str(got)) == value.replace("%2C", ",").replace("+", " ")


@needs_node
def test_a_bad_address_is_brought_into_bounds():
    text = "rho=7&l2=-1&r2=nonsense&decay=&target=1e9&t=99999&designs=none,deltanet,toString&writes=" + "A999+" * 40
    state = in_node(f"const result = fromHash({json.dumps(text)})")
    assert state["settings"] | {"writes": ""} == PAPER | {"rho": 0.99, "l2": 0.001, "target": 100, "writes": ""}
    assert (state["t"], state["designs"]) == (400, ["deltanet"])


@needs_node
def test_a_field_that_the_kernel_does_not_have_is_named():
    result = in_node(
        "let result = ''; try { kernel.prepare(1, { Q: 1 }, {}) } catch (error) { result = error.message }"
    )
    assert result == "struct Sizes: no field Q"


def test_the_kernel_is_the_one_that_was_recorded():
    made = json.loads((FOLDER / "step.json").read_text())
    kernel = (FOLDER / "step.wasm").read_bytes()
    assert hashlib.sha256(kernel).hexdigest() == made["sha256"]
    assert made["sha256"] in page("0")
    assert made["options"] == " ".join(wasm.OPTIONS)


def test_mbd_explore_writes_one_small_file_that_loads_nothing(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    out = tmp_path / "new" / "page.html"
    assert CliRunner().invoke(app, ["explore", "--out", str(out), "--no-open"]).exit_code == 0
    assert not opened
    assert CliRunner().invoke(app, ["explore", "--out", str(out)]).exit_code == 0
    assert opened == [out.as_uri()]
    text = out.read_text(encoding="utf-8")
    assert len(text.encode()) < 100_000
    assert "{{" not in text
    assert "default-src 'none'" in text
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)|@import|\bfetch\(|XMLHttpRequest""", text)
    assert re.findall(r"https?://[^\s\"']+", text) == ["http://www.w3.org/2000/svg"]  # a name, not an address


def test_every_control_has_a_label():
    text = (FOLDER / "page.html").read_text(encoding="utf-8")
    labels = "".join(re.findall(r"<label.*?</label>", text, re.DOTALL))
    inputs = re.findall(r'<input [^>]*id="(\w+)"', text)
    assert len(inputs) == 10
    assert all(f'id="{name}"' in labels for name in inputs)


def test_a_folder_as_file_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["explore", "--out", str(tmp_path), "--no-open"])
    assert result.exit_code == 2
    assert "--out: expected a file" in result.stderr
