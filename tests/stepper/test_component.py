"""The web component can be used by hand, key and link. (That it follows the events rightly: tests/replay.)"""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser
from rich.color import Color

from minipaged import SamplingParams
from minipaged.cli import main
from minipaged.demo.view import COLORS
from minipaged.events import (
    BlocksFreed,
    BlocksRolledBack,
    EngineStarted,
    Event,
    RequestArrived,
    StepStarted,
    TokenGenerated,
    TokensAccepted,
    TokensComputed,
    TokensDrafted,
)
from minipaged.stepper import Storyteller, record
from minipaged.stepper.page import UNSEEN, as_data, page
from tests.browser import COLOURS, SCREENS, Watched, axe_script, axe_violations, in_both, stop_time, watching
from tests.workloads import Workload, WorkloadRun, random_workload, windowed

Visiting = Callable[..., AbstractContextManager[Watched]]
EACH_STEP = """(look) => {
  const stepper = document.querySelector("paged-stepper");
  return stepper.events.map((_, i) => { stepper.go(i + 1); return eval(look)(stepper); });
}"""


def small_run() -> str:
    model = Storyteller(["one two three four five six seven", "one two three four FIVE SIX SEVEN"])
    with record("A small run", model.decode) as run:
        engine = model.engine(num_blocks=8, block_size=4)
        engine.add_request(model.encode("one two three"), SamplingParams(n=2, max_tokens=3, seed=1))
        run.note("Nothing has run yet.")
        while engine.has_unfinished_requests():
            engine.step()
    return run.page()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a small run."""
    path = tmp_path_factory.mktemp("small") / "run.html"
    path.write_text(small_run())
    return path


@pytest.fixture
def opened(visiting: Visiting, small: Path) -> Iterator[Any]:
    with visiting(small) as watched:
        yield watched.page


@pytest.mark.parametrize(
    "workload", [random_workload(3), random_workload(8), random_workload(21), windowed(3), windowed(4)]
)
def test_every_step_of_a_random_run_can_be_drawn_forward_and_back(
    visiting: Visiting, tmp_path: Path, workload: Workload
) -> None:
    heard: list[Event] = []
    WorkloadRun(workload, listeners=[heard.append]).to_the_end()
    (tmp_path / "run.html").write_text(page(as_data("", heard)))
    with visiting(tmp_path / "run.html") as watched:
        sentences = watched.page.evaluate(
            """() => {
              const stepper = document.querySelector("paged-stepper");
              const steps = Array.from({length: stepper.events.length}, (_, i) => i + 1);
              const look = (n) => { stepper.go(n); return stepper.say.textContent + stepper.state.textContent; };
              const forward = steps.map(look);
              const back = steps.reverse().map(look).reverse();
              return [forward, back];
            }"""
        )
        assert sentences[0] == sentences[1]
        assert not re.search(r"undefined|NaN|null", " ".join(sentences[0]))


LAYERS = [(None, 5), (7,), (None, 4, 4)]


@pytest.mark.parametrize("windows", LAYERS, ids=str)
def test_a_table_for_each_group_of_layers_is_drawn_with_the_holes_that_a_window_has_left(
    visiting: Visiting, tmp_path: Path, windows: tuple[int | None, ...]
) -> None:
    model = Storyteller(["one two three four five six seven eight nine ten"])
    with record("Windows", model.decode) as run:
        engine = model.engine(num_blocks=16, block_size=2, max_model_len=12, group_windows=windows)
        engine.add_request(model.encode("one two three four five six"), SamplingParams(max_tokens=5, temperature=0))
        while engine.has_unfinished_requests():
            engine.step()
    (tmp_path / "run.html").write_text(run.page())
    look = """(stepper) => {
      const text = (node) => node.textContent.replace(/\\s+/g, " ").trim();
      const tables = [...stepper.seqs.querySelectorAll(".table")];
      return [
        tables.map((table) => [...table.children].map((li) => text(li.lastChild))),
        tables.map((table) => table.previousElementSibling.textContent),
        tables.map((table) => [...table.querySelectorAll(".tok")].map(text)),
        [...stepper.arrows.children].map((path) => path.dataset.to),
        [...stepper.fold.at(stepper.n).sequences.values()].map((s) => s.table),
        stepper.moved()[1],
      ];
    }"""
    labels = [f"group {i}, {f'last {window}' if window else 'all'}" for i, window in enumerate(windows)]
    passed = 0
    with visiting(tmp_path / "run.html", viewport={"width": 1200, "height": 900}) as watched:
        words = [model.words[token] for token in range(len(model.words))]
        for event, seen in zip(run.events, watched.page.evaluate(EACH_STEP, look), strict=True):
            tables, titles, tokens, arrows, sequences, word = seen
            if not (sequences and sequences[0]):
                assert tables == []
                continue
            assert titles == labels
            groups = [sequences[0][group :: len(windows)] for group in range(len(windows))]
            assert [[entry.split(" (")[0] for entry in table] for table in tables] == [
                [f"{i} → {'-' if block < 0 else block}" for i, block in enumerate(table)] for table in groups
            ]
            in_blocks = sum(int(entry.split("(")[1][0]) for entry in tables[0] if "(" in entry)
            filled = in_blocks + 2 * groups[0].count(-1)
            for table, shown in zip(groups, tokens, strict=True):
                assert shown == words[2 * table.count(-1) : filled], "a hole shows no tokens"
            assert sorted(arrows) == sorted(f"block {block}" for block in sequences[0] if block >= 0)
            assert (word == "passed") == (event.name == "blocks_passed")
            passed += event.name == "blocks_passed"
        assert passed >= 2
        legend = watched.page.locator(".legend").text_content()
    assert "a hole: the window has passed" in legend


def test_a_model_without_windows_has_neither_labels_nor_holes(opened: Any) -> None:
    opened.get_by_role("slider").fill("7")
    assert opened.locator(".table").count() == opened.locator(".seq").count() > 0
    assert opened.locator("small").count() == 0
    assert "hole" not in opened.locator(".legend").text_content()


def test_what_the_floor_below_the_prefix_cache_keeps_is_shown_in_the_host_pool(
    visiting: Visiting, tmp_path: Path
) -> None:
    model = Storyteller(["a b c d e f", "A B C D E F"])
    with record("A floor", model.decode) as run:
        engine = model.engine(
            num_blocks=3, num_swap_blocks=4, block_size=2, enable_prefix_caching=True, kv_cache_tiers=("host",)
        )
        for prompt in ("a b c d e", "A B C D E", "a b c d e"):
            engine.add_request(model.encode(prompt), SamplingParams(temperature=0, max_tokens=1))
            while engine.has_unfinished_requests():
                engine.step()
    names = [event.name for event in run.events]
    assert {"block_demoted", "blocks_promoted"} <= {*names}
    (tmp_path / "run.html").write_text(run.page())
    with visiting(tmp_path / "run.html") as watched:
        look = """(n) => {
          const stepper = document.querySelector("paged-stepper");
          stepper.go(n);
          return [stepper.cells().get("host 0").querySelector(".who").textContent.trim(), stepper.moved()[1]];
        }"""
        down, up = names.index("block_demoted") + 1, names.index("blocks_promoted") + 1
        assert [watched.page.evaluate(look, n) for n in (down - 1, down, up)] == [
            ["", ""],
            ["floor", "down"],
            ["floor", "up"],
        ]


# --- Drafts ---------------------------------------------------------------------------------------

DRAFTED_RUN = runpy.run_path("docs/runs/speculation.py")["run"]
SLOTS_AND_TOKENS = """(stepper) => {
  const signs = ["draft", "refused", "pending"];
  const sign = (node) => [...node.classList].filter((name) => signs.includes(name)).join();
  const look = (frame, nodes) => [...frame.querySelectorAll(nodes)].filter((node) => node.textContent.trim())
    .map((node) => [node.textContent, sign(node), node.title]);
  return [look(stepper.memory, ".slots:not(.gone) li"), look(stepper.seqs, ".tok"), stepper.moved()[1]];
}"""


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the run in the docs in which four tokens are drafted twice."""
    path = tmp_path_factory.mktemp("drafting") / "run.html"
    path.write_text(DRAFTED_RUN.page())
    return path


@in_both
@pytest.mark.parametrize("screen", SCREENS)
def test_drafted_tokens_are_hollow_until_they_stand_or_vanish(visiting: Visiting, drafting: Path, screen: str) -> None:
    with visiting(drafting, **SCREENS[screen]) as watched:
        seen = watched.page.evaluate(EACH_STEP, SLOTS_AND_TOKENS)
        names = [event.name for event in DRAFTED_RUN.events]
        first = names.index("tokens_drafted")
        draft, refused = ["on", "the", "mat", "."], [["mat", "refused", "mat, refused"], [".", "refused", "., refused"]]
        hollow = [[word, "draft", f"{word}, draft"] for word in draft]

        def hollow_in(n: int) -> list[list[list[str]]]:
            return [[found for found in drawn if found[1]] for drawn in seen[n][:2]]

        assert names[first : first + 4] == [
            "tokens_drafted",
            "tokens_computed",
            "tokens_accepted",
            "blocks_rolled_back",
        ]
        assert hollow_in(first - 1) == [[], []]
        not_cached = [[word, "draft", "draft, not in the cache yet"] for word in draft]
        assert hollow_in(first) == [[], not_cached]  # known, without a slot
        assert hollow_in(first + 1) == [hollow, [[word, "draft", "draft"] for word in draft]]
        assert hollow_in(first + 2) == [refused, [[word, "refused", "refused"] for word in ("mat", ".")]]
        assert [found[0] for found in seen[first + 2][1]][-4:] == draft
        assert hollow_in(first + 3) == [[], []]
        assert [found[0] for found in seen[first + 3][0]][-2:] == ["on", "the"]
        assert seen[first + 3][2] == "back"
        assert seen[first + 3][1][-2:] == seen[first + 5][1][-2:] == [[word, "", "generated"] for word in ("on", "the")]


def test_a_draft_that_stands_as_a_whole_turns_solid_and_nothing_is_drawn_as_refused(
    visiting: Visiting, drafting: Path
) -> None:
    with visiting(drafting) as watched:
        seen = watched.page.evaluate(EACH_STEP, SLOTS_AND_TOKENS)
    last = max(i for i, event in enumerate(DRAFTED_RUN.events) if event.name == "tokens_accepted")
    assert [found[1] for found in seen[last - 1][1]][-4:] == ["draft"] * 4
    assert not any(found[1] for drawn in seen[last:] for found in (*drawn[0], *drawn[1]))


def test_a_slot_that_turns_solid_is_marked_as_changed_and_n_leads_there(visiting: Visiting, drafting: Path) -> None:
    with visiting(drafting, **SCREENS["desktop"]) as watched:
        page, names = watched.page, [event.name for event in DRAFTED_RUN.events]
        first = names.index("tokens_drafted")
        page.get_by_role("slider").fill(str(first))
        for name in ("tokens_drafted", "tokens_accepted", "blocks_rolled_back"):
            page.keyboard.press("n")
            assert names[page.evaluate("document.querySelector('paged-stepper').n") - 1] == name
            new = page.locator(".pool .new").evaluate_all("cells => cells.map((cell) => cell.dataset.block)")
            entries = page.locator(".seqs .entry.new").count()
            assert (new, entries) == {
                "tokens_drafted": ([], 0),
                "tokens_accepted": (["2", "3"], 2),
                "blocks_rolled_back": (["3"], 0),
            }[name]
        assert "2 of 4" not in page.locator(".say").text_content()


def test_in_blocks_of_many_slots_the_drafted_part_of_the_bar_is_hollow(visiting: Visiting, tmp_path: Path) -> None:
    events = [
        EngineStarted(2, 0, 16, 32),
        RequestArrived("a", 0, (1, 2, 3, 4), 1),
        TokensComputed(0, 4, (0,), 0),
        TokensDrafted(0, (5, 6)),
        TokensComputed(0, 6, (), 0),
        TokensAccepted(0, 2, 1),
        BlocksRolledBack(0, 5, ()),
    ]
    (tmp_path / "run.html").write_text(page(as_data("", events)))
    look = """(stepper) => [...stepper.memory.querySelectorAll("[data-block='0'] .fill")].map((bar) =>
      [bar.title, ...[...bar.children].map((part) => [part.className, part.style.width])])"""
    with visiting(tmp_path / "run.html") as watched:
        bars = [bars[0] for bars in watched.page.evaluate(EACH_STEP, look)]
    assert bars[2:] == [
        ["4 of 16 slots filled", ["", "25%"]],
        ["4 of 16 slots filled", ["", "25%"]],
        ["6 of 16 slots filled, 2 drafted", ["", "25%"], ["draft", "12.5%"]],
        ["6 of 16 slots filled, 1 drafted", ["", "31.25%"], ["draft", "6.25%"]],
        ["5 of 16 slots filled", ["", "31.25%"]],
    ]


def test_a_token_that_is_not_known_yet_is_drawn_as_pending(visiting: Visiting, tmp_path: Path) -> None:
    """A step that runs ahead takes a slot for it before, and so does one in which a model drafts."""
    events = [
        EngineStarted(2, 0, 4, 8),
        RequestArrived("a", 0, (1, 2), 1),
        TokensComputed(0, 2, (0,), 0),
        TokensComputed(0, 3, (), 0),
        TokenGenerated("a", 0, 7, -0.1),
        TokensComputed(0, 5, (1,), 0),
        TokensDrafted(0, (8, 9)),
        TokensAccepted(0, 2, 1),
        BlocksRolledBack(0, 4, (1,)),
    ]
    (tmp_path / "run.html").write_text(page(as_data("", events)))
    with visiting(tmp_path / "run.html") as watched:
        tokens = [tokens for _, tokens, _ in watched.page.evaluate(EACH_STEP, SLOTS_AND_TOKENS)]
    assert [each[-1] for each in tokens[2:4]] == [["2", "", "prompt"], ["?", "pending", "pending"]]
    assert [[[found[0], found[1]] for found in each[2:]] for each in tokens[4:]] == [
        [["7", ""]],
        [["7", ""], ["?", "pending"], ["?", "pending"]],
        [["7", ""], ["8", "draft"], ["9", "draft"]],
        [["7", ""], ["8", ""], ["9", "refused"]],
        [["7", ""], ["8", ""]],
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_drafts_can_be_read_in_both_colour_schemes_and_axe_finds_nothing(
    browser: Browser, drafting: Path, scheme: Any, width: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
    page.goto(drafting.as_uri())
    page.add_script_tag(content=axe_script())
    page.locator("summary").click()  # the legend shows them too
    first = [event.name for event in DRAFTED_RUN.events].index("tokens_drafted")
    for n in range(first + 1, first + 5):
        page.evaluate("n => document.querySelector('paged-stepper').go(n)", n)
        assert page.evaluate("document.querySelector('paged-stepper').fliers.children.length") == 0
        violations = axe_violations(page, **(COLOURS if scheme == "dark" else {}))
        assert not violations, (n, [(v["id"], [node["html"][:200] for node in v["nodes"]]) for v in violations])
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def test_a_note_stands_behind_the_sentence_of_its_step_and_of_no_other(opened: Any) -> None:
    say = opened.locator(".say")
    opened.get_by_role("slider").fill("2")
    assert say.text_content().endswith("It waits and holds no block. Nothing has run yet.")
    opened.keyboard.press("ArrowRight")
    assert "Nothing has run yet." not in say.text_content()


@in_both
def test_it_steps_by_button_key_and_slider_and_stops_at_both_ends(opened: Any) -> None:
    stepper, count = opened.locator("paged-stepper"), opened.locator(".n")
    last = stepper.evaluate("s => s.events.length")
    assert count.text_content() == f"1 / {last}"
    opened.get_by_role("button", name="Next step").click()
    assert count.text_content() == f"2 / {last}"
    opened.keyboard.press("ArrowRight")
    assert count.text_content() == f"3 / {last}"
    opened.get_by_role("button", name="Previous step").click()
    assert count.text_content() == f"2 / {last}"
    opened.keyboard.press("End")
    assert count.text_content() == f"{last} / {last}"
    assert opened.get_by_role("button", name="Next step").is_disabled()
    opened.keyboard.press("Home")
    assert count.text_content() == f"1 / {last}"
    slider = opened.get_by_role("slider", name="Step")
    slider.fill("7")
    assert count.text_content() == f"7 / {last}"
    slider.press("ArrowRight")
    assert count.text_content() == f"8 / {last}"  # once, not twice


@in_both
def test_keys_count_only_inside(opened: Any) -> None:
    opened.locator("h1").click()
    opened.keyboard.press("ArrowRight")
    assert opened.locator(".n").text_content().startswith("1 /")


@in_both
def test_a_button_that_is_disabled_leaves_the_keys_working(opened: Any) -> None:
    opened.get_by_role("button", name="Next step").click()
    opened.get_by_role("button", name="Previous step").click()  # at the first step now
    opened.keyboard.press("ArrowRight")
    assert opened.locator(".n").text_content().startswith("2 /")


@pytest.mark.parametrize(("query", "step"), [("?step=5", 5), ("?step=9999", None), ("?step=x", 1), ("?step=-3", 1)])
def test_a_link_leads_to_a_step(opened: Any, query: str, step: int | None) -> None:
    opened.goto(opened.url + query)
    last = opened.locator("paged-stepper").evaluate("s => s.events.length")
    assert opened.locator(".n").text_content() == f"{step or last} / {last}"
    opened.get_by_role("button", name="Previous step").click() if step != 1 else None
    opened.get_by_role("link", name="Link to step").click()
    assert f"?step={(step or last) - (step != 1)}" in opened.url


def test_a_link_to_a_heading_moves_no_stepper(opened: Any) -> None:
    opened.goto(opened.url + "?step=5")
    opened.get_by_role("button", name="Next step").click()
    opened.evaluate("new Promise((done) => { addEventListener('hashchange', done); location.hash = 'a-heading'; })")
    assert opened.locator(".n").text_content().startswith("6 /")


def test_a_stepper_hears_of_links_as_long_as_it_is_on_the_page(opened: Any) -> None:
    opened.evaluate("document.querySelector('paged-stepper').id = 'run'")
    opened.evaluate("window.taken = document.querySelector('paged-stepper'); taken.go(3); taken.remove()")
    go = """async (step) => {
      history.replaceState(null, "", `?step=${step}`);
      await new Promise((done) => { addEventListener("hashchange", done, {once: true}); location.hash = "run"; });
      return [taken.n, history.replaceState(null, "", "#elsewhere")][0];
    }"""
    assert opened.evaluate(go, 5) == 3
    opened.evaluate("document.querySelector('main').append(taken)")
    assert opened.evaluate(go, 6) == 6


@pytest.fixture
def in_still_time(browser: Browser, small: Path) -> Iterator[Any]:
    with watching(browser) as watched:
        watched.page.goto(small.as_uri())
        stop_time(watched.page)
        yield watched.page


def test_it_plays_and_pauses(in_still_time: Any) -> None:
    opened = in_still_time
    opened.get_by_role("button", name="Play").click()
    opened.clock.run_for(3100)
    assert opened.locator(".n").text_content().startswith("3 /")
    opened.get_by_role("button", name="Pause").click()
    opened.clock.run_for(5000)
    assert opened.locator(".n").text_content().startswith("3 /")


def test_blocks_say_number_count_and_owners_in_words(opened: Any) -> None:
    stepper = opened.locator("paged-stepper")
    copied = stepper.evaluate("s => s.events.findIndex((e) => e.event === 'sequence_forked') + 1")
    stepper.evaluate("(s, n) => s.go(n)", copied)
    block = opened.locator(".pool li").first
    assert re.sub(r"\s+", " ", block.inner_text()).startswith("0 \N{MULTIPLICATION SIGN}2 A B")
    assert opened.locator(".pool .free").count() == 7
    assert opened.locator(".say").get_attribute("aria-live") == "polite"
    assert "forked" in opened.locator(".say").text_content()
    assert opened.locator(".say .chip").all_text_contents() == ["B", "A"]
    assert re.sub(r"\s+", " ", opened.locator("dl").inner_text()).startswith("running 0 (A, B) waiting nobody")


def test_a_token_that_is_only_a_line_break_can_be_seen(opened: Any) -> None:
    look = "s => { s.data.words = {...s.data.words, 3: '\\n\\n'}; s.go(s.events.length); return s.visible(3); }"
    arrows = opened.locator("paged-stepper").evaluate(look)
    assert arrows == 2 * "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
    assert arrows in opened.locator(".tokens").first.text_content()


@in_both
def test_the_lit_line_is_in_sight(opened: Any) -> None:
    """And it is marked by a sign, not by its colour alone."""
    stepper = opened.locator("paged-stepper")
    for n in range(1, stepper.evaluate("s => s.events.length") + 1):
        stepper.evaluate("(s, n) => s.go(n)", n)
        lit = opened.locator(".now")
        if lit.count():
            inside = lit.evaluate(
                """(l) => {
                  const line = l.getBoundingClientRect(), pane = l.closest(".code").getBoundingClientRect();
                  return line.top >= pane.top - 1 && line.bottom <= pane.bottom + 1;
                }"""
            )
            assert inside, n
            assert lit.text_content().startswith("▶")


def test_the_code_is_the_function_that_the_sentence_speaks_of_and_on_demand_all_that_ran(opened: Any) -> None:
    stepper = opened.locator("paged-stepper")
    stepper.evaluate("s => s.go(s.events.findIndex((e) => e.event === 'block_copied') + 1)")
    assert [name.split()[0] for name in opened.locator(".name").all_text_contents()] == ["BlockAllocator.copy_on_write"]
    opened.get_by_role("button", name="Everything that ran").click()
    assert {"BlockTable.append", "BlockAllocator.copy_on_write"} <= {
        name.split()[0] for name in opened.locator(".name").all_text_contents()
    }
    assert opened.locator(".now").is_visible()


@in_both
def test_a_line_leads_to_the_next_step_that_runs_it(opened: Any) -> None:
    stepper = opened.locator("paged-stepper")
    ran = """(s) => s.data.lines_of.flatMap((which, i) =>
      s.data.lines[which].some(([f]) => s.data.functions[f].name === "Engine._finish_step") ? [i + 1] : [])"""
    steps = stepper.evaluate(ran)
    assert len(steps) >= 3
    stepper.evaluate("(s, n) => s.go(n)", steps[0])
    for n in [*steps[1:], steps[0]]:
        opened.locator(".now").click()
        assert stepper.evaluate("s => s.n") == n
    opened.keyboard.press("ArrowUp")  # to the line above
    opened.keyboard.press("Enter")
    assert stepper.evaluate("s => [s.n, s.shadowRoot.activeElement.matches('.ran')]") == [steps[1], True]


# --- What is drawn --------------------------------------------------------------------------------


def preempted_run() -> str:
    """Two samples, and requests that are preempted by swapping, in a pool too small."""
    model = Storyteller(["one two three four five six seven eight nine ten", "one two three four FIVE SIX SEVEN"])
    with record("Preempted", model.decode) as run:
        engine = model.engine(num_blocks=6, block_size=4, num_swap_blocks=6, preemption="swap", max_model_len=20)
        for prompt, n in [("one two three", 2), ("one two three four five", 1), ("one two three four", 1)]:
            engine.add_request(model.encode(prompt), SamplingParams(n=n, max_tokens=5, seed=1))
        while engine.has_unfinished_requests():
            engine.step()
    assert {event.name for event in run.events} >= {"swapped_out", "swapped_in", "block_copied", "sequence_forked"}
    return run.page()


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of that run."""
    path = tmp_path_factory.mktemp("crowded") / "run.html"
    path.write_text(preempted_run())
    return path


@pytest.fixture(params=SCREENS)
def preempted(visiting: Visiting, crowded: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    with visiting(crowded, **SCREENS[request.param]) as watched:
        yield watched.page


@pytest.fixture(params=["small", *SCREENS])
def either(visiting: Visiting, small: Path, crowded: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The small run; and the crowded one, on each screen."""
    file = small if request.param == "small" else crowded
    with visiting(file, **SCREENS.get(request.param, {})) as watched:
        yield watched.page


@in_both
def test_an_arrow_leads_from_each_table_entry_into_its_block(either: Any) -> None:
    look = """(stepper) => {
      const tables = [...stepper.fold.at(stepper.n).sequences.values()].flatMap((s) => s.table.map((block) =>
        [`${s.swapped ? "host" : "block"} ${block}`, s.id]));
      const arrows = [...stepper.arrows.children].map((path) => {
        const block = stepper.shadowRoot.querySelector(`.pool [data-key="${path.dataset.to}"]`).getBoundingClientRect();
        const head = path.getPointAtLength(path.getTotalLength() - 5).matrixTransform(path.getScreenCTM());
        const inside = head.x >= block.left && head.x <= block.right && head.y >= block.top && head.y <= block.bottom;
        return [path.dataset.to, Number(path.dataset.from.split(" ")[1]), inside];
      });
      return [tables, arrows, stepper.memory.offsetParent !== null && stepper.seqs.offsetParent !== null];
    }"""
    steps = either.evaluate(EACH_STEP, look)
    assert max(len(tables) for tables, _, _ in steps) >= 2
    for tables, arrows, both_are_seen in steps:
        assert all(inside for _, _, inside in arrows)
        assert [arrow[:2] for arrow in arrows] == (tables if both_are_seen else [])


@in_both
def test_nothing_changes_its_height_from_step_to_step(either: Any) -> None:
    parts = ["all", "time", "saying", "memory", "seqs", "code"]
    look = f"(stepper) => {parts}.map((part) => stepper[part].offsetHeight)"
    for tab in ("Memory", "Sequences", "Code"):
        if either.get_by_role("button", name=tab, exact=True).is_visible():
            either.get_by_role("button", name=tab, exact=True).click()
        assert len({tuple(heights) for heights in either.evaluate(EACH_STEP, look)}) == 1


@in_both
def test_on_a_phone_controls_sentence_and_pool_are_in_one_screen(preempted: Any) -> None:
    if preempted.viewport_size["width"] > 700:
        return
    preempted.locator(".time").evaluate("time => time.scrollIntoView()")
    bottom = preempted.locator(".memory .pools > div").first.evaluate("pool => pool.getBoundingClientRect().bottom")
    assert bottom <= preempted.viewport_size["height"]
    assert preempted.evaluate("document.documentElement.scrollWidth") <= preempted.viewport_size["width"]


@in_both
def test_what_is_pointed_at_or_has_the_focus_lights_what_belongs_to_it(opened: Any) -> None:
    stepper = opened.locator("paged-stepper")
    forked = stepper.evaluate("s => s.events.findIndex((e) => e.event === 'sequence_forked') + 1")
    stepper.evaluate("(s, n) => s.go(n)", forked)
    keys = "s => [...s.shadowRoot.querySelectorAll('[data-key].lit')].map((lit) => lit.dataset.key)"
    opened.locator(".pool li").first.focus()
    assert stepper.evaluate(keys) == ["block 0", "entry 0 0", "entry 1 0"]
    opened.keyboard.press("ArrowDown")
    assert stepper.evaluate(keys) == ["block 1"]
    opened.keyboard.press("ArrowRight")  # the keys go on working, and the focus stays
    assert stepper.evaluate("s => [s.n, s.shadowRoot.activeElement.dataset.key]") == [forked + 1, "block 1"]
    opened.locator(".entry").nth(1).locator(".tok").nth(2).hover()
    assert stepper.evaluate(keys) == ["block 0", "entry 1 0"]
    assert opened.locator(".slots .lit").all_text_contents() == ["three"]
    strong = "s => [...s.arrows.querySelectorAll('.strong')].map((path) => path.dataset.from)"
    assert stepper.evaluate(strong) == ["entry 1 0"]  # and what has changed is not, as long as something is pointed at


def luminance(color: str) -> float:
    """Of an rgb() color, as WCAG has it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_the_letters_of_sequences_can_be_read_on_their_colours_which_are_the_demos(opened: Any) -> None:
    colours = opened.evaluate(
        """() => {
          const stepper = document.querySelector("paged-stepper");
          stepper.say.replaceChildren(...Array.from({length: 12}, (_, i) => stepper.chip(i)), stepper.chip(27));
          const seen = [...stepper.say.children].map((chip) => [getComputedStyle(chip), chip.textContent]);
          return seen.map(([style, letter]) => [style.backgroundColor, style.color, letter]);
        }"""
    )
    assert "".join(letter for _, _, letter in colours) == "ABCDEFGHIJKLAB"
    palette = [tuple(Color.from_ansi(number).get_truecolor()) for number in COLORS]
    assert [tuple(map(int, re.findall(r"\d+", back))) for back, _, _ in colours[:12]] == palette
    for back, ink, _ in colours:
        dark, light = sorted((luminance(back), luminance(ink)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Browser, crowded: Path, scheme: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
    page.goto(crowded.as_uri())
    page.add_script_tag(content=axe_script())
    last = page.evaluate("document.querySelector('paged-stepper').events.length")
    rules = COLOURS if scheme == "dark" else {}
    for n in range(1, last + 1, 20):
        page.evaluate("n => document.querySelector('paged-stepper').go(n)", n)
        violations = axe_violations(page, **rules)
        assert not violations, (n, [(v["id"], [node["html"][:200] for node in v["nodes"]]) for v in violations])
    page.close()


# --- Movement -------------------------------------------------------------------------------------

FLIGHTS = {"block_copied": "copied", "swapped_out": "out", "swapped_in": "in"}
LOOK = """(stepper) => [stepper.fliers.children.length, stepper.moves.querySelectorAll("path").length,
  stepper.moves.textContent.trim(), stepper.state.querySelectorAll(".slots.gone").length]"""

UNDER_WAY = """(stepper) => {
  const {event, destination, pairs} = stepper.events[stepper.n - 1];
  const to = destination ?? pairs[0][1];
  const cell = stepper.cells().get(`${event === "swapped_out" ? "host" : "block"} ${to}`);
  return [getComputedStyle(stepper.fliers.querySelector("b")).visibility, +getComputedStyle(cell).opacity,
    +getComputedStyle(stepper.moves).opacity];
}"""
"""What flies does not say yet which block it is, and it is neither there yet nor its arrow drawn."""


def test_what_is_copied_and_swapped_flies_and_leaves_an_arrow_with_a_word(preempted: Any) -> None:
    stepper = preempted.locator("paged-stepper")
    events = stepper.evaluate("s => s.events")
    for i, event in enumerate(events):
        if word := FLIGHTS.get(event["event"]):
            pairs = len(event.get("pairs", "1"))
            stepper.evaluate("(s, n) => { s.go(n); s.go(n + 1); }", i)
            vacated = pairs if event["event"].startswith("swapped") else 0
            if preempted.viewport_size["width"] > 700 or event["event"] == "block_copied":
                assert stepper.evaluate(LOOK) == [pairs, pairs, word, vacated]
                assert stepper.evaluate(UNDER_WAY) == ["hidden", 0.15, 0.15]
            preempted.wait_for_function("document.querySelector('paged-stepper').fliers.children.length === 0")
            assert stepper.evaluate(LOOK)[1:] == [pairs, word, vacated]
            stepper.evaluate("(s, n) => s.go(n + 2)", i)
            assert stepper.evaluate(LOOK) == [0, 0, "", 0]
            stepper.evaluate("(s, n) => { s.go(n); s.go(n + 1); s.go(n); }", i)  # back, while it flies
            assert stepper.evaluate(LOOK)[:3] == [0, 0, ""]
            stepper.evaluate("(s, n) => { s.go(n + 2); s.go(n + 1); }", i)  # nothing flies backwards
            assert stepper.evaluate(LOOK) == [0, pairs, word, vacated]
            stepper.evaluate("(s, n) => { s.go(1); s.go(n + 1); }", i)  # who jumps there sees it too
            assert preempted.viewport_size["width"] < 700 or stepper.evaluate(LOOK)[0] == pairs


def test_who_wants_no_movement_has_the_arrows_alone(browser: Browser, crowded: Path) -> None:
    page = browser.new_page(reduced_motion="reduce")
    page.goto(crowded.as_uri())
    looked = page.evaluate(EACH_STEP, LOOK)
    assert not any(flying for flying, _, _, _ in looked)
    assert {word for _, arrows, word, _ in looked if arrows} == set(FLIGHTS.values())
    page.close()


def test_what_is_evicted_and_what_is_held_twice_have_their_arrows(browser: Browser, tmp_path: Path) -> None:
    heard: list[Event] = []
    model = Storyteller(["one two three four five six", "a b c d e f"])
    engine = model.engine(num_blocks=4, block_size=2, enable_prefix_caching=True)
    engine.listeners.append(heard.append)
    for prompts in (["one two three", "one two three"], ["a b c d e"]):
        for prompt in prompts:
            engine.add_request(model.encode(prompt), SamplingParams(max_tokens=3, temperature=0))
        while engine.has_unfinished_requests():
            engine.step()
    (tmp_path / "run.html").write_text(page(as_data("", heard, words=dict(enumerate(model.words)))))
    watched = Watched(browser, viewport={"width": 320, "height": 844})
    watched.page.goto(f"file://{tmp_path}/run.html")
    looked = watched.page.evaluate(EACH_STEP, LOOK)
    beside = "(stepper) => stepper.moved()[0].filter(({b}) => b.left + b.width > stepper.state.clientWidth).length"
    assert not any(watched.page.evaluate(EACH_STEP, beside)), "what is evicted does not fly out of the page"
    assert {(flying, arrows, word) for flying, arrows, word, _ in looked if arrows} == {
        (1, 1, "same"),
        (1, 1, "evicted"),
    }
    watched.check()
    watched.page.close()


# --- What is wrong --------------------------------------------------------------------------------


def test_what_is_wrong_is_in_the_picture_and_the_last_step_says_that_it_broke(browser: Browser, tmp_path: Path) -> None:
    run = runpy.run_path("docs/runs/minus_one.py")["run"]
    (tmp_path / "run.html").write_text(run.page())
    watched = Watched(browser, reduced_motion="reduce")
    page = watched.page
    page.goto(f"file://{tmp_path}/run.html?step=8")
    claims = (
        "[...document.querySelector('paged-stepper').shadowRoot.querySelectorAll('.claim')].map((c) => c.innerText)"
    )
    assert [re.sub(r"\s+", " ", claim) for claim in page.evaluate(claims)] == 2 * ["tables ×0 · allocator says ×-1"] + [
        "",
        "",
    ]
    page.keyboard.press("Tab")
    page.get_by_role("slider").press("End")
    assert (
        page.locator(".say").text_content().startswith("Broken here: InvariantViolation: invariant 'liveness' broken")
    )
    assert page.locator(".wrong").count() == 4
    assert page.locator(".badly").text_content() == "broken"
    heights = page.evaluate(EACH_STEP, "(stepper) => [stepper.offsetHeight, stepper.memory.offsetHeight]")
    assert len(set(map(tuple, heights))) == 1
    page.add_script_tag(content=axe_script())
    violations = axe_violations(page)
    assert not violations, [(v["id"], [node["html"][:200] for node in v["nodes"]]) for v in violations]
    watched.check()
    page.close()


def test_so_does_the_page_of_a_counterexample(visiting: Visiting, tmp_path: Path) -> None:
    grade = ["grade", "block-allocator", "museum/minus_one.py", "--no-model", "--counterexamples", str(tmp_path)]
    assert main_and_return(grade) == 1
    run = tmp_path / "minus_one" / "allocate-and-free.jsonl"
    assert main_and_return(["page", str(run), "-o", str(tmp_path / "page.html")]) == 0
    with visiting(tmp_path / "page.html", "?step=999") as watched:
        say, claim = watched.page.locator(".say").text_content(), watched.page.locator(".wrong .claim").inner_text()
        assert say.startswith(
            "Broken here: invariant 'exact-references' broken: after allocator.allocate() ref_count(0) is 0"
        )
        assert claim.split() == ["tables", "×1", "·", "allocator", "says", "×0"]


def test_a_run_that_contradicts_itself_can_be_stepped_through(visiting: Visiting, tmp_path: Path) -> None:
    """The sentence says so; what cannot be followed changes nothing more."""
    events = [
        EngineStarted(num_blocks=4, num_swap_blocks=0, block_size=2, max_model_len=8),
        BlocksFreed(sequence=7, blocks=(1,)),
        StepStarted(1),
    ]
    (tmp_path / "run.html").write_text(page(as_data("", events)))
    with visiting(tmp_path / "run.html", "?step=3") as watched:
        assert watched.page.locator(".n").text_content() == "3 / 3"
        assert "does not follow from what happened before" in watched.page.locator(".say").text_content()
        assert watched.page.locator(".pool .free").count() == 4


# --- The timeline ---------------------------------------------------------------------------------


@in_both
def test_a_click_on_the_timeline_leads_to_the_step_that_is_drawn_there(preempted: Any) -> None:
    stepper = preempted.locator("paged-stepper")
    marks = stepper.evaluate("s => [...s.whole.rows.values()].flatMap((row) => row.marks)")
    at = {mark["kind"]: mark["at"] for mark in marks}
    assert at.keys() == {"fork", "copy", "preemption", "end"}
    for n in at.values():
        x = stepper.evaluate("(s, n) => s.x(n) - s.slider.offsetLeft", n)
        preempted.get_by_role("slider").click(position={"x": x, "y": 30})
        assert abs(stepper.evaluate("s => s.n") - n) <= (0 if preempted.viewport_size["width"] > 700 else 1)
    said = preempted.get_by_role("slider").get_attribute("aria-valuetext")
    assert re.fullmatch(r"step \d+ of \d+, engine step \d+", said)


def test_the_rows_of_the_timeline_say_who_waits_runs_and_is_swapped_out(preempted: Any) -> None:
    """At every step as the fold says."""
    look = """(stepper) => {
      const state = stepper.fold.at(stepper.n);
      const swapped = (r) => [...state.sequences.values()].some((s) => s.request === r && s.swapped);
      return Object.fromEntries([...stepper.whole.rows].map(([r, {spans}]) => [r, [
        state.running.includes(r) ? "running" : swapped(r) ? "swapped" : state.waiting.includes(r) ? "waiting" : null,
        spans.find(({from, to}) => from <= stepper.n && stepper.n < to)?.kind ?? null]]));
    }"""
    for of_requests in preempted.evaluate(EACH_STEP, look)[:-1]:
        for request, (said, drawn) in of_requests.items():
            assert said == drawn, request


def test_a_long_run_has_a_timeline_that_is_not_higher_than_what_runs_at_a_time(
    visiting: Visiting, tmp_path: Path
) -> None:
    """And tells of the last sequences that have ended, with their number."""
    heard: list[Event] = []
    model = Storyteller(["one two three four five six seven eight nine ten"])
    engine = model.engine(num_blocks=16, block_size=4)
    engine.listeners.append(heard.append)
    for _ in range(30):
        for _ in range(4):
            engine.add_request(model.encode("one two three"), SamplingParams(max_tokens=6, temperature=0))
        while engine.has_unfinished_requests():
            engine.step()
    (tmp_path / "run.html").write_text(page(as_data("", heard)))
    with visiting(tmp_path / "run.html", "?step=99999") as watched:
        assert watched.page.locator(".time svg").first.bounding_box()["height"] < 130
        tops = watched.page.locator(".time > div rect.running").evaluate_all(
            "rows => rows.map((row) => row.getAttribute('y'))"
        )
        assert (len(tops), len(set(tops))) == (120, 4)
        assert watched.page.get_by_text("Finished, the last 12 of 120").count() == 1
        assert watched.page.locator(".seq").count() == 12


def test_what_is_computed_again_is_drawn_so_until_it_has_a_new_token(visiting: Visiting, tmp_path: Path) -> None:
    heard: list[Event] = []
    model = Storyteller(["one two three four five six seven eight nine ten"])
    engine = model.engine(num_blocks=5, block_size=2, preemption="recompute", max_model_len=10)
    engine.listeners.append(heard.append)
    for _ in range(2):
        engine.add_request(model.encode("one two three"), SamplingParams(max_tokens=6, temperature=0))
    while engine.has_unfinished_requests():
        engine.step()
    (tmp_path / "run.html").write_text(page(as_data("", heard)))
    with visiting(tmp_path / "run.html") as watched:
        rows = watched.page.evaluate("[...document.querySelector('paged-stepper').whole.rows.values()]")
        kinds = [[span["kind"] for span in row["spans"]] for row in rows]
        assert kinds == [["waiting", "running"], ["waiting", "running", "waiting", "recomputing", "running"]]


def test_n_leads_to_the_next_event_of_interest_and_shift_to_engine_steps(opened: Any) -> None:
    events = opened.evaluate("document.querySelector('paged-stepper').events.map((e) => e.event)")
    number = opened.locator(".n")
    opened.get_by_role("slider").focus()
    opened.keyboard.press("n")
    assert number.text_content() == f"2 / {len(events)}"  # of which there is something to note
    opened.keyboard.press("n")
    assert number.text_content() == f"{events.index('sequence_forked') + 1} / {len(events)}"
    opened.get_by_role("button", name="Next event of interest").click()
    assert number.text_content() == f"{events.index('block_copied') + 1} / {len(events)}"
    starts = [i + 1 for i, event in enumerate(events) if event == "step_started"]
    opened.keyboard.press("Home")
    for start in starts:
        opened.keyboard.press("Shift+ArrowRight")
        assert number.text_content() == f"{start} / {len(events)}"
    opened.keyboard.press("Shift+ArrowLeft")
    assert number.text_content() == f"{starts[-2]} / {len(events)}"


def test_it_plays_at_other_speeds(in_still_time: Any) -> None:
    opened = in_still_time
    opened.get_by_role("combobox", name="Speed").select_option("4×")
    opened.get_by_role("button", name="Play").click()
    opened.clock.run_for(1600)
    assert opened.locator(".n").text_content().startswith("5 /")


# --- Pages ----------------------------------------------------------------------------------------


def test_what_a_run_says_cannot_break_out_of_its_page(visiting: Visiting, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    model = Storyteller([f"one {evil} three four"])
    with record(evil, model.decode) as run:
        engine = model.engine(num_blocks=8, block_size=4)
        engine.add_request([0], SamplingParams(max_tokens=3, temperature=0), request_id=evil)
        while engine.has_unfinished_requests():
            engine.step()
    (tmp_path / "run.html").write_text(run.page())
    with visiting(tmp_path / "run.html", "?step=8") as watched:
        assert evil.split()[0] in watched.page.locator(".state").text_content()
        assert watched.page.locator("img").count() == 0


def test_the_command_makes_a_page_from_recorded_events(visiting: Visiting, tmp_path: Path) -> None:
    heard: list[Event] = []
    WorkloadRun(random_workload(3), listeners=[heard.append]).to_the_end()
    (tmp_path / "run.jsonl").write_text("".join(event.to_json() + "\n" for event in heard))
    main_and_return(["page", str(tmp_path / "run.jsonl"), "-o", str(tmp_path / "page.html")])
    seen = sum(not isinstance(event, UNSEEN) for event in heard)
    with visiting(tmp_path / "page.html", f"?step={seen}") as watched:
        assert watched.page.locator(".n").text_content() == f"{seen} / {seen}"
        assert watched.page.locator(".code").count() == 0  # there are no source lines in a file of events


def main_and_return(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


STARTED = EngineStarted(num_blocks=4, num_swap_blocks=0, block_size=2, max_model_len=8).to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no events"),
        ('{"event":"block_evicted","block":1}\n', "the first event of a run is engine_started"),
        ('{"event":"nonsense"}\n', "line 1: not an event"),
        (f"{STARTED}\n{STARTED}\n", "one engine_started event"),
        (f'{STARTED}\n{{"event":"block_evicted","block":1}}\n', "line 2"),
        ('\n{"event":\n', "line 2"),
    ],
)
def test_the_command_says_what_is_wrong_with_its_file(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.jsonl").write_text(text)
    assert main_and_return(["page", str(tmp_path / "run.jsonl"), "-o", str(tmp_path / "page.html")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_the_command_names_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_and_return(["page", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "page.html")]) == 1
    assert "No such file" in capsys.readouterr().err
