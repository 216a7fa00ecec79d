"""A query walks its block table: what is recorded of `attend` is attention, and the page shows no other numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser

from minipaged.errors import InvalidRequest
from minipaged.reference.attention import attend
from minipaged.reference.kv_cache import Array, KVCache
from minipaged.stepper.attention import KIND, LENGTHS, SCRIPT, Walk, watch_attention
from tests.browser import COLOURS, SCREENS, Watched, axe_script, axe_violations, in_both, stop_time, watching

rng = np.random.default_rng(4)
QUERIES = rng.standard_normal((4, 4)).astype(np.float32)  # [queries, head_dim], at positions 7 to 10
KEYS, VALUES = rng.standard_normal((2, 11, 4)).astype(np.float32)  # [keys, head_dim] each
TABLE, TAKEN, SIZE = [7, 1, 3], [2, 6], 4
SMALLEST = {1: 1e-6, 100: 1e-4}
"""How near float64 a float32 comes, by the length of the query."""


def walk(attend: Any = attend, title: str = "") -> Walk:
    pool = {"num_blocks": 8, "block_size": SIZE, "taken": TAKEN}
    return watch_attention(attend, KVCache, QUERIES, KEYS, VALUES, TABLE, title=title, **pool)


@pytest.fixture(scope="module")
def recorded() -> Walk:
    return walk()


def scores(query: int, length: int) -> Array:
    """Of one query, in float64: [keys up to its own]."""
    product: Array = KEYS[: 8 + query].astype(np.float64) @ (length * QUERIES[query]).astype(np.float64) / 2
    return product


def softmax_attention(query: int, length: int, keys: int) -> Array:
    """Over the first so many keys, in float64: [head_dim]."""
    seen = scores(query, length)[:keys]
    weights = np.exp(seen - seen.max())
    attention: Array = weights / weights.sum() @ VALUES[:keys].astype(np.float64)
    return attention


CASES = [(query, length) for query in range(4) for length in LENGTHS]


@pytest.mark.parametrize(("query", "length"), CASES)
def test_what_is_recorded_of_each_turn_is_that_of_the_keys_so_far(recorded: Walk, query: int, length: int) -> None:
    known = recorded.queries[query]["lengths"][LENGTHS.index(length)]
    right, near = scores(query, length), SMALLEST[length]
    for run in [*known["runs"], known["whole"]]:
        keys, m_old = 0, -np.inf
        for turn in run["turns"]:
            new = slice(keys, keys := keys + turn["n"])
            m = right[:keys].max()
            assert turn["scores"] == pytest.approx(right[new], rel=1e-6, abs=near)
            assert turn["m"] == pytest.approx(m, rel=1e-6)
            assert (-np.inf if turn["old"] is None else turn["old"]) == pytest.approx(m_old, rel=1e-6)
            assert turn["fade"] == pytest.approx(np.exp(m_old - m), abs=near)
            assert turn["p"] == pytest.approx(np.exp(right[new] - m), abs=near)
            assert turn["l"] == pytest.approx(np.exp(right[:keys] - m).sum(), rel=near)
            assert np.array(turn["o"]) / turn["l"] == pytest.approx(softmax_attention(query, length, keys), abs=near)
            m_old = m
        assert keys == recorded.queries[query]["position"] + 1 == 8 + query
        assert run["answer"] == pytest.approx(softmax_attention(query, length, keys), abs=near)
    assert len(known["whole"]["turns"]) == 1  # all scores at hand


def test_it_ran_in_every_place_where_the_blocks_could_lie(recorded: Walk) -> None:
    assert recorded.tables[0] == TABLE
    assert {tuple(table) for table in recorded.tables} == set(permutations([0, 1, 3, 4, 5, 7], 3))
    assert len(recorded.tables) == 120
    for query, length in CASES:
        known = recorded.queries[query]["lengths"][LENGTHS.index(length)]
        assert len(known["of"]) == 120
        answers = np.array([known["runs"][which]["answer"] for which in known["of"]])
        assert np.ptp(answers, axis=0).max() < 1e-6


def test_an_attention_that_ignores_the_table_would_be_seen() -> None:
    """So the places are no decoration: each run reads a cache in which the blocks lie there, and NaN elsewhere."""

    def careless(query: Array, cache: KVCache, layer: int, blocks: Array, position: int, scale: float) -> Array:
        return attend(query, cache, layer, np.sort(blocks), position, scale)

    assert len(walk(careless).queries[3]["lengths"][0]["runs"]) > 1


def test_the_lines_are_those_of_the_source(recorded: Walk) -> None:
    source = Path(attend.__code__.co_filename).read_text()
    assert list(recorded.code) == ["starts", "reads", "rescales", "adds", "divides"]
    for lines in recorded.code.values():
        assert all(line in source for line in lines)
    told = [
        ("starts", "o = np.zeros_like"),
        ("reads", "scores ="),
        ("rescales", "fade, p ="),
        ("adds", "o = fade"),
        ("divides", "return o / l"),
    ]
    for kind, start in told:
        assert recorded.code[kind][-1].lstrip().startswith(start)


@pytest.mark.parametrize("table", [[7, 1], [7, 1, 1], [7, 1, 8], [7, 1, 2], [7, 1, 3, 5]])
def test_a_table_that_cannot_hold_the_keys_is_refused(table: list[int]) -> None:
    q, K = np.zeros(4), np.zeros((10, 4))
    with pytest.raises(InvalidRequest, match="cannot hold 10 keys: it takes 3 different ones of"):
        watch_attention(attend, KVCache, q, K, K, table, num_blocks=8, block_size=4, taken=[2])


def test_watching_leaves_no_trace() -> None:
    before = sys.gettrace()
    walk()
    assert sys.gettrace() is before


def test_a_notebook_gets_the_data_the_page_and_a_text(recorded: Walk) -> None:
    shown = recorded._repr_mimebundle_()
    assert json.loads(json.dumps(shown[KIND], allow_nan=False))["block_size"] == SIZE
    assert "walks its block table [7, 1, 3]" in shown["text/plain"]
    assert shown["text/html"].count("</script>") == 2


def test_the_component_is_small() -> None:
    assert SCRIPT.stat().st_size < 26_000


# --- In a browser ---------------------------------------------------------------------------------


Visiting = Callable[..., AbstractContextManager[Watched]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, recorded: Walk) -> Path:
    """The page of the walk."""
    path = tmp_path_factory.mktemp("walk") / "walk.html"
    path.write_text(recorded.page())
    return path


@pytest.fixture(params=SCREENS)
def opened(visiting: Visiting, file: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    with visiting(file, **SCREENS[request.param]) as watched:
        yield watched.page


EVERYWHERE = """(look) => {
  const walk = document.querySelector("paged-attention");
  const found = [];
  const choices = walk.data.queries.flatMap((_, query) => [[query, 0], [query, 1]]);
  for (const [query, long, table] of choices.flatMap((choice) => [0, 119].map((table) => [...choice, table]))) {
    walk.choose(query, long);
    walk.arrange(table);
    for (let n = 1; n <= walk.last; n++) {
      walk.go(n);
      found.push([query, long, table, n, eval(look)(walk)]);
    }
  }
  return found;
}"""
"""Of every step, for every query, each length of it, and two places of the blocks."""


@in_both
def test_it_steps_by_button_key_and_slider_and_stops_at_both_ends(opened: Any) -> None:
    count = opened.locator(".n")
    assert count.text_content() == "1 / 11"
    opened.get_by_role("button", name="Next step").click()
    assert count.text_content() == "2 / 11"
    opened.keyboard.press("ArrowRight")
    assert count.text_content() == "3 / 11"
    opened.get_by_role("button", name="Previous step").click()
    assert count.text_content() == "2 / 11"
    opened.keyboard.press("End")
    assert count.text_content() == "11 / 11"
    assert opened.get_by_role("button", name="Next step").is_disabled()
    opened.keyboard.press("Home")
    assert count.text_content() == "1 / 11"
    slider = opened.get_by_role("slider", name="Step")
    slider.fill("7")
    slider.press("ArrowRight")
    assert count.text_content() == "8 / 11"  # once, not twice
    opened.get_by_role("button", name="Next step").focus()
    opened.keyboard.press("End")  # the button is disabled now
    opened.keyboard.press("ArrowLeft")
    assert count.text_content() == "10 / 11"
    opened.locator("h1").click()
    opened.keyboard.press("ArrowLeft")  # outside
    assert count.text_content() == "10 / 11"


@pytest.mark.parametrize("screen", SCREENS)
def test_it_plays_to_its_end_or_until_somebody_steps(browser: Browser, file: Path, screen: str) -> None:
    with watching(browser, **SCREENS[screen]) as watched:
        page = watched.page
        page.goto(file.as_uri())
        stop_time(page)
        player, count = page.locator(".tools button").nth(2), page.locator(".n")
        player.click()
        assert player.text_content() == "Pause"
        page.clock.run_for(3100)
        assert count.text_content().startswith("3 /")
        page.get_by_role("button", name="Next step").click()
        page.clock.run_for(3100)
        assert (player.text_content(), count.text_content()[:3]) == ("Play", "4 /")
        player.click()
        page.clock.run_for(60_000)
        last = count.text_content().split(" / ")[1]
        assert (player.text_content(), count.text_content()) == ("Play", f"{last} / {last}")
        player.click()  # from the start again
        page.clock.run_for(1600)
        assert count.text_content().startswith("2 /")


def test_the_numbers_of_every_step_are_those_of_attention_over_the_keys_so_far(opened: Any) -> None:
    """What the page multiplies, too: how much of each weight is left once m has risen."""
    steps = opened.evaluate(EVERYWHERE, "(walk) => walk.now")
    for query, long, _, n, now in steps:
        length, turns = LENGTHS[long], (8 + query + SIZE - 1) // SIZE
        right, near = scores(query, length), SMALLEST[length]
        ends = [min((turn + 1) * SIZE, 8 + query) for turn in range(turns)]
        kind = ["reads", "rescales", "adds"][(n - 2) % 3]
        kind = "starts" if n == 1 else "divides" if n == 3 * turns + 2 else kind
        t = min((n + 1) // 3, turns) - 1
        read = ends[t] if t >= 0 else 0  # keys that have a score
        under_m = ends[t - (kind == "reads")] if t >= (kind == "reads") else 0  # those of which m is the largest
        added = ends[t - (kind in ("reads", "rescales"))] if t >= (kind in ("reads", "rescales")) else 0
        assert now["kind"] == kind
        assert now["scores"] == pytest.approx(right[:read], rel=1e-6, abs=near)
        if not under_m:
            assert now["m"] is None
            continue
        m = right[:under_m].max()
        weights = np.exp(right[:added] - m)
        assert now["m"] == pytest.approx(m, rel=1e-6)
        assert now["weights"] == pytest.approx(weights, abs=near)
        assert now["l"] == pytest.approx(weights.sum(), abs=near)
        assert sum(now["parts"]) == pytest.approx(now["l"], rel=near)
        assert now["o"] == pytest.approx(weights @ VALUES[:added].astype(np.float64), abs=2 * near)
        if not now["l"]:  # nothing was added, or it has faded to 0: the scores of a long query are far apart
            assert now["answer"] == []
        elif weights.sum() > 1e-30:
            assert now["answer"] == pytest.approx(softmax_attention(query, length, added), abs=near)


@pytest.mark.parametrize("screen", SCREENS)
def test_after_the_last_block_each_bar_fills_the_outline_of_the_full_softmax(
    visiting: Visiting, file: Path, screen: str
) -> None:
    look = """(walk) => [walk.weights, walk.output, walk.stack].map((plot) => [plot.bars, plot.ghosts].map((all) => all
      .filter((bar) => !bar.hidden).map(({style}) => parseFloat(plot === walk.stack ? style.width : style.height))))"""
    before, after = [], []
    with visiting(file, **SCREENS[screen], reduced_motion="reduce") as watched:
        found = watched.page.evaluate(EVERYWHERE, look)
    for _, _, _, n, plots in found:
        heights, outlines = plots[0]
        (after if n in (8, 11) and len(heights) == len(outlines) else before).append((n, plots))
    assert sum(n in (8, 11) for n, _ in after) >= 4 * 2 * 2
    for _, ((weights, whole), (output, answer), (parts, whole_l)) in after:
        assert weights == pytest.approx(whole, abs=0.1)
        assert output == pytest.approx(answer, abs=0.1)
        assert sum(parts) == pytest.approx(whole_l[0], abs=0.1)
    assert any(max(heights, default=0) > 90 for _, ((heights, _), _, _) in before)


@in_both
def test_nothing_changes_its_height(opened: Any) -> None:
    look = """(walk) => [walk.all, ...walk.shadowRoot.querySelectorAll(".head,.cols,.cols>*,.why")]
      .map((part) => part.offsetHeight)"""
    heights = {tuple(found[-1]) for found in opened.evaluate(EVERYWHERE, look)}
    assert len(heights) == 1
    assert opened.evaluate("document.documentElement.scrollWidth") <= opened.viewport_size["width"]


PLACES = """() => {
  const walk = document.querySelector("paged-attention");
  const cells = [...walk.pool.children];
  const places = cells.filter((cell) => cell.matches(".own")).sort((a, b) => a.dataset.logical - b.dataset.logical);
  const table = walk.choices.map((choice) => Number(choice.value));
  return [places.map((cell) => cells.indexOf(cell)), table, walk.now.answer];
}"""


def test_shuffled_blocks_change_table_and_pool_and_not_the_answer(opened: Any) -> None:
    opened.get_by_role("slider").press("End")
    places, table, answer = opened.evaluate(PLACES)
    assert places == table == TABLE
    first = ", ".join(map(str, table))
    for _ in range(5):
        before = table
        opened.get_by_role("button", name="Shuffle the blocks").click()
        places, table, again = opened.evaluate(PLACES)
        assert places == table != before
        assert again == pytest.approx(answer, abs=1e-6)
        said = opened.locator(".same").text_content()
        assert said.startswith(
            f"The same answer as with blocks at {first} (to the last bit), and as the full softmax's (within"
        )
    assert answer == pytest.approx(softmax_attention(3, 1, 11), abs=1e-6)


def test_a_reader_chooses_where_a_block_lies_and_two_blocks_change_places(opened: Any) -> None:
    choice = opened.get_by_role("combobox", name="Physical block of logical block 0")
    assert choice.locator("option").all_text_contents() == ["0", "1", "3", "4", "5", "7"]
    choice.select_option("4")
    assert opened.evaluate(PLACES)[:2] == [[4, 1, 3], [4, 1, 3]]
    choice.select_option("3")
    assert opened.evaluate(PLACES)[:2] == [[3, 1, 4], [3, 1, 4]]
    assert "Tried: 3 of 120 places" in opened.locator(".same").text_content()
    opened.get_by_role("slider").fill("2")
    assert "block 3 of the pool" in opened.locator(".saying > :last-child").text_content()


@in_both
def test_an_arrow_leads_from_each_entry_into_its_block(opened: Any) -> None:
    look = """(walk) => [...walk.arrows.children].map((path, logical) => {
      const cell = walk.pool.querySelector(`[data-logical="${logical}"]`);
      const head = path.getPointAtLength(path.getTotalLength() - 7.2);
      const inside = Math.abs(head.x - cell.offsetLeft - cell.offsetWidth / 2) < 5
        && head.y > cell.offsetTop && head.y < cell.offsetTop + 10;
      return [walk.pool.children[walk.blocks[logical]] === cell, inside, path.matches(".now")];
    })"""
    for query, _, _, n, arrows in opened.evaluate(EVERYWHERE, look):
        turns = 2 if query == 0 else 3
        strong = (n + 1) // 3 - 1 if n < 3 * turns + 2 else -1
        assert arrows == [[True, True, logical == strong] for logical in range(3)]


def test_each_query_of_a_chunk_sees_the_keys_up_to_its_own(opened: Any) -> None:
    rows = opened.locator(".mask button")
    for query in range(4):
        rows.nth(query).click()
        assert rows.nth(query).get_attribute("aria-pressed") == "true"
        assert rows.nth(query).locator(".later").count() == 3 - query
        assert opened.locator(".slots .later").count() == 4 - query
        assert opened.locator(".saying > :last-child").text_content().startswith(f"The query at position {7 + query} ")
        hatched = opened.evaluate("document.querySelector('paged-attention').weights.later.hidden")
        assert hatched == (query == 3)


def test_it_says_what_would_overflow_without_m(opened: Any) -> None:
    opened.get_by_role("slider").press("End")
    why = opened.locator(".why .rooms > :last-child")
    largest = np.exp(np.float32(scores(3, 1).max()))
    assert f"= {largest:.3f}: float32 can hold it" in why.text_content()
    opened.get_by_role("button", name="Query × 100").click()
    with np.errstate(over="ignore"):
        assert np.isinf(np.exp(np.float32(scores(3, 100).max())))
    assert "infinite in float32" in why.text_content()
    assert opened.get_by_role("button", name="Query × 100").get_attribute("aria-pressed") == "true"
    assert opened.evaluate(PLACES)[2] == pytest.approx(softmax_attention(3, 100, 11), abs=1e-4)


def test_what_moves_flies_unless_somebody_wants_no_movement(visiting: Visiting, file: Path, opened: Any) -> None:
    move = """() => {
      const walk = document.querySelector("paged-attention");
      walk.arrange(119);
      return [...walk.pool.children].flatMap((cell) => cell.getAnimations()).length;
    }"""
    assert opened.evaluate(move) == 3
    with visiting(file, reduced_motion="reduce") as watched:
        assert watched.page.evaluate(move) == 0
        bar = "getComputedStyle(document.querySelector('paged-attention').weights.bars[0]).transitionProperty"
        assert watched.page.evaluate(bar) == "none"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_no_letter_is_too_small(browser: Browser, file: Path, scheme: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
    page.goto(file.as_uri())
    page.add_script_tag(content=axe_script())
    page.locator("summary").click()
    for query, long, n in [(3, 0, 1), (3, 0, 6), (0, 1, 4), (1, 0, 11)]:
        page.evaluate(
            """([query, long, n]) => {
              const walk = document.querySelector("paged-attention");
              walk.choose(query, long);
              walk.go(n);
            }""",
            [query, long, n],
        )
        violations = axe_violations(page, **(COLOURS if scheme == "dark" else {}))
        assert not violations, [(v["id"], [node["html"][:200] for node in v["nodes"]]) for v in violations]
    sizes = page.evaluate(
        """[...document.querySelector("paged-attention").all.querySelectorAll("*")]
          .map((part) => parseFloat(getComputedStyle(part).fontSize))"""
    )
    assert min(sizes) >= 11
    page.close()


def test_without_scripts_there_is_a_text(chromium: Browser, tmp_path: Path) -> None:
    (tmp_path / "walk.html").write_text(walk(title="</script><b>A walk").page())
    page = chromium.new_page(java_script_enabled=False)
    page.goto(f"file://{tmp_path}/walk.html")
    assert "The same in each of 120 places" in page.locator("pre").inner_text()
    assert page.locator("b").count() == 0
    page.close()
