"""Token files: the stream that was asked for, made once, read by others, and refused where it does not fit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from membydesign.data import token_files
from membydesign.data.tensor_files import TensorFile, Writer
from membydesign.data.text import PythonHelp
from membydesign.data.token_files import TokenFile, cut_long, pack
from text_problem import Texts, help_tokenizer

TEXTS = Texts.of("The first document.\n", "Second: größer 🙂", "x", "The last one. " * 20)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return help_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def stream(tokenizer, texts) -> list[int]:
    """What a stream is, the slow way."""
    return [i for text in texts for i in (tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids)]


def tokens_of(file: TokenFile) -> list[int]:
    return file.read(0, len(file)).tolist()


class TestPacking:
    def test_the_stream_is_bos_and_document_in_turn(self, tmp_path, tokenizer):
        file = pack(TEXTS, tokenizer, tmp_path / "t.safetensors")
        assert tokens_of(file) == stream(tokenizer, TEXTS.texts)
        assert file.documents == 4
        assert file.vocab_size == 512
        text = tokenizer.decode(file.read(0, len(file)))
        assert text.split(tokenizer.bos_token) == ["", *TEXTS.texts]

    def test_pythons_help(self, tmp_path, tokenizer):
        file = pack(PythonHelp(), tokenizer, tmp_path / "t.safetensors")
        documents = list(PythonHelp().documents())
        assert file.documents == len(documents)
        assert tokens_of(file) == stream(tokenizer, documents)

    @pytest.mark.parametrize(("piece", "documents"), [(30, 4096), (10_000, 2), (1, 1)])
    def test_many_batches_give_the_same(self, tmp_path, tokenizer, monkeypatch, piece, documents):
        monkeypatch.setattr(token_files, "PIECE", piece)
        monkeypatch.setattr(token_files, "DOCUMENTS", documents)
        monkeypatch.setattr(token_files.cut_long, "__defaults__", (10_000,))
        told = []
        file = pack(TEXTS, tokenizer, tmp_path / "t.safetensors", watch=lambda *so_far: told.append(so_far))
        assert tokens_of(file) == stream(tokenizer, TEXTS.texts)
        assert told[-1] == (len(file), 4)
        assert len(told) > 1

    def test_long_documents_in_pieces(self, tmp_path, tokenizer, monkeypatch):
        monkeypatch.setattr(token_files.cut_long, "__defaults__", (30,))
        file = pack(TEXTS, tokenizer, tmp_path / "t.safetensors")
        assert tokens_of(file) == stream(tokenizer, TEXTS.texts), "GPT-2's pattern begins a word at a space"
        assert file.documents == 4

    def test_cutting(self):
        text = "words of a few letters\nand lines " * 9 + "x" * 100
        for most in (10, 33, 1000):
            pieces = list(cut_long(text, most))
            assert "".join(pieces) == text
            assert max(map(len, pieces)) <= most
        assert all(piece[0] in " \n" for piece in list(cut_long(text[:200], 33))[1:])

    @pytest.mark.parametrize("most", [1, 7, 8, 30, 10**6])
    def test_a_limit_cuts_the_stream(self, tmp_path, tokenizer, most):
        file = pack(TEXTS, tokenizer, tmp_path / "t.safetensors", most_tokens=most)
        expected = stream(tokenizer, TEXTS.texts)[:most]
        assert tokens_of(file) == expected
        assert file.documents == expected.count(tokenizer.bos_token_id)

    def test_large_vocabularies_need_32_bits(self, tmp_path, tokenizer):
        small = pack(TEXTS, tokenizer, tmp_path / "16.safetensors")
        fits = pack(Texts.of("t1", f"t{2**16 - 1}"), words(2**16), tmp_path / "fits.safetensors")
        large = pack(Texts.of(f"t1 t{2**16}"), words(2**16 + 1), tmp_path / "32.safetensors")
        assert [file.stored_as for file in (small, fits, large)] == ["U16", "U16", "U32"]
        assert tokens_of(fits) == [0, 1, 0, 2**16 - 1]
        assert tokens_of(large) == [0, 1, 2**16]


def words(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of the words t0, t1, …"""
    backend = Tokenizer(WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="t0")


class TestFiles:
    def test_safetensors_reads_them_too(self, tmp_path, tokenizer):
        file = pack(TEXTS, tokenizer, tmp_path / "t.safetensors")
        with safe_open(file.path, "pt") as other:
            tensor = other.get_tensor("tokens")
            assert tensor.dtype == torch.uint16
            assert tensor.to(torch.int64).tolist() == tokens_of(file)
            header = json.loads(other.metadata()["membydesign"])
        assert header == file.header
        assert header["corpus"] == TEXTS.describe()
        assert (header["tokens"], header["documents"]) == (len(file), 4)

    def test_it_is_made_once_and_anew_when_something_changed(self, tmp_path, tokenizer):
        path = tmp_path / "t.safetensors"
        texts = Texts.of("one", "two")
        first = pack(texts, tokenizer, path)
        again = pack(texts, tokenizer, path)
        assert len(texts.reads) == 1
        assert tokens_of(first) == tokens_of(again)
        pack(texts, tokenizer, path, most_tokens=2)
        pack(texts, help_tokenizer(tmp_path, 600), path)
        assert len(texts.reads) == 3
        other = Texts.of("one", "three")
        assert tokens_of(pack(other, tokenizer, path)) == stream(tokenizer, other.texts)
        assert tokens_of(first) == stream(tokenizer, texts.texts), "what is open stays as it was"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["bpe-600", "t.safetensors"]

    def test_a_run_that_breaks_leaves_what_was_there(self, tmp_path, tokenizer):
        class Broken(Exception):
            pass

        def broken():
            yield "some text"
            raise Broken

        path = tmp_path / "t.safetensors"
        before = tokens_of(pack(TEXTS, tokenizer, path))
        texts = Texts.of("a")
        object.__setattr__(texts, "documents", broken)
        with pytest.raises(Broken):
            pack(texts, tokenizer, path)
        assert tokens_of(TokenFile(path)) == before
        assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]

    def test_files_that_do_not_fit_are_refused(self, tmp_path, tokenizer):
        file = pack(TEXTS, tokenizer, tmp_path / "t.safetensors")
        file.check(tokenizer)
        file.check(tokenizer, TEXTS)
        with pytest.raises(
            ValueError, match="^path: expected a matching file of tokens, got .*: its tokenizer is .* again"
        ):
            file.check(help_tokenizer(tmp_path, 600))
        with pytest.raises(ValueError, match="^path: .*: its corpus is .*first document.*, not .*another"):
            file.check(tokenizer, Texts.of("another"))

    def test_files_of_others_are_neither_read_nor_replaced(self, tmp_path, tokenizer):
        path = tmp_path / "t.safetensors"
        for content in (
            b"",
            b"some text that is long enough",
            b"\x05\0\0\0\0\0\0\0[1,2]   ",
            b"\x02" + bytes(7) + b"{}",
        ):
            path.write_bytes(content)
            with pytest.raises(
                ValueError, match="^path: expected a file of tokens that this package wrote, and .* is not"
            ):
                pack(TEXTS, tokenizer, path)
            assert path.read_bytes() == content
        with pytest.raises(ValueError, match="^path: expected a file of tokens, and there is no .*nothing"):
            TokenFile(tmp_path / "nothing")
        with Writer(path, {"kind": "poems"}) as file:
            file.add("x", "I64", torch.arange(3))
            file.done()
        with pytest.raises(ValueError, match="^path: expected a file of tokens, and .* is one of poems"):
            TokenFile(path)

    def test_damaged_files(self, tmp_path, tokenizer):
        path = pack(TEXTS, tokenizer, tmp_path / "t.safetensors").path
        whole = path.read_bytes()
        for content in (whole[:-1], whole + b"x"):
            (tmp_path / "damaged").write_bytes(content)
            with pytest.raises(ValueError, match=r"^path: expected [\d,]+ bytes, and .* it is damaged"):
                TokenFile(tmp_path / "damaged")

    def test_mistakes(self, tmp_path, tokenizer):
        with pytest.raises(ValueError, match="^most_tokens: expected a whole number of at least 1, got 0"):
            pack(TEXTS, tokenizer, tmp_path / "t", most_tokens=0)


class TestTensorFiles:
    def test_tensors_in_pieces_and_in_all_types(self, tmp_path):
        path = tmp_path / "folder" / "file"
        large = torch.tensor([-(2**60), 2**60, 3])
        with Writer(path, {"kind": "test", "long": "ö" * 1000}) as file:
            file.add("a", "U16", torch.tensor([1, -1], dtype=torch.int16))
            file.add("a", "U16", torch.tensor([-(2**15)], dtype=torch.int16))
            file.add("b", "I64", large)
            file.add("b", "I64", large[::2])
            file.add("c", "U32", torch.tensor([-1, 5], dtype=torch.int32))
            file.done(more=1)
        found = TensorFile(path, "test")
        assert found.header == {"kind": "test", "long": "ö" * 1000, "more": 1, "sha256": found.header["sha256"]}
        assert {name: found.read(name).tolist() for name in found.entries} == {
            "a": [1, 2**16 - 1, 2**15],
            "b": [-(2**60), 2**60, 3, -(2**60), 3],
            "c": [2**32 - 1, 5],
        }

    def test_headers_have_room(self, tmp_path):
        with Writer(tmp_path / "f", {}) as file:
            file.add("a", "I64", torch.arange(3))
            with pytest.raises(ValueError, match="^header: expected at most "):
                file.done(words="x" * 2000)
        assert not any(tmp_path.iterdir())

    def test_nothing_is_loaded_but_what_is_read(self, tmp_path):
        """A file of 256 MiB with holes, of which a few pages are read."""
        path, n = tmp_path / "large", 2**25
        with Writer(path, {"kind": "test"}) as file:
            file.add("x", "I64", torch.arange(4))
            file._file.truncate(8 + file._room + 8 * n)
            file._sizes["x"] = "I64", 8 * n
            file.done()
        before = _resident()
        x = TensorFile(path, "test")
        assert x.length("x") == n
        assert x.rows("x", 1, torch.tensor([3, n // 2, n - 1])).flatten().tolist() == [3, 0, 0]
        assert _resident() - before < 2**24


def _resident() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0
