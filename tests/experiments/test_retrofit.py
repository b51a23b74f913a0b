"""The retrofit: the paper's settings, a small copy of them, one process and two, and everything from end to end."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from membydesign.cli.app import app
from membydesign.data.token_files import TokenFile, pack
from membydesign.data.windows import Windows
from membydesign.evaluation.niah import TASKS
from membydesign.evaluation.niah.run import read_answers
from membydesign.experiments import load
from membydesign.experiments.retrofit import run as retrofit
from membydesign.experiments.retrofit.claims import PAPER_NIAH, PAPER_PERPLEXITY, claims
from membydesign.experiments.retrofit.config import CPU, PAPER, SMOKE, Distillation, Pretraining
from membydesign.experiments.retrofit.evaluation import MODELS, tokens_of
from membydesign.experiments.retrofit.training import load_model, pretraining_batches
from membydesign.experiments.shared.run_context import RunContext
from membydesign.experiments.shared.texts import TextsError
from membydesign.layers import GatedDeltaNet, MemoryLayer
from membydesign.models import MemoryConfig, MemoryForCausalLM
from membydesign.reports import record
from membydesign.retrofit import PhaseBSchedule, Stage
from text_problem import Texts, help_tokenizer
from tiny_tokenizers import words_tokenizer

RUNS = ("pretraining", "phase_a", "control_a", "phase_b", "control_b")


def test_the_paper_s_settings_to_the_letter():
    assert PAPER.teacher == PAPER.tokenizer == "linear-moe-hub/Gated-Deltanet-340M"
    assert replace(PAPER, teacher="a/folder").tokenizer == "a/folder"
    assert PAPER.student.layers == (5, 11, 17, 23)
    assert PAPER.student.start == "fresh"
    assert PAPER.texts.essays == "PaulGrahamEssays.json"
    both = PAPER.distillation
    assert (both.window, both.precision) == (2048, "bf16")
    a, b = both.settings("a"), both.settings("b")
    assert (a.steps, both.phase_a.tokens, a.batch_size * both.window) == (1526, 100_007_936, 65_536)
    assert both.phase_b.tokens == 300_285_952
    assert (both.phase_b.first.tokens, both.phase_b.second.tokens) == (150_077_440, 150_208_512)
    # 8 processes with 8 sequences each, then 16.
    assert [both.stretch("b", step)[1] for step in (0, 1144, 1145, 1717)] == [64, 64, 128, 128]
    assert (a.learning_rate, a.warmup, b.learning_rate, b.warmup) == (5e-4, 25, 3e-4, 50)
    for settings in (a, b):
        assert (settings.weight_decay, settings.clip, settings.final_fraction) == (0.0, 1.0, 0.1)
    # Warm-up by equal steps, the middle of a cosine from 1 to 0.1, and its end.
    assert a.rate(0) == pytest.approx(2e-5)
    assert a.rate(24) == pytest.approx(5e-4)
    assert a.rate(25 + 1501 // 2) == pytest.approx(5e-4 * 0.55, rel=2e-3)
    assert a.rate(1525) == pytest.approx(5e-5, rel=1e-3)
    assert b.rate(49) == pytest.approx(3e-4)
    assert b.rate(50 + 1668 // 2) == pytest.approx(3e-4 * 0.55, rel=2e-3)
    assert b.rate(1717) == pytest.approx(3e-5, rel=1e-3)
    assert PAPER.evaluation.lengths == (2048, 4096, 8192, 16384)
    assert len(PAPER.evaluation.tasks) == 6
    assert PAPER.evaluation.samples == 200


@pytest.mark.parametrize("both", [PAPER.distillation, CPU.distillation, SMOKE.distillation])
def test_every_window_comes_once(both: Distillation):
    at = 0
    for phase in "ab":
        for step in range(both.settings(phase).steps):
            start, count = both.stretch(phase, step)
            assert start == at
            at += count
    assert at * both.window == both.phase_a.tokens + both.phase_b.tokens
    assert at * both.window <= PAPER.texts.most_tokens["train"]


def test_pretraining_begins_with_drills(tmp_path):
    words = help_tokenizer(tmp_path, 300)
    for name, letter in {"train": "a", "drills": "b"}.items():
        pack(Texts.of(*[letter * 40] * 8), words, tmp_path / f"{name}.safetensors")
    files = {name: TokenFile(tmp_path / f"{name}.safetensors") for name in ("train", "drills")}
    assert isinstance(SMOKE.teacher, Pretraining)
    made = replace(SMOKE.teacher, drill_steps=2, window=10, train=replace(SMOKE.teacher.train, batch_size=3))
    batch = pretraining_batches(made, files)
    seen = [str(words.decode(batch(step)["input_ids"].flatten(), skip_special_tokens=True)) for step in range(4)]
    assert [set(text) for text in seen] == [{"b"}, {"b"}, {"a"}, {"a"}]
    assert batch(2)["input_ids"].equal(Windows(files["train"], 10, made.seed).batch(0, 3))
    with pytest.raises(ValueError, match=r"drill_steps: expected some if and only if there are drills, got 0 and"):
        replace(SMOKE, teacher=replace(SMOKE.teacher, drill_steps=0))


def test_steps_that_are_no_windows_are_refused():
    with pytest.raises(ValueError, match="tokens_per_step: expected a multiple of the window 2048, got 1000"):
        Distillation(phase_a=Stage(10_000, 1000))


def paper_s_own_table():
    """The paper's printed numbers, in the form of our metrics."""
    niah = {
        model: {str(length): dict(zip([*TASKS, "mean"], row, strict=True)) for length, row in rows.items()}
        for model, rows in PAPER_NIAH.items()
    }
    perplexity = {
        model: {
            text: [
                {"length": length, "perplexity": printed, "cross_entropy": math.log(printed)}
                for length, printed in zip(PAPER.evaluation.lengths, rows[model], strict=True)
            ]
            for text, rows in PAPER_PERPLEXITY.items()
        }
        for model in MODELS
    }
    return {"niah": niah, "perplexity": perplexity}


def test_claims_are_the_paper_s_and_hold_for_its_own_table():
    for rows in PAPER_NIAH.values():
        for *tasks, mean in rows.values():
            assert sum(tasks) / 6 == pytest.approx(mean, abs=0.01)
    found = claims(PAPER, paper_s_own_table())
    assert all(claim.agrees for claim in found)
    # 4 lengths for each of 2 models and 2 tasks; 3 for each text; the sentinel; 12 scores and 36 perplexities.
    assert len(found) == 4 * 4 + 3 * 3 + 1 + 12 + 36
    worse = paper_s_own_table()
    worse["niah"]["bl"]["8192"]["mean"] = 16.5
    disagreeing = [claim.quantity for claim in claims(PAPER, worse) if not claim.agrees]
    assert disagreeing == ["BL − GDN-zero at 8,192, points", "bl at 8,192"]


def test_the_paper_s_numbers_are_of_its_checkpoint_and_its_settings():
    def compared(config, metrics):
        return {claim.claim for claim in claims(config, metrics)} & {
            "Perplexity by length",
            "The checkpoint's cross-entropy on held-out SlimPajama",
        }

    assert len(compared(replace(PAPER, teacher="a/folder"), paper_s_own_table())) == 2
    other = paper_s_own_table()
    for row in other["perplexity"]["gdn_zero"]["slimpajama-heldout"]:
        row["cross_entropy"] += 0.1
    assert compared(replace(PAPER, teacher="a/folder"), other) == {
        "The checkpoint's cross-entropy on held-out SlimPajama"
    }
    shorter = replace(PAPER, evaluation=replace(PAPER.evaluation, samples=100))
    assert not compared(shorter, paper_s_own_table())


def test_windows_hold_the_paper_s_tokens():
    """SlimPajama: 489, 245, 123 and 62 windows; PG-19: 1,464, 732, 366 and 183."""
    lengths = PAPER.evaluation.lengths
    predicted = {"slimpajama-heldout": (1_000_983, 1_003_275, 1_007_493, 1_015_746)}
    predicted["pg19-validation"] = (2_996_808, 2_997_540, 2_997_906, 2_998_089)
    for text, wanted in predicted.items():
        there = PAPER.texts.most_tokens[text]
        asked = PAPER.texts.window_tokens.get(text)
        held = [tokens_of(there, length, asked) for length in lengths]
        assert max(held) <= there
        assert tuple(n // length * (length - 1) for n, length in zip(held, lengths, strict=True)) == wanted


def small(**changes):
    """The paper's settings but for sizes, text and teacher: bf16, accumulation, two stages, a ramp of ten."""
    distillation = replace(
        PAPER.distillation,
        window=32,
        phase_a=Stage(3 * 256, 256),
        phase_b=PhaseBSchedule(Stage(2 * 256, 256), Stage(10 * 512, 512)),
        warmups=(1, 1),
        rows_at_a_time=2,
        validation_windows=2,
    )
    return replace(PAPER, **{"texts": SMOKE.texts, "distillation": distillation, "teacher": SMOKE.teacher, **changes})


def saved_teacher(folder: Path, layers: str = "gated_deltanet", vocab_size: int = 512) -> str:
    torch.manual_seed(0)
    config = MemoryConfig(
        vocab_size=vocab_size, hidden_size=16, layers=[layers] * 3, num_heads=2, head_dim=8, intermediate_size=24
    )
    MemoryForCausalLM(config).save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_both_phases_and_the_control_of_a_small_copy(tmp_path):
    """From a saved teacher: what is replaced, what moves, and that the student comes nearer to its teacher."""
    teacher = saved_teacher(tmp_path / "teacher")
    student = replace(PAPER.student, layers=(0, 2), start="fresh")
    evaluation = replace(SMOKE.evaluation, samples=1, lengths=(1024,))
    config = small(teacher=teacher, student=student, evaluation=evaluation)
    assert config.distillation.precision == "bf16"
    outcome = retrofit.run(config, RunContext(tmp_path / "out"))
    made = outcome.metrics["training"]
    assert set(made) == {"phase_a", "control_a", "phase_b", "control_b"}
    hybrid, control, zero = (
        load_model(str(path))
        for path in (tmp_path / "out/runs/phase_b/model", tmp_path / "out/runs/control_b/model", tmp_path / "teacher")
    )
    kinds = [type(block.mixer) for block in hybrid.model.layers]
    assert kinds == [MemoryLayer, GatedDeltaNet, MemoryLayer]
    moved = {name for name, p in control.named_parameters() if not torch.equal(p, dict(zero.named_parameters())[name])}
    assert {name.split(".")[2] for name in moved} == {"0", "2"}
    assert any("gate_proj" in name for name in moved)
    assert not any("conv1d" in name for name in moved)
    assert all(
        torch.equal(p, zero.state_dict()[name]) for name, p in hybrid.state_dict().items() if ".layers.1." in name
    )
    first, *_, last = (found["nmse"] for found in made["phase_a"]["validation"].values())
    assert set(first) == {"0", "2"}
    assert sum(last.values()) < sum(first.values())
    assert made["phase_b"]["steps"] == 12
    assert made["phase_a"]["tokens"] == made["control_a"]["tokens"] == 3 * 256


def test_smoke_from_end_to_end(tmp_path):
    done = CliRunner().invoke(
        app, ["reproduce", "retrofit", "--preset", "smoke", "--workers", "1", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    found = record.read(tmp_path)
    assert not found.missing_figures
    assert len(found.figures) == 3
    metrics = json.loads((tmp_path / "metrics.json").read_text())["metrics"]
    assert set(metrics["training"]) == set(RUNS)
    assert set(metrics["niah"]) == set(metrics["perplexity"]) == set(MODELS)
    assert {length["length"] for length in metrics["perplexity"]["bl"]["python-help"]} == {1024, 2048}
    titles = [table.title for table in found.tables]
    for title in ("RULER scores, in per cent", "Perplexity by length: python-help", "Training"):
        assert title in titles
    assert len(found.tables) == 4 + 2 * 4
    # What it made can be evaluated by itself, to the same numbers.
    model = str(tmp_path / "runs/phase_b/model")
    options = ["--lengths", "1024,2048", "--samples", "2", "--new-tokens", "8", "--tasks", "single_1,multivalue"]
    again = CliRunner().invoke(app, ["evaluate", "niah", model, *options, "--out", str(tmp_path / "niah"), "--json"])
    assert again.exit_code == 0, again.output
    answers, others = (
        [(one.key, one.prompt_sha256, one.generation) for one in read_answers(file)]
        for file in (tmp_path / "runs/niah_bl/samples-0.jsonl", tmp_path / "niah/samples.jsonl")
    )
    assert answers == others
    assert len(answers) == 8


@pytest.mark.slow
def test_what_is_done_is_not_done_again(tmp_path):
    command = ["reproduce", "retrofit", "--preset", "smoke", "--workers", "1", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, command).exit_code == 0
    before = json.loads((tmp_path / "metrics.json").read_text())["metrics"]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/model/model.safetensors")}
    (tmp_path / "metrics.json").unlink()
    (tmp_path / "runs/niah_bl/metrics.json").unlink()
    (tmp_path / "runs/perplexity_bl/metrics.json").unlink()
    assert CliRunner().invoke(app, [*command, "--resume"]).exit_code == 0
    after = json.loads((tmp_path / "metrics.json").read_text())["metrics"]
    assert times == {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/model/model.safetensors")}
    assert after["niah"] == before["niah"]
    assert after["perplexity"] == before["perplexity"]


@pytest.mark.slow
def test_stopped_in_the_middle_of_each_phase_it_ends_with_the_same_weights(tmp_path):
    config = replace(SMOKE, evaluation=replace(SMOKE.evaluation, samples=1, lengths=(1024,), tasks=("niah_single_1",)))
    retrofit.run(config, RunContext(tmp_path / "whole"))
    stops: set[tuple[str, int | None]] = {("pretraining", 3), ("phase_a", 2), ("phase_b", 3), ("control_b", 2)}

    def watch(name, now):
        at = (name, now.step if now else None)
        if at in stops:
            stops.remove(at)
            raise KeyboardInterrupt

    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            retrofit.run(config, RunContext(tmp_path / "stopped", watch=watch))
    retrofit.run(config, RunContext(tmp_path / "stopped", watch=watch))
    assert not stops
    for name in RUNS:
        whole, stopped = (load_model(str(tmp_path / way / "runs" / name / "model")) for way in ("whole", "stopped"))
        theirs = stopped.state_dict()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in whole.state_dict().items())


@pytest.mark.slow
def test_two_processes_train_what_one_trains(tmp_path):
    config = ["reproduce", "retrofit", "--preset", "smoke", "--out"]
    assert CliRunner().invoke(app, [*config, str(tmp_path / "one"), "--workers", "1"]).exit_code == 0
    options = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--main_process_port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [*launch, "--module", "membydesign.cli", *config, str(tmp_path / "two")]
    subprocess.run(command, env=environment, check=True, timeout=600)
    one, two = (json.loads((tmp_path / n / "metrics.json").read_text())["metrics"] for n in ("one", "two"))
    for name in RUNS:
        ours, theirs = two["training"][name], one["training"][name]
        assert ours["training_loss"] == pytest.approx(theirs["training_loss"], abs=1e-4)
    for model in MODELS:
        ours, theirs = (m["perplexity"][model]["python-help"][0]["cross_entropy"] for m in (two, one))
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert len([*(tmp_path / "two/runs/niah_bl").glob("samples-*.jsonl")]) == 2
    assert two["differences"]["bl - gdn_ft"]["samples"] == one["differences"]["bl - gdn_ft"]["samples"] == 8


def test_what_cannot_be_had_is_named(tmp_path):
    def fails(*options: str) -> str:
        done = CliRunner().invoke(
            app, ["reproduce", "retrofit", "--workers", "1", "--out", str(tmp_path / "out"), *options]
        )
        assert done.exit_code == 2
        return " ".join(done.output.split())

    essays = fails("--preset", "cpu")
    assert "data: expected the folder that holds PaulGrahamEssays.json, RULER's haystack" in essays
    assert fails("--preset", "paper") == essays
    nowhere = fails("--preset", "smoke", "--teacher", str(tmp_path / "nowhere"))
    assert "name: expected a tokenizer that can be read" in nowhere
    (tmp_path / "empty").mkdir()
    words_tokenizer().save_pretrained(tmp_path / "empty")
    empty = fails("--preset", "smoke", "--teacher", str(tmp_path / "empty"))
    assert "teacher: expected a Gated DeltaNet of flash-linear-attention's or a model of ours" in empty
    other = saved_teacher(tmp_path / "other", layers="deltanet")
    assert "where there is deltanet" in fails("--preset", "smoke", "--teacher", other)
    narrow = saved_teacher(tmp_path / "narrow", vocab_size=100)
    assert "tokenizer: expected one with tokens below the model's vocab_size=100" in fails(
        "--preset", "smoke", "--teacher", narrow
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "short.txt").write_text("A text of a few words. " * 40)

    def refused(match: str, **changes):
        bad = replace(SMOKE, **changes)
        with pytest.raises(TextsError, match=match):
            retrofit.run(bad, RunContext(tmp_path / "bad", data=tmp_path / "data"))
        assert not (tmp_path / "bad" / "runs").exists()  # before anything was trained

    refused(
        "essays: expected 'embedded', a file or a folder, got no such path",
        texts=replace(SMOKE.texts, essays="nothing.txt"),
    )
    refused(
        r"length: expected at least \d+ tokens for niah_single_1",
        evaluation=replace(SMOKE.evaluation, lengths=(128,)),
    )
    refused(
        r"short: length: expected at least 1,024 tokens for windows of 1,024, got \d+$",
        texts=replace(SMOKE.texts, perplexity={"short": ("short.txt",)}),
    )
    with pytest.raises(ValueError, match="vocabulary: expected a size for a teacher that is trained here, got none"):
        replace(SMOKE, texts=replace(SMOKE.texts, vocabulary=None))


def test_it_is_an_experiment_like_the_others():
    module = load("retrofit")
    assert set(module.PRESETS) == {"smoke", "cpu", "paper"}
