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
        self._joining: set[str] = set()  # admitted, and not yet given blocks

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
            case RequestAdmitted():
                self._joining.add(event.request)
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
                self._tell(
                    "return", f"request {event.request} is back: {_count(len(event.pairs), 'block')} copied in again"
                )
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

    def _tell_prefix(self, event: PrefixReused) -> None:
        sequence = self.memory.sequences[event.sequence]
        found = len(event.blocks) * self.memory.block_size
        where = "in the cache" if event.source == "cache" else "with a sibling"
        self._tell(
            "prefix",
            f"request {sequence.request} finds {found} of its {sequence.num_prompt_tokens} prompt tokens {where}: "
            f"{numbers(event.blocks)}",
        )

    def _tell_growth(self, event: TokensComputed) -> None:
        sequence = self.memory.sequences[event.sequence]
        count = event.num_tokens - sequence.num_filled
        blocks = numbers(event.new_blocks)
        if event.recomputed:
            again = f"{_count(event.recomputed, 'token')} computed again in one go"
            self._tell("return", f"request {sequence.request} is back: {again}")
        elif sequence.request in self._joining:
            former = self._former_holders(event.new_blocks)
            self._tell("join", f"request {sequence.request} joins: {_count(count, 'token')} into {blocks}{former}")
        self._joining.discard(sequence.request)
        if event.new_blocks:
            first, last = sequence.num_filled, event.num_tokens - 1
            tokens = f"tokens {first}-{last}" if last > first else f"token {last}"
            logical = numbers(range(len(sequence.table), len(sequence.table) + len(event.new_blocks)))
            left = _count(-event.num_tokens % self.memory.block_size, "slot")
            self._tell("grow", f"{tokens}: logical {logical} -> physical {blocks}; {left} left")

    def _former_holders(self, blocks: Iterable[int]) -> str:
        """Whose these blocks were last, if anybody's."""
        last = {block: sequence.request for sequence in self.memory.sequences.values() for block in sequence.last_table}
        former = sorted({last[block] for block in blocks if block in last})
        return f" (once request {_list(former)}'s)" if former else ""

    def _tell_copy(self, event: BlockCopied) -> None:
        rest = "; the other now has it alone" if event.holders == 2 else ""
        self._tell(
            "copy",
            f"sequence {event.sequence} writes into block {event.source}, which {event.holders} hold: copied to block "
            f"{event.destination}{rest}",
        )

    def _tell_preemption(self, event: RequestPreempted) -> None:
        what = {
            "swap": f"swap, {_count(event.num_blocks, 'block')} copied out",
            "recompute": f"recompute, {event.num_tokens} tokens dropped",
        }[event.mode]
        short = _count(event.blocks_short, "block")
        self._tell("preempt", f"{short} short: request {event.request} preempted by {what}")

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
                f"sequence {parent} forks into {_list(children)}: {_count(len(table), 'block')} shared, none copied",
            )
        self._forks.clear()
        self._dropped.clear()

    def _survival(self) -> str:
        forks = Counter(fork.parent for fork in self._forks)
        goes_on = [f"sequence {parent} goes on {_times(count + 1)}" for parent, count in forks.items()]
        many = "sequences" if len(self._dropped) > 1 else "sequence"
        return ", ".join([*goes_on, f"{many} {_list(sorted(self._dropped))} dropped"])

    def _beam_blocks(self) -> str:
        """Of the blocks that the dropped beams held: those that nobody holds now."""
        held = sorted({block for blocks in self._dropped.values() for block in blocks})
        free = [block for block in held if not self.memory.holders(block)]
        return f"{numbers(free)} free again" if free else "all their blocks are shared: none free"


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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _times(count: int) -> str:
    return {2: "twice"}.get(count, f"{count} times")


def _list(items: Iterable[object]) -> str:
    *most, last = [str(item) for item in items]
    return f"{', '.join(most)} and {last}" if most else last
