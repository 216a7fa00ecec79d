"""What happened, in sentences: the engine's events told to a reader.

A `Story` follows the events of one run and writes a line for each that its scene wants told. Much happens many times
over; the first few times make the point, so that each kind of line has a limit, and what was left out is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from minipaged.demo.memory_map import MemoryMap
from minipaged.events import (
    BlockCopied,
    BlockDeduplicated,
    BlocksFreed,
    Event,
    PrefixReused,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    SequenceFinished,
    SequenceForked,
    StepFinished,
    StepStarted,
    SwappedIn,
    TokensComputed,
)

Topic = Literal["grow", "join", "leave", "prefix", "fork", "copy", "beams", "preempt", "return"]
"""What a scene may want told."""

LEFT_OUT: dict[Topic, str] = {
    "grow": "more blocks taken",
    "join": "more requests joined",
    "leave": "more requests left",
    "prefix": "more requests that found their beginning in the prefix cache",
    "fork": "more forks",
    "copy": "more writes into shared blocks",
    "beams": "more steps in which beams forked and were dropped",
    "preempt": "more preemptions",
    "return": "more requests came back",
}


class Story:
    """The lines of one run. `topics`: what to tell, and how often at most. Its `on_event` is a listener."""

    def __init__(self, topics: Mapping[Topic, int]) -> None:
        self.memory = MemoryMap()
        self.most_sequences = 0
        """Sequences in the largest batch."""
        self._topics = topics
        self._told: Counter[Topic] = Counter()
        self._lines: list[str] = []
        self._step = 0
        self._forks: list[SequenceForked] = []  # of this step
        self._dropped: dict[int, tuple[int, ...]] = {}  # beams dropped in this step, with the blocks they held
        self._shared: dict[int, int] = {}  # blocks written in this step that were copied for others -> who copied

    def lines(self) -> list[str]:
        """The story so far, and how much of it was left out."""
        left_out = [
            f"{'':8}  ... and {self._told[topic] - limit} {LEFT_OUT[topic]}"
            for topic, limit in self._topics.items()
            if self._told[topic] > limit
        ]
        return self._lines + left_out

    def on_event(self, event: Event) -> None:
        """Tell the event, then let the map follow it: a sentence is about the change from one to the other."""
        match event:
            case StepStarted():
                self._step = event.step
            case RequestArrived():
                pass
            case RequestAdmitted():
                self._tell("join", f"request {event.request} joins the batch: {self._arrival(event.request)}")
            case PrefixReused():
                self._tell_prefix(event)
            case TokensComputed():
                self._tell_growth(event)
            case BlockCopied():
                self._tell_copy(event)
            case BlockDeduplicated():
                self._tell("prefix", f"block {event.own} has the content of cached block {event.cached}: given back")
            case SequenceForked():
                self._forks.append(event)
            case SequenceFinished() if event.reason == "dropped":
                self._dropped[event.sequence] = ()
            case BlocksFreed() if event.sequence in self._dropped:
                self._dropped[event.sequence] = event.blocks
            case RequestPreempted():
                self._tell_preemption(event)
            case SwappedIn():
                self._tell("return", f"request {event.request} is back: {_blocks(len(event.pairs))} copied in again")
        self.memory.on_event(event)
        match event:
            case RequestFinished():
                self._tell_departure(event)
            case StepFinished():
                self._finish_step(event)

    def _tell(self, topic: Topic, sentence: str) -> None:
        if topic not in self._topics:
            return
        self._told[topic] += 1
        if self._told[topic] <= self._topics[topic]:
            self._lines.append(f"step {self._step:>3}  {sentence}")

    # --- One sentence each ------------------------------------------------------------------------

    def _arrival(self, request: str) -> str:
        tokens = self.memory.of_request(request)[0].num_prompt_tokens
        return f"{tokens} prompt tokens, {_blocks(-(-tokens // self.memory.block_size))}"

    def _tell_prefix(self, event: PrefixReused) -> None:
        sequence = self.memory.sequences[event.sequence]
        found = len(event.blocks) * self.memory.block_size
        where = "in the prefix cache" if event.source == "cache" else "with a sibling"
        self._tell(
            "prefix",
            f"request {sequence.request} finds {found} of its {sequence.num_prompt_tokens} prompt tokens {where}: "
            f"{numbers(event.blocks)}",
        )

    def _tell_growth(self, event: TokensComputed) -> None:
        sequence, size = self.memory.sequences[event.sequence], self.memory.block_size
        if event.recomputed:
            again = f"{event.recomputed} tokens computed again in one go"
            self._tell("return", f"request {sequence.request} is back: {again}")
        elif event.new_blocks:
            first, last = sequence.num_filled, event.num_tokens - 1
            tokens = f"tokens {first}-{last}" if last > first else f"token {last}"
            logical = range(len(sequence.table), len(sequence.table) + len(event.new_blocks))
            full = "" if event.num_tokens % size == 0 else f", {-event.num_tokens % size} slots of the last one left"
            self._tell("grow", f"{tokens}: logical {numbers(logical)} -> physical {numbers(event.new_blocks)}{full}")

    def _tell_copy(self, event: BlockCopied) -> None:
        self._tell(
            "copy",
            f"sequence {event.sequence} writes into block {event.source}, which {event.holders} hold: copied to "
            f"block {event.destination}",
        )

    def _tell_preemption(self, event: RequestPreempted) -> None:
        short = f"({event.blocks_short} short)"
        if event.mode == "swap":
            what = f"by swap: {_blocks(event.num_blocks)} copied to the host {short}"
        else:
            what = f"by recompute: {_blocks(event.num_blocks)} with {event.num_tokens} tokens dropped {short}"
        self._tell("preempt", f"request {event.request} preempted {what}")

    def _tell_departure(self, event: RequestFinished) -> None:
        freed = [block for sequence in self.memory.of_request(event.request) for block in sequence.last_table]
        self._tell("leave", f"request {event.request} has finished and gives back {numbers(sorted(set(freed)))}")

    def _finish_step(self, event: StepFinished) -> None:
        """What is known only at the end of the step: who of all the beams goes on."""
        self.most_sequences = max(self.most_sequences, event.num_sequences)
        if self._dropped:
            self._tell("beams", f"{self._survival()}; {self._beam_blocks()}")
        elif self._forks:
            parent, children = self._forks[0].parent, [fork.child for fork in self._forks]
            table = self.memory.sequences[parent].table
            self._tell(
                "fork",
                f"sequence {parent} forks into {_list(children)}: its {_blocks(len(table))} shared by "
                f"{len(children) + 1}, none copied",
            )
        self._forks.clear()
        self._dropped.clear()

    def _survival(self) -> str:
        forks = Counter(fork.parent for fork in self._forks)
        goes_on = [f"sequence {parent} goes on {_times(count + 1)}" for parent, count in forks.items()]
        return ", ".join([*goes_on, f"{_list(self._dropped)} dropped"])

    def _beam_blocks(self) -> str:
        """Of the blocks that the dropped beams held: those that nobody holds now."""
        held = sorted({block for blocks in self._dropped.values() for block in blocks})
        free = [block for block in held if not self.memory.holders(block)]
        return f"{numbers(free)} free" if free else "all their blocks shared, none free"


# --- Words ----------------------------------------------------------------------------------------


def numbers(blocks: Iterable[int]) -> str:
    """Block numbers, runs of neighbours drawn together: "blocks 0-3, 7"."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    many = len(runs) != 1 or runs[0][0] != runs[0][1]
    return f"block{'s' if many else ''} {text or 'none'}"


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _times(count: int) -> str:
    return {2: "twice"}.get(count, f"{count} times")


def _list(items: Iterable[int]) -> str:
    *most, last = [str(item) for item in items]
    return f"{', '.join(most)} and {last}" if most else last
