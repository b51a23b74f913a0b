"""`mbd bench --only text`: tokens a second, of things that do the same."""

import json
from collections import Counter
from itertools import pairwise

import torch
from typer.testing import CliRunner

from membydesign.cli.app import app
from membydesign.data.bigrams import count_bigrams
from membydesign.evaluation.ar_hits import ar_hits
from membydesign_bench.text import UNIT, _stream, by_dictionary

TINY = ("bench", "--only", "text", "--rounds", "1", "--size", "3,1,50,1")


def test_every_row_is_beside_another_way():
    result = CliRunner().invoke(app, [*TINY, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["task"] for row in rows] == ["packing", "counting pairs", "labelling AR-hits"]
    assert all(row["unit"] == UNIT and row["value"] > 0 and row["ratio"] > 0 for row in rows)
    assert [row["size"] for row in rows][1:] == ["150", "150"]


def test_the_loop_labels_what_we_label(tmp_path):
    tokens = _stream(tmp_path / "tokens", 4000)
    windows, stream = tokens.rows(1300, slice(None)), tokens.read(0, 4000).tolist()
    counter = Counter(pairwise(stream))
    found = ar_hits(windows, count_bigrams(tokens, tmp_path / "bigrams"), 2)
    assert found.mask.equal(torch.tensor([by_dictionary(window, counter, 2) for window in windows]))
    assert 0 < found.mask.float().mean() < 1
