"""The length study: its task as a reader would count it, gains by hand, and a small run."""

import json

import pytest
import torch
from typer.testing import CliRunner

from membydesign.cli.app import app
from membydesign.experiments.length.config import PRESETS, LengthRun, distance, gain_statistics, gains
from membydesign.experiments.length.data import NOTHING, Fillers


@pytest.mark.parametrize(("length", "window"), [(50, None), (60, 40), (200, 36)])
def test_the_task_as_a_reader_would_count_it(length, window):
    task = Fillers(pairs=5, writes=3, keys=9, values=7, fillers=11)
    batch = task.sample(20, length, torch.Generator().manual_seed(0), window=window)
    assert batch.ids.shape == batch.labels.shape == (20, length)
    for ids, labels, new in zip(*(x.tolist() for x in batch), strict=True):
        body = ids[:-5]
        places = [t for t, token in enumerate(body) if token < 9]
        assert len(places) == 5 * 3
        assert min(places) >= length - (length if window is None else window)
        value = {}
        for t, token in enumerate(body):
            if token < 9:
                assert labels[t] == value.get(token, NOTHING)
                assert new[t + 1] == (token not in value)
                assert value.setdefault(token, body[t + 1]) == body[t + 1]
            else:
                assert labels[t] == NOTHING
                assert token >= 16 or body[t - 1] < 9  # a value follows its key
        assert sum(new) == 5
        assert sorted(value) == sorted(ids[-5:])
        assert [value[key] for key in ids[-5:]] == labels[-5:]


def test_a_window_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="window: expected from 72 to length = 100, got 71"):
        Fillers().sample(2, 100, torch.Generator(), window=71)


def test_pairs_are_anywhere():
    task = Fillers(pairs=2, writes=1, keys=4, values=4, fillers=4)
    ids = task.sample(4000, 12, torch.Generator().manual_seed(0)).ids[:, :-2]
    share = (ids < 4).double().mean(0)
    # two of eight units are pairs, and a pair moves what follows by a token
    assert share.sum().item() == pytest.approx(2)
    assert share[0].item() == pytest.approx(2 / 8, abs=0.03)
    assert share[8].item() == pytest.approx(2 / 8, abs=0.03)


def test_the_distance_of_distributions():
    a, b = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([2.0, 3.0, 4.0, 5.0])
    assert distance(a, a) == 0
    assert distance(a, b) == pytest.approx(0.5)
    assert distance(a, a + 10) == 1
    found = gain_statistics({1: a, 4: b})
    assert found["1"]["distance"] == 0
    assert found["4"]["distance"] == pytest.approx(0.5)
    assert found["4"]["quantiles"][::10] == [2.0, 3.5, 5.0]


def by_hand(layer, x, new):
    """The gain β kᵀP̄k of new pairs in one layer, with the covariance written out."""
    inputs = layer.step_inputs(x, None, None)[0]
    found = []
    for b in range(x.shape[0]):
        for h in range(layer.num_heads):
            P = torch.eye(layer.key_dim, dtype=torch.float64)
            for t in range(x.shape[1]):
                now = {name: p[b, t, h].double() for name, p in inputs.parameters.items()}
                decay, k = now["log_decay"].exp(), inputs.k[b, t, h].double()
                P = decay[:, None] * P * decay + now["process_noise"] * torch.eye(layer.key_dim, dtype=torch.float64)
                u = P @ k
                precision = 1 / (now["write_noise"] + k @ u)
                P = P - precision * torch.outer(u, u)
                if new[b, t]:
                    found.append((precision * (k @ u)).item())
    return sorted(found)


def test_gains_are_those_of_the_covariance_written_out():
    task = Fillers(pairs=2, writes=1, keys=4, values=4, fillers=4)
    run = LengthRun(design="bayesian_layer", seed=0, length=8, times=(1, 2), task=task, gain_examples=2, layers=2)
    model = run.model().eval()
    found = gains(model, run, 2).sort().values
    seen = []
    for mixer in model.model.mixers():
        mixer.register_forward_pre_hook(lambda layer, inputs: seen.append((layer, inputs[0])))
    with torch.no_grad():
        (batch,) = run.tests(2, "recent", 2)
        model(batch.ids)
        expected = sorted(gain for layer, x in seen for gain in by_hand(layer, x, batch.new))
    assert len(expected) == run.layers * 2 * 2 * 2  # heads, sequences, pairs
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-5)


def test_every_seed_tests_the_same_sequences():
    runs = [LengthRun(design="bayesian_layer", seed=seed) for seed in (0, 1)]
    first, second = (next(iter(run.tests(4, "anywhere", 3))) for run in runs)
    assert torch.equal(first.ids, second.ids)
    assert first.ids.shape == (3, 4 * 128)
    assert not torch.equal(runs[0].batch(0)["input_ids"], runs[1].batch(0)["input_ids"])


def test_the_command_writes_a_report(tmp_path):
    out = tmp_path / "length"
    command = ["compare", "length", "--preset", "smoke", "--only", "bayesian_layer", "--workers", "1"]
    done = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads((out / "metrics.json").read_text())
    times = [str(n) for n in PRESETS["smoke"].times]
    assert list(found["metrics"]["designs"]["bayesian_layer"][0]["recall"]["anywhere"]) == times
    assert list(found["metrics"]["untrained"]["bayesian_layer"][0]["gains"]) == times
    assert (out / "length.png").read_bytes().startswith(b"\x89PNG")
    assert "Recall, pairs recent" in (out / "report.md").read_text()
