"""Writers of steps: they collect what changes between steps, and write it into the next step for the runner.

The receiving end is the runner's mirror (`mirror.py`). Nothing is compared to find changes: the block manager reports
changed tables, and the engine reports sequences that forked or ended. So writing a step costs as much as has changed,
not as much as runs. (Rows are compared, except in a step in which all of them only go on: `write_on`.)

With pipeline parallelism each lane has a writer, for a mirror of its own (`StepWriters`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from minipaged.engine.sequence import Request, SequenceState
from minipaged.steps import AllowedTokens, Begun, BlockMoves, ChosenToken, Forked, Row, StepInput, TableChange


class StepWriter:
    """The writer of one lane: what the runner knows, and the changes it has not received yet."""

    def __init__(self, lane: int = 0) -> None:
        self._lane = lane
        self.forget()

    def forget(self) -> None:
        """Forget what the runner knows, because it may have lost it: the next step is a `fresh` one."""
        self._fresh = True
        self._known: set[int] = set()
        self._rows: list[Row] = []  # rows of the latest step written in full
        self._num_since = 0  # steps since then, each with the same rows one token further
        self._forked: dict[int, Forked] = {}
        self._ended: list[int] = []
        self._changed: dict[SequenceState, int] = {}  # changed tables, with the number of unchanged first blocks
        self._told: dict[int, ChosenToken] = {}

    # --- Changes since the last step --------------------------------------------------------------

    def table_changed(self, sequence: SequenceState, kept: int) -> None:
        """Note that the sequence's table has changed from logical block `kept` on."""
        self._changed[sequence] = min(kept, self._changed.get(sequence, kept))

    def forked(self, child: SequenceState, parent: SequenceState, choice: int) -> None:
        """Note that `child` is now a copy of `parent`, except for its newest token (see `steps.Forked`)."""
        self._forked[child.sequence_id] = Forked(child.sequence_id, parent.sequence_id, choice)
        if parent in self._changed:  # the runner copies the table as it knows it
            self._changed[child] = self._changed[parent]

    def told(self, sequence: SequenceState) -> None:
        """Note that the host has chosen the sequence's newest token."""
        self._told[sequence.sequence_id] = ChosenToken(
            sequence.sequence_id, len(sequence.tokens) - 1, sequence.tokens[-1]
        )

    def ended(self, sequence: SequenceState) -> None:
        """Note that the sequence will not run again."""
        self._changed.pop(sequence, None)
        self._told.pop(sequence.sequence_id, None)
        self._forked.pop(sequence.sequence_id, None)
        if sequence.sequence_id in self._known:
            self._known.remove(sequence.sequence_id)
            self._ended.append(sequence.sequence_id)

    # --- The step ---------------------------------------------------------------------------------

    def write(
        self,
        number: int,
        rows: list[Row],
        owners: Iterable[tuple[Request, SequenceState]],
        moves: BlockMoves,
        allowed: tuple[AllowedTokens, ...] = (),
    ) -> StepInput:
        """Return the step that runs `rows`. `owners`: the request and the sequence of each row."""
        self._known.update(self._forked)
        left_out, added = self._compare(rows)
        begun = tuple(  # rows that go on have begun before
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
            allowed=allowed,
        )
        self._known.update(one.sequence for one in begun)
        self._rows, self._num_since, self._fresh = rows, 0, False
        self._forked, self._ended, self._told = {}, [], {}
        return step

    @property
    def has_news(self) -> bool:
        """Whether anything but tables has changed since the latest step."""
        return bool(self._fresh or self._forked or self._ended or self._told)

    def write_on(self, number: int, moves: BlockMoves, allowed: tuple[AllowedTokens, ...] = ()) -> StepInput:
        """Return the step in which all rows of the one before go on. Nothing but tables has changed (`has_news`)."""
        self._num_since += 1
        tables = self._take_tables() if self._changed else ()
        return StepInput(number, tables=tables, moves=moves, lane=self._lane, allowed=allowed)

    def _take_tables(self) -> tuple[TableChange, ...]:
        changed, self._changed = self._changed, {}
        return tuple(
            TableChange(sequence.sequence_id, kept, () if sequence.swapped else tuple(sequence.entries[kept:]))
            for sequence, kept in changed.items()
            if sequence.sequence_id in self._known
        )

    def _begin(self, request: Request, sequence: SequenceState) -> Begun:
        sampling = request.sampling and request.sampling._replace(stream=sequence.index)
        num_prompt = len(request.prompt_token_ids)
        blocks = tuple(sequence.entries)
        return Begun(sequence.sequence_id, tuple(sequence.tokens), num_prompt, blocks, sampling)

    def _compare(self, rows: list[Row]) -> tuple[tuple[int, ...], tuple[Row, ...]]:
        """Compare with the last step's rows: return the sequences that do not go on, and the rows that are new."""
        ended, left_out, goes_on = set(self._ended), [], 0
        for sequence, start, num_tokens, num_choices, drafted in self._rows:
            if not num_choices or drafted or sequence in ended:
                continue
            # The same as `Row.next`, as a plain tuple, because there is one for each running sequence.
            then = sequence, start + num_tokens + self._num_since, 1, 1 if num_choices > 0 else num_choices, ()
            if goes_on < len(rows) and then == rows[goes_on]:
                goes_on += 1
            else:
                left_out.append(sequence)
        return tuple(left_out), tuple(rows[goes_on:])


class StepWriters:
    """The writers of all lanes (one without a pipeline). Each change of a sequence goes to the writer of its lane."""

    def __init__(self, num_lanes: int = 1) -> None:
        self._writers = [StepWriter(lane) for lane in range(num_lanes)]

    def of(self, lane: int) -> StepWriter:
        return self._writers[lane]

    def change_lane(self, request: Request, lane: int) -> None:
        """Move a waiting request to this lane. Its sequences end in the lane where it ran before."""
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
