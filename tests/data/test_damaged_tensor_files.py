"""Token files that somebody changed: refused with the reason, and never a crash of the process."""

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch

from membydesign.data.bigrams import Bigrams, count_bigrams
from membydesign.data.tensor_files import TensorFile, Writer
from membydesign.data.token_files import TokenFile
from membydesign.data.windows import Windows

N, V = 100, 50


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens.safetensors"
    with Writer(path, {"kind": "tokens", "version": 1, "vocab_size": V}) as file:
        file.add("tokens", "U16", (torch.arange(N) % V).to(torch.int16))
        file.done(tokens=N, documents=1)
    return path


def rewrite(path, change) -> None:
    """Change the header of a file, in place of what it was, with spaces at its end."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    stored = json.loads(content[8 : 8 + size])
    header = json.loads(stored["__metadata__"]["membydesign"])
    change(stored, header)
    stored["__metadata__"]["membydesign"] = json.dumps(header)
    text = json.dumps(stored).encode()
    assert len(text) <= size
    path.write_bytes(content[:8] + text.ljust(size) + content[8 + size :])


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "U16", "shape": [N], "data_offsets": [-16, 2 * N]},
        {"dtype": "U16", "shape": [N + 8], "data_offsets": [-16, 2 * N]},
        {"dtype": "U16", "shape": [N - 1], "data_offsets": [2, 2 * N]},
        {"dtype": "U16", "shape": [N + 1], "data_offsets": [0, 2 * N]},
        {"dtype": "U16", "shape": [2, N // 2], "data_offsets": [0, 2 * N]},
        {"dtype": "U16", "shape": [], "data_offsets": [0, 2 * N]},
        {"dtype": "F16", "shape": [N], "data_offsets": [0, 2 * N]},
        {"dtype": ["U16"], "shape": [N], "data_offsets": [0, 2 * N]},
        {"dtype": "U16", "shape": [float(N)], "data_offsets": [0, 2 * N]},
        {"dtype": "U16", "shape": [True], "data_offsets": [0, 2]},
        {"dtype": "U16", "shape": [10**30], "data_offsets": [0, 2 * 10**30]},
        {"dtype": "U16", "shape": [N], "data_offsets": "ab"},
        {"shape": [N]},
        [],
        "tokens",
        None,
        7,
    ],
)
def test_entries_that_do_not_describe_the_data(path, entry):
    rewrite(path, lambda stored, _: stored.update(tokens=entry))
    with pytest.raises(ValueError, match=r"^path: expected (the tensor 'tokens' to have|[\d,]+ bytes).*it is damaged"):
        TokenFile(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("vocab_size", value) for value in (0, -1, "50", 2.5, None, True, [])),
        *(("documents", value) for value in (-1, "1", None)),
        *(("tokens", value) for value in (N - 1, "100", None)),
        *(("version", value) for value in (2, "1", None)),
    ],
)
def test_headers_with_other_values(path, field, value):
    rewrite(path, lambda _, header: header.update({field: value}))
    with pytest.raises(ValueError, match=f"^path: expected a matching file of tokens, got .*: its {field} is "):
        TokenFile(path)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 20_000, b"\xff\xfe", b'{"__metadata__": 1}', b"1"])
def test_headers_that_are_none(path, text):
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(100))
    with pytest.raises(ValueError, match="^path: expected a file of tokens that this package wrote, and .* is not"):
        TokenFile(path)


def test_a_tensor_of_another_name(path):
    rewrite(path, lambda stored, _: stored.update(tokenz=stored.pop("tokens")))
    with pytest.raises(ValueError, match="^path: expected the tensors tokens, and there is no tokens"):
        TokenFile(path)


def test_changed_tokens_are_noticed(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\x01")  # the last token becomes 305
    with pytest.raises(ValueError, match="^path: expected data with sha256 .*, got .* it is damaged"):
        TokenFile(path)
    file = TokenFile(path, verify=False)
    assert file.read(0, N - 1).tolist() == [i % V for i in range(N - 1)]
    for read in (
        lambda: file.read(0, N),
        lambda: file.rows(10, slice(0, 10)),
        lambda: file.rows(1, torch.tensor([99])),
    ):
        with pytest.raises(ValueError, match="^path: expected tokens below vocab_size = 50 in .*, got 305"):
            read()
    path.write_bytes(content)
    assert len(TokenFile(path)) == N


def test_the_hash_is_computed_once_per_process(path, monkeypatch):
    path.write_bytes(path.read_bytes())  # the writer has not seen this one
    TokenFile(path)
    monkeypatch.setattr(TensorFile, "_fill", _count := Counting(TensorFile._fill))
    TokenFile(path)
    assert _count.calls == 2, "the header and its length alone"


class Counting:
    def __init__(self, function):
        self.function, self.calls = function, 0

    def __get__(self, instance, _kind):
        def call(*inputs):
            self.calls += 1
            return self.function(instance, *inputs)

        return call


TRUNCATED = """
import os, sys
from pathlib import Path
from membydesign.data.token_files import TokenFile
path = Path(sys.argv[1])
file = TokenFile(path)
os.truncate(path, 1000)
try:
    file.read(len(file) - 10, len(file))
except ValueError as error:
    print(error)
"""


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    n = 2**16
    with Writer(tmp_path / "t", {"kind": "tokens", "version": 1, "vocab_size": V}) as file:
        file.add("tokens", "U16", torch.zeros(n, dtype=torch.int16))
        file.done(tokens=n, documents=1)
    # In another process, which a memory map would end with SIGBUS.
    result = subprocess.run(
        [sys.executable, "-c", TRUNCATED, tmp_path / "t"], capture_output=True, text=True, check=False, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert "path: expected at least " in result.stdout
    assert "and it now has 1,000" in result.stdout


def test_open_files_are_pickled_and_closed(path):
    file = TokenFile(path)
    again = pickle.loads(pickle.dumps(file))
    assert again.read(0, N).equal(file.read(0, N))
    handle = file._tensors._file.fileno()
    del file
    with pytest.raises(OSError):
        os.fstat(handle)
    assert len(again) == N


def test_rows_that_are_not_there(path):
    file = TokenFile(path)
    assert file.rows(10, torch.tensor([9, 0])).shape == (2, 10)
    assert file.rows(10, slice(8, 20)).shape == (2, 10)
    for row in (-1, 10):
        with pytest.raises(IndexError, match="^rows: expected numbers from 0 to 9"):
            file.rows(10, torch.tensor([0, row]))
    assert Windows(file, 10).batch(0, 4).shape == (4, 10)


def test_counts_are_verified_when_they_are_read(path, tmp_path):
    bigrams = count_bigrams(TokenFile(path), tmp_path / "bigrams")
    pairs = torch.tensor([[0, 1], [1, 0]])
    assert bigrams.counts(pairs).tolist() == [2, 0]
    content = (tmp_path / "bigrams").read_bytes()
    (tmp_path / "bigrams").write_bytes(content[:-8] + bytes(8))
    with pytest.raises(ValueError, match="^path: expected data with sha256"):
        Bigrams(tmp_path / "bigrams").counts(pairs)
    rewrite(tmp_path / "bigrams", lambda _, header: header.update(vocab_size="x"))
    with pytest.raises(ValueError, match="^path: expected a whole number as vocab_size of .*, got 'x'"):
        Bigrams(tmp_path / "bigrams")
