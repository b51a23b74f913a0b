"""What a model's memories know while it reads: the measured numbers, the page, and the page in a real browser."""

import json
import struct
from base64 import b64decode

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from browser import cells, chromium, opened, serious, settle, until, visit
from membydesign import filter_sequence
from membydesign.cli.app import app
from membydesign.explore import text as explore_text
from membydesign.explore import text_page
from membydesign.explore.text import MEASURES, read
from membydesign.layers import FilterLayer
from membydesign.models import MemoryConfig, MemoryForCausalLM, next_token_losses

LETTERS = "\n </>abcdefghij"
TEXT = "a bad cab </script>\n" + "fed a jade face " * 3
LAYERS = ["bayesian_layer", "attention", "deltanet_style", "gla_style", "count_memory"]


def mbd(*words: object, code: int = 0):
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200", "TERM": "xterm"})
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = MemoryConfig(vocab_size=len(LETTERS), hidden_size=16, num_heads=2, layers=LAYERS)
    return MemoryForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokenizer():
    made = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="/"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="/")


@pytest.fixture(scope="module")
def reading(model, tokenizer):
    return read(model, tokenizer, TEXT, "tiny")


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def numbers(packed):
    data = b64decode(packed)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def test_the_numbers_are_those_of_the_model(reading, model, tokenizer):
    ids = torch.tensor([tokenizer(TEXT).input_ids])
    with torch.no_grad():
        out = model(ids, return_variance=True, return_evidence=True)
        torch.testing.assert_close(reading.loss[1:], next_token_losses(model, {"input_ids": ids}), rtol=1e-5, atol=1e-5)
    assert "".join(reading.tokens) == TEXT
    assert [(head.layer, head.head) for head in reading.heads] == [(i, h) for i in range(1, 5) for h in (1, 2)]
    own = [i for i, mixer in enumerate(model.model.mixers()) if isinstance(mixer, FilterLayer)]
    for head in reading.heads:
        i, h = own[head.layer - 1], head.head - 1
        evidence = out.log_evidences[i][0, :, h].double() / model.model.mixers()[i].value_dim
        torch.testing.assert_close(head.evidence, evidence, rtol=1e-4, atol=1e-4)
        variance = out.variances[i]
        if variance is None:
            assert head.variance.isnan().all()
        else:
            torch.testing.assert_close(head.variance, variance[0, :, h].double().mean(-1), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_gain_is_the_share_of_an_error_that_a_write_corrects(reading, model, tokenizer):
    """From the covariance of a Bayesian Layer, which is unsure of a key just after its write by r² times the gain."""
    mixer, found = model.model.mixers()[0], []
    hook = mixer.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    model(torch.tensor([tokenizer(TEXT).input_ids]))
    hook.remove()
    x, _ = mixer.step_inputs(found[0], None, None)
    out = filter_sequence(mixer.design, x.k, x.k, x.v, **x.parameters, return_variance=True)
    assert out.variance is not None
    gain = out.variance[0, :, :, 0] / x.parameters["write_noise"][0]
    for head in reading.heads[:2]:
        torch.testing.assert_close(head.gain, gain[:, head.head - 1].double(), rtol=1e-4, atol=1e-5)
        assert 0 < head.gain.min() < head.gain.max() < 1


def test_a_page_holds_the_numbers_and_no_markup_of_the_text(reading):
    page = text_page("0", reading.as_dict())
    assert page.count("</script>") == 3  # its own
    assert "{{" not in page
    assert "default-src 'none'" in page
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert "".join(data["tokens"]) == TEXT
    for name in MEASURES:
        expected = torch.cat([getattr(head, name) for head in reading.heads]).float()
        torch.testing.assert_close(torch.tensor(numbers(data[name])), expected, rtol=0, atol=0, equal_nan=True)


def test_long_texts_are_cut_so_that_a_page_stays_small(model, tokenizer, monkeypatch, folder, tmp_path):
    monkeypatch.setattr(explore_text, "BYTES", 3200)
    short = read(model, tokenizer, TEXT * 9, "tiny")
    assert (len(short.tokens), short.left_out) == (20, 9 * len(TEXT) - 20)
    file = tmp_path / "text.txt"
    file.write_text(TEXT * 9)
    output = mbd("explore", "--model", folder, "--text", file, "--out", tmp_path / "page.html", "--no-open").output
    assert f"shows the first 20 of {9 * len(TEXT)} tokens" in output


def test_mistakes_are_explained(folder, tmp_path):
    def wrong(*words):
        return " ".join(mbd("explore", *words, "--no-open", "--out", tmp_path / "x.html", code=2).stderr.split())

    assert "--text: expected a text file, since" in wrong("--model", folder)
    assert "--text: expected a text file in UTF-8" in wrong("--model", folder, "--text", tmp_path / "none")
    (tmp_path / "bad").write_bytes(b"\xff")
    assert "--text: expected a text file in UTF-8" in wrong("--model", folder, "--text", tmp_path / "bad")
    (tmp_path / "empty").write_text("")
    assert "--text: expected a text with at least one token" in wrong("--model", folder, "--text", tmp_path / "empty")
    plain = tmp_path / "plain"
    MemoryForCausalLM(MemoryConfig(vocab_size=16, hidden_size=16, num_heads=2, layers=["attention"])).save_pretrained(
        plain
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (plain / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "good").write_text("a bad")
    assert "expected a model with memory layers" in wrong("--model", plain, "--text", tmp_path / "good")
    assert "MODEL: expected one of example:characters" in wrong("--model", "example:nonsense")


@pytest.mark.parametrize("name", ["recall", pytest.param("characters", marks=pytest.mark.slow)])
def test_the_examples_make_pages_below_a_megabyte(name, tmp_path):
    out = tmp_path / "page.html"
    mbd("explore", "--model", f"example:{name}", "--out", out, "--no-open")
    assert 10_000 < out.stat().st_size < 1_000_000
    assert f'"model":"example:{name}"' in out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def file(reading, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "text.html"
    path.write_text(text_page("0", reading.as_dict()), encoding="utf-8")
    return path


def assert_shows(row, *values):
    assert len(row) == len(values)
    for cell, value in zip(row, values, strict=True):
        if torch.as_tensor(value).isnan():
            assert cell == "there is none"
        else:
            assert float(cell) == pytest.approx(float(value), rel=1e-9, abs=1e-9)


def of(head, t):
    return [getattr(head, name)[t].float() for name in MEASURES]


def test_every_number_on_the_page_is_python_s(browser, file, reading):
    with opened(browser, file) as page:
        for t in (0, 7, len(reading.tokens) - 1):
            visit(page, f"t={t}")
            for row, head in zip(cells(page, "#numbers"), reading.heads, strict=True):
                assert_shows(row[:3], *of(head, t))
                means = [getattr(head, name).float().double().mean() for name in MEASURES]
                assert_shows(row[3:], *means)
        page.click("#more summary")
        for h in (0, 2, 7):
            visit(page, f"head={h}")
            for t, row in enumerate(cells(page, "#all")):
                assert_shows(row, reading.loss[t], *of(reading.heads[h], t))


def test_keys_pointer_and_address_move_the_same_place(browser, file, reading):
    last = len(reading.tokens) - 1
    with opened(browser, file) as page:
        page.focus("#map")
        for key, place in (
            ("ArrowRight", (1, 0)),
            ("ArrowDown", (1, 1)),
            ("PageDown", (11, 1)),
            ("End", (last, 1)),
            ("ArrowRight", (last, 1)),
            ("ArrowUp", (last, 0)),
            ("Home", (0, 0)),
        ):
            page.keyboard.press(key)
            settle(page)
            assert page.evaluate("[state.t, state.head]") == list(place)
        box = page.locator("#map").bounding_box()
        x, y = box["x"] + box["width"] * 20.5 / len(reading.tokens), box["y"] + box["height"] * 3.5 / 8
        page.mouse.move(x, y)
        assert "layer 2, head 2: variance" in page.locator("#tip").inner_text()
        page.mouse.click(x, y)
        until(page, "location.hash.includes('head=3') && location.hash.includes('t=20')")
        until(page, "document.getElementById('summary').textContent.includes('Token 21 of')")
        page.check("#show-gain")
        page.locator("#text span").nth(4).click()
        page.check("#own")
        until(page, "location.hash === '#measure=gain&head=3&t=4&own=1'")
        fragment = page.evaluate("location.hash.slice(1)")
        stops = []
        page.evaluate("document.activeElement.blur()")
        for _ in range(16):
            page.keyboard.press("Tab")
            stops.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert {"skip", "head", "t", "own", "map", "text"} <= set(stops)
    with opened(browser, file, fragment) as page:
        assert page.evaluate("[state.measure, state.head, state.t, state.own]") == ["gain", 3, 4, True]
        visit(page, "measure=<b>&head=99&t=-1")
        assert page.evaluate("[state.measure, state.head, state.t, state.own]") == ["variance", 7, 0, False]


def test_a_phone_shows_the_text_without_scrolling_sideways(browser, file):
    with opened(browser, file, viewport={"width": 320, "height": 740}, has_touch=True) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 320


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, file, scheme):
    with opened(browser, file, "head=1&t=9", color_scheme=scheme) as page:
        page.click("#more summary")
        settle(page)
        assert serious(page) == []
