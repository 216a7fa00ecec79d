"""The web component can be used by hand, key and link. (That it follows the events rightly: tests/replay.)"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from minipaged import SamplingParams
from minipaged.cli import main
from minipaged.events import EngineStarted, Event
from minipaged.stepper import Storyteller, record
from minipaged.stepper.page import UNSEEN, as_data, page
from tests.browser import Watched
from tests.workloads import Run, random_workload


def small_run() -> str:
    model = Storyteller(["one two three four five six seven", "one two three four FIVE SIX SEVEN"])
    with record("A small run", model.decode) as run:
        engine = model.engine(num_blocks=8, block_size=4)
        engine.add_request(model.encode("one two three"), SamplingParams(n=2, max_tokens=3, seed=1))
        run.note("Nothing has run yet.")
        while engine.has_unfinished_requests():
            engine.step()
    return run.page()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Any:
    (tmp_path / "run.html").write_text(small_run())
    watched = Watched(browser)
    watched.page.goto(f"file://{tmp_path}/run.html")
    yield watched.page
    watched.check()
    watched.page.close()


@pytest.mark.parametrize("seed", [3, 8, 21])
def test_every_step_of_a_random_run_can_be_drawn_forward_and_back(browser: Browser, tmp_path: Path, seed: int) -> None:
    heard: list[Event] = []
    Run(random_workload(seed), listeners=[heard.append]).to_the_end()
    (tmp_path / "run.html").write_text(page(as_data("", heard)))
    watched = Watched(browser)
    watched.page.goto(f"file://{tmp_path}/run.html")
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
    watched.check()
    watched.page.close()


def test_a_note_stands_behind_the_sentence_of_its_step_and_of_no_other(opened: Any) -> None:
    say = opened.locator(".say")
    opened.get_by_role("slider").fill("2")
    assert say.text_content().endswith("It waits and holds no block. Nothing has run yet.")
    opened.keyboard.press("ArrowRight")
    assert "Nothing has run yet." not in say.text_content()


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


def test_keys_count_only_inside(opened: Any) -> None:
    opened.locator("h1").click()
    opened.keyboard.press("ArrowRight")
    assert opened.locator(".n").text_content().startswith("1 /")


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


def test_it_plays_and_pauses(opened: Any) -> None:
    opened.clock.install()
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
    assert re.sub(r"\s+", " ", block.inner_text()).startswith("0 \N{MULTIPLICATION SIGN}2 s0 s1")
    assert opened.locator(".pool .free").count() == 7
    assert opened.locator(".say").get_attribute("aria-live") == "polite"
    assert "forked" in opened.locator(".say").text_content()


def test_a_token_that_is_only_a_line_break_can_be_seen(opened: Any) -> None:
    look = "s => { s.data.words = {...s.data.words, 3: '\\n\\n'}; s.go(s.events.length); return s.visible(3); }"
    arrows = opened.locator("paged-stepper").evaluate(look)
    assert arrows == 2 * "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
    assert arrows in opened.locator(".tokens").first.text_content()


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


def test_what_a_run_says_cannot_break_out_of_its_page(browser: Browser, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    model = Storyteller([f"one {evil} three four"])
    with record(evil, model.decode) as run:
        engine = model.engine(num_blocks=8, block_size=4)
        engine.add_request([0], SamplingParams(max_tokens=3, temperature=0), request_id=evil)
        while engine.has_unfinished_requests():
            engine.step()
    (tmp_path / "run.html").write_text(run.page())
    watched = Watched(browser)
    watched.page.goto(f"file://{tmp_path}/run.html?step=8")
    assert evil.split()[0] in watched.page.locator(".state").text_content()
    assert watched.page.locator("img").count() == 0
    watched.check()
    watched.page.close()


def test_the_command_makes_a_page_from_recorded_events(browser: Browser, tmp_path: Path) -> None:
    heard: list[Event] = []
    Run(random_workload(3), listeners=[heard.append]).to_the_end()
    (tmp_path / "run.jsonl").write_text("".join(event.to_json() + "\n" for event in heard))
    main_and_return(["page", str(tmp_path / "run.jsonl"), "-o", str(tmp_path / "page.html")])
    watched = Watched(browser)
    seen = sum(not isinstance(event, UNSEEN) for event in heard)
    watched.page.goto(f"file://{tmp_path}/page.html?step={seen}")
    assert watched.page.locator(".n").text_content() == f"{seen} / {seen}"
    assert watched.page.locator(".code").count() == 0  # there are no source lines in a file of events
    watched.check()
    watched.page.close()


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
