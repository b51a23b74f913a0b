"""The explorer: the page's own scripts and kernel are run by node, and compared with `filter_step`."""

import base64
import hashlib
import json
import math
import random
import re
import shutil
import subprocess
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from membydesign import Belief, catalogue, filter_step
from membydesign.cli.app import app
from membydesign.design import Dense, Diagonal
from membydesign.explore import FOLDER, page, wasm

NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node, to run what a browser would run")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
needs_zig = pytest.mark.skipif(not wasm.has_compiler(), reason="needs ziglang, to compile for WebAssembly")

# Chromium's virtual time runs ahead of the thread that compiles WebAssembly, unless the page is busy meanwhile.
WAIT = """
setInterval(() => {
  for (let i = 0; i < 1e5 && !document.querySelector("#numbers td"); i++);
}, 10)
"""

D, M, A, B = 16, 6, 0, 1
DESIGNS = (
    "bayesian_layer",
    "bayesian_layer_diagonal",
    "stationary_bayesian_layer",
    "gated_deltanet",
    "deltanet",
    "linear_attention",
)
PAPER = {"rho": 0.92, "l2": 0.05, "r2": 0.05, "p0": 3, "decay": 1, "seed": 2, "target": 40, "distractor": 60}


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


def written(s):
    """The identities of the writes, in order."""
    if s.get("writes"):
        return ["ABCDEF".index(part[0]) for part in s["writes"].split() for _ in range(int(part[1:] or 1))]
    return [*range(M)] * s["seed"] + [B] * s["target"] + [A] * s["distractor"]


def expected(name, s, t):
    """The same numbers from `filter_step`, and from the paper's equations for u, beta and the gain."""
    eye = torch.eye(D, dtype=torch.float64)
    keys = eye[:M].clone()
    keys[B] = s["rho"] * eye[0] + math.sqrt(1 - s["rho"] ** 2) * eye[1]
    values = torch.eye(M, dtype=torch.float64)
    design = catalogue[name]
    parameters = {"write_noise": s["r2"]}
    kept = name in DESIGNS[:3]
    if kept:
        design = design.replace(covariance=(Diagonal if "diagonal" in name else Dense)(float(s["p0"])))
    variance = {0: "process_noise", 1: "process_noise", 2: "stationary_variance"}.get(
        DESIGNS.index(name), "prior_variance"
    )
    parameters[variance] = s["p0"] if variance == "stationary_variance" else s["l2"]
    if any(parameter.name == "log_decay" for parameter in design.step_parameters):
        parameters["log_decay"] = math.log(s["decay"])
    belief = Belief.prior(design, 2, 1, D, M, dtype=torch.float64)
    read = before = torch.zeros(2, M, dtype=torch.float64)
    order, gain = written(s)[:t], None
    for i, identity in enumerate(order):
        k, before = keys[identity], read
        if i == t - 1:
            gain = gain_of(name, s, belief, k)
        output, belief = filter_step(
            design, belief, keys[[A, B], None], k.expand(2, 1, D), values[identity].expand(2, 1, M), **parameters
        )
        read = output[:, 0]
    difference = (read[1, B] - read[1, A]).item()
    result = {
        "retrieval": torch.tensor(difference, dtype=torch.float64).sigmoid().item(),
        "margin": 2 * torch.tensor(difference, dtype=torch.float64).sigmoid().item() - 1,
        "readout_B": read[1, B].item(),
        "readout_A": read[1, A].item(),
        "readout_at_A": read[0, A].item(),
        "change_B": (read[1, B] - before[1, B]).item(),
        "change_A": (read[1, A] - before[1, A]).item(),
        **dict.fromkeys(("gain", "gain_at_B", "warp", "variance_A", "variance_B", "long_axis", "short_axis")),
    }
    if gain is not None:
        k = keys[order[-1]]
        along = (k @ gain).item()
        result |= {"gain": along, "gain_at_B": (keys[B] @ gain).item()}
        result["warp"] = math.degrees(math.atan2((gain - along * k).norm().item(), along))
    if kept:
        P = belief.covariance[0, 0].squeeze(0)
        P = P.diag() if P.ndim == 1 else P
        axes = torch.linalg.eigvalsh(P[:2, :2]).clamp(min=0).sqrt()
        result |= {"variance_A": (keys[A] @ P @ keys[A]).item(), "variance_B": (keys[B] @ P @ keys[B]).item()}
        result |= {"short_axis": axes[0].item(), "long_axis": axes[1].item()}
    return result


def gain_of(name, s, belief, k):
    """The gain beta u of a write."""
    if name in DESIGNS[:3]:
        P = belief.covariance[0, 0].squeeze(0)
        P, eye, a = P.diag() if P.ndim == 1 else P, torch.eye(D, dtype=torch.float64), s["decay"]
        noise = s["p0"] * (1 - a * a) if name == "stationary_bayesian_layer" else s["l2"]
        u = (a * a * P + noise * eye) @ k
        return u / (s["r2"] + k @ u)
    return s["l2"] * k / (s["r2"] + s["l2"] * (k @ k))


def random_requests(count):
    random.seed(0)
    for i in range(count):
        settings: dict[str, Any] = {name: 10 ** random.uniform(-2.5, 1) for name in ("l2", "r2", "p0")}
        settings |= {"rho": random.uniform(0, 0.99), "decay": random.choice([1.0, random.uniform(0.5, 1)])}
        settings |= {"seed": random.randint(0, 2), "target": random.randint(0, 15), "distractor": random.randint(0, 15)}
        if i % 4 == 0:
            settings["writes"] = " ".join(f"{random.choice('ABCDEF')}{random.randint(1, 9)}" for _ in range(5))
        yield DESIGNS[i % len(DESIGNS)], settings, random.randint(0, len(written(settings)))


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


@needs_chromium
@pytest.mark.slow
def test_a_browser_shows_the_numbers_and_the_walk(tmp_path):
    assert CHROMIUM is not None
    path = tmp_path / "page.html"
    path.write_text(page("0").replace("</body>", f"<script>{WAIT}</script></body>"), encoding="utf-8")
    options = ("--headless", "--no-sandbox", f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=20000")
    address = f"{path.as_uri()}#designs={','.join(DESIGNS)}&t=53&story=3"
    done = subprocess.run([CHROMIUM, *options, "--dump-dom", address], capture_output=True, timeout=120, check=True)
    text = done.stdout.decode()
    rows = re.findall(r"<tr><th scope=.row.>.*?</tr>", text)
    columns = [expected(name, PAPER, 53) for name in DESIGNS]
    assert len(rows) == len(columns[0])
    for row, name in zip(rows, columns[0], strict=True):
        for cell, column in zip(re.findall(r'<td title="(.*?)">', row), columns, strict=True):
            if column[name] is None:
                assert cell == "this design has none"
            else:
                assert float(cell) == pytest.approx(column[name], rel=1e-9, abs=1e-9), name
    assert "4 of 6. The first write of A. The Bayesian Layer learns it with the gain 0.907" in text
    assert "After 53 of 112 writes (the last write was A)" in text


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
