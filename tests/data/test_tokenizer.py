"""Tokenizers: trained ones are the same again, load like any other and lose no text; what does not fit is refused."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from membydesign.data.text import PythonHelp
from membydesign.data.tokenizer import (
    BOS,
    TRAINED_ON,
    bos_of,
    check_vocabulary,
    encoder,
    fingerprint,
    load_tokenizer,
    train_tokenizer,
    vocabulary_size,
)
from text_problem import Texts, help_tokenizer

TEXT = "def größe(x):\n    return x + 1  # 漢字 🙂\r\n\t\x00 end"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return help_tokenizer(folder)


def bytes_of(folder: Path) -> str:
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


class TestTraining:
    def test_it_loads_with_auto_tokenizer_and_has_bos(self, folder, tokenizer):
        loaded = AutoTokenizer.from_pretrained(folder / "bpe-512")
        assert len(loaded) == vocabulary_size(loaded) == 512
        assert loaded.bos_token == loaded.eos_token == BOS
        assert loaded(TEXT).input_ids == [loaded.bos_token_id, *encoder(tokenizer)([TEXT])[0]]
        assert fingerprint(loaded) == fingerprint(tokenizer)

    def test_no_text_is_lost(self, tokenizer):
        for text in (TEXT, *PythonHelp().documents()):
            assert tokenizer.decode(encoder(tokenizer)([text])[0]) == text

    def test_merges_are_the_most_frequent_pairs(self, folder):
        """The first merges of a text that can be counted by hand."""
        texts = Texts.of("ababab ababab cdcd cdcd x", "ababab y")
        made = train_tokenizer(texts, 259, folder / "small")
        vocabulary = {token: i for token, i in made.get_vocab().items() if i >= 257}
        assert vocabulary == {"ab": 257, "abab": 258}, "ab nine times, then abab six times, before cd four times"

    def test_another_process_with_other_threads_makes_the_same(self, folder, tokenizer):
        program = (
            "import sys; from pathlib import Path; from membydesign.data.text import PythonHelp;"
            "from membydesign.data.tokenizer import train_tokenizer;"
            "train_tokenizer(PythonHelp('validation'), 512, Path(sys.argv[1]))"
        )
        other = folder / "other-process"
        environment = {**os.environ, "PYTHONHASHSEED": "77", "TOKENIZERS_PARALLELISM": "false"}
        words = [sys.executable, "-W", "ignore", "-c", program, str(other)]
        subprocess.run(words, check=True, env=environment, timeout=300)
        assert bytes_of(other) == bytes_of(folder / "bpe-512")

    def test_it_is_trained_once(self, tmp_path):
        texts = Texts.of("some words and some words again")
        made = [train_tokenizer(texts, 259, tmp_path / "t") for _ in range(2)]
        assert len(texts.reads) == 1
        assert fingerprint(made[0]) == fingerprint(made[1])
        train_tokenizer(texts, 260, tmp_path / "t")
        train_tokenizer(Texts.of("other words and other words"), 260, tmp_path / "t")

    def test_one_of_before_digits_were_single_tokens_is_replaced(self, tmp_path):
        texts = Texts.of("1234 1234 and 1234 again and again")
        train_tokenizer(texts, 260, tmp_path / "t")
        record = tmp_path / "t" / TRAINED_ON
        now = json.loads(record.read_text())
        record.write_text(json.dumps({"vocab_size": now["vocab_size"], "corpus": now["corpus"]}))
        (tmp_path / "t" / "old").touch()
        made = train_tokenizer(texts, 260, tmp_path / "t")
        assert not (tmp_path / "t" / "old").exists()
        assert len(texts.reads) == 2
        assert len(encoder(made)(["1234"])[0]) == 4
        assert json.loads(record.read_text()) == now
        assert len(texts.reads) == 2
        assert json.loads((tmp_path / "t" / "trained_on.json").read_text())["vocab_size"] == 260
        assert [path.name for path in tmp_path.iterdir()] == ["t"]

    def test_numbers_in_groups_of_three(self, tmp_path):
        texts = Texts.of("some words and some words again", "and 12345 again")
        made = train_tokenizer(texts, 257 + 1100 + 5, tmp_path / "t", digits=3)
        assert vocabulary_size(made) == 257 + 1100 + 5
        encode = encoder(made)
        for size in (1, 2, 3):
            assert all(len(ids) == 1 for ids in encode([f"{n:0{size}d}" for n in range(10**size)]))
        for text, tokens in {
            "7007071": ["700", "707", "1"],
            "10042": ["100", "42"],
            "a1b2345": ["a", "1", "b", "234", "5"],
        }.items():
            assert made.tokenize(text) == tokens
            assert made.decode(encode([text])[0]) == text
        assert len(encoder(train_tokenizer(texts, 262, tmp_path / "t"))(["7007071"])[0]) == 7, "the rule is part of it"

    def test_mistakes(self, tmp_path):
        with pytest.raises(ValueError, match="^digits: expected one of 1, 3, got 2"):
            train_tokenizer(PythonHelp(), 2048, tmp_path / "t", digits=2)
        with pytest.raises(ValueError, match="^vocab_size: expected a whole number of at least 1357, got 512"):
            train_tokenizer(PythonHelp(), 512, tmp_path / "t", digits=3)
        with pytest.raises(ValueError, match="^vocab_size: expected a whole number of at least 257, got 256"):
            train_tokenizer(PythonHelp(), 256, tmp_path / "t")
        with pytest.raises(ValueError, match="^vocab_size: expected at most 258, .* got 300"):
            train_tokenizer(Texts.of("ab ab"), 300, tmp_path / "t")
        assert not any(tmp_path.iterdir())
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "poem.txt").write_text("x")
        with pytest.raises(ValueError, match="^folder: expected a new folder, or .*, and .*mine is neither"):
            train_tokenizer(Texts.of("ab ab"), 258, tmp_path / "mine")
        assert (tmp_path / "mine" / "poem.txt").exists()


class TestEncoding:
    def test_it_is_what_transformers_gives(self, tokenizer):
        texts = [TEXT, "", "one two", BOS + "x"]
        expected = tokenizer(texts, add_special_tokens=False)["input_ids"]
        assert encoder(tokenizer)(texts) == expected
        assert encoder(tokenizer)([BOS]) == [[bos_of(tokenizer)]]

    def test_special_tokens_may_be_text(self, folder):
        tokenizer = load_tokenizer(folder / "bpe-512")
        before = fingerprint(tokenizer)
        tokenizer.split_special_tokens = True
        (ids,) = encoder(tokenizer)([BOS])
        assert bos_of(tokenizer) not in ids
        assert [ids] == tokenizer([BOS], add_special_tokens=False)["input_ids"]
        assert fingerprint(tokenizer) != before

    def test_truncation_and_padding_of_callers_do_not_matter(self, folder):
        tokenizer = load_tokenizer(folder / "bpe-512")
        before, expected = fingerprint(tokenizer), encoder(tokenizer)([TEXT])
        tokenizer.pad_token = BOS
        tokenizer([TEXT, "a"], truncation=True, max_length=3, padding=True)
        assert fingerprint(tokenizer) == before
        assert encoder(tokenizer)([TEXT]) == expected
        assert len(expected[0]) > 3

    def test_fingerprints_tell_tokenizers_apart(self, folder, tokenizer):
        tokenizers = [tokenizer, help_tokenizer(folder, 513), load_tokenizer(folder / "bpe-512")]
        tokenizers[2].bos_token = "a"
        assert len(set(map(fingerprint, tokenizers))) == 3


class TestFitting:
    def test_vocabularies(self, folder):
        tokenizer = load_tokenizer(folder / "bpe-512")
        check_vocabulary(tokenizer, 512)
        check_vocabulary(tokenizer, 1024)
        message = "^tokenizer: expected one with tokens below the model's vocab_size=511, got one with 512 tokens"
        with pytest.raises(ValueError, match=message):
            check_vocabulary(tokenizer, 511)
        tokenizer.add_tokens(["<new>"])
        with pytest.raises(ValueError, match="^tokenizer: .* got one with 513 tokens"):
            check_vocabulary(tokenizer, 512)
        with pytest.raises(ValueError, match="^vocab_size: expected a whole number of at least 1, got 0"):
            check_vocabulary(tokenizer, 0)

    def test_without_bos(self, tokenizer):
        without = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
        with pytest.raises(
            ValueError, match="^tokenizer: expected one with a BOS token, got .* set tokenizer.bos_token"
        ):
            bos_of(without)

    def test_code_in_the_folder_of_a_tokenizer_is_not_run(self, tmp_path, monkeypatch):
        ran = tmp_path / "ran"
        (tmp_path / "trap.py").write_text(f"open({str(ran)!r}, 'w')\nclass Trap: pass\n")
        config = {"tokenizer_class": "Trap", "auto_map": {"AutoTokenizer": ["trap.Trap", "trap.Trap"]}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        config = {"model_type": "trap", "auto_map": {"AutoConfig": "trap.Trap"}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        monkeypatch.setattr("builtins.input", lambda *_: "y")  # the answer to Transformers' question
        with pytest.raises(ValueError, match="^name: expected a tokenizer that can be read"):
            load_tokenizer(tmp_path)
        assert not ran.exists()

    def test_names_that_lead_nowhere(self, tmp_path, monkeypatch):
        with pytest.raises(ValueError, match="(?s)^name: expected a tokenizer that can be read, got '.*nothing'"):
            load_tokenizer(tmp_path / "nothing")
        with pytest.raises(ValueError, match="^name: expected the name or folder of a tokenizer, got None"):
            load_tokenizer(None)  # pyright: ignore[reportArgumentType]
