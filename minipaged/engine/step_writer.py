"""Writes the steps that runners are given: collects what changes while it does, and says it at the next step.

The other end is the runner's mirror (`mirror.py`). Nothing is compared to find out what has changed: the block manager
says which tables have, the engine which sequences forked and ended. So the writing of a step costs what has changed,
not what runs. (Rows are compared; but not those of a step in which all that ran only goes on: `write_on`.)

With pipeline parallelism each lane has a writer, for a mirror of its own (`StepWriters`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from minipaged.engine.sequence import Request, SequenceState
from minipaged.steps import Begun, BlockMoves, ChosenToken, Forked, Row, StepInput, TableChange


class StepWriter:
    """What the runner knows, and what it has to be told."""

    def __init__(self, lane: int = 0) -> None:
        self._lane = lane
        self.forget()

    def forget(self) -> None:
        """The runner may have lost what it knew: the next step begins anew."""
        self._fresh = True
        self._known: set[int] = set()
        self._rows: list[Row] = []  # of the latest step that was written in full
        self._num_since = 0  # steps since then: in each, the same rows were one token further
        self._forked: dict[int, Forked] = {}
        self._ended: list[int] = []
        self._changed: dict[SequenceState, int] = {}  # tables, and how many of their first blocks are as they were
        self._told: dict[int, ChosenToken] = {}

    # --- What changes -----------------------------------------------------------------------------

    def table_changed(self, sequence: SequenceState, kept: int) -> None:
        """The sequence's table has other blocks than it had, from logical block `kept` on."""
        self._changed[sequence] = min(kept, self._changed.get(sequence, kept))

    def forked(self, child: SequenceState, parent: SequenceState, choice: int) -> None:
        """`child` is a copy of `parent` now, but for its newest token (see `steps.Forked`)."""
        self._forked[child.sequence_id] = Forked(child.sequence_id, parent.sequence_id, choice)
        if parent in self._changed:  # what the runner copies is the table that it knows
            self._changed[child] = self._changed[parent]

    def told(self, sequence: SequenceState) -> None:
        """The host has chosen the sequence's newest token."""
        self._told[sequence.sequence_id] = ChosenToken(
            sequence.sequence_id, len(sequence.tokens) - 1, sequence.tokens[-1]
        )

    def ended(self, sequence: SequenceState) -> None:
        """The sequence will not run again."""
        self._changed.pop(sequence, None)
        self._told.pop(sequence.sequence_id, None)
        self._forked.pop(sequence.sequence_id, None)
        if sequence.sequence_id in self._known:
            self._known.remove(sequence.sequence_id)
            self._ended.append(sequence.sequence_id)

    # --- The step ---------------------------------------------------------------------------------

    def write(
        self, number: int, rows: list[Row], owners: Iterable[tuple[Request, SequenceState]], moves: BlockMoves
    ) -> StepInput:
        """The step in which `rows` run; `owners`: the request and the sequence of each."""
        self._known.update(self._forked)
        left_out, added = self._compare(rows)
        begun = tuple(  # who goes on has begun before
            self._begin(request, sequence)
            for request, sequence in islice(owners, len(rows) - len(added), None)
            if sequence.sequence_id not in self._known
        )
        step = StepInput(
            number,
            fresh=self._fresh,
            forked=tuple(self._forked.values()),
            ended=tuple(self._ended),
            begun=begun,
            tables=self._take_tables(),
            told=tuple(self._told.values()),
            moves=moves,
            left_out=left_out,
            added=added,
            lane=self._lane,
        )
        self._known.update(one.sequence for one in begun)
        self._rows, self._num_since, self._fresh = rows, 0, False
        self._forked, self._ended, self._told = {}, [], {}
        return step

    @property
    def has_news(self) -> bool:
        """Whether more than tables has changed since the latest step."""
        return bool(self._fresh or self._forked or self._ended or self._told)

    def write_on(self, number: int, moves: BlockMoves) -> StepInput:
        """The step in which all rows of the one before go on. Nothing but tables has changed (`has_news`)."""
        self._num_since += 1
        tables = self._take_tables() if self._changed else ()
        return StepInput(number, tables=tables, moves=moves, lane=self._lane)

    def _take_tables(self) -> tuple[TableChange, ...]:
        changed, self._changed = self._changed, {}
        return tuple(
            TableChange(sequence.sequence_id, kept, () if sequence.swapped else tuple(sequence.table.blocks[kept:]))
            for sequence, kept in changed.items()
            if sequence.sequence_id in self._known
        )

    def _begin(self, request: Request, sequence: SequenceState) -> Begun:
        sampling = request.sampling and request.sampling._replace(stream=sequence.index)
        num_prompt = len(request.prompt_token_ids)
        blocks = tuple(sequence.table.blocks)
        return Begun(sequence.sequence_id, tuple(sequence.tokens), num_prompt, blocks, sampling)

    def _compare(self, rows: list[Row]) -> tuple[tuple[int, ...], tuple[Row, ...]]:
        """What of the rows of the step before does not go on as it is, and what comes after those that do."""
        ended, left_out, goes_on = set(self._ended), [], 0
        for sequence, start, num_tokens, num_choices in self._rows:
            if not num_choices or sequence in ended:
                continue
            # What `Row.next` says, as a plain tuple: there is one for each that runs.
            then = sequence, start + num_tokens + self._num_since, 1, 1 if num_choices > 0 else num_choices
            if goes_on < len(rows) and then == rows[goes_on]:
                goes_on += 1
            else:
                left_out.append(sequence)
        return tuple(left_out), tuple(rows[goes_on:])


class StepWriters:
    """The writers of all lanes (without a pipeline, of one). What happens to a sequence is told to its lane's."""

    def __init__(self, num_lanes: int = 1) -> None:
        self._writers = [StepWriter(lane) for lane in range(num_lanes)]

    def of(self, lane: int) -> StepWriter:
        return self._writers[lane]

    def change_lane(self, request: Request, lane: int) -> None:
        """The request, which has waited, runs in this lane now; where it ran before, its sequences are over."""
        request.lane = lane
        for sequence in request.sequences:
            self.ended(sequence)
            sequence.lane = lane

    def forget(self) -> None:
        for writer in self._writers:
            writer.forget()

    def table_changed(self, sequence: SequenceState, kept: int) -> None:
        self._writers[sequence.lane].table_changed(sequence, kept)

    def forked(self, child: SequenceState, parent: SequenceState, choice: int) -> None:
        self._writers[parent.lane].forked(child, parent, choice)

    def told(self, sequence: SequenceState) -> None:
        self._writers[sequence.lane].told(sequence)

    def ended(self, sequence: SequenceState) -> None:
        self._writers[sequence.lane].ended(sequence)
