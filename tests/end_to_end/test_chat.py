"""`minipaged chat`: what it answers, what it finds in the cache, how it is stopped, and how it leaves the terminal."""

from __future__ import annotations

import io
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from minipaged import LLM, InvalidRequest, SamplingParams
from minipaged.cli import main
from minipaged.cli.conversation import BlockCounts, Conversation, Progress, TerminalView
from minipaged.events import BlockDeduplicated, Event, StepFinished
from tests.effort import examples, thorough
from tests.serve.harness import PATIENCE_S, wait_until
from tests.tiny_model import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@dataclass
class RecordingView:
    """Keeps what it is given; `on_write` may do something at each piece."""

    on_write: Callable[[RecordingView], None] = lambda view: None
    pieces: list[str] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    ends: list[Progress] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def write(self, piece: str, progress: Progress) -> None:
        self.pieces.append(piece)
        self.progress.append(progress)
        self.on_write(self)

    def finish(self, progress: Progress) -> None:
        self.ends.append(progress)

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


def small_llm(folder: Path, num_blocks: int = 64, **options: int) -> LLM:
    return LLM(folder, tier="reference", num_blocks=num_blocks, num_swap_blocks=0, debug=True, **options)


def assert_all_given_back(llm: LLM) -> None:
    """Nobody holds a block but the cache."""
    llm.engine.check_invariants()
    assert not llm.engine.unfinished_requests
    assert llm.stats().blocks_used == 0
    assert llm.engine.blocks.num_available == llm.config.num_blocks


# --- Answers --------------------------------------------------------------------------------------


def test_each_turn_is_answered_as_the_api_answers_the_whole_conversation(small_llama: Path) -> None:
    view, conversation = RecordingView(), Conversation(llm := small_llm(small_llama), GREEDY, "be kind")
    messages = [{"role": "system", "content": "be kind"}]
    for question in ("the one", "and then", "or not"):
        output = conversation.ask(question, view)
        assert output is not None
        messages.append({"role": "user", "content": question})
        [expected] = LLM(small_llama, tier="reference", num_blocks=64).chat(messages, GREEDY)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        messages.append({"role": "assistant", "content": expected.outputs[0].text})
        assert "".join(view.pieces) == expected.outputs[0].text
        assert_all_given_back(llm)
        view.pieces.clear()


def test_a_turn_finds_in_the_cache_what_the_turns_before_have_computed(small_llama: Path) -> None:
    conversation, view = Conversation(llm := small_llm(small_llama, block_size=4), GREEDY), RecordingView()
    computed: list[int] = []
    for turn, question in enumerate(("the one", "and then", "or not")):
        output = conversation.ask(question, view)
        assert output is not None
        prompt = list(output.prompt_token_ids)
        common = next((i for i, (a, b) in enumerate(zip(prompt, computed, strict=False)) if a != b), len(computed))
        assert view.ends[-1].num_cached_tokens == output.num_cached_tokens == min(common, len(prompt) - 1)
        assert (output.num_cached_tokens > 0) == (turn > 0)
        assert view.ends[-1].num_prompt_tokens == len(prompt)
        computed = prompt + list(output.outputs[0].token_ids[:-1])  # the last token is never run
    conversation.reset()
    assert conversation.num_turns == 0
    again = conversation.ask("the one", view)
    assert again is not None
    assert again.num_cached_tokens == len(again.prompt_token_ids) - 1, "the blocks outlive the conversation"
    assert llm.stats().prefix_cache_hit_tokens == sum(end.num_cached_tokens for end in view.ends)


def test_characters_of_several_tokens_are_never_written_in_parts(tiny_model: Path) -> None:
    """A token a byte: pieces end where characters do, so that they join to the text."""
    for seed in range(12):
        view, llm = RecordingView(), small_llm(tiny_model)  # a conversation follows its engine from the first event on
        output = Conversation(llm, SamplingParams(seed=seed, max_tokens=30, ignore_eos=True)).ask("東京は", view)
        assert output is not None
        assert "".join(view.pieces) == output.outputs[0].text
        assert any(len(piece.encode()) > 1 and "\ufffd" not in piece for piece in view.pieces) or "" in view.pieces


def test_the_counts_of_blocks_are_those_of_the_engine_at_every_word(small_llama: Path) -> None:
    """BlockUse folds events; the engine's own counts are the truth. The pool is small: the cache is evicted from."""
    llm = small_llm(small_llama, num_blocks=14, block_size=4)

    def compare(view: RecordingView) -> None:
        counts, stats = view.progress[-1].blocks, llm.stats()
        assert (counts.shared + counts.used, counts.cached, counts.total) == (
            stats.blocks_used,
            stats.blocks_cached,
            14,
        )
        cache = llm.engine.blocks.prefix_cache
        assert cache is not None
        assert counts.shared + counts.cached == len(list(cache.blocks))

    view = RecordingView(on_write=compare)
    conversation, r = Conversation(llm, SamplingParams(max_tokens=12, ignore_eos=True, seed=1)), random.Random(0)
    for _ in range(12):
        conversation.ask("".join(r.choices("abc ", k=r.randint(1, 8))).strip() or "a", view)
    assert llm.stats().prefix_cache_evictions > 0
    assert llm.stats().prefix_cache_hit_tokens > 0
    assert all(end.blocks.shared + end.blocks.used > 0 for end in view.ends), "at the end of an answer, before they go"
    assert max(progress.blocks.cached for progress in view.progress) > 0


def test_a_block_computed_twice_is_counted_as_the_one_that_stays(small_llama: Path) -> None:
    """Asked again after a reset, the question finds its prompt in the cache and exchanges the answer's blocks. All but
    the last one, of which the cache has one already: the first answer's, with the same tokens."""
    exchanged: list[Event] = []
    llm = small_llm(small_llama, block_size=4)
    llm.engine.listeners.append(lambda e: exchanged.append(e) if isinstance(e, BlockDeduplicated) else None)
    conversation, view = Conversation(llm, GREEDY), RecordingView()
    conversation.ask("the one", view)
    conversation.reset()
    conversation.ask("the one", view)
    assert exchanged
    first, second = view.ends
    assert (first.blocks.used, first.blocks.cached) == (0, 0)
    assert (second.blocks.shared, second.blocks.used) == (first.blocks.shared - 1, 1)
    assert second.blocks.cached == 1


# --- What does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [41, 43, 45, 48])
def test_a_conversation_that_outgrows_the_model_forgets_its_oldest_turns_and_says_so(
    small_llama: Path, num_blocks: int
) -> None:
    llm = small_llm(small_llama, num_blocks=num_blocks, block_size=4)
    conversation, view = Conversation(llm, GREEDY, "be kind"), RecordingView()
    for turn in range(12):
        output = conversation.ask(f"the {turn}", view)
        assert output is not None
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 20, "there was room for the answer"
        text = llm.tokenizer.decode(output.prompt_token_ids) if llm.tokenizer else ""
        assert "be kind" in text
        assert f"the {turn}" in text
    assert 1 < conversation.num_turns < 12
    assert any(
        f"outgrown max_model_len ({4 * num_blocks} tokens): its 1 oldest turn is forgotten" in note
        for note in view.notes
    )
    assert_all_given_back(llm)


def test_a_question_that_can_never_fit_is_refused_and_changes_nothing(small_llama: Path) -> None:
    llm = small_llm(small_llama, num_blocks=12)
    conversation, view = Conversation(llm, GREEDY), RecordingView()
    conversation.ask("the one", view)
    with pytest.raises(
        InvalidRequest, match=r"the question has \d+ tokens, and an answer needs 20 more, but max_model"
    ):
        conversation.ask("x" * 180, view)
    assert conversation.num_turns == 1
    assert_all_given_back(llm)
    output = conversation.ask("and then", view)
    assert output is not None
    assert output.num_cached_tokens > 0


# --- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_the_answer_gives_its_blocks_back_and_the_chat_goes_on(small_llama: Path, presses: int) -> None:
    llm = small_llm(small_llama)

    def press(view: RecordingView) -> None:
        if len(view.pieces) == 5:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)

    conversation, view = Conversation(llm, GREEDY), RecordingView(on_write=press)
    before, listeners = signal.getsignal(signal.SIGINT), list(llm.engine.listeners)
    output = conversation.ask("the one", view)
    assert output is not None
    assert llm.engine.listeners == listeners
    assert signal.getsignal(signal.SIGINT) is before
    assert (output.finished, output.outputs[0].finish_reason) == (False, "abort")
    assert len(output.outputs[0].token_ids) == 5
    assert view.ends[-1].ending == "stopped; all its blocks are given back"
    assert view.ends[-1].blocks.shared == view.ends[-1].blocks.used == 0
    assert_all_given_back(llm)
    after = conversation.ask("and then", RecordingView())
    assert after is not None
    assert after.finished
    assert output.outputs[0].text in (llm.tokenizer.decode(after.prompt_token_ids) if llm.tokenizer else "")


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_before_the_first_word_takes_the_question_back(small_llama: Path, presses: int) -> None:
    """The prompt runs in chunks; the second press comes within a step."""
    llm = small_llm(small_llama, max_num_batched_tokens=4)

    def press(event: Event) -> None:
        if isinstance(event, StepFinished) and event.step == 1:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)

    llm.engine.listeners.append(press)
    conversation = Conversation(llm, GREEDY)
    assert conversation.ask("the one and the other", RecordingView()) is None
    assert conversation.num_turns == 0
    assert_all_given_back(llm)
    assert conversation.ask("the one", RecordingView()) is not None


# --- The command ----------------------------------------------------------------------------------


@pytest.fixture
def chat(
    small_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str, str, int]]:
    """`minipaged chat` with the small model and these lines for stdin: what it wrote, its errors, its exit status."""

    def run(lines: str, *arguments: str) -> tuple[str, str, int]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        with pytest.raises(SystemExit) as exit_:
            main(["chat", f"--model={small_llama}", "--num-blocks=12", "--temperature=0", "--max-tokens=9", *arguments])
        out, err = capsys.readouterr()
        return out, err, int(exit_.value.code or 0)

    return run


def test_a_pipe_gets_an_answer_for_each_line_and_the_map_goes_to_stderr(
    chat: Callable[..., tuple[str, str, int]], small_llama: Path
) -> None:
    llm, params = LLM(small_llama, num_blocks=12), SamplingParams(temperature=0, top_p=0.9, max_tokens=9, seed=0)
    conversation = [{"role": "user", "content": "the one"}]
    first = llm.chat(conversation, params)[0].outputs[0].text
    conversation += [{"role": "assistant", "content": first}, {"role": "user", "content": "and then"}]
    second = llm.chat(conversation, params)[0].outputs[0].text
    out, err, status = chat("the one\n\n  and then  \n/quit\nnever\n")
    assert (out, status) == (f"{first}\n{second}\n", 0)
    found = re.findall(
        r"^\[\d+ shared, \d+ used, \d+ cached of 12 blocks \| found (\d+)/\d+ \| \d+ tokens/s\]$", err, re.M
    )
    assert len(found) == 2
    assert int(found[0]) == 0 < int(found[1])
    assert "\x1b" not in out + err


def test_in_a_terminal_piped_questions_are_shown_above_their_answers(
    chat: Callable[..., tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, color_system=None, width=80)
    monkeypatch.setattr("minipaged.cli.conversation._choose_view", lambda: TerminalView(console))
    assert chat("the one\n/quit\n") == ("", "", 0)
    assert terminal.getvalue().startswith("> the one\n")


def test_reset_begins_anew(chat: Callable[..., tuple[str, str, int]]) -> None:
    out, err, status = chat("the one\n/reset\nthe one")
    assert status == 0
    assert out[: len(out) // 2] == out[len(out) // 2 :]
    assert "[forgotten; its blocks stay cached until their room is needed]" in err


def test_what_is_refused_is_said_and_the_rest_is_answered(chat: Callable[..., tuple[str, str, int]]) -> None:
    out, err, status = chat(f"/help\n{'x' * 500}\nthe one\n")
    assert status == 1
    assert "error: there is no command /help; /reset forgets the conversation, /quit ends the chat\n" in err
    assert "error: the question has " in err
    assert out == chat("the one\n")[0]


def test_settings_reach_the_model(chat: Callable[..., tuple[str, str, int]]) -> None:
    sampled = [chat("the one\n", "--temperature=2", "--top-p=1", f"--seed={seed}")[0] for seed in (3, 3, 4)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert chat("the one\n", "--system=be kind")[0] != chat("the one\n")[0]
    assert "of 24 blocks" in chat("the one\n", "--num-blocks=24", "--block-size=8")[1]


def test_a_model_that_cannot_chat_says_so_before_a_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    folder = make_tiny_model(tmp_path / "mute", chat_template=False)
    with pytest.raises(SystemExit) as exit_:
        main(["chat", f"--model={folder}", "--num-blocks=12"])
    assert exit_.value.code == 1
    assert "has no chat template" in capsys.readouterr().err


@thorough
@pytest.mark.model
def test_the_real_model_answers_and_finds_its_first_turn_in_the_cache() -> None:
    """In float32: the best two first tokens have 25.33 and 25.24, and there bfloat16 has eighths."""
    options = ["--temperature=0", "--max-tokens=40", "--num-blocks=64", "--dtype=float32"]
    done = subprocess.run(
        [sys.executable, "-m", "minipaged", "chat", *options],
        input="What is the capital of France?\nAnd of Italy?\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    found = [int(number) for number in re.findall(r"found (\d+)/", done.stderr)]
    assert len(found) == 2
    assert found[0] == 0 < found[1]


# --- The terminal ---------------------------------------------------------------------------------

PROGRESS = Progress(BlockCounts(3, 1, 2, 64), 20, 16, 5, 1.0)


@settings(max_examples=examples(200))
@given(data=st.data(), text=st.text(alphabet="ab \n東é\x1b\t", max_size=120), width=st.integers(8, 30))
def test_rows_are_the_same_however_the_answer_comes_in_pieces(data: st.DataObject, text: str, width: int) -> None:
    def rows(pieces: list[str]) -> str:
        console = Console(file=io.StringIO(), width=width, highlight=False, force_terminal=False)
        view = TerminalView(console)
        written = [str(row) for piece in pieces for row in view._whole_rows(piece)]
        assert all(cell_len(row) <= width for row in written)
        return "\n".join([*written, view._row])

    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = rows([text])
    assert rows(pieces) == whole
    assert "\x1b" not in whole
    assert "".join(whole.split()) == "".join(text.replace("\x1b", "").split())
    if max(map(cell_len, re.split(r"[\s\x1b]", text))) < width:
        assert whole.split() == text.replace("\x1b", " ").split(), "no word is cut that fits a row, and none are joined"


def test_the_map_is_one_line_at_any_width_and_shows_every_state() -> None:
    for width in (20, 80, 200):
        console = Console(file=io.StringIO(), width=width, highlight=False, force_terminal=True, color_system=None)
        view = TerminalView(console)
        view.write("some words", PROGRESS)
        view.finish(PROGRESS)
        last = console.file.getvalue().rstrip("\n").split("\n")[-1]  # type: ignore[attr-defined]
        assert len(last) <= width
        assert re.match(r"\[▓+█+░+·+\]", last)
        assert (str(PROGRESS) in last) == (width >= 80)
    assert BlockCounts(30, 1, 2, 64).bar(16, "abc.") == "aaaaaaaabc......"
    assert BlockCounts(64, 0, 0, 64).bar(16, "abc.") == "a" * 16


def sleeps(pid: int) -> bool:
    """Whether a process has waited for the same thing, say a key, for a moment."""
    process = psutil.Process(pid)

    def waits() -> int | None:
        return process.num_ctx_switches().voluntary if process.status() == psutil.STATUS_SLEEPING else None

    before = waits()
    time.sleep(0.05)
    return before is not None and waits() == before


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_in_a_terminal_ctrl_c_stops_an_answer_ctrl_d_ends_the_chat_and_all_is_left_as_it_was(tiny_model: Path) -> None:
    import termios

    controller, terminal = os.openpty()
    before = termios.tcgetattr(terminal)
    command = [
        sys.executable,
        "-m",
        "minipaged",
        "chat",
        f"--model={tiny_model}",
        "--tier=reference",
        "--num-blocks=64",
    ]
    child = subprocess.Popen(
        # At random, with a seed that brings 646 tokens: more than a terminal that is not read takes up.
        [*command, "--max-tokens=700", "--temperature=3", "--top-p=1", "--seed=12"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # makes it the controlling terminal
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
    )
    seen = b""

    def until(words: bytes) -> None:
        nonlocal seen
        end, fresh = time.monotonic() + PATIENCE_S, b""
        while words not in fresh:
            assert time.monotonic() < end, f"no {words!r} in {fresh[-800:]!r}"
            if select.select([controller], [], [], 0.1)[0]:
                fresh += os.read(controller, 65536)
        seen += fresh

    try:
        until(b"Ctrl-D\x1b[0m\r\n> ")
        os.write(controller, b"hello\n")
        until(b" used, ")
        os.write(controller, b"\x03")
        until(b"all its blocks are given back\x1b[0m\r\n> ")
        wait_until(lambda: sleeps(child.pid))  # a signal between readline's prompt and its waiting would be seen late
        os.write(controller, b"\x03")
        until(b"Ctrl-D ends the chat\x1b[0m\r\n> ")
        os.write(controller, b"\x04")
        until(b"\n")
        assert child.wait(PATIENCE_S) == 0
        assert termios.tcgetattr(terminal) == before
        assert seen.count(b"\x1b[?25l") == seen.count(b"\x1b[?25h") == 1, "the cursor is shown again"
    finally:
        child.kill()
        child.wait()
        os.close(terminal)
        os.close(controller)
