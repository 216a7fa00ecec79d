"""Assignment 5, `beam-search`: which beams go on, which have finished, when the search is over (paper, section 4.4).

The properties are small searches that Hypothesis makes up: a table of logits for each step, given to the student's
search and to the reference's. Each test has a rule of its own. Then the real engine serves random workloads with the
student's search, on a model that checks every read: survivors fork block tables, their next tokens copy blocks, and
the beams left behind give theirs back. Then SmolLM2 has to come to the same beams as with the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import numpy as np
from hypothesis import strategies as st

from minipaged import contracts
from minipaged.contracts import BeamStep
from minipaged.course.assignments.beam_search.session import ALL, Look, Session, Settings
from minipaged.course.grader.assignment import Assignment, Bench, Failed, Failure, Test
from minipaged.course.grader.search import search
from minipaged.course.sandbox.contract import StudentError
from minipaged.errors import Invariant, InvariantViolation
from minipaged.events import Event, StepFailed
from minipaged.llm import LLM, LoadedModel
from minipaged.params import BeamSearchParams
from minipaged.testing.workloads import Run, Workload, all_sound, random_workload
from minipaged.tiers import reference_tier

ENGINE_WORKLOADS = 12
UNREACHED = 50
"""A maximum of generated tokens that no made-up search comes to."""
LEVELS = 20
"""Logits are 0, 1/4, 2/4, ... up to this many quarters: short to write down, and no rounding in them."""


# --- Made-up searches -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scenario:
    """The settings of one search, and the logits of each step: a row for each beam that there can be."""

    settings: Settings
    tables: tuple[np.ndarray, ...]
    turned: bool = False
    """Whether the rows come in another order than the beams, after a row that is no beam's."""

    def step_inputs(self, number: int, num_beams: int) -> tuple[np.ndarray, list[int]]:
        """The logits of one step, and which row is whose."""
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
    """`most_tokens`: the range of the maximum length, less the prompt; sequences: what is drawn from."""
    width = draw(st.integers(1, widest))
    vocab = draw(st.integers(2 + bool(num_eos), 5))
    most = draw(st.integers(*most_tokens))
    prompt_length = draw(st.integers(1, 3))
    params = BeamSearchParams(
        beam_width=width,
        max_tokens=most + draw(st.sampled_from([0, 0, 3])),  # max_length may come earlier
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
    settings = Settings(params, prompt_length, prompt_length + most, tuple(eos))
    return Scenario(settings, tuple(logits), turned and draw(st.booleans()))


def follow(session: Session, scenario: Scenario, look: Look, *, to_the_end: bool) -> None:
    """Step through the tables, as long as the steps are clear.

    Unless `to_the_end`, only until the search may be over: who goes on then is another test's business.
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
    """The sums that the next step is given: short to write down."""
    return [round(move.cumulative_logprob, 2) for move in step.survivors]


def property_of(look: Look = ALL, *, to_the_end: bool = False, **kinds: Any) -> Callable[[Bench], None]:
    """A check that follows such searches."""

    def check(bench: Bench) -> None:
        def run(scenario: Scenario) -> None:
            bench.process.forget()
            follow(Session(bench, scenario.settings), scenario, look, to_the_end=to_the_end)

        search(bench, scenarios(**kinds), run)

    return check


def each_of(*checks: Callable[[Bench], None]) -> Callable[[Bench], None]:
    """Several searches for one test: what is rare in the one is common in the other."""

    def check(bench: Bench) -> None:
        for one in checks:
            one(bench)

    return check


# --- Logits that are no numbers, copies -----------------------------------------------------------

BAD = (
    (np.nan, 1, "a beam's row holds NaN"),
    (np.inf, 1, "a beam's row holds plus infinity"),
    (-np.inf, None, "a beam's row holds nothing but minus infinity"),
)
"""What is put into a row, into how many places (None: all), and why that is refused."""


def check_bad_logits(bench: Bench) -> None:
    """Rows from which nothing can be chosen; tokens that the model rules out; and rows that are no beam's."""
    places = st.tuples(st.integers(0, 2), st.integers(0, 4))

    def refused(drawn: tuple[Scenario, tuple[Any, int | None, str], tuple[int, int]]) -> None:
        scenario, (value, how_many, why), (beam, token) = drawn
        bench.process.forget()
        session = Session(bench, scenario.settings)
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
        bench.process.forget()
        logits, rows = scenario.step_inputs(0, 1)
        logits = logits.copy()
        logits[rows[0], [token % logits.shape[1] for token in tokens]] = -np.inf
        if np.isfinite(logits[rows[0]]).any():
            session = Session(bench, scenario.settings)
            if session.is_clear(logits, rows, [0.0]):
                session.step(logits, rows, [0.0])

    search(bench, st.tuples(scenarios(steps=2, turned=True), st.sampled_from(BAD), places), refused)
    search(bench, st.tuples(scenarios(steps=1, turned=True), places), ruled_out)


def check_copies(bench: Bench) -> None:
    """The engine steps a deep copy, and throws it away when something goes wrong; and it runs many searches at once."""

    def run(drawn: tuple[Scenario, Scenario]) -> None:
        one, two = drawn
        bench.process.forget()
        session = Session(bench, one.settings)
        other = Session(bench, two.settings, beside=session)
        sums, other_sums = [0.0], [0.0]

        def step(search: Session, scenario: Scenario, number: int, sums: list[float]) -> list[float]:
            logits, rows = scenario.step_inputs(number, len(sums))
            return rounded_sums(search.step(logits, rows, sums)) if search.is_clear(logits, rows, sums) else []

        for number in range(len(one.tables)):
            if sums:
                step(session.copied("thrown_away"), one, number - 1, sums)  # on other logits
            other_sums = other_sums and step(other, two, number, other_sums)
            sums = sums and step(session, one, number, sums)

    kinds: dict[str, Any] = {"widest": 2, "steps": 3, "num_eos": 1, "most_tokens": (2, 5)}
    search(bench, st.tuples(scenarios(**kinds), scenarios(**kinds)), run)


# --- The engine -----------------------------------------------------------------------------------


def remote_search(bench: Bench) -> type[contracts.BeamSearch]:
    """The student's search as the engine uses it: every step is made in the worker, and compared."""

    class Remote(contracts.BeamSearch):
        def __init__(
            self, params: BeamSearchParams, prompt_length: int, max_length: int, eos_token_ids: Sequence[int]
        ) -> None:
            self._session = Session(bench, Settings(params, prompt_length, max_length, tuple(eos_token_ids)))

        def step(self, logits: Any, rows: Sequence[int], cumulative_logprobs: Sequence[float]) -> BeamStep:
            return self._session.step(logits[list(rows)], range(len(rows)), cumulative_logprobs)

        def __deepcopy__(self, memo: object) -> Remote:
            twin = Remote.__new__(Remote)
            twin._session = self._session.copied()
            return twin

    return Remote


def workloads_with_beams(seed: int) -> Iterator[tuple[int, Workload]]:
    """Random workloads in which some request searches with several beams."""
    for number in count(1000 * seed):
        workload = random_workload(number)
        if any(isinstance(one.params, BeamSearchParams) and one.params.beam_width > 1 for one in workload.requests):
            yield number, workload


def check_engine(bench: Bench) -> None:
    """Forks, copy-on-write, beams left behind, preemption in the midst of a search: blocks are conserved."""
    for number, workload in islice(workloads_with_beams(bench.seed), ENGINE_WORKLOADS):
        bench.process.forget()
        events: list[Event] = []
        tier = replace(reference_tier(), beam_search=remote_search(bench))
        try:
            run = Run(workload, tier, listeners=[events.append])
            run.to_the_end()
            run.check_outputs()
            run.check_nothing_leaked()
        except Failed as failed:
            message = f"in the engine, workload {number}: {failed.failure.message}"
            raise Failed(replace(failed.failure, message=message)) from None
        except (InvariantViolation, StudentError, AssertionError, ValueError, TypeError, IndexError) as error:
            invariant = error.invariant if isinstance(error, InvariantViolation) else None
            if not isinstance(events[-1] if events else None, StepFailed):
                events.append(StepFailed(0, repr(error), ()))
            message = f"in the engine, workload {number}: {error}"
            raise Failed(Failure(message, invariant, events=tuple(events))) from None


# --- SmolLM2 --------------------------------------------------------------------------------------

PROMPTS = ("Paging is a way to", "The capital of France is")


def check_model(bench: Bench) -> None:
    """Beam search on SmolLM2, some of it preempted: the same beams as with the reference's search."""
    loaded = LoadedModel.load(bench.model, "reference")
    params = BeamSearchParams(beam_width=3, max_tokens=5)

    def beams(model: LoadedModel) -> list[list[tuple[int, ...]]]:
        llm = LLM(model, block_size=4, num_blocks=10, num_swap_blocks=10, max_model_len=64)  # too few for both at once
        return [
            [tuple(one.token_ids) for one in output.outputs]
            for output in all_sound(llm.beam_search(list(PROMPTS), params))
        ]

    expected = beams(loaded)
    tier = replace(loaded.tier, beam_search=remote_search(bench))
    try:
        found = beams(replace(loaded, tier=tier))
    except Failed as failed:
        raise Failed(replace(failed.failure, message=f"with SmolLM2: {failed.failure.message}")) from None
    except (InvariantViolation, StudentError, ValueError, TypeError, IndexError) as error:
        invariant = error.invariant if isinstance(error, InvariantViolation) else None
        raise Failed(Failure(f"with SmolLM2: {error}", invariant)) from None
    if found != expected:
        raise Failed(Failure(f"SmolLM2's beams are {found!r}; they should be {expected!r}"))


# --- The assignment -------------------------------------------------------------------------------

PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
ENDINGS: dict[str, Any] = {"steps": 5, "most_tokens": (2, 8), "num_eos": 2, "eos_bonus": (0.0, 1.0, 2.5)}
"""Searches in which many sequences finish."""

ASSIGNMENT = Assignment(
    name="beam-search",
    title="Beam search with block sharing",
    part="BeamSearch",
    members=("step",),
    cap=70,
    modules=("copy", "numpy", "minipaged.reference.sampling"),  # the last one for parts that rank as the reference does
    tests=(
        Test(
            name="the first step",
            points=5,
            invariant=None,
            meaning="One beam, the prompt: the beam_width likeliest tokens go on, the likeliest first, each with its "
            "log-probability.",
            hint="What turns logits into log-probabilities? They are all below 0, and their exponentials add up to 1.",
            check=property_of(steps=1),
        ),
        Test(
            name="beams are ranked together",
            points=15,
            invariant=None,
            meaning="The candidates of all beams compete by the sum of their log-probabilities: one beam may have "
            "several survivors, another none. `parent` says whose block table a survivor goes on with.",
            hint="Where does the sum so far of each beam come in, and before or after the ranking? Which row of the "
            "logits is beam 1's?",
            check=property_of(steps=3, widest=4, turned=True),
        ),
        Test(
            name="ties",
            points=5,
            invariant=None,
            meaning="Of equal candidates the one of the earlier beam comes first, then the one with the lower token "
            "id: the same logits give the same beams, every time.",
            hint="Is your sort stable, and does it turn the order of equals around when it goes downwards?",
            check=property_of(steps=2, ties=(True,)),
        ),
        Test(
            name="sequences that end in EOS",
            points=15,
            invariant=None,
            meaning="A candidate that ends in EOS is finished if it is among the best beam_width of its step, and "
            "dropped if not. The best beam_width of the others go on: an EOS takes nobody's place.",
            hint="Rank first, then look at each of the best: does it end? How many candidates have to be ranked, so "
            "that beam_width are left to go on whatever ends? And what does ignore_eos ask for?",
            check=property_of(Look(scores=False), steps=4, widest=4, num_eos=2, may_ignore_eos=True, turned=True),
        ),
        Test(
            name="scores and the length penalty",
            points=10,
            invariant=None,
            meaning="The score of a finished sequence is its sum of log-probabilities divided by the number of its "
            "generated tokens to the power of length_penalty; the EOS counts, the prompt does not.",
            hint="Work one out by hand for length_penalty 0, 1 and 2. How many tokens has a sequence that ends in "
            "the first step?",
            check=property_of(Look(survivors=False), steps=4, widest=4, num_eos=1, length_penalties=PENALTIES),
        ),
        Test(
            name="the maximum length",
            points=5,
            invariant=None,
            meaning="At max_length the best beam_width candidates finish, whatever they end in, and nobody goes on.",
            hint="max_length counts the prompt too; and it may come before params.max_tokens.",
            check=property_of(to_the_end=True, steps=3, most_tokens=(1, 3), length_penalties=(0.0, 1.0)),
        ),
        Test(
            name="early_stopping True and False",
            points=10,
            invariant=None,
            meaning="With beam_width finished sequences the search may be over. True: it is. False: it is when the "
            "best survivor, scored as if it ended now, is no better than the worst of them. Only the best beam_width "
            "of all that finished are kept: one that is worse is not reported.",
            hint="Which of the finished sequences is the one to beat, after three steps in which some finished? And "
            "what if both are equal?",
            check=each_of(
                property_of(
                    to_the_end=True,
                    length_penalties=PENALTIES,
                    early_stopping=(True, False),
                    **ENDINGS,
                ),
                property_of(to_the_end=True, steps=2, widest=2, num_eos=1, ties=(True,)),
            ),
        ),
        Test(
            name='early_stopping "never"',
            points=5,
            invariant=None,
            meaning="The search is over when the best survivor could not beat the worst of the finished ones even if "
            "it came to max_length and lost nothing more on the way. With a length penalty of 0 or less longer is no "
            "better: then as for False.",
            hint="At which length is a sum of log-probabilities worth most, with a penalty above 0, and with one "
            "below?",
            check=each_of(
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
        ),
        Test(
            name="logits that are no numbers",
            points=5,
            invariant=None,
            meaning="NaN, plus infinity, or a row of nothing but minus infinity: BadLogits, a ValueError. A token "
            "whose logit is minus infinity is in no sequence. Rows that are no beam's are not looked at.",
            hint="What does your ranking do with NaN? And how many candidates are there, if the model rules all tokens "
            "out but one?",
            check=check_bad_logits,
        ),
        Test(
            name="a copy goes its own way",
            points=5,
            invariant=Invariant.ATOMIC_FAILURE,
            meaning="The engine steps a deep copy, and keeps the search as it was if anything raises. It runs many "
            "searches at once.",
            hint="Where is the state of a search kept: in the object, or where all objects share it?",
            check=check_copies,
        ),
        Test(
            name="the engine, on a small model",
            points=10,
            invariant=Invariant.CONSERVATION,
            meaning="Survivors of one parent share its blocks, the first to write into a shared one copies it, and "
            "beams without survivors give theirs back: no block is lost.",
            hint="The engine asks as the tests above do, with wider vocabularies and longer searches.",
            check=check_engine,
            stage="engine",
        ),
        Test(
            name="SmolLM2",
            points=10,
            invariant=Invariant.SCHEDULING_INVARIANCE,
            meaning="The beams are those of the reference's search, although some were preempted on the way.",
            hint="A vocabulary of 49,152 tokens: is anything in your search made for small ones?",
            check=check_model,
            stage="model",
        ),
    ),
)
