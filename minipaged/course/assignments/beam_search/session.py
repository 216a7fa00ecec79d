"""Steps a student's beam search, and compares each decision with the reference's.

A `BeamSession` makes one search in the worker. Both searches get each step, and their decisions are compared. The
candidates of a wrong step are drawn as a table. The real engine carries out the right decisions so far, which gives the
events: forked tables, and blocks shared, copied and freed.

If two candidates or two scores are nearly equal, rounding decides their order, and both orders are right. Such a step
is not compared, unless the two are equal however they are computed; then the rule for ties decides.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from minipaged import contracts
from minipaged.contracts import BeamMove, BeamStep
from minipaged.course.grader.assignment import Bench, Failure
from minipaged.course.grader.counterexample import aligned, shown
from minipaged.course.grader.session import Session
from minipaged.course.sandbox.contract import Outcome, Raised
from minipaged.engine.engine import Engine
from minipaged.errors import Invariant
from minipaged.events import Event, StepFailed
from minipaged.params import BeamSearchParams, EngineConfig
from minipaged.testing.content_runner import ContentRunner
from minipaged.tiers import reference_tier

CLOSE = 1e-4
"""The difference below which candidates or scores are not compared. All of them are at most a few times 10."""
TOLERANCE = 1e-3
"""The tolerance for a sum or a score, relative to the reference's (absolute below 1)."""
DRAWN = 8
"""The most candidates in a drawing."""
LARGEST_VOCABULARY = 64
"""The largest vocabulary with a script and a drawing; larger ones make them too wide."""
BLOCK_SIZE = 2
"""The block size of the engine that carries out the decisions for the recorded run."""


@dataclass(frozen=True, slots=True)
class BeamSettings:
    """The arguments that a search is made with."""

    params: BeamSearchParams
    prompt_length: int
    max_length: int
    eos_token_ids: tuple[int, ...] = ()

    def as_arguments(self) -> str:
        """Return the arguments' source in a script."""
        default = BeamSearchParams()
        names = ("beam_width", "max_tokens", "length_penalty", "early_stopping", "ignore_eos")
        values = {name: getattr(self.params, name) for name in names}
        given = [f"{name}={value!r}" for name, value in values.items() if value != getattr(default, name)]
        params = f"BeamSearchParams({', '.join(given)})"
        return f"{params}, {self.prompt_length}, {self.max_length}, {self.eos_token_ids!r}"


@dataclass(frozen=True, slots=True)
class Look:
    """The parts of a step to compare. Each test checks another rule, so that half the work gets half the points."""

    survivors: bool = True
    finished: bool = True
    scores: bool = True
    ties: bool = False
    """Whether steps with exact ties are compared too."""


ALL = Look(ties=True)


class BeamSession(Session):
    """One search of the student's, with the reference's search."""

    KIND = "a search"

    def __init__(self, bench: Bench, settings: BeamSettings, *, beside: BeamSession | None = None) -> None:
        super().__init__(bench, beside=beside)
        self.settings = settings
        given = (settings.params, settings.prompt_length, settings.max_length, settings.eos_token_ids)
        self._reference = reference_tier().beam_search(*given)
        self._variable = "other" if beside else "search"
        self._right: list[BeamStep] = []
        """The right decisions so far."""
        self._kept: list[float] = []
        """The scores of the best finished sequences so far, best first."""
        self._judgement: _Judgement | None = None
        """The judgement of the step that is being compared."""
        shown = f"{self._name}({settings.as_arguments()})"
        self._lines.append(f"{self._variable} = {shown}")
        self._search = self._make(shown, *given)

    def copied(self, variable: str = "search") -> BeamSession:
        """Return a deep copy that includes the student's search, like the engine's copy before each step."""
        self._judgement = None
        twin = copy.copy(self)
        twin._reference, twin._right, twin._kept = copy.deepcopy(self._reference), list(self._right), list(self._kept)
        twin._variable = variable
        self._lines.append(f"{variable} = copy.deepcopy({self._variable})")
        [made] = self._ask([(self._bench.process.modules[0], "deepcopy", (self._search,))], seed=self._bench.seed)
        if isinstance(made, Raised):
            self._raised("__deepcopy__", made.error, f"copy.deepcopy({self._variable})")
        twin._search = made
        return twin

    def is_clear(
        self, logits: np.ndarray, rows: Sequence[int], cumulative_logprobs: Sequence[float], *, ties: bool = True
    ) -> bool:
        """Whether the next step's decisions do not depend on rounding."""
        return _Judgement(self, logits, rows, cumulative_logprobs, ties).clear

    def num_about_to_finish(self, logits: np.ndarray, rows: Sequence[int], cumulative_logprobs: Sequence[float]) -> int:
        """Return the number of sequences that the next step finishes."""
        return len(copy.deepcopy(self._reference).step(logits, rows, cumulative_logprobs).finished)

    def step(
        self, logits: np.ndarray, rows: Sequence[int], cumulative_logprobs: Sequence[float], look: Look = ALL
    ) -> BeamStep:
        """Step both searches and compare them. Return the reference's step, with the student's sums."""
        judgement = self._judgement = _Judgement(self, logits, rows, cumulative_logprobs, look.ties)
        arguments = f"{_written(logits)}, {list(rows)}, {list(cumulative_logprobs)}"
        call = f"{self._variable}.step({arguments})"
        self._lines.append(f"step = {call}")
        given = (logits, list(rows), list(cumulative_logprobs))
        [answer] = self._ask([(self._search, "step", given)], seed=self._bench.seed)
        right = self._reference.step(logits, rows, cumulative_logprobs)
        which = f"step {len(self._right) + 1}"
        if isinstance(answer, Raised):
            self._raised("step", answer.error, which)
        found = self._understand(answer, which)
        if judgement.clear:
            judgement.note(found, right)
            if look.survivors:
                self._compare_survivors(found.survivors, right.survivors, which)
            if look.finished:
                self._compare_finished(found.finished, right.finished, which, look.scores)
            own = {(move.parent, move.token_id): move for move in found.survivors}
            moves = [own.get((move.parent, move.token_id), move) for move in right.survivors]
        else:
            moves = right.survivors
        self._right.append(right)
        self._kept = judgement.kept
        return BeamStep(moves, right.finished)

    def refuse(self, logits: np.ndarray, rows: Sequence[int], cumulative_logprobs: Sequence[float], why: str) -> None:
        """Make a step that has to raise a ValueError."""
        call = f"{self._variable}.step({_written(logits)}, {list(rows)}, {list(cumulative_logprobs)})"
        self._judgement = None
        self._lines += [
            "try:",
            f"    {call}",
            "except ValueError:",
            "    pass",
            "else:",
            f'    raise AssertionError("step has to raise BadLogits: {why}")',
        ]
        given = (logits, list(rows), list(cumulative_logprobs))
        [answer] = self._ask([(self._search, "step", given)], seed=self._bench.seed)
        if isinstance(answer, Raised) and isinstance(answer.error, ValueError):
            return
        if isinstance(answer, Raised):
            self._raised("step", answer.error, "step", f"; it has to raise BadLogits: {why}")
        self._fail(f"step returned {shown(answer)}; it has to raise BadLogits: {why}")

    # --- Comparing --------------------------------------------------------------------------------

    def _understand(self, answer: Outcome, which: str) -> BeamStep:
        """Return the answer as a BeamStep of plain numbers."""
        try:
            survivors = [_move(move) for move in answer.survivors]
            finished = [(_move(move), _number(score)) for move, score in answer.finished]
            return BeamStep(survivors, finished)
        except (AttributeError, TypeError, ValueError):
            self._fail(
                f"{which} returned {shown(answer)}; it has to return a BeamStep: a list of BeamMoves, and a list of "
                "pairs (BeamMove, score)",
                'assert all(isinstance(m.token_id, int) for m in step.survivors), f"step is {step}"',
                'assert all(isinstance(m.token_id, int) for m, score in step.finished), f"it is {step}"',
            )

    def _compare_survivors(self, found: list[BeamMove], right: list[BeamMove], which: str) -> None:
        theirs, ours = ([(move.parent, move.token_id) for move in moves] for moves in (found, right))
        if theirs != ours:
            self._fail(
                f"{which}: the survivors are {_pairs(theirs)}; they should be {_pairs(ours)}",
                "survivors = [(move.parent, move.token_id) for move in step.survivors]",
                f'assert survivors == {ours}, f"survivors (beam, token): {{survivors}}"',
            )
        for place, (own, move) in enumerate(zip(found, right, strict=True)):
            if not _is_close(own.cumulative_logprob, move.cumulative_logprob):
                self._expect_close(
                    f"step.survivors[{place}].cumulative_logprob", move.cumulative_logprob, own.cumulative_logprob
                )
                self._fail(
                    f"{which}: cumulative_logprob of survivor {place} (beam {move.parent} + token {move.token_id}) is "
                    f"{own.cumulative_logprob:.4f}; it should be {move.cumulative_logprob:.4f}"
                )

    def _compare_finished(
        self,
        found: list[tuple[BeamMove, float]],
        right: list[tuple[BeamMove, float]],
        which: str,
        scores: bool,
    ) -> None:
        """Compare finished sequences, in any order, since their scores rank them."""
        theirs, ours = (sorted((move.parent, move.token_id) for move, _ in ended) for ended in (found, right))
        if theirs != ours:
            self._fail(
                f"{which}: the finished sequences are {_pairs(theirs)}; they should be {_pairs(ours)}",
                "finished = sorted((move.parent, move.token_id) for move, score in step.finished)",
                f'assert finished == {ours}, f"finished (beam, token): {{finished}}"',
            )
        own = {(move.parent, move.token_id): (move, score) for move, score in found}
        for move, score in right:
            key = (move.parent, move.token_id)
            their_move, their_score = own[key]
            what = f"finished beam {move.parent} + token {move.token_id}"
            found_in = f"next(one for one in step.finished if (one[0].parent, one[0].token_id) == {key})"
            if scores and not _is_close(their_score, score):
                self._expect_close(f"{found_in}[1]", score, their_score)
                self._fail(f"{which}: the score of {what} is {their_score:.4f}; it should be {score:.4f}")
            if not _is_close(their_move.cumulative_logprob, move.cumulative_logprob):
                theirs_sum, ours_sum = their_move.cumulative_logprob, move.cumulative_logprob
                self._expect_close(f"{found_in}[0].cumulative_logprob", ours_sum, theirs_sum)
                self._fail(f"{which}: cumulative_logprob of {what} is {theirs_sum:.4f}; it should be {ours_sum:.4f}")

    def _expect_close(self, expression: str, right: float, found: float) -> None:
        self._lines += [
            f"value = {expression}",
            f'assert abs(value - {right:.6g}) <= {_room(right):.6g}, f"it is {{value}}"',
        ]

    # --- Failing ----------------------------------------------------------------------------------

    def _imports(self) -> list[str]:
        imports = ["import numpy as np"] if any("np." in line for line in self._lines) else []
        return [*imports, "from minipaged import BeamSearchParams"]

    def _failure(self, invariant: Invariant | None, message: str) -> Failure:
        judgement = self._judgement
        if judgement and judgement.vocab_size > LARGEST_VOCABULARY:
            return Failure(message)
        events, tables = carry_out(self.settings, self._right, message)
        drawing = (*(judgement.drawing() if judgement else ()), *tables)
        return replace(super()._failure(invariant, message), drawing=drawing, events=tuple(events))


# --- Judging a step -------------------------------------------------------------------------------


class _Judgement:
    """One step in float64: the candidates by rank, and whether rounding could change the decisions."""

    def __init__(
        self,
        session: BeamSession,
        logits: np.ndarray,
        rows: Sequence[int],
        cumulative_logprobs: Sequence[float],
        ties: bool,
    ) -> None:
        self._settings = settings = session.settings
        params, width = settings.params, settings.params.beam_width
        self._ends = frozenset(() if params.ignore_eos else settings.eos_token_ids)
        table = np.asarray(logits, dtype=np.float64)[list(rows)]  # [beams, vocab]
        self.vocab_size = table.shape[1]
        peaks = table.max(axis=1, keepdims=True)
        logprobs = table - peaks - np.log(np.exp(table - peaks).sum(axis=1, keepdims=True))
        self._sums = np.array(cumulative_logprobs)[:, None] + logprobs  # [beams, vocab]
        count = max(2, 1 + len(self._ends)) * width
        order = np.argsort(-self._sums, axis=None, kind="stable")[: count + 1]
        self._ranking = [divmod(int(index), self.vocab_size) for index in order]  # (beam, token), best first
        self._ranking = [one for one in self._ranking if self._sums[one] > -np.inf]
        length = len(session._right) + 1
        most = settings.max_length - settings.prompt_length
        self._is_last = length == most
        self.kept = list(session._kept)

        def tie(one: tuple[int, int], other: tuple[int, int]) -> bool:
            """Whether two candidates are equal however they are computed."""
            (a, token), (b, second) = one, other
            same_row = cumulative_logprobs[a] == cumulative_logprobs[b] and bool((table[a] == table[b]).all())
            return ties and same_row and bool(table[a, token] == table[b, second])

        self.clear = all(
            self._sums[one] - self._sums[other] >= CLOSE or tie(one, other) for one, other in pairwise(self._ranking)
        )
        scored: list[tuple[float, tuple[int, int] | None]] = [(score, None) for score in self.kept]
        for one in self._ranking[:width]:
            if self._is_last or one[1] in self._ends:
                scored.append((self._sums[one] / length**params.length_penalty, one))
        scored.sort(key=lambda pair: -pair[0])
        for (high, one), (low, other) in pairwise(scored):
            self.clear &= high - low >= CLOSE or (one is not None and other is not None and tie(one, other))
        scored = scored[:width]
        self.kept = [float(score) for score, _ in scored]
        best = next((one for one in self._ranking if one[1] not in self._ends), None)
        if len(scored) == width and params.early_stopping is not True and best and not self._is_last:
            patient = params.early_stopping == "never" and params.length_penalty > 0
            reachable = self._sums[best] / (most if patient else length) ** params.length_penalty
            worst, one = scored[-1]
            equal = one is not None and not patient and tie(best, one)
            self.clear &= bool(abs(reachable - worst) >= CLOSE or equal)
        self._found: dict[tuple[int, int], str] = {}
        self._expected: dict[tuple[int, int], str] = {}

    def note(self, found: BeamStep, right: BeamStep) -> None:
        """Keep both searches' decisions for the drawing."""
        self._found, self._expected = _fates(found), _fates(right)

    def drawing(self) -> tuple[str, ...]:
        rows = [["rank", "beam", "token", "sum", "should be", "your search says"]]
        ranking = [*self._ranking[:DRAWN], *(one for one in self._found if one not in self._ranking[:DRAWN])]
        for rank, one in enumerate(ranking[: 2 * DRAWN], start=1):
            beam, token = one
            known = beam < len(self._sums) and token < self.vocab_size and beam >= 0 and token >= 0
            total = f"{self._sums[one]:.3f}" if known else "?"
            expected, found = self._expected.get(one, "-"), self._found.get(one, "-")
            end = " (EOS)" if token in self._ends else ""
            wrong = " <--" if expected != found and self._expected | self._found else ""
            rows.append([str(rank), str(beam), f"{token}{end}", total, expected, found + wrong])
        return tuple(aligned(rows))


def _fates(step: BeamStep) -> dict[tuple[int, int], str]:
    """Return a description of what the step does with each candidate."""
    fates = {(move.parent, move.token_id): f"beam {place}" for place, move in enumerate(step.survivors)}
    return fates | {(move.parent, move.token_id): f"finished, {score:.3f}" for move, score in step.finished}


# --- The same decisions, carried out by the engine ------------------------------------------------


class _Stopped(Exception):
    """Raised at the end of the recorded decisions."""


def carry_out(settings: BeamSettings, steps: Sequence[BeamStep], message: str) -> tuple[list[Event], tuple[str, ...]]:
    """Return the engine's events up to the wrong step, and the beams' block tables before it."""

    class Decided(contracts.BeamSearch):
        def __init__(self, *_: object) -> None:
            self._left = list(steps)

        def step(self, logits: Any, rows: Sequence[int], cumulative_logprobs: Sequence[float]) -> BeamStep:
            if not self._left:
                raise _Stopped
            return self._left.pop(0)

    width, length = settings.params.beam_width, settings.max_length
    config = EngineConfig(
        num_blocks=2 * width * (length // BLOCK_SIZE + 2),
        max_model_len=length + 1,
        vocab_size=LARGEST_VOCABULARY,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=False,
        eos_token_ids=settings.eos_token_ids,
    )
    runner = ContentRunner(config.num_blocks, 0, BLOCK_SIZE, config.vocab_size)
    events: list[Event] = []
    tier = replace(reference_tier(), beam_search=Decided)
    engine = Engine(config, tier, runner, listeners=[events.append], steady=False)
    runner.engine = engine
    engine.add_request([0] * settings.prompt_length, settings.params, request_id="A")
    tables: tuple[str, ...] = ()
    try:
        while engine.has_unfinished_requests():
            engine.step()
            beams = [sequence for request in engine.scheduler.running for sequence in request.sequences]
            tables = tuple(
                f"beam {number}: tokens {sequence.output_token_ids}, block table {list(sequence.table.blocks)}"
                for number, sequence in enumerate(beams)
            )
    except _Stopped:
        events[-1] = StepFailed(len(steps) + 1, message, ("A",))
    return events, tables


# --- Helpers --------------------------------------------------------------------------------------


def _move(value: Any) -> BeamMove:
    if not isinstance(value, BeamMove):
        raise TypeError
    for number in (value.parent, value.token_id):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError
    return BeamMove(value.parent, value.token_id, _number(value.cumulative_logprob))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _room(right: float) -> float:
    return TOLERANCE * max(1.0, abs(right))


def _is_close(found: float, right: float) -> bool:
    return abs(found - right) <= _room(right)


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"beam {beam} + token {token}" for beam, token in pairs) or "none"


def _written(logits: np.ndarray) -> str:
    """Return the array's source in a script."""
    values = repr(np.asarray(logits).tolist()).replace("-inf", "-np.inf").replace("nan", "np.nan")
    return f"np.array({values.replace(' inf', ' np.inf').replace('[inf', '[np.inf')}, dtype=np.{logits.dtype})"
