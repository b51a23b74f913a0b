"""The explorer's page of designs in a real browser: what it shows, how it moves, what it requests, how fast it is."""

import re
from urllib.parse import urlencode

import pytest

from browser import cells, chromium, opened, serious, settle, until, visit
from explorer_reference import DESIGNS, PAPER, expected, random_requests
from membydesign.explore import page as write_page

EVERY = ",".join(DESIGNS)


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    path.write_text(write_page("0"), encoding="utf-8")
    return path


def assert_shows(page, settings, t, designs=DESIGNS):
    """Every number of the table is Python's, to 1e-9."""
    columns = [expected(name, settings, t) for name in designs]
    rows = cells(page, "#numbers")
    assert len(rows) == len(columns[0])
    for name, row in zip(columns[0], rows, strict=True):
        for cell, column in zip(row, columns, strict=True):
            if column[name] is None:
                assert cell == "this design has none"
            else:
                assert float(cell) == pytest.approx(column[name], rel=1e-9, abs=1e-9), (name, settings, t)


def test_every_number_on_the_page_is_that_of_filter_step(browser, file):
    with opened(browser, file) as page:
        for _, settings, t in random_requests(10):
            visit(page, urlencode({**settings, "designs": EVERY, "t": t}))
            assert_shows(page, settings, t)
        visit(page, f"designs={EVERY}&t=53")
        assert_shows(page, PAPER, 53)


def test_dragging_a_key_changes_the_overlap(browser, file):
    with opened(browser, file, f"designs={EVERY}&t=53") as page:
        handle = page.locator("#planes .handle").first
        handle.scroll_into_view_if_needed()
        plane = page.locator("#planes svg").first.bounding_box()
        box = handle.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.mouse.down()
        middle = plane["x"] + plane["width"] / 2, plane["y"] + plane["height"] / 2
        page.mouse.move(middle[0] + 30, middle[1] - 40, steps=5)
        page.mouse.up()
        settle(page)
        assert page.locator("#rho-value").inner_text() == "0.6"
        assert_shows(page, {**PAPER, "rho": 0.6}, 53)
        until(page, "location.hash.includes('rho=0.6')")
        page.mouse.move(middle[0] - 40, middle[1] - 30)  # the button is up
        settle(page)
        assert page.locator("#rho-value").inner_text() == "0.6"


def test_everything_works_with_the_keyboard(browser, file):
    with opened(browser, file, "designs=bayesian_layer,deltanet&t=53") as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "controls-heading"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "rho"
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        settle(page)
        assert_shows(page, {**PAPER, "rho": 0.9}, 53, ("bayesian_layer", "deltanet"))
        page.focus("#t")
        page.keyboard.press("ArrowRight")
        settle(page)
        assert_shows(page, {**PAPER, "rho": 0.9}, 54, ("bayesian_layer", "deltanet"))
        page.focus("#show-linear_attention")
        page.keyboard.press("Space")
        settle(page)
        assert_shows(page, {**PAPER, "rho": 0.9}, 54, ("bayesian_layer", "deltanet", "linear_attention"))
        page.focus("#writes")
        page.keyboard.type("C2 B10 A5")
        settle(page)
        shown = ("bayesian_layer", "deltanet", "linear_attention")
        assert_shows(page, {**PAPER, "rho": 0.9, "writes": "C2 B10 A5"}, 17, shown)
        page.focus("#reset")
        page.keyboard.press("Enter")
        settle(page)
        assert_shows(page, PAPER, 112, shown)
        assert page.locator("#summary").inner_text()
        stops = []
        page.evaluate("document.activeElement.blur()")
        for _ in range(60):
            page.keyboard.press("Tab")
            stops.append(page.evaluate("document.activeElement.id"))
        names = [*PAPER, "writes", "t", "play", "reset", "story-next", *(f"show-{name}" for name in DESIGNS)]
        assert set(names) <= set(stops)


def test_the_walk_tells_what_happens(browser, file):
    with opened(browser, file) as page:
        texts = []
        for _ in range(6):
            page.click("#story-next")
            settle(page)
            texts.append(page.locator("#story-text").inner_text())
        assert page.locator("#story-next").is_disabled()
        assert "4 of 6. The first write of A. The Bayesian Layer learns it with the gain 0.907" in texts[3]
        assert [text[:6] for text in texts] == [f"{i} of 6" for i in range(1, 7)]
        until(page, "document.getElementById('summary').textContent.includes('After 112 of 112 writes')")


def test_the_address_keeps_everything_that_was_set(browser, file):
    with opened(browser, file) as page:
        page.fill("#writes", "C2 B10 A5")
        page.check("#show-deltanet")
        page.locator("#p0").fill("20")
        page.locator("#t").fill("7")
        until(page, "location.hash.includes('t=7')")
        fragment, before = page.evaluate("location.hash"), cells(page, "#numbers")
    with opened(browser, file, fragment.removeprefix("#")) as page:
        assert cells(page, "#numbers") == before
        assert page.locator("#writes").input_value() == "C2 B10 A5"
        assert page.locator("#show-deltanet").is_checked()
    with opened(browser, file, "rho=7&l2=nonsense&t=1e9&designs=none&writes=<script>") as page:
        assert page.locator("#rho-value").inner_text() == "0.99"


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_shows_all_without_scrolling_sideways(browser, file, width):
    with opened(browser, file, f"designs={EVERY}", viewport={"width": width, "height": 740}, has_touch=True) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for box in (each.bounding_box() for each in page.locator("#planes figure, #charts figure, input").all()):
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width


def test_playing_moves_less_where_motion_is_unwelcome(browser, file):
    for motion, first in (("reduce", 10), ("no-preference", 1)):
        with opened(browser, file, "t=0", reduced_motion=motion) as page:
            page.clock.install()
            page.click("#play")
            page.clock.run_for(1550 if motion == "reduce" else 140)
            assert page.locator("#t").input_value() == str(first)
            page.clock.run_for(60_000)
            assert page.locator("#t").input_value() == "112"
            assert page.locator("#play").inner_text() == "Play the writes"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, file, scheme):
    with opened(browser, file, f"designs={EVERY}&story=3&t=53", color_scheme=scheme) as page:
        assert serious(page) == []


DRAG = """(frames) => new Promise((done) => {
  let i = 0;
  const next = () => {
    if (i++ === frames) { done(); return; }
    change({ settings: { rho: 0.3 + (0.6 * i) / frames } });
    requestAnimationFrame(next);
  };
  next();
})"""
FIRST = """new MutationObserver((_, watch) => {
  if (document.querySelector("#numbers td")) { window.numbersAt = performance.now(); watch.disconnect(); }
}).observe(document, { childList: true, subtree: true });"""


def time_of_a_frame(page, frames=60):
    """Milliseconds of processor time that the page's thread needs for a frame of a drag, scripts, layout and paint."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent():
        return {x["name"]: x["value"] for x in session.send("Performance.getMetrics")["metrics"]}["TaskDuration"]

    page.evaluate(DRAG, 20)
    start = spent()
    page.evaluate(DRAG, frames)
    return 1000 * (spent() - start) / frames


@pytest.mark.slow
def test_a_frame_of_dragging_takes_less_than_16_ms(browser, file):
    """Prints what docs/concepts/explorer.md states: pytest -s -m slow -k 16_ms."""
    firsts, paints = [], []
    for _ in range(5):
        context = browser.new_context()
        context.add_init_script(FIRST)
        page = context.new_page()
        page.goto(file.as_uri())
        until(page, "window.numbersAt && performance.getEntriesByName('first-contentful-paint').length")
        paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        firsts.append(page.evaluate("numbersAt"))
        context.close()
    print(f"\nfirst paint {min(paints):.0f} ms, numbers {min(firsts):.0f} ms (best of 5)")
    for designs in (DESIGNS[0], ",".join(DESIGNS[:4]), EVERY):
        with opened(browser, file, f"designs={designs}") as page:
            took = min(time_of_a_frame(page) for _ in range(3))
        print(f"a frame with {designs.count(',') + 1} designs, D = 16, 112 writes: {took:.1f} ms of processor time")
        assert took <= 16


def test_the_foot_names_the_kernel(browser, file):
    with opened(browser, file) as page:
        assert re.search("SHA-256 [0-9a-f]{64}", page.locator("footer").inner_text())
