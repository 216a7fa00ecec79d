"""Assignment 12, `speculative`: which drafted tokens stand, which token comes after them, and what is rolled back.

The properties call `residual` and `verify` with small distributions, whose probabilities are eighths, so that the right
answer is exact. They run random programs on tables whose refused tokens are rolled back. Hypothesis generates and
shrinks both. One test draws many tokens, and compares their shares with the model's distribution. Then the real engine
verifies and rolls back with the student's part, on a model that checks every read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from random import Random
from typing import Any

from hypothesis import strategies as st

from minipaged.contracts import Logits, Sampled, SamplingInput
from minipaged.course.assignments.speculative.session import (
    RollBackSession,
    RollBackStep,
    Row,
    SpeculativeSession,
    Verification,
)
from minipaged.course.assignments.speculative.worker import outcomes
from minipaged.course.grader.assignment import Bench, Check, Failed, Failure
from minipaged.course.grader.counterexample import make_script, raised_message, sources_of
from minipaged.course.grader.points import described
from minipaged.course.grader.search import search
from minipaged.course.grader.serving import Parts, check_workloads, in_engine, numbered_workloads
from minipaged.course.sandbox.contract import Raised, StudentError
from minipaged.engine.drafting import AdaptiveDrafts
from minipaged.engine.drafts import Drafts
from minipaged.engine.engine import Engine
from minipaged.engine.sequence import Request, SequenceState
from minipaged.errors import Invariant
from minipaged.events import Event
from minipaged.params import SamplingParams, SpeculativeConfig
from minipaged.testing.plain_model import PlainModel
from minipaged.testing.workloads import Workload, all_sound, expected_tokens

PARTS = 8
"""Probabilities and the numbers u are multiples of one in PARTS. The numbers v lie in the middle between two."""
MOST_TOKENS = 4
"""The most tokens of a vocabulary, and of a draft."""
LARGEST_BLOCK = 4
"""The most slots of a block."""
ENGINE_WORKLOADS = 20


# --- Verifying --------------------------------------------------------------------------------------


def distributions(vocab: int) -> st.SearchStrategy[Row]:
    """Return a strategy for distributions over `vocab` tokens, in multiples of 1 / PARTS."""
    cuts = st.lists(st.integers(0, PARTS), min_size=vocab - 1, max_size=vocab - 1).map(sorted)
    return cuts.map(lambda cuts: [(b - a) / PARTS for a, b in zip([0, *cuts], [*cuts, PARTS], strict=True)])


def certain(vocab: int) -> st.SearchStrategy[Row]:
    """Return a strategy for distributions that are certain of a token."""
    return st.integers(0, vocab - 1).map(lambda token: one_hot(token, vocab))


def one_hot(token: int, vocab: int) -> Row:
    return [float(other == token) for other in range(vocab)]


@st.composite
def verifications(
    draw: st.DrawFn, lengths: tuple[int, int], rows: Callable[[int], st.SearchStrategy[Row]] = distributions
) -> Verification:
    """Draw a draft with a length in this range, and what verifies it."""
    vocab, k = draw(st.integers(2, MOST_TOKENS)), draw(st.integers(*lengths))
    p, q = (draw(st.lists(rows(vocab), min_size=n, max_size=n)) for n in (k + 1, k))
    drafted = [draw(st.sampled_from([token for token, share in enumerate(row) if share])) for row in q]
    numbers = st.integers(0, PARTS - 1)
    u = [draw(numbers) / PARTS for _ in range(k)]
    return Verification(p, q, drafted, u, [(2 * draw(numbers) + 1) / (2 * PARTS) for _ in range(k + 1)])


def all_standing(case: Verification) -> Verification:
    """Return the draft with a row of q for p wherever a token would be refused."""
    rows = zip(case.p, case.q, strict=False)
    p = [mine if case.stands(i) else theirs for i, (mine, theirs) in enumerate(rows)]
    return replace(case, p=[*p, case.p[-1]])


def cut(case: Verification) -> Verification:
    """Return the draft with NaN in the rows of p that nobody may look at."""
    n = case.num_accepted + 1
    return replace(case, p=[row if i < n else [math.nan] * len(row) for i, row in enumerate(case.p)])


def check_verify(cases: st.SearchStrategy[Verification], **more: Any) -> Check:
    """Return a check of `verify` on such drafts; `more` goes to `SpeculativeSession.verify`."""

    def run(bench: Bench, case: Verification) -> None:
        SpeculativeSession(bench).verify(case, **more)

    return lambda bench: search(bench, cases, partial(run, bench))


def check_residual(bench: Bench) -> None:
    pairs = st.integers(2, MOST_TOKENS).flatmap(lambda vocab: st.tuples(distributions(vocab), distributions(vocab)))
    different = pairs.filter(lambda pair: pair[0] != pair[1])
    search(bench, different, lambda pair: SpeculativeSession(bench).residual(*pair))


# --- The distribution -------------------------------------------------------------------------------

DRAWS = 60_000
"""The number of drafts that are drawn and verified."""
DRAWS_OF_A_CALL = 200
"""The number of them in one call of the worker."""
P = [[0.375, 0.375, 0.125, 0.125], [0.125, 0.125, 0.25, 0.5]]
Q = [[0.125, 0.125, 0.25, 0.5]]
LARGEST_CHI_SQUARE = 40.0
"""With 3 degrees of freedom, more than that comes once in 100 million times."""
CHI_SQUARE = "sum((counts[t] - n * share) ** 2 / (n * share) for t, share in enumerate({row}))"


def check_distribution(bench: Bench) -> None:
    """Check the shares of tokens among many, and how often a drafted one stands."""
    session = SpeculativeSession(bench)
    worker, counts = bench.process.modules[0], Counter[tuple[int, ...]]()
    for seed in seeds(bench):
        given = (session.speculative, P, Q, DRAWS_OF_A_CALL, seed)
        [answer] = bench.process.batch([(worker, "outcomes", given)])
        if isinstance(answer, Raised):
            crashed = isinstance(answer.error, StudentError)
            raise Failed(Failure(raised_message("verify", answer.error, "verify"), crashed=crashed))
        counts.update(answer)
    stand, right = sum(n for tokens, n in counts.items() if len(tokens) == 2) / DRAWS, sum(map(min, P[0], Q[0]))
    room = 5 * math.sqrt(right * (1 - right) / DRAWS)  # 1 %
    if abs(stand - right) > room:
        message = f"{stand:.1%} of the drafted tokens stand; it should be the sum of min(p, q), {right:.1%}"
        lines = [
            f"stand = sum(n for tokens, n in answers.items() if len(tokens) == 2) / {DRAWS}",
            f"assert abs(stand - {right}) < {room:.3f}, stand",
        ]
        drawing = (f"{stand * DRAWS:,.0f} of {DRAWS:,} stand, about {right * DRAWS:,.0f} expected",)
        raise distribution_failure(bench, message, drawing, lines)
    for place, row in enumerate(P):
        at = Counter(tokens[place] for tokens in counts.elements() if len(tokens) > place)
        n = at.total()
        chi_square = sum((at[token] - n * share) ** 2 / (n * share) for token, share in enumerate(row))
        if chi_square > LARGEST_CHI_SQUARE:
            token = max(range(len(row)), key=lambda token: abs(at[token] - n * row[token]))
            which = ("first tokens", "tokens after one that stands")[place]
            message = (
                f"of {n:,} {which}, {at[token]:,} are token {token}; about {n * row[token]:,.0f} should be, since its "
                f"probability in p[{place}] is {row[token]:g} (chi-square is {chi_square:,.0f}, with 3 degrees of "
                "freedom)"
            )
            lines = [
                f"counts = Counter(tokens[{place}] for tokens in answers.elements() if len(tokens) > {place})",
                "n = counts.total()",
                f"chi_square = {CHI_SQUARE.format(row=f'p[{place}]')}",
                f"assert chi_square < {LARGEST_CHI_SQUARE}, chi_square",
            ]
            counted = [f"token {t}: {at[t]:6,} times, about {n * share:6,.0f} expected" for t, share in enumerate(row)]
            raise distribution_failure(bench, message, counted, lines)


def seeds(bench: Bench) -> range:
    """Return a seed for each call of the worker."""
    number = DRAWS // DRAWS_OF_A_CALL
    return range(number * bench.seed, number * (bench.seed + 1))


def distribution_failure(bench: Bench, message: str, drawing: Sequence[str], lines: Sequence[str]) -> Failed:
    """Return the failure with a script that draws the same tokens; `lines` then compare them."""
    body = [
        *sources_of(outcomes),
        f"p = {P}",
        f"q = {Q}",
        f"speculative = {bench.part[1]}(4)",
        "answers = Counter()",
        f"for seed in {seeds(bench)}:",
        f"    answers.update(outcomes(speculative, p, q, {DRAWS_OF_A_CALL}, seed))",
        *lines,
    ]
    imports = ["from collections import Counter", "from random import Random"]
    script = make_script(bench.submission, bench.part[1], None, message, imports, body)
    return Failed(Failure(message, drawing=tuple(drawing), script=script))


# --- Rolling back -----------------------------------------------------------------------------------


def check_roll_back(*kinds: str, beginning: Sequence[RollBackStep] = ()) -> Check:
    """Return a check that runs random programs: the beginning, followed by random steps of these kinds."""
    small = st.integers(0, 7)
    steps = st.lists(st.builds(RollBackStep, st.sampled_from(kinds), small, small, small), max_size=8)
    programs = st.tuples(st.integers(1, LARGEST_BLOCK), steps)

    def run(bench: Bench, program: tuple[int, list[RollBackStep]]) -> None:
        block_size, steps = program
        RollBackSession(bench, block_size).run([*beginning, *steps])

    return lambda bench: search(bench, programs, partial(run, bench))


# --- The engine -------------------------------------------------------------------------------------

MODEL = PlainModel()
PROMPT_LOOKUP: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
ASKED = SpeculativeConfig(**PROMPT_LOOKUP)


class StudentsSpeculation:
    """Lets an engine verify with the student's `verify`, and give slots back with the student's `roll_back`.

    p is certain of the token that the engine would choose without drafts, greedy or not, and q of the drafted one. So
    the output is the one without drafts. Tokens that are neither chosen nor drafted are left out of the vocabulary.
    """

    def __init__(self, bench: Bench, engine: Engine) -> None:
        self._bench = bench
        runner: Any = engine.runner  # one that has a `sample`
        self._block_size = engine.config.block_size
        self._runner, self._sample, self._trim = runner, runner.sample, engine.blocks.trim
        self._verified: dict[int, tuple[int, int]] = {}
        """The numbers of drafted and of accepted tokens, by sequence."""
        runner.sample = self.sample
        engine.blocks.trim = self.trim  # type: ignore[method-assign]

    def sample(self, logits: Logits, inputs: Sequence[SamplingInput]) -> list[Sampled]:
        """Choose a token for each input, as the runner does; those of rows with drafts, by `verify`."""
        chosen, first = list(self._sample(logits, inputs)), 0
        for row in self._runner.mirror.rows:
            if row.drafted:
                here = chosen[first : first + len(row.drafted) + 1]
                for i, token in enumerate(self._verify(row.sequence, row.drafted, [one.token_id for one in here])):
                    chosen[first + i] = replace(here[i], token_id=token)
            first += row.num_chosen
        return chosen

    def _verify(self, sequence: int, drafted: Sequence[int], plain: Sequence[int]) -> list[int]:
        vocab = sorted({*drafted, *plain})
        p, q = ([one_hot(vocab.index(token), len(vocab)) for token in tokens] for tokens in (plain, drafted))
        r = Random(f"{self._bench.seed} {sequence} {[*drafted]}")
        u, v = [r.random() for _ in q], [r.random() for _ in p]
        case = Verification(p, q, [vocab.index(token) for token in drafted], u, v)
        tokens = SpeculativeSession(self._bench).verify(case, invariant=Invariant.SCHEDULING_INVARIANCE)
        self._verified[sequence] = len(drafted), case.num_accepted
        return [vocab[token] for token in tokens]

    def trim(self, sequence: SequenceState, num_tokens: int) -> tuple[int, ...]:
        """Give back the slots of refused tokens (`Memory.trim`): those that a table of the same length has lost."""
        session = RollBackSession(self._bench, self._block_size)
        verified = self._verified[sequence.sequence_id]
        return self._trim(sequence, session.slots_left(sequence.table.num_tokens, *verified))


class Guesses(Drafts):
    """Drafts that are often right: the tokens that the request will get, with mistakes."""

    def __init__(self, number: int, workload: Workload) -> None:
        super().__init__(AdaptiveDrafts(ASKED.num_speculative_tokens))
        self._workload, self._random = workload, Random(f"guesses of {number}")

    def draft(self, request: Request, sequence: SequenceState, num_sequences: int) -> list[int]:
        r, config = self._random, self._workload.config
        outputs = expected_tokens(self._workload.requests[int(request.request_id[1:])], config, MODEL)
        following = outputs[sequence.index][len(sequence.output_token_ids) :]
        return [
            r.randrange(config.vocab_size) if r.random() < 0.25 else token
            for token in following[: r.randint(0, ASKED.num_speculative_tokens)]
        ]


def drafting_workloads(seed: int) -> Iterator[tuple[int, Workload]]:
    """Yield workloads whose engines draft."""
    for number, workload in numbered_workloads(seed):
        yield number, replace(workload, config=replace(workload.config, speculative_config=ASKED))


def check_engine(bench: Bench) -> None:
    """Check samples, penalties, stop strings, prefix caching, preemption and cancelled requests, all with drafts."""
    for number, workload in islice(drafting_workloads(bench.seed), ENGINE_WORKLOADS):
        attach = partial(put_in, bench, Guesses(number, workload))
        check_workloads(bench, [(number, workload)], Parts, attach, model=MODEL)


def put_in(bench: Bench, drafts: Drafts, engine: Engine) -> None:
    """Let an engine draft so, and verify and roll back with the student's part."""
    engine.scheduler.drafts = drafts
    StudentsSpeculation(bench, engine)


REPETITIVE = (
    "The cat sat on the mat. The dog sat on the mat. The cow sat on",
    "one two three, one two three, one two",
)
SETTINGS: dict[str, Any] = {
    "num_blocks": 40,
    "block_size": 4,
    "max_model_len": 64,
    "speculative_config": PROMPT_LOOKUP,
}


def check_model(bench: Bench) -> None:
    """Check SmolLM2's texts with prompt lookup, greedy and sampled: they are the same as with the engine's own part."""
    from minipaged.llm import LLM
    from minipaged.setup.loaded_model import LoadedModel

    loaded = LoadedModel.load(bench.model, "reference")
    assert loaded.tokenizer
    prompts = [loaded.tokenizer.encode(prompt)[:24] for prompt in REPETITIVE]
    params = [SamplingParams(temperature=t, seed=bench.seed, max_tokens=12, ignore_eos=True) for t in (0.0, 0.4)]

    def texts(llm: LLM) -> list[list[int]]:
        outputs = llm.generate([prompt for prompt in prompts for _ in params], params * len(prompts), use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in all_sound(outputs)]

    expected = texts(LLM(loaded, **SETTINGS))
    bench.process.forget()
    events: list[Event] = []
    try:
        llm = LLM(loaded, **SETTINGS, listeners=[events.append])
        StudentsSpeculation(bench, llm.engine)
        found = texts(llm)
    except Exception as error:
        raise in_engine(error, "with SmolLM2", events) from None
    if found != expected:
        raise Failed(Failure(f"SmolLM2's tokens are {found!r}; they should be {expected!r}", events=tuple(events)))


# --- The assignment ---------------------------------------------------------------------------------

FORKED = (RollBackStep("begin", b=4), RollBackStep("draft", b=3, c=1), RollBackStep("fork"))

CHECKS: dict[str, Check] = {
    "nothing is drafted": check_verify(verifications((0, 0))),
    "a drafted token stands, or is refused": check_verify(
        verifications((1, 1)).filter(lambda case: case.p[0] != case.q[0]), last=False
    ),
    "the residual": check_residual,
    "the token in its place": check_verify(verifications((1, 1)).filter(lambda case: not case.num_accepted)),
    "all tokens stand": check_verify(verifications((0, MOST_TOKENS)).map(all_standing)),
    "the first that is refused": check_verify(
        verifications((2, MOST_TOKENS)) | verifications((2, MOST_TOKENS)).map(cut)
    ),
    "greedy tokens": check_verify(verifications((0, MOST_TOKENS), certain), invariant=Invariant.SCHEDULING_INVARIANCE),
    "the distribution": check_distribution,
    "slots of refused tokens": check_roll_back("begin", "draft", "draft", "fork", beginning=FORKED),
    "blocks to publish": check_roll_back("begin", "draft_and_publish", "fork"),
    "the engine, on a small model": check_engine,
    "SmolLM2": check_model,
}

ASSIGNMENT = described(
    "speculative",
    CHECKS,
    part="Speculative",
    members=("residual", "verify", "roll_back"),
    modules=(
        "minipaged.course.assignments.speculative.worker",
        *("minipaged.reference.block_allocator", "minipaged.reference.block_table"),  # for students' tests
    ),
)
