"""Corpora: how text is cut, what is read from files, datasets and Python's help, and what is said of what cannot be."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from membydesign.data.splitting import articles, whole
from membydesign.data.text import Corpus, HubText, JoinedText, PartOfText, PythonHelp, hub_text
from membydesign.data.text_files import TextFiles
from membydesign.evaluation.text import text_at
from membydesign.install import install_hint

WIKI = (
    " \n = One = \n \n It is . \n It was . \n \n = = A section = = \n \n With k \n = 1 rad / s and L = \n 2 henry . \n"
    " \n \n = = = Deeper = = = \n \n More . \n \n = Two ( a film ) = \n \n End . \n \n"
)
FIRST, SECOND = WIKI.index(" \n = One"), WIKI.index(" \n = Two")


def written(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def documents(corpus: Corpus) -> list[str]:
    return list(corpus.documents())


class TestCuts:
    def test_articles_begin_at_titles_alone(self):
        assert list(articles([WIKI])) == [WIKI[FIRST:SECOND], WIKI[SECOND:]]

    def test_lines_one_by_one_give_the_same(self):
        lines = WIKI.splitlines(keepends=True)
        assert list(articles(lines)) == list(articles([WIKI]))
        on_the_hub = [line if line.strip() else "" for line in lines]
        assert list(articles(on_the_hub)) == list(articles([WIKI]))

    def test_no_text_is_lost(self):
        for text in (WIKI, "before \n" + WIKI, WIKI + "no line end", " = A = ", "\n\n = A = \n\n = B = \n\n", "x"):
            assert "".join(articles([text])) == text

    def test_text_before_the_first_title(self):
        assert list(articles(["Preface . \n" + WIKI])) == ["Preface . \n", WIKI[FIRST:SECOND], WIKI[SECOND:]]

    @pytest.mark.parametrize(
        "line",
        [" = = A = = ", " = A", "A = ", " = = A = ", " = A = = ", "x = 1 = y", "==", " = 1 rad , k = \nno blank"],
    )
    def test_what_is_no_title(self, line):
        assert len(list(articles([f" \n = T = \n \n Text \n \n{line}\n \n"]))) == 1

    def test_only_line_feeds_end_lines(self):
        text = " \n = A = \n \n a\x85 = B = \u2028 = C = \x0c\r \n \n"
        assert list(articles([text])) == [text]

    def test_blank_pieces_are_no_documents(self):
        assert list(whole(["a", "", " \n", "b\n"])) == ["a", "b\n"]
        assert list(articles([" \n", "", " \n \n"])) == []


class TestFiles:
    def test_every_file_of_a_folder_is_a_document(self, tmp_path):
        files = {
            "b.txt": "second",
            "a/z.txt": "first\r\n",
            "c.tokens": WIKI,
            "note.md": "not read",
            ".x/d.txt": "hidden",
        }
        corpus = TextFiles(written(tmp_path, files))
        assert documents(corpus) == ["first\r\n", "second", WIKI]
        assert corpus.describe()["cut"] == {"whole": 3}

    def test_wikitext_is_known_by_its_names(self, tmp_path):
        corpus = TextFiles(written(tmp_path, {"wiki.test.tokens": WIKI, "other.txt": WIKI}))
        assert documents(corpus) == [WIKI, *articles([WIKI])]
        assert corpus.describe()["cut"] == {"articles": 1, "whole": 1}
        assert len(documents(TextFiles(tmp_path, cut="articles"))) == 4
        assert documents(TextFiles(tmp_path / "wiki.test.tokens", cut="whole")) == [WIKI]

    def test_json(self, tmp_path):
        lines = [{"text": "one\u2028line"}, {"text": ""}, {"text": "two", "title": "x"}]
        files: Mapping[str, str | bytes] = {
            "a.jsonl": "\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n",
            "b.json": json.dumps({"text": "an object"}),
            "c.json": json.dumps([{"text": "of a list"}, "a string"]),
        }
        expected = ["one\u2028line", "two", "an object", "of a list", "a string"]
        assert documents(TextFiles(written(tmp_path, files))) == expected
        assert documents(TextFiles(written(tmp_path / "d", {"d.json": '{"body": "b"}'}), column="body")) == ["b"]

    def test_what_is_not_ascii(self, tmp_path):
        files: Mapping[str, str | bytes] = {"a.txt": b"\xef\xbb\xbfwith a mark", "b.txt": "Größe 漢字 🙂"}
        assert documents(TextFiles(written(tmp_path, files))) == ["with a mark", "Größe 漢字 🙂"]

    def test_a_description_tells_texts_apart_and_not_places(self, tmp_path):
        def described(folder: str, files: Mapping[str, str | bytes], **options):
            return TextFiles(written(tmp_path / folder, files), **options).describe()

        one = described("one", {"a.txt": "alpha", "b.txt": "beta"})
        assert one == described("two", {"a.txt": "alpha", "b.txt": "beta"})
        others = [
            described("three", {"a.txt": "beta", "b.txt": "alpha"}),
            described("four", {"a.txt": "alphabeta", "b.txt": "x"}),
            described("five", {"a.txt": "alph", "b.txt": "abeta"}),
            described("one", {}, cut="articles"),
            described("six", {"a.txt": "alpha", "b.json": '"beta"'}),
        ]
        assert len({json.dumps(x) for x in (one, *others)}) == 6
        assert str(tmp_path) not in json.dumps(one)

    @pytest.mark.parametrize(
        ("files", "options", "message"),
        [
            ({"note.md": "x"}, {}, r"path: expected files \*.txt or .* in a folder, and .* has none"),
            ({"a.txt": " \n", "b.jsonl": ""}, {}, "path: expected text in .*, got blank files only"),
            ({"a.txt": b"caf\xe9"}, {}, "path: expected text in UTF-8, got invalid UTF-8 at byte 3 of .*a.txt"),
            ({"a.jsonl": '{"text": "a"}\n{"text": '}, {}, "path: expected JSON in .*a.jsonl, line 2"),
            (
                {"a.json": '[{"text": "a"}, {"body": "b"}]'},
                {},
                "column: expected text in the column 'text' of item 2 of .*a.json, got columns body",
            ),
            ({"a.json": '{"text": "a"}'}, {"column": "b"}, "column: expected text in the column 'b' .* columns text"),
            ({"a.json": "3"}, {}, "column: expected text in the column 'text' of item 1 .* got int"),
            ({"a.txt": "a"}, {"cut": "lines"}, "cut: expected one of whole, articles, got 'lines'"),
            ({"a.txt": "a"}, {"column": ""}, "column: expected a name, got ''"),
        ],
    )
    def test_mistakes_are_explained(self, tmp_path, files, options, message):
        with pytest.raises(ValueError, match=f"^{message}"):
            documents(TextFiles(written(tmp_path, files), **options))

    def test_paths_that_are_none(self, tmp_path):
        with pytest.raises(ValueError, match="^path: expected a file or folder of text, and there is no .*nowhere"):
            documents(TextFiles(tmp_path / "nowhere"))
        with pytest.raises(ValueError, match=r"^path: expected a file \*.txt or \*.tokens .* got .*a.parquet"):
            documents(TextFiles(written(tmp_path, {"a.parquet": "x"}) / "a.parquet"))
        with pytest.raises(ValueError, match="^path: expected a file or folder, got None"):
            TextFiles(None)  # pyright: ignore[reportArgumentType]


class TestPythonHelp:
    def test_both_splits_are_topics_and_a_tenth_is_validation(self):
        from pydoc_data.topics import topics

        train, validation = documents(PythonHelp()), documents(PythonHelp("validation"))
        assert set(train) | set(validation) <= set(topics.values())
        assert not set(train) & set(validation)
        together = sum(map(len, train + validation))
        assert 250_000 < together < 1_000_000
        assert 0.08 < sum(map(len, validation)) / together <= 0.1

    def test_validation_is_not_in_the_training_text(self):
        """Topics repeat one another's text: a split by name alone would put a tenth of it on both sides."""

        def stretches(split) -> set[tuple[str, ...]]:
            words = [text.split() for text in PythonHelp(split).documents()]
            return {tuple(w[i : i + 12]) for w in words for i in range(len(w) - 11)}

        validation = stretches("validation")
        assert len(validation & stretches("train")) < 0.02 * len(validation)

    def test_mistakes(self):
        with pytest.raises(ValueError, match="^split: expected 'train' or 'validation', got 'test'"):
            PythonHelp("test")  # pyright: ignore[reportArgumentType]


class TestParts:
    def test_joined_and_cut(self, tmp_path):
        a, b = (TextFiles(written(tmp_path / name, {"x.txt": f"{name} x", "y.txt": f"{name} y"})) for name in "ab")
        joined = JoinedText((a, b))
        assert documents(joined) == ["a x", "a y", "b x", "b y"]
        assert documents(PartOfText(joined, 1, 3)) == ["a y", "b x"]
        assert documents(PartOfText(joined, 3)) == ["b y"]
        described = [c.describe() for c in (a, joined, JoinedText((b, a)), PartOfText(a), PartOfText(a, 0, 1))]
        assert len({json.dumps(x) for x in described}) == 5

    def test_mistakes(self):
        text = PythonHelp()
        with pytest.raises(ValueError, match="^start: expected fewer than the documents of PythonHelp.*, got 999"):
            documents(PartOfText(text, 999))
        with pytest.raises(ValueError, match="^stop: expected a whole number of at least 3, got 2"):
            PartOfText(text, 2, 2)
        with pytest.raises(ValueError, match="^corpus: expected a corpus, got 'text'"):
            PartOfText("text")  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match=r"^parts: expected a tuple of at least one corpus, got \(\)"):
            JoinedText(())


class TestDatasets:
    """`datasets` itself, on a dataset in a folder: what it does with a name on the Hub, but for the network."""

    @pytest.fixture(autouse=True)
    def _no_network(self, monkeypatch, tmp_path_factory):
        from datasets import config

        monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))

    def dataset(self, folder: Path, rows: list[dict], split: str = "train") -> str:
        content = "".join(json.dumps(row) + "\n" for row in rows)
        return str(written(folder, {f"{split}.jsonl": content}))

    def test_rows_are_documents(self, tmp_path):
        self.dataset(tmp_path, [{"text": "held out"}], "test")
        name = self.dataset(tmp_path, [{"text": f"row {i}", "body": "b"} for i in range(5)] + [{"text": ""}])
        assert documents(HubText(name)) == [f"row {i}" for i in range(5)]
        assert documents(HubText(name, split="test")) == ["held out"]
        assert documents(PartOfText(HubText(name), 1, 3)) == ["row 1", "row 2"]

    def test_wikitext_has_lines_for_rows(self, tmp_path):
        rows = [{"text": line if line.strip() else ""} for line in WIKI.splitlines(keepends=True)]
        name = self.dataset(tmp_path / "wikitext", rows)
        assert HubText(name).cut_by == HubText("Salesforce/wikitext").cut_by == "articles"
        assert documents(HubText(name)) == list(articles([WIKI]))
        assert len(documents(HubText(name, cut="whole"))) > 5

    def test_what_cannot_be_read(self, tmp_path):
        name = self.dataset(tmp_path, [{"text": "a", "number": 3}])
        with pytest.raises(
            ValueError, match=r"^column: expected a column of text .*\(columns of text: text\), got 'b'"
        ):
            documents(HubText(name, column="b"))
        with pytest.raises(ValueError, match="^column: expected a column of text .* got 'number'"):
            documents(HubText(name, column="number"))
        with pytest.raises(ValueError, match="(?s)^name: expected a dataset that can be read, got .*split 'dev'"):
            documents(HubText(name, split="dev"))
        with pytest.raises(ValueError, match="(?s)^name: expected a dataset .* give a local folder of text instead"):
            documents(HubText("nobody/no-such-dataset"))
        blank = self.dataset(tmp_path / "blank", [{"text": " "}])
        with pytest.raises(ValueError, match="^name: expected text in .*, got no document"):
            documents(HubText(blank))

    def test_names(self):
        with pytest.raises(ValueError, match="^name: expected a name, got ''"):
            HubText("")
        with pytest.raises(ValueError, match="^cut: expected one of whole, articles, got 'rows'"):
            HubText("a", cut="rows")

    def test_one_word(self):
        assert hub_text("hub:some/set") == HubText("some/set")
        assert hub_text("hub:some/set::test") == HubText("some/set", split="test")
        assert text_at("hub:some/set:one:test") == HubText("some/set", "one", "test")
        for name in ("hub:", "some/set", "hub:some/set:one:test:more"):
            with pytest.raises(ValueError, match="name: expected hub:DATASET:CONFIG:SPLIT"):
                hub_text(name)

    def test_a_description_asks_nobody(self):
        described = HubText("Salesforce/wikitext", "wikitext-103-v1", "test").describe()
        assert described == {
            "kind": "dataset",
            "name": "Salesforce/wikitext",
            "config": "wikitext-103-v1",
            "split": "test",
            "column": "text",
            "cut": "articles",
            "revision": None,
        }


def test_without_the_extra_it_says_what_to_install():
    """Python's help needs no package; datasets and tokenizers name the extra."""
    program = """
    import sys
    sys.modules.update(dict.fromkeys(("datasets", "transformers", "tokenizers")))
    from membydesign.data.text import HubText, PythonHelp
    from membydesign.data.tokenizer import load_tokenizer
    import membydesign.data.token_files, membydesign.data.windows, membydesign.evaluation.ar_hits
    assert len(list(PythonHelp().documents())) > 20
    for f in (lambda: list(HubText("a").documents()), lambda: load_tokenizer("a")):
        try:
            f()
        except ModuleNotFoundError as error:
            print(error)
    """
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines() == [
        f"reading a dataset of the Hugging Face Hub needs datasets: {install_hint('text')}",
        f"a tokenizer needs transformers: {install_hint('text')}",
    ]
