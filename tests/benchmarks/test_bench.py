"""`mbd bench`: every section at a tiny size, and that ours and the peers do the same work."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from membydesign.cli.app import app
from membydesign.testing import assert_close
from membydesign_bench import generation, memory, page, speed, steps, timing, works
from membydesign_bench.accuracy import LOOP, METHODS, STREAMS
from membydesign_bench.choices import BACKENDS, CHUNK_SIZES
from membydesign_bench.models import made_models
from membydesign_bench.problem import GRID, Problem, Size
from membydesign_bench.rate import chunk_operations, operations
from membydesign_bench.sections import SECTIONS
from membydesign_bench.timing import Row, Settings

TINY = ("--size", "1,2,40,8", "--rounds", "1")


def mbd(*words: str, code: int = 0):
    result = CliRunner().invoke(app, ["bench", *words], env={"COLUMNS": "140", "TERM": "xterm"})
    assert result.exit_code == code, result.output
    return result


def rows_of(*words: str) -> list[dict]:
    return json.loads(mbd(*words, "--json").stdout)["rows"]


def peer(rule: str) -> works.Work:
    work = works.PEERS[rule]()
    if work is None:
        pytest.skip(f"the installed Transformers, if any, has no {rule}")
    return work


def test_models_are_of_equal_size():
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in made_models(Size(1, 4, 1, 64)).items()}
    assert abs(sizes["bayesian_layer"] / sizes["peer"] - 1) < 0.01
    assert abs(sizes["gated_deltanet"] / sizes["peer"] - 1) < 0.01
    assert 0.9 < sizes["bayesian_layer_rotating"] / sizes["peer"] < 1  # its keys and queries have half of the rows


def test_the_peer_of_recall_computes_the_gated_delta_rule():
    """Token by token, with its own gates, written out."""
    peer("gated_deltanet")
    torch.manual_seed(0)
    layer, B, T, H, D = steps.TheirDelta(6, 2, 4).double(), 2, 7, 2, 4
    x, q, k = torch.randn(B, T, 6).double(), *(torch.nn.functional.normalize(torch.randn(2, B, T, D).double(), dim=-1))
    beta, decay = layer.gates(x).sigmoid().chunk(2, -1)
    v = layer.v_proj(x).unflatten(-1, (H, D))
    memory_of, ys = torch.zeros(B, H, D, D).double(), []
    for t in range(T):
        memory_of = decay[:, t, :, None, None] * memory_of
        kept = k[:, t, None, :, None] * memory_of
        wrong = v[:, t] - kept.sum(-2)
        memory_of = memory_of + beta[:, t, :, None, None] * k[:, t, None, :, None] * wrong[:, :, None, :]
        ys.append((q[:, t, None, :, None] * memory_of).sum(-2))
    expected = layer.o_proj(torch.stack(ys, 1).flatten(-2))[:, -3:]
    assert_close(layer(x, q, k, 3), expected, 1e-5)


@pytest.mark.slow
def test_training_steps_are_timed():
    found = rows_of("--only", "steps", "--rounds", "1")
    assert [(row["task"], row["what"]) for row in found] == [
        ("learned recall, n_f = 8", "Bayesian Layer"),
        ("MQAR, L = 128, D = 16, width 128", "Bayesian Layer"),
        ("MQAR, L = 128, D = 16, width 128", "Gated DeltaNet"),
    ]
    assert all(row["value"] > 0 and row["reference"] > 0 for row in found)


# Ours and theirs do the same work


def outputs_and_gradients(work: works.Work, size: Size) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    leaves = {name: x.detach().requires_grad_() for name, x in work.inputs(Problem(size)).items()}
    output = work.sequence(**leaves)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4))
    return output.detach(), dict(zip(leaves, torch.autograd.grad(output, list(leaves.values()), weights), strict=True))


DELTA = {"q": "query", "v": "value", "log_decay": "g"}  # our r² depends on k where their β does not, so dk differs
SSM = {"q": "C", "k": "B", "x": "hidden_states", "dt": "dt"}


@pytest.mark.parametrize(("rule", "names"), [("gated_deltanet", DELTA), ("kda", DELTA), ("mamba2", SSM)])
@pytest.mark.parametrize("size", [Size(2, 3, 150, 16), Size(1, 2, 256, 64)], ids=str)
def test_ours_equals_theirs(rule, names, size):
    """Outputs, and gradients of the inputs that mean the same, on the benchmark's own inputs."""
    theirs, their_gradients = outputs_and_gradients(peer(rule), size)
    ours, our_gradients = outputs_and_gradients(works.OURS[rule], size)
    assert_close(ours, theirs, 2e-5)
    for our, their in names.items():
        scale = size.D**0.5 if their == "query" else 1.0  # theirs is q √D
        # Small entries of a gradient are differences of large ones, whose rounding depends on the processor.
        largest = their_gradients[their].abs().max()
        assert_close(our_gradients[our] / largest, scale * their_gradients[their] / largest, 5e-6)


def test_our_decoding_step_equals_theirs():
    problem = Problem(Size(3, 2, 1, 16))
    ours, theirs = works.OURS["gated_deltanet"].step, peer("gated_deltanet").step
    assert ours is not None
    assert theirs is not None
    assert_close(ours(problem)(), theirs(problem)(), 1e-5)


def test_a_step_of_mamba2_is_its_sequence_from_a_memory():
    """Only its sequence is given x and Δ; its step must mean the same."""
    work, problem = works.OURS["mamba2"], Problem(Size(2, 3, 1, 8))
    assert work.step is not None
    from_nothing = work.sequence(**work.inputs(problem))[:, 0]
    decay = problem.log_decay[:, 0, :, None].exp()
    from_memory = decay * torch.einsum("bhdm,bhd->bhm", problem.memory, problem.q[:, 0])
    assert_close(work.step(problem)(), from_nothing + from_memory, 1e-5)


def test_every_design_has_its_own_peer():
    assert {name: works.rule_to_compare(name, "forward") for name in works.OURS} == {
        "bayesian_layer": "gated_deltanet",
        "gated_deltanet": "gated_deltanet",
        "kda": "kda",
        "mamba2": "mamba2",
    }
    assert {works.rule_to_compare(name, "decode") for name in works.OURS} == {"gated_deltanet"}


# Every section


def test_speed():
    rows = rows_of("--only", "speed", *TINY, "--naive")
    compared = {(row["task"], row["what"]) for row in rows}
    titles = {work.title for work in works.OURS.values()}
    assert compared == set(itertools.product(works.TASKS, titles))
    assert [row["task"] for row in rows if row["against"] == "its loop over tokens"] == list(works.TRAINING)
    for row in rows:
        assert row["value"] > 0
        assert row["against"] == "" or row["ratio"] == pytest.approx(row["value"] / row["reference"])


def test_the_loop_is_timed_only_where_its_backward_fits_in_memory():
    sizes = {task: [size for size in GRID if speed._loop_can(task, size)] for task in works.TASKS}
    assert sizes == {"forward": list(GRID), "forward+backward": list(GRID[:-1]), "decode": []}


def test_transitions():
    rows = rows_of("--only", "transitions", *TINY)
    assert {(row["what"], row["against"]) for row in rows} == {
        ("DiagonalDecay", "ScalarDecay"),
        ("DampedRotation", "ScalarDecay"),
    }
    assert len(rows) == 4


def test_growth_is_for_each_token():
    rows = rows_of("--only", "growth", *TINY)
    assert [row["task"] for row in rows] == list(works.TRAINING)
    assert {(row["what"], row["against"], row["unit"]) for row in rows} == {("T = 1,280", "T = 40", "µs/token")}


def test_rate():
    rows = rows_of("--only", "rate", *TINY)
    assert {row["what"] for row in rows} == {"Bayesian Layer", "chunks of 40 in torch"}
    assert all(0 < row["ratio"] < 1 for row in rows)


def test_choices_finds_the_fastest():
    rows = rows_of("--choices", *TINY)
    assert {row["section"] for row in rows} == {"choices"}
    for task in works.TRAINING:
        ways = {row["what"]: row for row in rows if row["task"] == task}
        fastest = min((name for name in ways if name != "default"), key=lambda name: ways[name]["value"])
        assert {row["against"] for row in ways.values()} == {fastest}
        assert ways[fastest]["ratio"] == 1.0
        assert {f"torch {C}" for C in CHUNK_SIZES if C > 1} | {"default"} <= set(ways)
        assert set(ways) <= {f"{name} {C}" for name in BACKENDS for C in CHUNK_SIZES} | {"default"}
    assert "fastest" in mbd("--choices", *TINY).output


def test_accuracy_is_beside_the_loop():
    rows = rows_of("--only", "accuracy", *TINY)
    assert {row["task"].rpartition(", ")[0] for row in rows} == set(STREAMS)
    assert {row["what"] for row in rows} == set(METHODS) - {LOOP}
    assert all(row["value"] < 0.1 for row in rows)
    assert "near-duplicates, covariance" in mbd("--only", "accuracy", *TINY).output


def test_memory(monkeypatch):
    asked = []

    def peak(whose, name, task, size, device):
        assert device == "cpu"
        asked.append((whose, name, task, str(size)))
        return {"ours": 2.0, "theirs": 8.0}[whose] if task != "decode" else 0.5

    monkeypatch.setattr(memory, "peak", peak)
    rows = rows_of("--only", "memory", *TINY)
    assert {(row["task"], row["what"]) for row in rows} == set(
        itertools.product(works.TASKS, (work.title for work in works.OURS.values()))
    )
    assert len(asked) == len(set(asked)), "each in one process, once"
    for row in rows:
        assert row["ratio"] == (0.25 if row["against"] and row["task"] != "decode" else None)


def test_the_default_grid_is_what_the_page_of_benchmarks_says():
    titles = {name: [job.title for job in section.jobs(Settings())] for name, section in SECTIONS.items()}
    assert len(titles["speed"]) == len(GRID) * (2 * 3 + 1)
    assert {title.split(":")[0] for title in titles["speed"]} == {
        f"{task} at {size}" for task in works.TASKS for size in GRID
    }
    assert {title.split(" at ")[1].split(":")[0] for title in titles["transitions"]} == {"1,4,2048,64", "1,4,2048,128"}
    assert Size(1, 4, 2048, 64) == speed.GROWTH_SIZE
    assert speed.GROWTH * speed.GROWTH_SIZE.T == 65_536
    assert "forward+backward at 1,4,16384,128: peak memory" in titles["memory"]
    assert any("1,4,2048,256" in title for title in titles["rate"])
    assert [title.split(",")[3].split(":")[0] for title in titles["choices"]] == [
        "8",
        "16",
        "32",
        "64",
        "128",
        "256",
    ] * 2


def test_generation_with_and_without_a_cache_says_the_same():
    made, tokens = generation.works("bayesian_layer", Size(2, 2, 24, 8))
    said = [work() for work in made.values()]
    assert said[0] == said[1]
    assert sum(map(len, said[0])) == tokens == 2 * 12
    assert {len(prompt) for prompt in generation.prompts(Size(2, 2, 24, 8), 12)} == {12}
    assert len(generation.prompts(Size(1, 2, 1024, 8), 128)[0]) > 800
    rows = rows_of("--only", "generation", *TINY)
    assert [(row["what"], row["against"]) for row in rows] == [
        (title, "the same without a cache") for title in generation.OURS.values()
    ]
    assert {row["unit"] for row in rows} == {"tokens/s"}


@pytest.mark.slow
def test_the_cache_makes_generation_as_many_times_faster_as_is_wanted():
    """Where it is meant to be: 1,024 tokens of context on a CPU."""
    [size] = generation.SIZES
    assert size.T == 1024
    for name in generation.OURS:
        [row] = generation._generation(name, size, rounds=1)
        assert row.ratio is not None
        assert row.ratio > generation.WANTED


# What people see


def test_tables_and_files(tmp_path):
    result = mbd("--only", "transitions,rate", "--only", "choices", *TINY, "--out", str(tmp_path))
    for words in ("forward+backward: DampedRotation / ScalarDecay", "1,2,40,8", "matrix products run at", "fastest"):
        assert words in result.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert {row["section"] for row in found["rows"]} == {"transitions", "rate", "choices"}
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["machine"]["matrix_product_gflops"] > 0
    assert {"command", "commit", "seconds", "versions"} <= set(found["provenance"])
    assert "date" not in found["provenance"]
    text = (tmp_path / "results.md").read_text()
    assert "| forward: DiagonalDecay / ScalarDecay | 1,2,40,8 |" in text
    assert found["provenance"]["commit"] in text


def test_without_transformers_ours_stands_alone(monkeypatch):
    monkeypatch.setattr(page, "version_of", lambda package: None)
    monkeypatch.setattr(works, "transformers_function", lambda model, function: None)
    result = mbd("--only", "speed", *TINY)
    assert result.stderr.count("Transformers is not installed") == 1
    assert "decode: Bayesian Layer\n" in result.stdout
    assert "Transformers'" not in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--only", "speed,everything"],
            "--only: expected some of speed, models, accelerate, steps, transitions",
        ),
        (["--size", "1,2"], "--size: expected four whole numbers B,H,T,D such as 1,4,2048,64, got '1,2'"),
        (["--size", "1,2,0,8"], "--size: expected numbers of at least 1, got '1,2,0,8'"),
        (
            ["--size", "1,2,40,7"],
            "--size: expected an even D for transitions, which turn pairs of rows, got '1,2,40,7'",
        ),
        (["--out", "README.md"], "--out: expected a folder, and README.md is a file"),
    ],
)
def test_mistakes_are_explained(words, message):
    assert message in mbd(*words, code=2).stderr


def test_help_teaches():
    output = mbd("--help").output
    for name in SECTIONS:
        assert name in output


# The instruments


def test_works_are_timed_in_turn():
    order = []
    pending = {name: lambda name=name: order.append(name) or torch.zeros(300_000).exp() for name in "ab"}
    times = timing.interleaved(pending, rounds=3)
    assert set(times) == {"a", "b"}
    assert all(value > 0 for value in times.values())
    turns = [name for name, _ in itertools.groupby(order)]
    assert turns[-6:] == ["a", "b"] * 3


def test_a_ratio_needs_a_reference_that_can_be_measured():
    assert Row("memory", "decode", "1,1,1,1", "x", 3.0, "MiB", "y", 0.5).ratio is None
    assert Row("memory", "decode", "1,1,1,1", "x", 3.0, "MiB", "y", 1.5).ratio == 2.0
    assert Row("memory", "decode", "1,1,1,1", "x", None, "MiB", "y", 1.5).ratio is None
    assert Row("speed", "decode", "1,1,1,1", "x", 1.0, "ms").ratio is None


def test_the_rise_of_memory_is_what_was_allocated():
    # The least of some: pages that the system had taken away come back at any time, and count.
    assert 63 < min(memory.rise(lambda: torch.ones(2**24)) for _ in range(5)) < 70
    assert min(memory.rise(lambda: None) for _ in range(5)) < 5


def test_the_rise_of_memory_where_it_cannot_be_set_back(monkeypatch):
    def refused(*_):
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refused)
    assert 0 <= memory.rise(lambda: torch.ones(2**24)) < 70


def test_peak_memory_in_a_process_of_its_own():
    size = Size(1, 4, 4096, 64)
    gradients = 3 * math.prod(size) * 4 / 2**20
    found = memory.peak("ours", "bayesian_layer", "forward+backward", size)
    assert found is not None
    assert gradients < found < 12 * gradients


def test_a_process_that_fails_is_reported(capfd):
    assert memory.peak("ours", "nothing", "forward", Size(1, 1, 1, 1)) is None
    assert "no memory of ours nothing, forward at 1,1,1,1: KeyError: 'nothing'" in capfd.readouterr().err


def test_operations_are_those_of_the_products():
    """torch counts the same products in full: both triangles, and none of the substitutions."""
    size, C = Size(1, 2, 64, 128), 4
    work = works.bayesian(backend="torch", chunk_size=C)
    with FlopCounterMode(display=False) as counter:
        work.sequence(**work.inputs(Problem(size)))
    useful = operations(size, "forward", C)
    assert 0.95 * useful < counter.get_total_flops() < 1.3 * useful
    assert chunk_operations(256, 256, 64) == pytest.approx(10 * 64 * 256**2 + 7 * 64**2 * 256 + 2 / 3 * 64**3)
    assert operations(size, "forward+backward", C) == 3 * useful
    assert operations(size, "forward", 1) / (2 * 64) == pytest.approx(10 * 128**2 + 7 * 128 + 2 / 3)
