"""`minipaged chat`: a conversation in the terminal, with the KV memory in use shown below each answer.

A chat model has no memory of its own: every turn sends the whole conversation again. Prefix caching makes that cheap.
The blocks that the first turn filled stay in the cache when its request ends. The second turn begins with the same
tokens, finds their blocks there, and computes only the new ones. A block is in one of four states:

    shared   the answer's block table and the prefix cache both hold it: it is full, or the answer is about to end; the
             next turn can find it
    used     only the table holds it: the last block, which is being filled
    cached   only the cache holds it: it is from an earlier turn, and is given back when room is needed
    free     nothing holds it

`Conversation` keeps the messages and steps the engine. `BlockUse` follows the engine's events and counts the blocks in
each state. A view prints the text and the counts: `TerminalView`, or `PlainView` if the output is not a terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from minipaged.errors import InvalidRequest
from minipaged.events import BlocksFreed, Event
from minipaged.llm import LLM, interrupt_between_steps
from minipaged.outputs import RequestOutput, RequestUpdate
from minipaged.params import SamplingParams
from minipaged.replay.state import State

COMMANDS = "/reset forgets the conversation, /quit ends the chat"
LEAST_ANSWER = 0.25
"""The room kept free for an answer, as a fraction of `max_model_len`; `max_tokens` if that is less."""

# --- Display --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """The number of blocks in each state."""

    shared: int
    used: int
    cached: int
    total: int

    def bar(self, cells: int, marks: str) -> str:
        """Draw the pool as a bar, with a mark per state and the last mark for free. A nonzero count gets a cell."""
        counts = (self.shared, self.used, self.cached)
        drawn = [mark * max(1, round(n * cells / self.total)) for n, mark in zip(counts, marks, strict=False) if n]
        return "".join(drawn)[:cells].ljust(cells, marks[-1])

    def __str__(self) -> str:
        return f"{self.shared} shared, {self.used} used, {self.cached} cached of {self.total} blocks"


class BlockUse:
    """A listener that counts an engine's blocks by state. Attach it before the engine's first request."""

    def __init__(self) -> None:
        self._state = State()
        self.at_end = self.counts()
        """The counts just before the latest request gave back its blocks."""

    def counts(self) -> BlockCounts:
        state = self._state
        held, shared = len(state.device.holders), len(state.cached) - state.num_cached_only
        return BlockCounts(shared, held - shared, state.num_cached_only, state.device.num_blocks)

    def __call__(self, event: Event) -> None:
        if isinstance(event, BlocksFreed):
            self.at_end = self.counts()
        self._state.apply(event)

    @property
    def num_found(self) -> int:
        """The number of tokens found in the prefix cache, over all requests so far."""
        return self._state.counts["tokens found in cache"]


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of an answer, while it grows and when it has ended."""

    blocks: BlockCounts
    num_prompt_tokens: int
    num_cached_tokens: int
    """The number of prompt tokens whose keys and values were found in the prefix cache."""
    num_tokens: int
    seconds: float
    ending: str = ""
    """Why the answer ended, if the user should know; else empty."""

    def __str__(self) -> str:
        speed = f"{self.num_tokens / self.seconds:.0f} tokens/s" if self.num_tokens and self.seconds else "..."
        return f"{self.blocks} | found {self.num_cached_tokens}/{self.num_prompt_tokens} | {speed}"


class AnswerView(Protocol):
    """Prints an answer and its progress."""

    def write(self, piece: str, progress: Progress) -> None: ...
    def finish(self, progress: Progress) -> None: ...
    def note(self, sentence: str) -> None: ...


class PlainView:
    """Prints answers to stdout and all else to stderr. For files, pipes and terminals that can only append lines."""

    def write(self, piece: str, progress: Progress) -> None:
        print(piece, end="", flush=True)

    def finish(self, progress: Progress) -> None:
        print(flush=True)
        self.note(str(progress))
        if progress.ending:
            self.note(progress.ending)

    def note(self, sentence: str) -> None:
        print(f"[{sentence}]", file=sys.stderr, flush=True)


class TerminalView:
    """Prints an answer row by row. While it grows, a one-line memory map is shown below it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.marks = "▓█░·" if console.encoding.startswith("utf") else "%#:."
        self._row = ""  # the last row, which may still grow
        self._live: Live | None = None

    def write(self, piece: str, progress: Progress) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        rows = list(self._whole_rows(piece))
        self._live.update(Group(Text(self._row), self._map(progress)), refresh=not rows)
        for row in rows:
            self._console.print(row)  # above the live part, which is then drawn again

    def finish(self, progress: Progress) -> None:
        self.close()
        self._console.print(self._map(progress), no_wrap=True, overflow="ellipsis")
        if progress.ending:
            self.note(progress.ending)

    def close(self) -> None:
        """Stop the live display, and leave the text so far on the terminal."""
        if self._live:
            self._live.stop()
            self._live = None
            self._console.print(Text(self._row))
            self._row = ""

    def note(self, sentence: str) -> None:
        self._console.print(Text(sentence, style="dim"))

    def _whole_rows(self, piece: str) -> Iterator[Text]:
        """Add text to the answer and yield the rows that it completes, as wide as the terminal. Keep the last row."""
        for char in piece:
            if not char.isprintable() and char != "\n":
                char = " "  # no control characters for the terminal
            if char != "\n" and cell_len(self._row + char) <= self._console.width:
                self._row += char
                continue
            words, _, word = self._row.rpartition(" ")
            if char in "\n " or not words.strip():  # the row ends here
                words, word = self._row, ""
            yield Text(words)
            self._row = word + char if char not in "\n " else ""

    def _map(self, progress: Progress) -> Text:
        words = str(progress)
        bar = progress.blocks.bar(max(8, min(40, self._console.width - len(words) - 3)), self.marks)
        return Text(f"[{bar}] {words}", style="dim", no_wrap=True, overflow="ellipsis")


# --- The conversation -----------------------------------------------------------------------------


class Conversation:
    """The messages so far, and the engine that answers them. Nothing else may use this engine."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._system = [{"role": "system", "content": system}] if system else []
        self._turns: list[tuple[dict[str, str], dict[str, str]]] = []
        self._use = BlockUse()
        llm.engine.listeners.append(self._use)

    @property
    def num_turns(self) -> int:
        """The number of earlier questions with their answers, which the next question is sent with."""
        return len(self._turns)

    def reset(self) -> None:
        """Forget all messages but the system prompt."""
        self._turns.clear()

    def ask(self, question: str, view: AnswerView) -> RequestOutput | None:
        """Answer a question, and show the text as it is generated.

        Ctrl-C ends the answer and gives its blocks back; the text so far is kept as the answer. If there is no text
        yet, the question is forgotten and the result is None. Raises InvalidRequest for a question that is too long;
        the conversation is then unchanged.
        """
        asked = {"role": "user", "content": question}
        with interrupt_between_steps("") as interrupted:
            prompt, num_dropped = self._fit(asked)
            if num_dropped:
                view.note(
                    f"the conversation has outgrown max_model_len ({self._llm.config.max_model_len} tokens): its "
                    f"{num_dropped} oldest turn{'s are' if num_dropped > 1 else ' is'} forgotten, and as it now begins "
                    "with other tokens, little of it is found in the cache"
                )
            output = self._serve(prompt, view, interrupted)
        del self._turns[:num_dropped]
        completion = output.outputs[0]
        if not completion.text and not output.finished:
            return None
        self._turns.append((asked, {"role": "assistant", "content": completion.text}))
        return output

    def _fit(self, asked: dict[str, str]) -> tuple[list[int], int]:
        """Return the tokens to send, and the number of oldest turns left out so that an answer fits."""
        limit = self._llm.config.max_model_len
        room = max(1, min(self._params.max_tokens or limit, int(limit * LEAST_ANSWER)))
        for num_dropped in range(len(self._turns) + 1):
            messages = [message for turn in self._turns[num_dropped:] for message in turn]
            prompt = self._llm.encode_chat([*self._system, *messages, asked])
            if len(prompt) + room <= limit:
                return prompt, num_dropped
        with_system = " with the system prompt" if self._system else ""
        raise InvalidRequest(
            f"the question has {len(prompt)} tokens{with_system}, and an answer needs {room} more, but max_model_len "
            f"is {limit}; shorten the question, or raise --num-blocks if that is what limits it"
        )

    def _serve(self, prompt: list[int], view: AnswerView, interrupted: Callable[[], bool]) -> RequestOutput:
        """Run one request until it ends or Ctrl-C stops it. It always gives back all its blocks, also on an error."""
        engine = self._llm.engine
        found_before, num_tokens = self._use.num_found, 0
        started = time.perf_counter()

        def progress() -> Progress:
            seconds = time.perf_counter() - started
            found = self._use.num_found - found_before
            return Progress(self._use.counts(), len(prompt), found, num_tokens, seconds)

        output: RequestOutput | None = None

        def show(updates: list[RequestUpdate]) -> None:
            nonlocal output, num_tokens
            for update in updates:
                output = update.output
                for new in update.completions:
                    num_tokens += len(new.new_token_ids)
                    if new.new_token_ids or new.new_text:
                        view.write(new.new_text, progress())

        request_id = engine.add_request(prompt, self._params)
        try:
            while output is None and not interrupted():
                show(engine.step())
        except KeyboardInterrupt:  # a second Ctrl-C, during a step
            pass
        finally:
            engine.abort(request_id)
        show(engine.take_updates())  # the last update of an answer that was stopped
        assert output is not None
        completion = output.outputs[0]
        ending = {"length": "cut off: no more tokens", "abort": "stopped; all its blocks are given back"}
        told = f"failed: {output.error}" if output.error else ending.get(completion.finish_reason, "")
        blocks = self._use.at_end if output.finished else self._use.counts()
        view.finish(replace(progress(), blocks=blocks, ending=told))
        return output


# --- The loop -------------------------------------------------------------------------------------


def run_chat(llm: LLM, params: SamplingParams, system: str | None = None) -> int:
    """Read questions from stdin, one per line, and answer them until /quit or the end of input.

    Returns the exit status. If the questions come from a file or a pipe, it is 1 if one of them was refused, and 130 if
    Ctrl-C came between two answers. Otherwise it is 0.
    """
    if sys.stdin is None or sys.stdout is None:
        raise InvalidRequest("a chat reads from stdin and writes to stdout; one of them is closed")
    asking = sys.stdin.isatty()
    conversation = Conversation(llm, params, system)
    llm.encode_chat(
        [{"role": "user", "content": "hello"}]
    )  # raises now, not after a question, if the model cannot chat
    view = _choose_view()
    if asking:
        name, limit = llm.folder.name, llm.config.max_model_len
        view.note(f"{name}, {llm.description}; {limit} tokens a conversation at most")
        if isinstance(view, TerminalView):
            view.note(
                "under each answer, the KV blocks: {} shared by it and the cache, {} used by it alone, {} cached "
                "from earlier turns, {} free; and how many of the prompt's tokens were found there".format(*view.marks)
            )
        view.note(f"Ctrl-C stops an answer; {COMMANDS}, and so does Ctrl-D")
    refused = False
    while True:
        try:
            line = _read_line(asking)
            if line is None or line == "/quit":
                return int(refused and not asking)
            if line == "/reset":
                conversation.reset()
                view.note("forgotten; its blocks stay cached until their room is needed")
            elif line.startswith("/"):
                raise InvalidRequest(f"there is no command {line.split()[0]}; {COMMANDS}")
            elif line:
                if not asking and isinstance(view, TerminalView):
                    view.note(f"> {line}")
                conversation.ask(line, view)
        except InvalidRequest as error:
            refused = True
            print(f"error: {error}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:  # between two answers
            if not asking:
                return 130
            print(file=sys.stderr)
            view.note("/quit or Ctrl-D ends the chat")
        finally:
            if isinstance(view, TerminalView):
                view.close()


def _choose_view() -> PlainView | TerminalView:
    console = Console(highlight=False)
    return TerminalView(console) if sys.stdout.isatty() and not console.is_dumb_terminal else PlainView()


def _read_line(asking: bool) -> str | None:
    """Read the next question; None at the end of input. Raises InvalidRequest for bytes that are not text."""
    prompt = ""
    if asking:
        import readline  # noqa: F401  # gives `input` a history and line editing

        if sys.stdout.isatty():
            prompt = "> "
        else:
            print("> ", end="", file=sys.stderr, flush=True)
    try:
        return input(prompt).strip()
    except EOFError:
        if asking:
            print(file=sys.stderr)
        return None
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the question is not text in {error.encoding}: byte {error.object[error.start]:#x}"
        ) from None
