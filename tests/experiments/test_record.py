"""What a run leaves behind: files that load again, also those of older versions, and pages that say what they hold."""

import json
import re
import struct
from contextlib import suppress
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

import made_up
from made_up import FAILS, HOLDS, TRICKY
from membydesign.reports import page, record
from membydesign.reports.comparison import failing
from membydesign.reports.page_html import html, note
from membydesign.reports.page_markdown import markdown, plain
from membydesign.reports.provenance import command
from membydesign.reports.sessions import Sessions

VOID = {"meta", "img", "br", "hr"}


class Reader(HTMLParser):
    """The elements of a page with the text in each; fails if a tag is not closed in its turn."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[int] = []
        self.texts: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(len(self.texts))
            self.texts.append((tag, ""))

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.texts[self.open.pop()][0] == tag

    def handle_data(self, data):
        for i in self.open:
            tag, text = self.texts[i]
            self.texts[i] = (tag, text + data)

    def of(self, *tags: str) -> list[str]:
        return [text for tag, text in self.texts if tag in tags]

    def values(self, tag: str, attribute: str) -> list[str]:
        return [a[attribute] or "" for t, a in self.attributes if t == tag and attribute in a]


def rendered(text: str) -> Reader:
    """Markdown as another program reads it; raw HTML, of which only our anchors are meant, passes."""
    return Reader(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text))


@pytest.fixture
def folder(tmp_path):
    made_up.write(tmp_path / "results" / "made_up")
    return tmp_path / "results" / "made_up"


def gathered(folder, out):
    blocks = page.gathered({folder.name: record.read(folder)})
    return markdown(blocks, out), html(blocks)


def test_what_is_written_is_read(folder):
    found, expected = record.read(folder), made_up.outcome()
    assert found.title == f"Title {TRICKY}"
    assert found.comparisons == expected.comparisons
    assert found.notes == expected.notes
    assert found.figures == {f"Caption {TRICKY}": folder / "loss (a).png"}
    assert [(t.title, t.headings, t.rows, t.note) for t in found.tables] == [
        (t.title, t.headings, t.rows, t.note) for t in expected.tables
    ]
    assert found.provenance.experiment == "made-up"
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["metrics"]["curve"] == [1.0, "nan"]
    assert [row["kind"] for row in metrics["comparisons"]] == ["number", "number", "about", "bound", *["ordering"] * 2]
    assert json.loads((folder / "config.json").read_text()) == {"preset": "cpu", "width": 16}


def test_a_number_that_is_not_finite_is_recorded(tmp_path):
    made_up.write(tmp_path / "diverged", ours=float("nan"))
    found = record.read(tmp_path / "diverged")
    assert failing(found.comparisons) == [HOLDS, FAILS]
    assert found.comparisons[3].shown().ours == "nan"


def test_older_results_load(folder):
    path = folder / "metrics.json"
    metrics = json.loads(path.read_text())
    for key in ("title", "notes", "figures", "tables"):
        del metrics[key]
    metrics["comparisons"] = [
        {key: value for key, value in row.items() if key != "kind"} for row in metrics["comparisons"][:2]
    ]
    path.write_text(json.dumps(metrics))
    found = record.read(folder)
    assert found.title == "made_up"
    assert found.comparisons == made_up.outcome().comparisons[:2]
    assert (found.notes, found.tables) == ([], [])
    assert found.figures == {"loss (a)": folder / "loss (a).png"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "got an error: Expecting property name"),
        ("[]", "got an error"),
        ("{}", "got one without 'provenance'"),
        ('{"provenance": {"experiment": "x"}}', "got one without 'preset'"),
        (b"\xff", "got an error: 'utf-8' codec"),
        (None, "got an error: .*No such file"),
    ],
)
def test_what_is_not_a_result_is_named(folder, text, message):
    path = folder / "metrics.json"
    path.unlink()
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"made_up.metrics.json: expected a result of mbd reproduce, {message}"):
        record.read(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"figures": {"a": "../../secret.png"}}, "figures: expected names of files in the same folder, got '../../sec"),
        ({"comparisons": [{"kind": "guess"}]}, "kind: expected one of number"),
        ({"comparisons": [{"claim": "", "quantity": "", "paper": 1, "ours": [], "tolerance": 1}]}, "error"),
        (
            {"tables": [{"title": "t", "headings": ["a"], "rows": [[1, 2]]}]},
            r"rows: expected 1 cells in each row of 't'",
        ),
    ],
)
def test_a_part_that_is_wrong_is_named(folder, change, message):
    path = folder / "metrics.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=rf"metrics.json: .*{message}"):
        record.read(folder)


def test_plain_text_stays_plain():
    for text in (TRICKY, "k_B g_A|B", "__init__ _x_ a_b_ _", "<script>", "&lt;", "`", "1 ≤ 2 > 1", "* a * b *", "a#"):
        assert rendered(f"# {plain(text)}").of("h1") == [text]
        assert rendered(f"| {plain(text)} |\n|---|\n| {plain(text)} |").of("th", "td") == [text, text]
    assert plain("k_B = 0.5 (a), g_A: 1") == "k_B = 0.5 (a), g_A: 1"


def test_the_report_of_a_result(folder):
    text = (folder / "report.md").read_text()
    found = rendered(text)
    assert found.of("h1") == [f"Title {TRICKY}"]
    held, settings = "1 of 2 claims hold", "These are results of the cpu preset, not of the paper preset."
    assert found.texts[1:4] == [
        ("p", f"cpu preset · 2.4 % of the paper's training · {held}"),
        ("strong", held),
        ("p", f"This does not: {FAILS}. 5 of 6 comparisons agree with the paper. {settings}"),
    ]
    assert found.of("h2") == [HOLDS, FAILS, f"Table {TRICKY}", "Notes"]
    assert found.of("code") == [f"mbd reproduce '{TRICKY}'", "k_B < 1"]
    assert [found.values("img", key) for key in ("alt", "src")] == [[f"Caption {TRICKY}"], ["loss%20%28a%29.png"]]
    cells = found.of("td")
    for cell in (
        "Bayesian Layer lowest",
        "≈ 88",
        "> 0",
        "by > 0.05",
        "KDA < Bayesian Layer < A|B",
        TRICKY,
        "<i>",
        "inf",
    ):
        assert cell in cells
    assert "Bayesian Layer 1.5, KDA 1.6, A|B 1.6002" in cells
    assert "1.235" in cells
    # Verdicts follow the claims.
    assert text.index(plain(HOLDS)) < text.index("**holds**: 5 of 5") < text.index("**DOES NOT HOLD**: 0 of 1")


def test_a_good_result_says_so_and_has_no_failing_claims(tmp_path):
    out = made_up.outcome()
    good = record.Outcome(out.config, out.comparisons[:5], {})
    made = record.Provenance("made-up", "cpu", "mbd", "0123", "today", 1.5, {})
    text = record.write(tmp_path, good, made, "Title", {}).read_text()
    assert "\n\ncpu preset · **1 of 1 claim holds**\n\n5 of 5 comparisons agree with the paper." in text
    assert "NOT" not in text
    none = record.Outcome(out.config, [], {})
    assert "cpu preset · no claim was compared\n" in record.write(tmp_path, none, made, "Title", {}).read_text()


def test_a_smoke_run_is_no_test_of_the_claims(tmp_path):
    report = made_up.write(tmp_path / "smoke", preset="smoke", ours=-1.0)
    pages = [report.read_text(), *gathered(tmp_path / "smoke", tmp_path)]
    for text in pages:
        assert "smoke: not a test of the claims" in text
        assert not made_up.VERDICT.search(text.replace(HOLDS, ""))
    assert Reader(pages[2]).of("h3")[:2] == [HOLDS, FAILS]
    assert "| result | preset | of the paper's training | claims held |" in pages[1]
    assert "| smoke | 2.4 % | — | — |" in pages[1]
    assert 'class="badge bad"' not in pages[2]
    assert 'class="badge good"' not in pages[2]
    metrics = json.loads((tmp_path / "smoke" / "metrics.json").read_text())
    assert {row["agrees"] for row in metrics["comparisons"]} == {None}
    assert record.read(tmp_path / "smoke").comparisons == made_up.outcome(-1.0).comparisons


def test_the_page_in_markdown(folder, tmp_path):
    out = tmp_path / "elsewhere" / "page"
    out.mkdir(parents=True)
    text, _ = gathered(folder, out)
    found = rendered(text)
    (source,) = found.values("img", "src")
    assert (out / unquote(source)).resolve() == (folder / "loss (a).png").resolve()
    anchors = found.values("a", "id")
    assert len(set(anchors)) == len(anchors) == 3
    targets = [link.removeprefix("#") for link in found.values("a", "href") if link.startswith("#")]
    assert targets == ["made-up", *anchors]  # the summary, then the contents
    (file,) = [link for link in found.values("a", "href") if not link.startswith(("#", "https:"))]
    assert (out / file).resolve() == (folder / "report.md").resolve()
    assert found.of("h2") == ["Contents", f"Title {TRICKY}"]
    assert found.of("h3") == [HOLDS, FAILS, f"Table {TRICKY}", "Notes"]
    assert text.index("| **1/2** |") < text.index("## Contents") < text.index("DOES NOT HOLD")


def test_the_page_in_html(folder, tmp_path):
    _, text = gathered(folder, tmp_path)
    found = Reader(text)
    (source,) = found.values("img", "src")
    assert source.startswith("data:image/png;base64,iVBOR")
    assert found.values("img", "alt") == [f"Caption {TRICKY}"]
    assert found.of("h2") == ["Contents", f"Title {TRICKY}"]
    assert found.of("h3") == [HOLDS, FAILS, f"Table {TRICKY}", "Notes"]
    for cell in (TRICKY, "KDA < Bayesian Layer < A|B", "n|m", "<i>", "1.235"):
        assert cell in found.of("td", "th")
    assert found.of("code") == [f"mbd reproduce '{TRICKY}'", "k_B < 1"]
    marks = [a.get("class") for tag, a in found.attributes if tag == "span"]
    fact, good, bad = "badge", "badge good", "badge bad"
    assert marks[:7] == [bad, bad, fact, fact, bad, good, bad]  # the summary's two, then the contents
    assert found.values("img", "width") == []  # the file does not say how many dots an inch has
    links = found.values("a", "href")
    assert [link for link in links if not link.startswith("#")] == ["https://example.org/?a=1&b=2"]
    assert {link[1:] for link in links if link.startswith("#")} == {
        a for _, x in found.attributes if (a := x.get("id"))
    }
    assert "prefers-color-scheme: dark" in text
    for fetched in ("<script", "<link", "url(", "@import", "srcset", "javascript:"):
        assert fetched not in text


def test_figures_have_letters_of_one_size_and_captions_of_one_form(folder):
    def png(width, height, per_metre):
        return b"\x89PNG\r\n\x1a\n" + struct.pack(
            ">I4sIIBBBBBII4sIIBI", 13, b"IHDR", width, height, 8, 2, 0, 0, 0, 0, 9, b"pHYs", per_metre, per_metre, 1, 0
        )

    figures = {"One: with parts": png(1152, 612, 7087), "Two. And more.": png(1800, 648, 7087), "Three": b"no PNG"}
    blocks = []
    for i, (caption, image) in enumerate(figures.items()):
        (folder / f"{i}.png").write_bytes(image)
        blocks.append(page.Figure(caption, folder / f"{i}.png"))
    text = html(blocks)
    assert Reader(text).values("img", "width") == ["614", "960"]  # 6.4 and 10 inches
    captions = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert captions == ["<b>One:</b> with parts.", "<b>Two.</b> And more.", "<b>Three.</b>"]


def test_results_say_how_long_all_sessions_and_runs_took(folder):
    path = folder / "metrics.json"
    metrics = json.loads(path.read_text())

    def told(**changes):
        path.write_text(json.dumps({**metrics, "provenance": {**metrics["provenance"], **changes}}))
        in_markdown, _ = gathered(folder, folder.parent)
        row = next(line for line in in_markdown.splitlines() if line.startswith("| [made"))
        facts = next(line for line in in_markdown.splitlines() if line.startswith("- seconds"))
        return row.split(" | ")[-2:], facts

    assert told() == (["1.50", "— |"], "- seconds: 1.50")
    assert told(sessions=3) == (["1.50", "— |"], "- seconds: 1.50 in 3 sessions")
    for i, seconds in enumerate((1000.4, 234)):
        (folder / "runs" / str(i)).mkdir(parents=True)
        (folder / "runs" / str(i) / "metrics.json").write_text(json.dumps({"seconds": seconds}))
    runs = "1,234 in all runs and their sessions"
    assert told() == (["≥ 1.50", "1,234 |"], f"- seconds: 1.50 in the last session; {runs}")
    assert told(sessions=1) == (["1.50", "1,234 |"], f"- seconds: 1.50; {runs}")


def test_seconds_add_up_over_sessions(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    with suppress(KeyboardInterrupt), Sessions(tmp_path, resume=False):
        now[0] += 5
        raise KeyboardInterrupt
    with Sessions(tmp_path, resume=True) as second:
        now[0] += 2
        assert (second.seconds, second.count) == (7, 2)
    with Sessions(tmp_path, resume=False) as fresh:
        assert (fresh.seconds, fresh.count) == (0, 1)
    with Sessions(None, resume=True) as none:
        assert none.count == 1


def test_results_of_one_name_have_anchors_of_their_own(folder):
    each = record.read(folder)
    blocks = page.gathered({"a b": each, "a-b": each, "a-b-2": each, "ü": each, "ö": each})
    anchors = [block.anchor for block in blocks if isinstance(block, page.Heading) and block.anchor]
    assert len(set(anchors)) == len(anchors) == 15


def test_a_missing_figure_is_named(folder, tmp_path):
    (folder / "loss (a).png").unlink()
    assert record.read(folder).missing_figures == [folder / "loss (a).png"]
    in_markdown, in_html = gathered(folder, tmp_path)
    for found in (rendered(in_markdown), Reader(in_html)):
        assert "FIGURE MISSING: loss (a).png" in found.of("strong", "span")
        assert not found.values("img", "src")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 < 2 & `a*b*c`", "1 &lt; 2 &amp; <code>a*b*c</code>"),
        ("**a *b* c**", "<strong>a <em>b</em> c</strong>"),
        ("2 * 3 * 4 \\* 5", "2 * 3 * 4 * 5"),
        ("[a `b`](https://x.org)", '<a href="https://x.org">a <code>b</code></a>'),
        ("[a](javascript:x) <b>", "a &lt;b&gt;"),
    ],
)
def test_notes_in_html(text, expected):
    assert note(text) == expected


def test_a_result_names_the_command_as_one_types_it():
    assert command(["/usr/bin/mbd", "reproduce", "recall"]) == "mbd reproduce recall"
    assert command(["/lib/membydesign/cli/__main__.py", "report", "a b"]) == "mbd report 'a b'"
