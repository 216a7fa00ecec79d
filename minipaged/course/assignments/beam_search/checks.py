"""Assignment 5, `beam-search`: the beams that continue, those that have finished, the end (paper, section 4.4).

The properties are small random searches: the student's search and the reference's get the same table of logits for each
step. Each test checks another rule. Then the real engine serves random workloads with the student's search, on a model
that checks every read: survivors fork block tables, their next tokens copy blocks, and dropped beams free theirs. Then
SmolLM2 has to find the same beams as with the reference's search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from hypothesis import strategies as st

from minipaged import contracts
from minipaged.contracts import BeamStep
from minipaged.course.assignments.beam_search.session import ALL, BeamSession, BeamSettings, Look
from minipaged.course.grader.assignment import Bench, Check, Performance, Submission, fastest
from minipaged.course.grader.points import described
from minipaged.course.grader.search import search
from minipaged.course.grader.serving import Parts, check_texts, check_workloads, workloads_with_beams
from minipaged.params import BeamSearchParams
from minipaged.testing.content_runner import numpy_model

ENGINE_WORKLOADS = 12
UNREACHED = 50
"""A maximum of generated tokens that no random search reaches."""
LEVELS = 20
"""The largest logit in quarters. Logits are 0, 1/4, 2/4, ...: short in scripts, and exact in floating point."""


# --- Random searches ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scenario:
    """The settings of one search, and the logits of each step: one row for each possible beam."""

    settings: BeamSettings
    tables: tuple[np.ndarray, ...]
    turned: bool = False
    """Whether the rows are in another order than the beams, after a row that belongs to no beam."""

    def step_inputs(self, number: int, num_beams: int) -> tuple[np.ndarray, list[int]]:
        """Return the logits of one step, and each beam's row."""
        logits = self.tables[number][:num_beams]
        if not self.turned:
            return logits, list(range(num_beams))
        nobodys = np.full((1, logits.shape[1]), np.nan, dtype=np.float32)
        return np.concatenate([nobodys, logits[::-1]]), list(range(num_beams, 0, -1))


@st.composite
def scenarios(
    draw: st.DrawFn,
    *,
    steps: int,
    widest: int = 3,
    most_tokens: tuple[int, int] = (UNREACHED, UNREACHED),
    num_eos: int = 0,
    may_ignore_eos: bool = False,
    length_penalties: Sequence[float] = (1.0,),
    early_stopping: Sequence[Any] = (False,),
    eos_bonus: Sequence[float] = (0.0,),
    ties: Sequence[bool] = (False,),
    turned: bool = False,
) -> Scenario:
    """Draw a search. `most_tokens` is the range of the maximum length without the prompt; the arguments that are
    sequences have the values to choose from."""
    width = draw(st.integers(1, widest))
    vocab = draw(st.integers(2 + bool(num_eos), 5))
    most = draw(st.integers(*most_tokens))
    prompt_length = draw(st.integers(1, 3))
    params = BeamSearchParams(
        beam_width=width,
        max_tokens=most + draw(st.sampled_from([0, 0, 3])),  # the search may reach max_length earlier
        length_penalty=draw(st.sampled_from(length_penalties)),
        early_stopping=draw(st.sampled_from(early_stopping)),
        ignore_eos=may_ignore_eos and draw(st.booleans()),
    )
    eos = draw(st.lists(st.integers(0, vocab - 1), min_size=min(1, num_eos), max_size=num_eos, unique=True))
    tied = draw(st.sampled_from(ties))
    row = st.lists(st.integers(0, 2 if tied else LEVELS), min_size=vocab, max_size=vocab, unique=not tied)
    table = st.lists(row, min_size=width, max_size=width)
    logits = np.array(draw(st.lists(table, min_size=steps, max_size=steps)), dtype=np.float32) / 4
    logits[:, :, eos] += draw(st.sampled_from(eos_bonus))
    settings = BeamSettings(params, prompt_length, prompt_length + most, tuple(eos))
    return Scenario(settings, tuple(logits), turned and draw(st.booleans()))


def follow(session: BeamSession, scenario: Scenario, look: Look, *, to_the_end: bool) -> None:
    """Step through the tables while the right decisions are clear.

    Without `to_the_end`, stop when the search may be over; another test checks the survivors of that step.
    """
    sums, finished = [0.0], 0
    for number in range(len(scenario.tables)):
        logits, rows = scenario.step_inputs(number, len(sums))
        if not session.is_clear(logits, rows, sums, ties=look.ties):
            return
        finished += session.num_about_to_finish(logits, rows, sums)
        may_be_over = not to_the_end and finished >= scenario.settings.params.beam_width
        step = session.step(logits, rows, sums, replace(look, survivors=False) if may_be_over else look)
        if may_be_over or not step.survivors:
            return
        sums = rounded_sums(step)


def rounded_sums(step: BeamStep) -> list[float]:
    """Return the rounded sums for the next step, which are short in scripts."""
    return [round(move.cumulative_logprob, 2) for move in step.survivors]


def property_of(look: Look = ALL, *, to_the_end: bool = False, **kinds: Any) -> Callable[[Bench], None]:
    """Return a check that follows such searches."""

    def run(bench: Bench, scenario: Scenario) -> None:
        follow(BeamSession(bench, scenario.settings), scenario, look, to_the_end=to_the_end)

    return lambda bench: search(bench, scenarios(**kinds), partial(run, bench))


def each_of(*checks: Callable[[Bench], None]) -> Callable[[Bench], None]:
    """Return a check that runs several checks. Cases that are rare in one are common in another."""

    def check(bench: Bench) -> None:
        for one in checks:
            one(bench)

    return check


# --- Bad logits, copies ---------------------------------------------------------------------------

BAD = (
    (np.nan, 1, "a beam's row holds NaN"),
    (np.inf, 1, "a beam's row holds plus infinity"),
    (-np.inf, None, "a beam's row holds nothing but minus infinity"),
)
"""Bad rows: the value put into a row, the number of places (None: all), and why the row is refused."""


def check_bad_logits(bench: Bench) -> None:
    """Check rows from which no token can be chosen, tokens that the model rules out, and rows without a beam."""
    places = st.tuples(st.integers(0, 2), st.integers(0, 4))

    def refused(drawn: tuple[Scenario, tuple[Any, int | None, str], tuple[int, int]]) -> None:
        scenario, (value, how_many, why), (beam, token) = drawn
        session = BeamSession(bench, scenario.settings)
        logits, rows = scenario.step_inputs(0, 1)
        if not session.is_clear(logits, rows, [0.0]):
            return
        sums = rounded_sums(session.step(logits, rows, [0.0]))
        logits, rows = scenario.step_inputs(1, len(sums))
        logits = logits.copy()
        logits[rows[beam % len(rows)], slice(None) if how_many is None else token % logits.shape[1]] = value
        session.refuse(logits, rows, sums, why)

    def ruled_out(drawn: tuple[Scenario, tuple[int, int]]) -> None:
        scenario, tokens = drawn
        logits, rows = scenario.step_inputs(0, 1)
        logits = logits.copy()
        logits[rows[0], [token % logits.shape[1] for token in tokens]] = -np.inf
        if np.isfinite(logits[rows[0]]).any():
            session = BeamSession(bench, scenario.settings)
            if session.is_clear(logits, rows, [0.0]):
                session.step(logits, rows, [0.0])

    search(bench, st.tuples(scenarios(steps=2, turned=True), st.sampled_from(BAD), places), refused)
    search(bench, st.tuples(scenarios(steps=1, turned=True), places), ruled_out)


def check_copies(bench: Bench) -> None:
    """Check that deep copies and several searches are independent.

    The engine steps a deep copy, discards it after an error, and runs many searches at the same time.
    """

    def run(drawn: tuple[Scenario, Scenario]) -> None:
        one, two = drawn
        session = BeamSession(bench, one.settings)
        other = BeamSession(bench, two.settings, beside=session)
        sums, other_sums = [0.0], [0.0]

        def step(search: BeamSession, scenario: Scenario, number: int, sums: list[float]) -> list[float]:
            logits, rows = scenario.step_inputs(number, len(sums))
            return rounded_sums(search.step(logits, rows, sums)) if search.is_clear(logits, rows, sums) else []

        for number in range(len(one.tables)):
            if sums:
                step(session.copied("thrown_away"), one, number - 1, sums)  # a step with other logits
            other_sums = other_sums and step(other, two, number, other_sums)
            sums = sums and step(session, one, number, sums)

    kinds: dict[str, Any] = {"widest": 2, "steps": 3, "num_eos": 1, "most_tokens": (2, 5)}
    search(bench, st.tuples(scenarios(**kinds), scenarios(**kinds)), run)


# --- The engine -----------------------------------------------------------------------------------


def remote_search(bench: Bench) -> type[contracts.BeamSearch]:
    """Return the class of the student's search for an engine. Every step runs in the worker, and is compared."""

    class RemoteBeamSearch(contracts.BeamSearch):
        def __init__(
            self, params: BeamSearchParams, prompt_length: int, max_length: int, eos_token_ids: Sequence[int]
        ) -> None:
            self._session = BeamSession(bench, BeamSettings(params, prompt_length, max_length, tuple(eos_token_ids)))

        def step(self, logits: Any, rows: Sequence[int], cumulative_logprobs: Sequence[float]) -> BeamStep:
            return self._session.step(logits[list(rows)], range(len(rows)), cumulative_logprobs)

        def __deepcopy__(self, memo: object) -> RemoteBeamSearch:
            twin = RemoteBeamSearch.__new__(RemoteBeamSearch)
            twin._session = self._session.copied()
            return twin

    return RemoteBeamSearch


def check_engine(bench: Bench) -> None:
    """Check that blocks are conserved with forks, copy-on-write, dropped beams, and preemption during a search."""
    workloads = islice(workloads_with_beams(bench.seed), ENGINE_WORKLOADS)
    check_workloads(bench, workloads, lambda: Parts({"beam_search": remote_search(bench)}), model=numpy_model())


def check_model(bench: Bench) -> None:
    """Check that SmolLM2 finds the same beams as with the reference's search, some of them preempted."""
    check_texts(bench, lambda: Parts({"beam_search": remote_search(bench)}))


# --- Speed ----------------------------------------------------------------------------------------

TIMED_WIDTH, TIMED_VOCABULARY, TIMED_STEPS = 4, 4096, 8
"""The sizes of the timed search. It has few steps, so that Python loops, hundreds of times slower, finish in time."""
ROUNDS = 5
"""The number of speed measurements; the fastest one counts."""


def measure(bench: Bench) -> Performance:
    """Measure the steps per second of one search, in turns with the reference's."""
    params = BeamSearchParams(beam_width=TIMED_WIDTH, max_tokens=TIMED_STEPS)
    shape = (TIMED_WIDTH, TIMED_VOCABULARY)
    logits = np.random.default_rng(bench.seed).standard_normal(shape).astype(np.float32)
    with bench.beside(Submission.of_reference("beam_search", "BeamSearch")) as theirs:

        def seconds(one: Bench) -> float:
            return float(one.process.modules[-1].call("seconds", *one.part, params, 1, 1 + TIMED_STEPS, logits))

        best = fastest(ROUNDS, lambda: seconds(bench), lambda: seconds(theirs))
    return Performance(TIMED_STEPS / best[0], TIMED_STEPS / best[1], "steps")


# --- The assignment -------------------------------------------------------------------------------

PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
ENDINGS: dict[str, Any] = {"steps": 5, "most_tokens": (2, 8), "num_eos": 2, "eos_bonus": (0.0, 1.0, 2.5)}
"""Arguments for searches in which many sequences finish."""

CHECKS: dict[str, Check] = {
    "the first step": property_of(steps=1),
    "beams are ranked together": property_of(steps=3, widest=4, turned=True),
    "ties": property_of(steps=2, ties=(True,)),
    "sequences that end in EOS": property_of(
        Look(scores=False), steps=4, widest=4, num_eos=2, may_ignore_eos=True, turned=True
    ),
    "scores and the length penalty": property_of(
        Look(survivors=False), steps=4, widest=4, num_eos=1, length_penalties=PENALTIES
    ),
    "the maximum length": property_of(to_the_end=True, steps=3, most_tokens=(1, 3), length_penalties=(0.0, 1.0)),
    "early_stopping True and False": each_of(
        property_of(
            to_the_end=True,
            length_penalties=PENALTIES,
            early_stopping=(True, False),
            **ENDINGS,
        ),
        property_of(to_the_end=True, steps=2, widest=2, num_eos=1, ties=(True,)),
    ),
    'early_stopping "never"': each_of(
        *(
            property_of(
                to_the_end=True,
                length_penalties=penalties,
                early_stopping=("never",),
                **ENDINGS,
            )
            for penalties in ((0.5, 1.0, 2.0), (-1.0, -0.5))
        )
    ),
    "logits that are no numbers": check_bad_logits,
    "a copy goes its own way": check_copies,
    "the engine, on a small model": check_engine,
    "SmolLM2": check_model,
}

ASSIGNMENT = described(
    "beam-search",
    CHECKS,
    part="BeamSearch",
    members=("step",),
    # The sampling module is for parts that rank candidates with it, as the reference does.
    modules=("copy", "numpy", "minipaged.reference.sampling", "minipaged.course.assignments.beam_search.worker"),
    measure=measure,
)
