"""What is drawn: snapshots of one small run at several sizes, and what holds at every size."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.color import Color, ColorSystem

from minipaged.demo import replay
from minipaged.demo.player import Film, Player
from minipaged.demo.recording import Screencast
from minipaged.demo.view import BASIC_COLORS, COLORS, Caption, Frame, Note, PlayerStatus, StateView, _wrap_cells
from minipaged.events import (
    BlockCopied,
    BlocksPassed,
    BlocksRolledBack,
    EngineStarted,
    Event,
    PrefixReused,
    RequestAdmitted,
    RequestArrived,
    RequestPreempted,
    RequestRefused,
    StepFinished,
    SwappedIn,
    TokenGenerated,
    TokensAccepted,
    TokensComputed,
    TokensDrafted,
)
from minipaged.params import BeamSearchParams, EngineConfig, SamplingParams
from minipaged.replay.state import State
from minipaged.replay.teller import tell
from minipaged.replay.timeline import Timeline
from tests.tokens import bytes_joined, token
from tests.workloads import Workload, WorkloadRequest, WorkloadRun, letters, random_workload

SNAPSHOTS = Path(__file__).parent / "snapshots"
CAPTION = Caption("a small run", "Watch three samples share, one beam search, and a pool that is too small.")
ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")


def small_run() -> list[Event]:
    """Sharing, copy-on-write, beams, a prefix found again, and preemption by swap, in a pool of 20 blocks."""
    prompt = tuple(range(9))
    requests = (
        WorkloadRequest(0, prompt, SamplingParams(n=3, seed=1, max_tokens=14, ignore_eos=True)),
        WorkloadRequest(2, prompt, SamplingParams(seed=2, max_tokens=20, ignore_eos=True)),
        WorkloadRequest(3, prompt[:6], BeamSearchParams(beam_width=2, max_tokens=10)),
        WorkloadRequest(4, prompt[::-1], SamplingParams(seed=3, max_tokens=20, ignore_eos=True)),
    )
    config = EngineConfig(
        num_blocks=20,
        num_swap_blocks=16,
        block_size=4,
        max_model_len=64,
        vocab_size=26,
        preemption="swap",
        seed=0,
        debug=True,
    )
    run = WorkloadRun(Workload(config, requests, swap_is_cheap=True), listeners=[(heard := []).append])
    run.to_the_end()
    assert {"block_copied", "request_preempted", "swapped_in", "prefix_reused"} <= {event.name for event in heard}
    return [replace(event, seconds=0.04) if isinstance(event, StepFinished) else event for event in heard]


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return small_run()


def after(events: list[Event], kind: type[Event], number: int = 1) -> int:
    """The position after so many events of one kind."""
    return [place for place, event in enumerate(events, start=1) if isinstance(event, kind)][number - 1]


class Frames:
    """Keeps what a player draws, as a recording would."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.texts: list[str] = []

    def add(self, now: float, frame: Frame) -> None:
        self.frames.append(frame)
        self.texts.append(frame.text())


def drawn(events: list[Event], position: int, width: int, height: int, **options: Any) -> Frame:
    """The picture that a player shows when it has come that far."""
    frames = Frames()
    player = Player(Film(width, height), StateView(letters, **options), recording=frames, keys=True)  # type: ignore[arg-type]
    player.caption = CAPTION
    player.play(Timeline(events[:position]), lambda: False)
    return frames.frames[-1]


def check_snapshot(name: str, text: str) -> None:
    """Compare with the file of that name; UPDATE_SNAPSHOTS=1 writes it (then read what has changed)."""
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(text + "\n", encoding="utf-8")
    assert text + "\n" == path.read_text(encoding="utf-8")


# --- Snapshots ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
@pytest.mark.parametrize("kind", [BlockCopied, RequestPreempted, SwappedIn])
def test_the_picture_after_an_event_is_the_one_that_was_looked_at(
    events: list[Event], kind: type[Event], width: int, height: int
) -> None:
    frame = drawn(events, after(events, kind), width, height)
    check_snapshot(f"{kind.name}-{width}x{height}", frame.text())


def test_without_colours_the_same_is_said_in_bold_dim_and_reverse(events: list[Event]) -> None:
    position = after(events, SwappedIn)
    with_colours, without = (drawn(events, position, 80, 24, colors=colors) for colors in (COLORS, ()))
    assert with_colours.text() == without.text()
    plain = "\n".join(without.ansi(ColorSystem.EIGHT_BIT))
    codes = {code for given in ESCAPE.findall(plain) for code in given.split(";")}
    assert codes <= {"", "0", "1", "2", "3", "4", "7"}
    assert "7" in codes
    assert "38;5;" in "\n".join(with_colours.ansi(ColorSystem.EIGHT_BIT))
    check_snapshot("no-color-80x24", plain.replace("\x1b", "␛"))


def test_every_colour_is_seen_on_black_and_on_white() -> None:
    """WCAG asks 3 : 1 of large or bold text."""

    def luminance(red: int, green: int, blue: int) -> float:
        linear = [
            c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (red / 255, green / 255, blue / 255)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for number in COLORS:
        own = luminance(*Color.from_ansi(number).get_truecolor())
        assert (own + 0.05) / 0.05 > 3
        assert 1.05 / (own + 0.05) > 3
    assert not {0, 7, 8, 15} & set(BASIC_COLORS)  # black, white, grey


def test_not_a_terminal_gets_lines(events: list[Event], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(f"{event.to_json()}\n" for event in events))
    replay(path)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    check_snapshot("not-a-terminal", printed.rstrip("\n"))


# --- What holds at every size ---------------------------------------------------------------------

SIZES = [(20, 6), (40, 12), (60, 16), (80, 24), (80, 60), (100, 30), (120, 40), (200, 20), (250, 70)]


@pytest.fixture(scope="module")
def random_runs() -> list[list[Event]]:
    """The events of each of some random workloads."""
    runs: list[list[Event]] = []
    for seed in range(4):
        runs.append([])
        WorkloadRun(random_workload(seed), listeners=[runs[-1].append]).to_the_end()
    return runs


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_a_picture_is_as_wide_and_as_high_as_the_terminal(
    seed: int, width: int, height: int, random_runs: list[list[Event]]
) -> None:
    timeline = Timeline(random_runs[seed])
    view = StateView(letters)
    while not timeline.at_end:
        timeline.seek(timeline.position + 17)
        frame = view.frame(timeline.state, width, height, CAPTION, [], PlayerStatus(keys="q quit"))
        assert len(frame.lines) == height
        assert all(cell_len("".join(text for text, _, _ in line)) == width for line in frame.lines)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_ranks_have_the_same_pool_side_by_side(events: list[Event], width: int, height: int) -> None:
    timeline = Timeline(events)
    timeline.seek(after(events, BlockCopied))
    ranks = ("rank 0", "rank 1", "rank 2")
    frame = StateView(letters).frame(timeline.state, width, height, replace(CAPTION, ranks=ranks), [], PlayerStatus())
    assert len(frame.lines) == height
    assert all(cell_len("".join(text for text, _, _ in line)) == width for line in frame.lines)
    pools = [line.split(" │ ") for line in frame.text().splitlines() if " │ " in line]
    assert len(pools) > 2 or height < 12
    for tiles in pools[1:]:
        assert len({each.rstrip() for each in tiles}) == 1
    if width >= 60:
        assert [title.split(":")[0] for title in pools[0]] == [f"── {rank}" for rank in ranks]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_two_engines_have_each_its_pool(events: list[Event], width: int, height: int) -> None:
    """The other one's first; what has just happened is marked in the second."""
    timeline, other = Timeline(events), State()
    timeline.seek(after(events, BlockCopied))
    other.apply(EngineStarted(num_blocks=5, num_swap_blocks=0, block_size=4, max_model_len=64))
    caption = replace(CAPTION, ranks=("one", "other"), beside=other)
    frame = StateView(letters).frame(timeline.state, width, height, caption, [], PlayerStatus())
    assert len(frame.lines) == height
    assert all(cell_len("".join(text for text, _, _ in line)) == width for line in frame.lines)
    pools = [line.split(" │ ") for line in frame.text().splitlines() if " │ " in line]
    if width >= 60 and height >= 12:
        assert pools[0][0].startswith("── one: 0 of 5")
        assert pools[0][1].startswith(f"── other: {len(timeline.state.device.holders)} of ")
        assert not any(letter in tiles[0] for tiles in pools[1:] for letter in "AB")
        assert any("A" in tiles[1] for tiles in pools[1:])


def test_a_block_that_a_window_has_passed_is_a_hole_in_the_table_and_free_in_the_pool() -> None:
    state = State()
    for event in (
        EngineStarted(8, 0, 2, 16, (None, 2)),
        RequestArrived("a", 0, (1, 2, 3), 1),
        RequestAdmitted("a"),
        TokensComputed(0, 3, (0, 1, 2, 3), 0),
    ):
        state.apply(event)
    before = StateView(letters).frame(state, 80, 24, CAPTION, [], PlayerStatus()).text()
    state.apply(BlocksPassed(0, (1,), (1,)))
    after = StateView(letters).frame(state, 80, 24, CAPTION, [], PlayerStatus()).text()
    rows = [[line.split()[:5] for line in text.splitlines() if "/2  " in line] for text in (before, after)]
    assert rows == [
        [["0", "0", "1", "2/2", "1"], ["1", "2", "3", "1/2", "1"]],
        [["0", "0", "-", "2/2", "1"], ["1", "2", "3", "1/2", "1"]],
    ]
    assert "4 held, 4 free" in before
    assert "3 held, 5 free" in after


@pytest.mark.parametrize(("unicode", "sign"), [(True, "▯"), (False, "?")])
def test_drafted_tokens_are_hollow_until_they_stand_or_vanish(unicode: bool, sign: str) -> None:
    """In tiles, where the part of a block that they fill is hollow, and in the words of a table."""
    state, view, seen = State(), StateView(letters, unicode=unicode), []
    for event in (
        EngineStarted(6, 0, 4, 16),
        RequestArrived("a", 0, (0, 1, 2), 1),
        TokensComputed(0, 3, (0,), 0),
        TokensDrafted(0, (3, 4, 5)),
        TokensComputed(0, 6, (1,), 0),
        TokensAccepted(0, 3, 1),
        BlocksRolledBack(0, 4, (1,)),
        TokenGenerated("a", 0, 3, -0.1),
    ):
        state.apply(event)
        text = view.frame(state, 80, 24, CAPTION, [], PlayerStatus()).text().replace(".", "·")
        tiles = ["".join(segment.text for segment in view._tile(state, state.device, block, 4)) for block in (0, 1)]
        seen.append((tiles, [line.split()[-1] for line in text.splitlines() if re.search(r" \d/4 ", line)]))
        assert (f"{sign} drafted" in text) == (state.counts["tokens_drafted"] > 0)
    assert seen[2:] == [
        (["A  ·", "·   "], ["A|B|C|·"]),
        (["A  ·", "·   "], ["A|B|C|·"]),
        (["A  ▯", "A▯··"], [f"A|B|C|{sign}D", f"{sign}E|{sign}F|·|·"]),
        (["A   ", "A▯··"], ["A|B|C|D", f"{sign}E|{sign}F|·|·"]),
        (["A   ", "·   "], ["A|B|C|D"]),
        (["A   ", "·   "], ["A|B|C|D"]),
    ]


def test_a_tile_that_holds_drafted_tokens_only_has_a_letter_that_is_not_solid() -> None:
    state = state_with(6, 1)
    for event in (TokensDrafted(0, (7,)), TokensComputed(0, 5, (1,), 0)):
        state.apply(event)
    assert [segment.text for segment in StateView()._tile(state, state.device, 1, 4)] == ["", "A···"]
    assert [segment.text for segment in StateView()._tile(state, state.device, 0, 4)] == ["A   "]


def test_wide_and_unprintable_characters_break_no_line(events: list[Event]) -> None:
    view = StateView(lambda tokens: "".join("界\x1b[2J\n🚆\u200b"[token % 7] for token in tokens))
    timeline = Timeline(events)
    timeline.seek(len(events) // 2)
    for width in (60, 80, 121):
        frame = view.frame(timeline.state, width, 24, CAPTION, [], PlayerStatus())
        assert all(cell_len("".join(text for text, _, _ in line)) == width for line in frame.lines)
        assert "\x1b" not in frame.text()


def test_names_reasons_and_prompts_cannot_command_the_terminal() -> None:
    evil = "\x1b]0;title\x07\x1b[2J\ud800\x9b31m"
    started = EngineStarted(8, 0, 4, 64)
    run = [started, RequestArrived(evil, 0, (1, 2), 1), RequestRefused(evil, f"too {evil}\nlong")]
    timeline = Timeline(run)
    view = StateView(lambda tokens: evil)
    view.questions = {evil: evil}
    notes = []
    while not timeline.at_end:
        if sentence := tell(timeline.state, timeline.next_event()):
            notes.append(Note(timeline.position, 1, sentence))
        timeline.forward()
        frame = view.frame(timeline.state, 100, 30, replace(CAPTION, run=evil), notes, PlayerStatus())
        assert all(line.isprintable() for line in frame.text().splitlines())
    assert notes, "nothing was told"


def test_a_character_that_begins_in_the_prompt_is_whole_in_the_answer() -> None:
    """And so is one at which the end of a long answer is cut (text-of-all)."""
    view = StateView(bytes_joined)
    parts = [token(bytes([byte])) for byte in "€".encode()]
    for number in (0, 200):
        state = State()
        state.apply(EngineStarted(64, 0, 16, 1024))
        state.apply(RequestArrived("r", 0, tuple(parts[:1]), 1))
        state.apply(TokensComputed(0, 1, (0,), 0))
        for one in parts[1:] + parts * number:
            state.apply(TokenGenerated("r", 0, one, -0.1))
        [sequence] = state.sequences.values()
        assert set(view._text(sequence, 100)) <= {"€", "…"}


def test_the_newest_words_are_seen_even_when_every_character_is_two_columns_wide() -> None:
    assert _wrap_cells("界" * 60, 40) == ["界" * 20] * 3
    assert _wrap_cells("ab " * 30, 10) == ["ab ab ab"] * 10
    assert _wrap_cells("", 10) == []


@pytest.mark.parametrize("width", [1, 3, 6, 12])
def test_the_narrowest_terminals_break_nothing(events: list[Event], width: int) -> None:
    for place in range(0, len(events), 60):
        assert drawn(events, place, width, 24).text() is not None


def test_a_terminal_that_knows_no_unicode_gets_ascii(events: list[Event]) -> None:
    for place in range(0, len(events), 40):
        assert drawn(events, place, 80, 24, unicode=False).text().isascii()


def state_with(num_blocks: int, holders: int, *, prompt: int = 4) -> State:
    """A pool in which so many sequences hold one block each."""
    state = State()
    state.apply(EngineStarted(num_blocks, 0, 4, 64))
    for number in range(holders):
        state.apply(RequestArrived(str(number), number, tuple(range(prompt)), 1))
        state.apply(TokensComputed(number, prompt, (number,), 0))
    return state


@pytest.mark.parametrize("num_blocks", [1, 30, 300, 5000, 100_000])
def test_a_pool_of_any_size_is_drawn_without_a_lie(num_blocks: int) -> None:
    """Tiles where there is room for them; else the legend says how many blocks a sign stands for."""
    held = min(num_blocks, 3 * num_blocks // 4 + 1)
    frame = StateView().frame(state_with(num_blocks, held), 80, 24, CAPTION, [], PlayerStatus())
    text = frame.text()
    assert f"{num_blocks} blocks of 4 slots: {held} held, {num_blocks - held} free" in text
    if match := re.search(r"a sign is (\d+) blocks", text):
        signs = "".join(text.split("free ──")[1].split("a sign is")[0].split())[1:].strip("─")
        assert len(signs) == -(-num_blocks // int(match[1]))
    else:
        assert num_blocks <= 300


def test_a_shared_block_shows_how_many_hold_it_and_a_partly_filled_one_how_much(events: list[Event]) -> None:
    timeline = Timeline(events)
    timeline.seek(after(events, BlockCopied) - 1)
    state = timeline.state
    block = next(event for event in events if isinstance(event, BlockCopied)).source
    line = StateView()._tile(state, state.device, block, 4)
    assert "".join(segment.text for segment in line) == f"A×{state.ref_count(block)}·"
    assert line[0].text == "A"  # one of four slots is filled, so one column of four is solid
    assert line[0].style is not None
    assert line[0].style.reverse


def test_a_block_that_only_the_cache_holds_is_dimmed(events: list[Event]) -> None:
    timeline = Timeline(events)
    timeline.seek(len(events))
    state = timeline.state
    assert state.num_cached_only == len(state.cached) > 0
    line = StateView()._tile(state, state.device, min(state.cached), 4)
    assert line[0].text.strip() == "(c)"
    assert line[0].style is not None
    assert line[0].style.dim


def test_the_bars_say_what_paging_takes_and_what_contiguous_would_reserve() -> None:
    text = StateView().frame(state_with(30, 3), 100, 30, CAPTION, [], PlayerStatus()).text()
    assert "12 of 120 slots taken, 100 % of them filled" in text
    assert "3 × 64 slots reserved, of which 1 fit" in text


# --- The player -----------------------------------------------------------------------------------


class Typist(Film):
    """A screen at which somebody presses these keys, one whenever the player waits."""

    def __init__(self, *keys: str) -> None:
        super().__init__(80, 24)
        self.keys = [*keys]

    def key(self, seconds: float):  # type: ignore[no-untyped-def]
        return self.keys.pop(0) if self.keys else super().key(seconds)


def play(events: list[Event], *keys: str) -> list[str]:
    frames = Frames()
    player = Player(Typist(*keys), StateView(letters), recording=frames, keys=True)  # type: ignore[arg-type]
    player.play(Timeline(events), lambda: False)
    return frames.texts


def test_stepping_back_and_on_again_shows_the_same_pictures(events: list[Event]) -> None:
    there = 60
    texts = play(events, *["right"] * there, *["left"] * 50, *["right"] * 50, "space")
    steps = texts[1 : there + 1]
    back, again = texts[there + 1 : there + 51], texts[there + 51 : there + 101]
    assert [f"event {place}/" in text for place, text in enumerate(steps, start=2)] == [True] * there
    assert back == steps[there - 51 : there - 1][::-1]
    assert again == steps[there - 50 :]


def test_who_steps_is_told_of_every_event(events: list[Event]) -> None:
    texts = play(events, *["right"] * (len(events) - 1), "space")
    timeline = Timeline(events)
    timeline.forward()
    for text in texts[1 : len(events)]:
        sentence = tell(timeline.state, timeline.next_event(), lambda token: letters([token]))
        timeline.forward()
        news = " ".join(text.split("what just happened")[1].split())
        if sentence:
            assert f"step {timeline.state.step} {sentence.text} space pause" in news.replace("─", "").replace("  ", " ")
    assert timeline.at_end


def test_playing_stops_where_something_happens_and_shows_it(events: list[Event]) -> None:
    texts = play(events)
    for words in ("forks into", "copied to block", "prefix cache", "preempted by swap", "is back"):
        assert any(words in text for text in texts), words


def test_a_question_is_shown_before_its_answer_also_when_it_arrives_later(events: list[Event]) -> None:
    frames, questions = Frames(), dict[str, str]()
    player = Player(Film(120, 40), StateView(letters), recording=frames)  # type: ignore[arg-type]
    timeline = Timeline()

    def advance() -> bool:
        if not len(timeline):
            questions["r1"] = "Who goes there?"
            for event in events:
                timeline.append(event)
            return True
        return False

    player.play(timeline, advance, questions=questions)
    assert any("Who goes there? → S" in text for text in frames.texts)


def test_the_words_are_explained_before_anything_happens(events: list[Event]) -> None:
    text = drawn(events, 1, 80, 24).text()
    for word in ("block table", "shared block", "copy-on-write", "preemption"):
        assert word in text
    assert max(len(line) for line in text.split("\n")) <= 80
    assert "…" not in text


def test_what_was_preempted_is_seen_on_the_host(events: list[Event]) -> None:
    position = after(events, RequestPreempted) + 1
    text = drawn(events, position, 120, 40).text()
    assert re.search(r"host: [1-9]\d* of 16 held", text)
    assert "on the host" in text
    assert re.search(r"swapped 1: [A-Z]", text)


def test_a_recording_of_an_empty_run_is_no_file(tmp_path: Path) -> None:
    recording = Screencast(tmp_path / "a.svg")
    recording.save()
    assert (tmp_path / "a.svg").read_text() == ""


def test_prefix_reuse_is_in_the_small_run(events: list[Event]) -> None:
    assert any(isinstance(event, PrefixReused) and event.source == "cache" for event in events)
