"""The site as its readers have it: in a browser, from a folder of files, with no network."""

from __future__ import annotations

import http.server
import json
import os
import random
import re
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import settings
from markdown import markdown
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output
from playwright.sync_api import Browser, Page

from docs import build, cards, npm, opening, python_in_page, wheels
from minipaged.events import (
    BlocksFreed,
    EngineStarted,
    Event,
    RequestArrived,
    SequenceForked,
    TokensComputed,
    from_json,
)
from minipaged.stepper.page import NO_CODE, sentences_of
from minipaged.stepper.pictures import Bars
from tests.browser import COLOURS, ROOT, Watched, axe_script, axe_violations, missing, watching
from tests.effort import drawn
from tests.javascript import check_folds_agree


class Screen(NamedTuple):
    name: str
    width: int
    height: int
    scheme: Literal["light", "dark"]


DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Done when the page has been drawn as it is now."""

DESKTOP, PHONE = Screen("desktop", 1280, 900, "light"), Screen("phone", 390, 844, "dark")


def pages(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def with_stepper(site: Path) -> list[Path]:
    return [page for page in pages(site) if "<paged-stepper" in page.read_text()]


# --- The recorded runs ----------------------------------------------------------------------------

RUN = re.compile(r'<paged-stepper[^>]*><script type="application/json">(.*?)</script>', re.DOTALL)


def test_every_run_of_the_site_is_followed_by_the_stepper_as_by_the_project(site: Path) -> None:
    runs: list[list[Event]] = []
    for page in with_stepper(site):
        for text in RUN.findall(page.read_text()):
            data = json.loads(text)
            runs.append([from_json(json.dumps(event)) for event in data["events"]])
            words = data["words"] and {int(token): word for token, word in data["words"].items()}
            told = data["sentences"]
            if data.get("beliefs"):  # a faulty allocator does not count as free what should be
                told = [said.replace(", which should be free again", ", free again") for said in told]
            assert told == sentences_of(runs[-1], words), page
    assert len(runs) == sum(page.read_text().count("<paged-stepper") for page in with_stepper(site)) > 20
    assert sum(any(map(takes_blocks, run)) for run in runs) > 20
    assert {page.stem for page in with_stepper(site)} >= {"index", "02_blocks_on_demand", "04_token_by_token"}
    check_folds_agree(runs)


def takes_blocks(event: Event) -> bool:
    return bool(getattr(event, "new_blocks", ()) or getattr(event, "blocks", ()))


def test_attention_is_walked_through_where_it_is_explained(site: Path) -> None:
    tutorials = ["03_online_softmax", "10_decode_kernel", "11_prefill_kernel"]
    assert [page.stem for page in pages(site) if "<paged-attention" in page.read_text()] == [
        "paged_attention",
        *tutorials,
    ]


# --- In a browser ---------------------------------------------------------------------------------


def test_n_is_for_the_stepper_that_is_pointed_at_and_not_for_the_next_page(site: Path, browser: Browser) -> None:
    watched = Watched(browser)
    page = watched.page
    page.goto((site / "tutorials" / "06_copy_on_write.html").as_uri())
    stepper = page.locator("paged-stepper").first
    stepper.locator(".bar").hover()
    before = stepper.evaluate("s => s.n")
    page.evaluate("navigation.addEventListener('navigate', () => { globalThis.leaves = true; })")
    page.keyboard.press("n")
    page.evaluate(DRAWN)
    assert page.evaluate("globalThis.leaves === undefined")
    assert page.url.endswith("06_copy_on_write.html")
    now = stepper.evaluate("s => s.n")
    assert now > before
    page.evaluate("""() => {
      const editor = document.body.appendChild(document.createElement("div"));
      editor.attachShadow({mode: "open"}).append(document.createElement("textarea"));
      editor.shadowRoot.firstChild.focus({preventScroll: true});
    }""")
    page.keyboard.press("n")
    written = "() => document.body.lastElementChild.shadowRoot.firstChild.value"
    assert (page.evaluate(written), stepper.evaluate("s => s.n")) == ("n", now), "who writes is left alone"
    page.evaluate("() => document.body.lastElementChild.remove()")
    page.mouse.move(5, 5)
    page.keyboard.press("n")
    page.wait_for_url("**/07_beam_search.html")
    watched.page.close()


def search(page: Any, words: str) -> list[str]:
    """Where the first results lead, the best first."""
    box, results = page.get_by_role("textbox", name="Search"), page.locator(".md-search-result__item")
    box.fill("")
    results.first.wait_for(state="detached", timeout=60_000)  # those of other words
    box.fill(words)  # at once: of half a word, such as "copy-", the search engine complains
    box.press("End")
    results.first.wait_for(state="attached", timeout=60_000)
    links: list[str] = page.locator(".md-search-result__link").evaluate_all("links => links.map(l => l.href)")
    return links


def test_search_for_copy_on_write_leads_to_its_tutorial_first_from_a_file(site: Path, browser: Browser) -> None:
    watched = Watched(browser, viewport={"width": 1280, "height": 900})
    watched.page.goto((site / "index.html").as_uri())
    for words in ("copy-on-write", "copy on write"):  # one page: it takes ten seconds to make its index
        assert "06_copy_on_write.html" in search(watched.page, words)[0], words
    watched.check()
    watched.page.close()


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_search_for_copy_on_write_leads_to_its_tutorial_first_from_a_server(served: str, browser: Browser) -> None:
    watched = Watched(browser, viewport={"width": 1280, "height": 900})
    watched.page.goto(f"{served}/index.html")
    assert "06_copy_on_write.html" in search(watched.page, "copy-on-write")[0]
    watched.check()
    watched.page.close()


def test_code_can_be_changed_and_run_from_a_server(served: str, browser: Browser) -> None:
    watched = Watched(browser, viewport={"width": 1280, "height": 900})
    page = watched.page
    page.goto(f"{served}/tutorials/02_blocks_on_demand.html")
    if page.locator("paged-editor").count() == 0:
        missing("the site was built without Pyodide: there is no npm here")
    place = page.locator(".editable").nth(1)
    assert not any("python.js" in url for url in watched.asked)
    place.get_by_role("button", name="Edit and run this code").click()
    place.get_by_text("Python is here").wait_for(timeout=90_000)
    area = place.get_by_role("textbox", name="The code")
    area.fill(area.input_value().replace("==", ">=").replace("self.block_size:", "self.block_size - 1:"))
    page.keyboard.type("  # f s n p / .")  # keys by which the theme is used elsewhere on the page
    assert area.input_value().endswith("# f s n p / .")
    place.get_by_role("button", name="Run").click()
    place.get_by_text("Your version ran").wait_for(timeout=60_000)
    events = place.locator("paged-stepper").evaluate("stepper => stepper.events")
    assert [event["new_blocks"] for event in events if "new_blocks" in event][:2] == [[0, 1], [2]]
    watched.check()
    page.close()


def test_a_page_says_what_it_has_so_that_no_style_looks_through_all_of_it(site: Path) -> None:
    """`.md-grid:has(.twins)` took most of the minute in which a long page of the API was drawn."""
    asked = re.findall(r"([^\s,{}]*):has\(([^)]*)\)", (site / "assets" / "site.css").read_text())
    assert all(within.startswith("+") or subject == ".field" for subject, within in asked), asked
    for name, has in (
        ("index", ["opening"]),
        ("concepts/kv_cache", ["twins"]),
        ("contributing", []),
        ("api/paper", []),
    ):
        body = re.findall(r"<body[^>]*>", (site / f"{name}.html").read_text())
        assert re.findall(r"has-(\w+)", *body) == has, name


# --- Every page, visited once ---------------------------------------------------------------------

PARTS = 4
"""The number of tests that share out the pages."""
MADE_ALIKE = {"api": 5, "paper": 2}
"""Pages in these folders are made by programs, all alike. Axe looks at one of every n (the number here), and at all in
`make test-nightly`. Axe always looks at what a person wrote."""
LONG = "api"
"""Pages of this folder at which axe does not look are not loaded, either: they are up to fifty times as long as others,
and axe or not, drawing them costs as much as all else together."""
STEPPED = 4
"""One of every n steppers is tried out, and all in `make test-nightly`. The others are loaded."""

ONCE = """() => {
    const seen = new Set();
    for (const part of document.querySelectorAll('.highlight code :is(span, a)')) {
        if (seen.has(part.className)) part.replaceWith(...part.childNodes);
        else seen.add(part.className);
    }
    document.body.normalize();
}"""
"""Of each kind of word in code one is left in its colour: axe would look at fifty thousand more, all alike."""
OPEN_FOLDS = "document.querySelectorAll('details').forEach((folded) => { folded.open = true; })"
IN_VIEW = """(part) => { const box = part.getBoundingClientRect();
    return box.top >= 0 && box.left >= 0 && box.bottom <= innerHeight && box.right <= innerWidth; }"""
SMALLEST = """(opening) => Math.min(...[...opening.querySelectorAll('text, p, b, span, figcaption, button')]
    .filter((part) => !part.hidden).map((part) => parseFloat(getComputedStyle(part).fontSize)
        * (part.ownerSVGElement ? part.getScreenCTM().a : 1)))"""
"""The size of the smallest letters, in pixels."""


@pytest.mark.parametrize("part", range(PARTS))
def test_pages_fit_the_screen_ask_for_nothing_axe_finds_no_violation_and_what_is_in_them_works(
    site: Path, browser: Browser, pytestconfig: pytest.Config, part: int
) -> None:
    """Each page is loaded on one screen and seen on both, and all that is to hold of it is looked at in that one visit.

    Axe looks at it on the screen on which it is loaded: the desktop for half of the pages, the phone for the others, by
    the run's seed. In `make test-nightly` it looks at each on both.

    With MINIPAGED_SCREENSHOTS=1 the test leaves a picture of each in build/screenshots, to be looked at.
    """
    seed = str(pytestconfig.getoption("--hypothesis-seed"))
    axe, wrong, on_both = axe_script(), [], settings.get_current_profile_name() == "nightly"
    passed_over, tried = without_axe(site, seed), steppers_to_try(site, seed)
    screens = random.Random(seed).sample((DESKTOP, PHONE), 2)
    with watching(browser, reduced_motion="reduce") as watched:
        page = watched.page
        page.add_init_script("localStorage.clear()")  # at each load: which scheme was chosen on the page before
        visited = [path for path in pages(site) if path not in passed_over or path.parent.name != LONG]
        for path in visited[part::PARTS]:
            name = path.relative_to(site).with_suffix("").as_posix()
            for screen in screens:
                page.set_viewport_size({"width": screen.width, "height": screen.height})
                page.emulate_media(color_scheme=screen.scheme)
                if screen is screens[0]:
                    page.goto(path.as_uri())
                    check_no_stepper_begins_with_an_empty_pool(page, name)
                    page.evaluate("document.querySelector('paged-stepper')?.go(12)")
                else:
                    page.get_by_title(f"Switch to {screen.scheme} mode").click()
                check_it_fits(page, name, screen)
                if not name.startswith("api/") and os.environ.get("MINIPAGED_SCREENSHOTS"):
                    picture = f"{name.replace('/', '-')}-{screen.name}-{screen.scheme}.png"
                    page.screenshot(path=ROOT / "build" / "screenshots" / picture, full_page=True)
                if path in passed_over or (screen is screens[1] and not on_both):
                    continue
                if screen is screens[0]:
                    page.evaluate(ONCE)
                    page.add_script_tag(content=axe)
                rules = COLOURS if name.startswith("api/") and screen is screens[1] else {}
                wrong += [
                    (name, screen.name, violation["id"], node["target"], node["html"][:160])
                    for violation in axe_violations(page, preload=False, **rules)
                    for node in violation["nodes"]
                ]
            if name.startswith("tutorials/"):
                on_a_desktop(page)
                check_no_line_of_a_tutorial_is_cut_and_its_pictures_can_be_read(page, name)
            if page.locator("paged-attention").count():
                on_a_desktop(page)
                check_a_query_walks_its_block_table(page)
            for i in range(page.locator("paged-stepper").count()):
                if (path, i) in tried:
                    on_a_desktop(page)
                    check_it_steps_by_button_key_slider_and_link(page, i, name)
            screens.reverse()  # the next page is loaded as this one was seen last: to draw this one again is in vain
    assert not wrong, "\n".join(map(str, wrong))


def on_a_desktop(page: Page) -> None:
    page.set_viewport_size({"width": DESKTOP.width, "height": DESKTOP.height})


def without_axe(site: Path, seed: str) -> set[Path]:
    """Most of the pages that are made alike."""
    left_out: set[Path] = set()
    for folder, number in MADE_ALIKE.items():
        made = sorted(page for page in (site / folder).glob("*.html") if page.stem not in ("index", "what"))
        left_out |= {*made} - {*one_in(number, made, seed)}
    return left_out


def steppers_to_try(site: Path, seed: str) -> list[tuple[Path, int]]:
    """Some of the steppers, by page and place on it."""
    placed = [(page, i) for page in with_stepper(site) for i in range(page.read_text().count("<paged-stepper"))]
    return one_in(STEPPED, placed, seed)


def one_in(number: int, all_of_them: list[Any], seed: str) -> list[Any]:
    """One of every n of them, drawn by the run's seed; all in `make test-nightly`."""
    if settings.get_current_profile_name() == "nightly":
        return all_of_them
    return drawn(number, all_of_them, seed)


def check_no_stepper_begins_with_an_empty_pool(page: Page, name: str) -> None:
    held = """all => all.map((s) => [s.state.querySelectorAll('[data-refs]:not([data-refs="0"])').length,
      s.events.some((event) => event.new_blocks?.length || event.blocks?.length)])"""
    assert all(now or not ever for now, ever in page.locator("paged-stepper").evaluate_all(held)), name


def check_it_fits(page: Page, name: str, screen: Screen) -> None:
    """In the colours that the reader prefers; and what is wide on a page has the room that it needs."""
    assert page.evaluate("document.body.dataset.mdColorScheme") == {"light": "default", "dark": "slate"}[screen.scheme]
    assert page.evaluate("document.documentElement.scrollWidth") <= screen.width, f"{name} is wider than the screen"
    if name == "index":
        check_the_opening_can_be_read(page, screen)
    if name in ("course", "glossary", "museum/index", "assignments/1_block_allocator/handout"):
        check_no_line_is_cut_and_no_table_of_few_columns_needs_scrolling(page, name)
    if screen is DESKTOP and (name == "museum/index" or name.endswith("/handout")):  # a run has its code beside it
        room = page.locator("article").evaluate("part => part.clientWidth")
        assert room > 780, name  # the stepper's 700, and a frame


def check_the_opening_can_be_read(page: Page, screen: Screen) -> None:
    """And on a phone both pools, and what they come to, are in view."""
    assert page.locator(".opening").evaluate(SMALLEST) >= 11
    results = page.locator(".opening .result")
    assert results.count() == 2
    if screen is PHONE:
        page.evaluate("scrollTo(0, 0)")
        assert all(result.evaluate(IN_VIEW) for result in results.all())


def check_no_line_is_cut_and_no_table_of_few_columns_needs_scrolling(page: Page, name: str) -> None:
    wide = "parts => parts.filter((part) => part.scrollWidth > part.clientWidth + 1).length"
    page.evaluate(DRAWN)
    if name == "course":
        console = page.locator(".language-console code")
        assert console.count() >= 3
        assert console.evaluate_all(wide) == 0
        return
    tables = page.locator(".md-typeset__scrollwrap")
    tables.first.wait_for()
    assert tables.evaluate_all(wide) == 0
    names = tables.locator("td > code").filter(visible=True)
    assert set(names.evaluate_all("all => all.slice(0, 20).map((name) => name.getClientRects().length)")) <= {1}


def check_no_line_of_a_tutorial_is_cut_and_its_pictures_can_be_read(page: Page, name: str) -> None:
    page.evaluate(OPEN_FOLDS)
    code = page.locator(".language-python code")
    assert code.evaluate_all("all => all.filter((code) => code.scrollWidth > code.clientWidth + 1).length") == 0, name
    sizes = page.locator(".picture svg text").evaluate_all(
        "all => all.map((text) => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a)"
    )
    assert all(11 <= size < 17 for size in sizes), name  # the text around them has 16


def check_a_query_walks_its_block_table(page: Page) -> None:
    """To its end, by key; shuffled blocks give the same answer there."""
    walk = page.locator("paged-attention")
    walk.get_by_role("slider", name="Step").press("End")
    last = walk.evaluate("walk => walk.last")
    assert walk.locator(".n").text_content() == f"{last} / {last}"
    answers = [walk.evaluate("walk => walk.now.answer")]
    walk.get_by_role("button", name="Shuffle the blocks").click()
    answers += walk.evaluate("walk => [walk.now.answer, walk.known.whole.answer]")
    assert answers == [pytest.approx(answers[0], abs=1e-6)] * 3


def check_it_steps_by_button_key_slider_and_link(page: Page, i: int, name: str) -> None:
    """The page's i-th stepper does, and the link moves no other."""
    page.evaluate(OPEN_FOLDS)
    page.evaluate("document.querySelectorAll('paged-stepper').forEach((stepper) => { stepper.go(1); })")
    stepper = page.locator("paged-stepper").nth(i)
    last = stepper.evaluate("s => s.events.length")
    # The last that has lines, but for the very last: a step that failed tells only that something raised.
    late = stepper.evaluate("s => s.data.current.findLastIndex((lit, i) => lit && i < s.events.length - 1) + 1")
    count = stepper.locator(".n")
    stepper.get_by_role("button", name="Next step").click()
    assert count.text_content() == f"2 / {last}", name
    page.keyboard.press("ArrowRight")
    assert count.text_content() == f"3 / {last}"
    stepper.get_by_role("button", name="Previous step").click()
    assert count.text_content() == f"2 / {last}"
    stepper.get_by_role("slider").fill(str(late))
    assert count.text_content() == f"{late} / {last}"
    assert stepper.locator(".ran").count() > 0
    assert stepper.locator(".now").count() == 1
    stepper.get_by_role("link", name="Link to step").click()
    again = page.locator("paged-stepper").nth(i)
    assert again.locator(".n").text_content() == f"{late} / {last}"
    begun = "all => all.map((s) => s.n === 1 || s.n === Number(s.getAttribute('start')))"  # or as they were
    others = page.locator("paged-stepper").evaluate_all(begun)
    del others[i]
    assert all(others), name


# --- The home page --------------------------------------------------------------------------------

SCREENS = pytest.mark.parametrize("screen", [DESKTOP, PHONE], ids=lambda screen: screen.name)
FILLED = """(pool) => [...pool.querySelectorAll('g path:not(.reserved, .hatch)')].filter((square) => {
    for (let part = square; part !== pool; part = part.parentElement) {
        if (getComputedStyle(part).opacity < 1) return false;
    }
    return square.getBoundingClientRect().height > 3 && getComputedStyle(square).fill !== 'none';
}).map((square) => getComputedStyle(square).fill)"""
"""The colours of the squares that are to be seen."""
COUNTED = """(counts) => counts.map((count) => getComputedStyle(count).getPropertyValue('--so-far')
    + getComputedStyle(count).getPropertyValue('--unit').replaceAll("'", '').replaceAll('"', ''))"""
"""The numbers as they are drawn by now."""
SLOWLY = """addEventListener('DOMContentLoaded', () => {
    const style = Object.assign(document.createElement('style'), {textContent: '.opening { --step: 9s !important; }'});
    document.head.append(style);
})"""
"""So that it does not end before it is looked at."""


def home(site: Path, browser: Browser, screen: Screen, **settings: Any) -> Watched:
    size = {"width": screen.width, "height": screen.height}
    watched = Watched(browser, viewport=size, color_scheme=screen.scheme, **settings)
    watched.page.add_init_script(SLOWLY)
    watched.page.goto((site / "index.html").as_uri())
    return watched


@SCREENS
def test_the_home_page_has_a_filled_pool_and_a_button_in_view_at_once_and_ends_as_its_still(
    site: Path, browser: Browser, screen: Screen
) -> None:
    watched = home(site, browser, screen)
    pools, button = watched.page.locator(".opening svg"), watched.page.locator(".opening button")
    assert button.text_content() == "Pause"
    button.evaluate("button => button.click()")
    assert button.text_content() == "Play"
    watched.page.evaluate("document.getAnimations().forEach((part) => { part.currentTime = 0; })")  # at its beginning
    assert watched.page.locator(".md-content .md-button").first.evaluate(IN_VIEW)
    assert pools.first.evaluate(IN_VIEW)
    first = [pools.nth(i).evaluate(FILLED) for i in (0, 1)]
    assert all(first)
    counts = watched.page.locator(".opening .count")
    assert counts.evaluate_all(COUNTED) == ["1", "2%", "1", "2%"]  # the first request's prompt
    watched.page.evaluate("document.getAnimations().forEach((part) => part.finish())")
    watched.page.wait_for_function("document.querySelector('.opening button').textContent === 'Play again'")
    last = [pools.nth(i).evaluate(FILLED) for i in (0, 1)]
    assert len(last[0]) < len(last[1]) / 5
    assert len(set(last[1])) == 12  # hues
    assert counts.evaluate_all(COUNTED) == counts.all_text_contents()
    button.click()
    assert button.text_content() == "Pause"
    watched.check()
    watched.page.close()
    for without in ({"reduced_motion": "reduce"}, {"java_script_enabled": False}):
        still = home(site, browser, screen, **without)
        pools = still.page.locator(".opening svg")
        assert [pools.nth(i).evaluate(FILLED) for i in (0, 1)] == last
        assert not still.page.locator(".opening button").is_visible()
        assert pools.first.evaluate("() => document.getAnimations().length") == 0
        still.page.close()


def test_the_opening_paused_half_way_goes_on_where_it_was(site: Path, browser: Browser) -> None:
    watched = home(site, browser, DESKTOP)
    button = watched.page.locator(".opening button")
    half = """document.getAnimations().filter((part) => part instanceof CSSAnimation)
        .forEach((part) => { part.currentTime = 200_000; })"""
    watched.page.evaluate(half)
    pool = watched.page.locator(".opening svg").nth(1)
    before = pool.evaluate(FILLED)
    for word in ("Play", "Pause"):
        button.click()
        assert button.text_content() == word
    after = pool.evaluate(FILLED)
    assert 0 < len(before) == len(after)
    watched.page.evaluate("document.getAnimations().forEach((part) => part.finish())")
    assert len(pool.evaluate(FILLED)) > len(after)
    watched.check()
    watched.page.close()


def test_the_stepper_of_the_home_page_begins_where_a_block_is_copied_and_a_link_begins_elsewhere(
    site: Path, browser: Browser
) -> None:
    watched = home(site, browser, DESKTOP, reduced_motion="reduce")
    stepper = watched.page.locator("paged-stepper")
    assert stepper.evaluate("stepper => stepper.events[stepper.n - 1].event") == "block_copied"
    assert stepper.locator("[data-block]:not([data-refs='0'])").count() >= 5
    watched.page.goto(f"{(site / 'index.html').as_uri()}?step=2")
    assert stepper.evaluate("stepper => stepper.n") == 2
    watched.check()
    watched.page.close()


def test_every_tutorial_has_a_card_with_a_picture_and_minutes(site: Path) -> None:
    cards_shown = re.findall(
        r'<li><a href="tutorials/(\w+)\.html">(<svg.*?</svg>)<b>.*?</b><span>(\d+) min', home_of(site)
    )
    assert {stem for stem, _, _ in cards_shown} == {path.stem for path in (ROOT / "tutorials").glob("*.py")}
    assert all("<path" in drawn or "<rect" in drawn for _, drawn, _ in cards_shown)
    assert all(5 <= int(taken) <= 60 for _, _, taken in cards_shown)


def home_of(site: Path) -> str:
    return (site / "index.html").read_text()


def test_the_opening_gives_both_engines_the_same_requests_until_each_lets_one_wait() -> None:
    paged = opening.serve(contiguous=False)
    contiguous = opening.serve(paged.steps, contiguous=True)
    assert contiguous.arrived == paged.arrived
    assert paged.waiting == [len(paged.arrived) - 1]
    for request, table in contiguous.tables.items():
        blocks = [block for block, _ in table]
        assert len(blocks) * opening.BLOCK_SIZE == opening.LONGEST
        assert blocks == list(range(blocks[0], blocks[0] + len(blocks)))
        assert contiguous.lengths[request] == paged.lengths[request]
    assert len(contiguous.tables) * opening.LONGEST == opening.NUM_BLOCKS * opening.BLOCK_SIZE  # no room for one more
    held = [block for table in paged.tables.values() for block, _ in table]
    assert opening.NUM_BLOCKS - len(held) < len(paged.tables)  # fewer than a block for each that runs
    assert len(held) == len(set(held)) == sum(-(-n[-1][1] // opening.BLOCK_SIZE) for n in paged.lengths.values())
    assert opening.opening().count("<text") == len(held) + sum(
        -(-lengths[-1][1] // opening.BLOCK_SIZE) for lengths in contiguous.lengths.values()
    )


def test_the_picture_of_a_card_is_the_pool_at_its_fullest_with_a_stripe_for_each_holder() -> None:
    events = [
        EngineStarted(num_blocks=4, num_swap_blocks=0, block_size=2, max_model_len=8),
        RequestArrived("a", 0, (1, 2, 3), 2),
        TokensComputed(0, 3, (2, 0), 0),
        SequenceForked("a", 0, 1),
        BlocksFreed(0, (2, 0)),
    ]
    drawn = cards.pool([json.loads(event.to_json()) for event in events])
    assert drawn.count('class="free"') == 4
    assert cards.picture(f"{as_element(events[:3])}{as_element(events)}") == drawn  # of all its runs
    assert len(re.findall(r"--hue:#0087ff.*?d=\"M(1|41) ", drawn)) == 2
    assert len(re.findall(r"--hue:#d75f00.*?d=\"M(10|50) ", drawn)) == 2


def as_element(events: list[Any]) -> str:
    data = json.dumps({"events": [json.loads(event.to_json()) for event in events]})
    return f'<paged-stepper id="x"><script type="application/json">{data}</script></paged-stepper>'


def test_a_card_shows_the_picture_of_most_parts_whole_and_without_words() -> None:
    fills = {"held": "full", "saved": "lines"}
    few, many = (Bars([(f"row {i}", [("held", 3), ("saved", 1)]) for i in range(n)], fills) for n in (1, 3))
    drawn = [f'<div class="picture">{picture._repr_html_()}</div>' for picture in (many, few)]
    card = cards.picture("".join(drawn))
    assert card == cards.picture("".join(reversed(drawn)))
    assert "<text" not in card
    assert 'height="16"' not in card  # what stands for each fill
    left, top, width, height = map(float, re.findall(r'viewBox="(.*?)"', card)[0].split())
    boxes = [list(map(float, box)) for box in cards.RECT.findall(card)]
    assert len(boxes) == 3 * 3  # two parts, and a pattern
    assert all(left < x and x + w < left + width and top < y and y + h < top + height for x, w, y, h in boxes)
    axis = float(cards.AXIS.findall(card)[0][1])
    assert max(y + h for *_, y, h in boxes) < axis == top + height - 2, "it ends with the axis"


def test_minutes_are_of_words_and_of_lines_of_code() -> None:
    cells = [{"cell_type": "markdown", "source": "word " * 400}, {"cell_type": "code", "source": "x = 1\n\n" * 45}]
    assert cards.minutes(cells) == 400 / cards.WORDS_A_MINUTE + 45 / cards.LINES_A_MINUTE


# --- Room -----------------------------------------------------------------------------------------


def test_a_wide_page_has_its_headings_folded_and_its_words_as_they_are() -> None:
    page = build.wide("# A part\n\nWhat it is.\n\n## What to write\n\nAll of it.\n")
    head, _, rest = page.partition("# A part\n")
    assert head == f"{build.WIDE}\n\n"
    assert "- [What to write](#what-to-write)" in rest
    assert rest.endswith("</details>\n\nWhat it is.\n\n## What to write\n\nAll of it.\n")


# --- On a phone -----------------------------------------------------------------------------------


def test_where_a_phone_is_turned_tables_are_as_if_the_page_were_loaded_then(site: Path, browser: Browser) -> None:
    watched = Watched(browser)
    page, stacked = watched.page, "frames => frames.map((frame) => frame.classList.contains('stacks'))"
    for name in ("glossary", "assignments/1_block_allocator/handout"):
        page.goto((site / f"{name}.html").as_uri())
        frames = page.locator(".md-typeset__scrollwrap")
        seen = []
        for width in (390, 660, 390):
            page.set_viewport_size({"width": width, "height": 844})
            page.evaluate(DRAWN)
            turned = frames.evaluate_all(stacked)
            page.reload()
            seen.append(frames.evaluate_all(stacked))
            assert turned == seen[-1], (name, width)
            cells = page.locator(".stacks td").first
            assert not any(seen[-1]) or cells.evaluate("cell => getComputedStyle(cell).display") == "block"
        assert any(seen[0])
        assert seen[0] != seen[1] or name == "glossary"
    watched.page.close()


def test_the_contents_of_a_tutorial_lead_to_all_its_headings(site: Path) -> None:
    for path in (site / "tutorials").glob("*.html"):
        text = path.read_text()
        contents = text.split('<details class="contents">')[1].split("</details>")[0]
        assert re.findall(r'href="#([^"]+)"', contents) == re.findall(r'<h2 id="([^"]+)"', text), path.name


# --- As files -------------------------------------------------------------------------------------


class Links(HTMLParser):
    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.targets.append(value)
            if name in ("id", "name") and value:
                self.anchors.add(value)


def test_every_link_resolves(site: Path) -> None:
    parsed = {page: Links(page) for page in pages(site)}
    wrong = []
    for page, links in parsed.items():
        for target in links.targets:
            url = urlsplit(target)
            if url.scheme in ("http", "https", "data"):
                continue
            there = (page.parent / unquote(url.path)).resolve() if url.path else page
            anchors = parsed[there].anchors if url.fragment and there in parsed else {unquote(url.fragment)}
            if not there.is_file() or unquote(url.fragment) not in anchors:
                wrong.append((page.relative_to(site), target))
    assert not wrong


def test_nothing_but_links_leads_out(site: Path) -> None:
    """No script, style, picture or font comes from elsewhere."""
    for page in pages(site):
        text = page.read_text()
        for start in ('src="http', "src=http", "url(http", "@import"):
            assert start not in text, f"{start} in {page.name}"
        assert "preconnect" not in text


def test_every_tutorial_has_its_page_and_its_notebook(site: Path) -> None:
    tutorials = {path.stem for path in (ROOT / "tutorials").glob("*.py")}
    assert tutorials
    for kind in ("html", "ipynb"):
        assert {path.stem for path in (site / "tutorials").glob(f"*.{kind}")} == tutorials


# --- The build ------------------------------------------------------------------------------------


def tutorial(folder: Path, code: str) -> Path:
    script = folder / "01_made_up.py"
    script.write_text(f"# %% [markdown]\n# # Made up\n\n# %%\n{code}\n")
    return script


def test_a_failed_assert_ends_the_build(tmp_path: Path) -> None:
    with pytest.raises(CellExecutionError, match="AssertionError"):
        build.run_tutorial(tutorial(tmp_path, "assert 1 + 1 == 3"))


def test_the_page_of_a_tutorial_shows_what_its_cells_put_out_but_no_warnings(tmp_path: Path) -> None:
    code = 'print("six times", flush=True)\nprint(7)\n6 * 7\n\n# %% tags=["solution"]\nprint("a secret")'
    code += '\n\n# %%\nimport sys\n\nprint("be" + "ware", file=sys.stderr)'
    notebook, page = build.run_tutorial(tutorial(tmp_path, code))
    assert "```text\nsix times\n7\n```" in page
    assert "```text\n42\n```" in page
    folded = page.index("<details")
    assert folded < page.index("a secret") < page.index("</details>")
    assert "beware" not in page
    assert '"outputs": []' in notebook


def editable(*outputs: Any) -> list[Any]:
    tagged = new_code_cell("run", metadata={"tags": ["editable"]}, outputs=list(outputs))
    return [new_markdown_cell("# Made up"), tagged]


def test_an_editable_cell_has_an_editor_or_a_note_why_there_is_none() -> None:
    data = {build.RECORDING: {"title": "A run", "events": [], **NO_CODE}}
    cells = editable(new_output("execute_result", data))
    page, without = (build.as_markdown(cells, Path("01_made_up.py"), can_edit) for can_edit in (True, False))
    assert '<paged-editor name="01_made_up: A run"><script type="application/json">{"code":"run",' in page
    held = json.loads(re.findall(r"json\">(.*?)</script>", markdown(build.editor("a > b & c < d", "x")))[0])
    assert held == {"code": "a > b & c < d", "needed": "", "sliders": []}
    assert "paged-editor" not in without
    assert "This copy was built without" in without
    with pytest.raises(ValueError, match="something else than a recording"):
        build.as_markdown(editable(new_output("stream", text="42")), Path("01_made_up.py"), True)


def test_without_npm_the_site_is_built_unless_it_must_be_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(npm, "FOLDER", tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("MINIPAGED_NEEDS_BROWSER", raising=False)
    assert not build.brings("nothing", python_in_page.write, tmp_path)
    assert "there is no npm here" in capsys.readouterr().err
    monkeypatch.setenv("MINIPAGED_NEEDS_BROWSER", "1")
    with pytest.raises(npm.NotFetched, match="apt-get install npm"):
        build.brings("nothing", python_in_page.write, tmp_path)


@pytest.mark.parametrize(
    "said", ["", "/bin/python: No module named pip", "ERROR: first\\nERROR: No module named pip\\nnote"]
)
def test_why_pip_fetched_nothing_is_told(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "FOLDER", tmp_path / "wheels")
    (tmp_path / "python").write_text(f"#!/bin/sh\nprintf '{said}' >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(npm.NotFetched, match="No module named pip$" if said else "it said nothing$"):
        wheels.fetch("made-up==1", "0")


def test_why_npm_fetched_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npm, "FOLDER", tmp_path / "packages")
    (tmp_path / "npm").write_text("#!/bin/sh\necho npm error code ENOTFOUND >&2\nexit 1\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(npm.NotFetched, match="could not fetch pyodide@1: npm error code ENOTFOUND"):
        npm.fetch("pyodide@1", "AAAA")


def test_a_package_that_is_not_what_it_was_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npm, "FOLDER", tmp_path)
    (tmp_path / "pyodide-1.tgz").write_bytes(b"something else")
    with pytest.raises(ValueError, match="not what it was"):
        npm.fetch("pyodide@1", "AAAA")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[x](events.md#a)", "[x](events.md#a)"),
        ("[x](https://example.org/a)", "[x](https://example.org/a)"),
        ("[x](../tutorials/01_contiguous_memory.py)", "[x](tutorials/01_contiguous_memory.md)"),
        ("[x](../assignments/1_block_allocator/handout.md)", "[x](assignments/1_block_allocator/handout.md)"),
        ("[x](../minipaged/reference/block_table.py)", "[x][minipaged.reference.block_table]"),
        ("[`minipaged.llm`](../minipaged/llm.py)", "[`minipaged.llm`][minipaged.llm]"),
        ("[`minipaged/llm.py`](../minipaged/llm.py)", "[`minipaged/llm.py`][minipaged.llm]"),
        (
            "[`BlockTable.append`](../minipaged/reference/block_table.py)",
            "[`BlockTable.append`][minipaged.reference.block_table.BlockTable.append]",
        ),
    ],
)
def test_links_to_files_become_links_into_the_site(text: str, expected: str) -> None:
    source = ROOT / "docs" / "index.md"
    assert build.with_links_into_the_site(text, source, Path("index.md")) == expected
