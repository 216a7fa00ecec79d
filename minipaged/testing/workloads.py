"""Random workloads for the engine, and the output that each of their requests must produce.

The requests run on a model that checks every read (`content_runner.py`). The expected outputs come from the simplest
possible serving: one request at a time, all tokens at hand, no cache. The project's tests and the grader both use this.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count

from minipaged import contracts
from minipaged.contracts import Logits, SamplingInput, Tier
from minipaged.engine.detokenizer import Decode
from minipaged.engine.drafts import Drafts
from minipaged.engine.engine import Engine
from minipaged.engine.floors import paged_memory
from minipaged.engine.memory import MakeMemory
from minipaged.engine.policies import looks_at_priority
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.errors import BadLogits, InvalidRequest
from minipaged.events import (
    BlockCached,
    BlockEvicted,
    Event,
    HostBlockDropped,
    Listener,
    PrefixReused,
    RequestArrived,
    RequestPreempted,
    TokensComputed,
)
from minipaged.mirror import token_bits
from minipaged.outputs import CompletionUpdate, RequestOutput, RequestUpdate
from minipaged.params import BeamSearchParams, EngineConfig, RequestOutputKind, SamplingParams
from minipaged.scheduling import MakePolicy
from minipaged.testing.content_runner import ContentRunner, numpy_model
from minipaged.testing.fake_model import FakeModel
from minipaged.testing.random_grammar import RandomGrammar

COUNTED = (
    "request_refused",
    "block_copied",
    "block_evicted",
    "block_deduplicated",
    "block_demoted",
    "blocks_promoted",
    "blocks_passed",
)
"""The kinds of events that are counted by their names alone (`WorkloadRun.happened`)."""


@dataclass(frozen=True)
class WorkloadRequest:
    arrives: int
    """The step before which it is added."""
    prompt: tuple[int, ...]
    params: SamplingParams | BeamSearchParams
    cancelled: int | None = None
    """The step before which it is cancelled."""
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True)
class Workload:
    config: EngineConfig
    requests: tuple[WorkloadRequest, ...]
    swap_is_cheap: bool


def random_workload(seed: int) -> Workload:
    """Make a workload of small pools, shared prefixes and mixed settings, where block managers go wrong."""
    r = random.Random(seed)
    block_size = r.choice([1, 2, 3, 4, 4, 8, 16])
    vocab_size = r.choice([5, 11, 37])
    requests = _random_requests(r, vocab_size)
    _ask_for_more(random.Random(f"more of {seed}"), requests, vocab_size)
    config = EngineConfig(
        num_blocks=max(1, round(r.choice([0.7, 1.0, 1.0, 1.0, 1.2, 1.6]) * _largest_need(requests, block_size))),
        num_swap_blocks=(num_swap_blocks := r.choice([0, r.randint(1, 8), r.randint(8, 64)])),
        block_size=block_size,
        max_model_len=r.choice([16, 40, 64]),
        vocab_size=vocab_size,
        preemption=r.choice(["swap", "recompute", "auto"]) if num_swap_blocks else r.choice(["recompute", "auto"]),
        enable_prefix_caching=r.random() < 0.7,
        max_num_seqs=r.choice([4, 8, 64, 64]),
        max_num_batched_tokens=r.choice([4, 5, 8, 16, 64, 2048]),
        eos_token_ids=r.choice([(), (2,), (2, 3)]),
        seed=seed,
        debug=True,
    )
    swap_is_cheap = r.random() < 0.5
    requests += _next_turns(random.Random(f"turns of {seed}"), requests, config)
    return Workload(config, tuple(replace(one, priority=r.randint(-2, 2)) for one in requests), swap_is_cheap)


def with_salts(workload: Workload, seed: int) -> Workload:
    """Return the workload with two salts, given to some of its requests at random."""
    r = random.Random(f"salts of {seed}")
    requests = (replace(one, cache_salt=r.choice([None, "a", "b"])) for one in workload.requests)
    return replace(workload, requests=tuple(requests))


def _ask_for_more(r: random.Random, requests: list[WorkloadRequest], vocab_size: int) -> None:
    """Give some of the sampling requests parameters that few requests have."""
    for i, request in enumerate(requests):
        if isinstance(request.params, SamplingParams) and r.random() < 0.4:
            some = r.sample(range(1, vocab_size), 4)  # without token 0, which ends no sequence: something is left
            more: dict[str, object] = {
                "prompt_logprobs": r.choice([None, 0, 2]),
                "logit_bias": r.choice([(), {some[0]: 5.0, some[1]: -100.0}]),
                "allowed_token_ids": r.choice([None, None, (0, *some)]),
                "bad_words": r.choice([(), (letters(some[:1]), letters(some[1:3]))]),
                "include_stop_str_in_output": r.random() < 0.5,
                "truncate_prompt_tokens": r.choice([None, None, 7]),
            }
            requests[i] = replace(request, params=replace(request.params, **more))  # type: ignore[arg-type]


def _next_turns(r: random.Random, requests: list[WorkloadRequest], config: EngineConfig) -> list[WorkloadRequest]:
    """Requests that go on where others end, as in a chat. They are made for some workloads with a prefix cache, which
    keeps the last blocks of those."""
    before = [request for request in requests if isinstance(request.params, SamplingParams)]
    if not (config.enable_prefix_caching and before and r.random() < 0.5):
        return []
    turns: list[WorkloadRequest] = []
    for _ in range(r.randint(1, 3)):
        request = r.choice(before)
        said = [*prompt_of(request), *expected_tokens(request, config)[0]]
        said = said[: len(said) - r.choice([0, 1, 1, r.randrange(len(said))])]
        said += [r.randrange(config.vocab_size) for _ in range(r.randint(0 if said else 1, 4))]
        params = SamplingParams(temperature=0, seed=1, max_tokens=r.randint(1, 6), ignore_eos=True)
        turns.append(WorkloadRequest(request.arrives + r.randint(1, 30), tuple(said), params))
    return turns


def _largest_need(requests: list[WorkloadRequest], block_size: int) -> int:
    """The most blocks that any one request could come to hold. A pool of about that size gets crowded."""

    def need(request: WorkloadRequest) -> int:
        params = request.params
        num_sequences = params.beam_width if isinstance(params, BeamSearchParams) else params.n
        shared = len(request.prompt) // block_size
        each = -(-(len(request.prompt) + (params.max_tokens or 16) - 1) // block_size)
        return shared + num_sequences * (each - shared)

    return max(need(request) for request in requests)


def _random_requests(r: random.Random, vocab_size: int) -> list[WorkloadRequest]:
    stems = [tuple(r.randrange(vocab_size) for _ in range(r.randint(1, 24))) for _ in range(2)]
    requests: list[WorkloadRequest] = []
    for _ in range(r.randint(1, 10)):
        prompt = r.choice([(), *stems])[: r.randint(0, 24)]
        prompt += tuple(r.randrange(vocab_size) for _ in range(r.randint(0 if prompt else 1, 6)))
        max_tokens = r.randint(1, 24)
        params: SamplingParams | BeamSearchParams
        if r.random() < 0.25:
            params = BeamSearchParams(
                beam_width=r.randint(1, 4),
                max_tokens=max_tokens,
                length_penalty=r.choice([0.0, 1.0, 2.0]),
                early_stopping=r.choice([True, False, "never"]),
                ignore_eos=r.random() < 0.3,
            )
        else:
            params = SamplingParams(
                n=r.choice([1, 1, 1, 2, 3, 4]),
                temperature=r.choice([0.0, 0.7, 1.0]),
                top_p=r.choice([1.0, 0.9]),
                top_k=r.choice([0, 3]),
                seed=r.randrange(2**32),
                max_tokens=max_tokens,
                min_tokens=r.choice([0, 0, min(3, max_tokens)]),
                ignore_eos=r.random() < 0.5,
                stop_token_ids=r.choice([(), (1,)]),
                stop=r.choice(["", "", letters([r.randrange(vocab_size) for _ in range(r.randint(1, 2))])]) or (),
                presence_penalty=r.choice([0.0, 0.0, 0.5]),
                repetition_penalty=r.choice([1.0, 1.0, 1.3]),
                logprobs=r.choice([None, None, 2]),
            )
        arrives = r.choice([0, 0, 0, r.randint(0, 20)])
        cancelled = arrives + r.randint(0, 16) if r.random() < 0.15 else None
        requests.append(WorkloadRequest(arrives, prompt, params, cancelled))
    return requests


@dataclass
class WorkloadRun:
    """One workload, run on one engine."""

    workload: Workload
    tier: Tier | None = None
    """The tier whose parts are used; its choices must equal those of the model's own tier. None: the model's own."""
    make_runner: Callable[..., ContentRunner] = ContentRunner
    allocator: Callable[[int], contracts.BlockAllocator] | None = None
    decode: Decode | None = None
    """A replacement for `letters`."""
    memory: MakeMemory = paged_memory
    policy: MakePolicy = FirstComeFirstServed
    listeners: Sequence[Listener] = ()
    steady: bool = True
    """False: the engine always takes the long way (`engine/steady.py`)."""
    drafts: Drafts | None = None
    """Guesses tokens, which steps verify; None: nothing is drafted."""
    model: FakeModel = field(default_factory=numpy_model)
    """The model whose choices are the expected outputs."""
    updates: dict[str, list[RequestUpdate]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    happened: Counter[str] = field(default_factory=Counter)
    """Counts of events that the workload caused. Tests make sure that every kind occurs."""

    def __post_init__(self) -> None:
        config, tier = self.workload.config, self.tier or self.model.tier
        ticks = count()  # each reading of the clock is a millisecond later, so that runs are repeatable
        self.runner = self.make_runner(
            config.num_blocks,
            config.num_swap_blocks,
            config.block_size,
            config.vocab_size,
            self.workload.swap_is_cheap,
            tier.sample,
            self.model,
            config.group_windows,
        )
        self.engine = Engine(
            config,
            tier,
            self.runner,
            allocator=self.allocator,
            memory=self.memory,
            policy=self.policy,
            decode=self.decode or letters,
            encode=from_letters,
            compile_grammar=partial(RandomGrammar, vocab_size=config.vocab_size),
            listeners=self.listeners,
            clock=lambda: next(ticks) / 1000,
            steady=self.steady,
            drafts=self.drafts,
        )
        self.engine.listeners.append(self._count)
        self.runner.engine = self.engine
        self._prompt_lengths: dict[int, int] = {}

    def to_the_end(self, max_steps: int = 5000) -> None:
        """Run steps until every request has ended. Raises AssertionError (liveness) after `max_steps`."""
        for now in range(max_steps):
            if not self.advance(now):
                return
        raise AssertionError(f"liveness: requests are unfinished after {max_steps} steps")

    def advance(self, now: int) -> bool:
        """Add and cancel the requests due before step `now`, then run that step. Returns False when all is done."""
        for name, request in self.named_requests():
            if request.arrives == now:
                try:
                    self.engine.add_request(
                        request.prompt,
                        request.params,
                        request_id=name,
                        output_kind=list(RequestOutputKind)[len(request.prompt) % 2],
                        priority=request.priority if looks_at_priority(self.engine.scheduler.policy) else 0,
                        cache_salt=request.cache_salt,
                    )
                except InvalidRequest:
                    self.refused.add(name)
            if request.cancelled == now:
                queues = self.engine.scheduler.waiting + self.engine.scheduler.running
                self.happened.update(f"cancelled while {r.state.value}" for r in queues if r.request_id == name)
                if self._is_in_flight(name):
                    self.happened["cancelled while in flight"] += 1
                self.engine.abort(name)
        for update in self.engine.step():
            self.updates[update.request_id].append(update)
            if update.output:
                self.outputs[update.request_id] = update.output
        if not self.engine.config.debug:  # debug mode checks every step itself
            self.engine.check_invariants()
        return self.engine.has_unfinished_requests() or any(r.arrives > now for r in self.workload.requests)

    def _is_in_flight(self, name: str) -> bool:
        parts = [part for step in self.engine.steps_in_flight for part in step.plan.scheduled]
        return any(part.request.request_id == name for part in parts)

    def _count(self, event: Event) -> None:
        match event:
            case RequestArrived():
                self._prompt_lengths[event.sequence] = len(event.prompt_token_ids)
            case TokensComputed() if event.num_tokens < self._prompt_lengths.get(event.sequence, 0):
                self.happened["prompt computed in chunks"] += 1
            case RequestPreempted():
                self.happened[f"preempted by {event.mode}"] += 1
            case PrefixReused():
                self.happened[f"prefix reused from {event.source}"] += 1
                if event.num_tokens % self.engine.config.block_size:
                    self.happened["block reused in part"] += 1
            case BlockCached() if event.num_tokens < self.engine.config.block_size:
                self.happened["last block kept"] += 1
            case BlockEvicted() if event.reason != "room":
                self.happened[f"block {event.reason}"] += 1
            case HostBlockDropped():
                self.happened[f"host block dropped: {event.reason}"] += 1
            case _ if event.name in COUNTED:
                self.happened[event.name.replace("_", " ")] += 1

    def named_requests(self) -> list[tuple[str, WorkloadRequest]]:
        return [(f"r{i}", request) for i, request in enumerate(self.workload.requests)]

    def check_outputs(self, failed: Container[str] = ()) -> None:
        """Check that every request produced what it would have produced alone. If it was cancelled, or is in `failed`,
        it may have produced only a beginning of that. Its updates, joined, must equal its output."""
        for name, request in self.named_requests():
            if name in self.refused:
                continue
            output = self.outputs[name]
            check_stream(self.updates[name])
            assert output.error is None or name in failed, f"request {name} failed: {output.error}"
            expected = expected_tokens(request, self.workload.config, self.model)
            if output.finished:
                assert [list(o.token_ids) for o in output.outputs] == expected, name
                keeps_stop = isinstance(request.params, SamplingParams) and request.params.include_stop_str_in_output
                for completion in output.outputs:
                    stop = completion.stop_reason if isinstance(completion.stop_reason, str) and not keeps_stop else ""
                    assert completion.text + stop == letters(completion.token_ids), name
            elif isinstance(request.params, SamplingParams):
                for partial in output.outputs:
                    assert list(partial.token_ids) == expected[partial.index][: len(partial.token_ids)], name
            told, logprobs = output.prompt_logprobs, expected_prompt_logprobs(request, self.workload.config, self.model)
            assert told == (logprobs and logprobs[: len(told or ())]), name
            assert len(told or ()) == len(logprobs or ()) or not output.finished, name

    def check_nothing_leaked(self) -> None:
        """Check that all blocks are free or only cached, and that the queues are empty."""
        blocks = self.engine.blocks
        assert blocks.num_available == blocks.allocator.num_blocks
        assert blocks.host_allocator is None or blocks.num_host_available == blocks.host_allocator.num_blocks
        assert not self.engine.scheduler.running
        assert not self.engine.scheduler.waiting


def all_sound(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Return the outputs of a model with a student's part. Raises BadLogits if that part gave invalid logits."""
    for output in outputs:
        if output.error is not None:
            raise BadLogits(output.error)
    return outputs


def check_stream(updates: Sequence[RequestUpdate]) -> None:
    """Check that all updates of a request that has ended, joined, are its output: stream-equals-final."""
    output = updates[-1].output
    assert output is not None
    assert not any(update.output for update in updates[:-1])
    of_prompt = [update.prompt_logprobs for update in updates if update.prompt_logprobs is not None]
    begun = any(completion.token_ids for completion in output.outputs)
    assert of_prompt == ([output.prompt_logprobs] if begun and output.prompt_logprobs is not None else [])
    joined: dict[int, list[CompletionUpdate]] = {completion.index: [] for completion in output.outputs}
    for update in updates:
        assert update.request_id == output.request_id
        for news in update.completions:
            joined[news.index].append(news)
    for whole in output.outputs:
        parts = joined[whole.index]
        assert tuple(token for part in parts for token in part.new_token_ids) == whole.token_ids
        assert "".join(part.new_text for part in parts) == whole.text
        logprobs = [part.new_logprobs for part in parts]
        if whole.logprobs is None:
            assert set(logprobs) == {None}
        else:
            assert tuple(one for some in logprobs for one in some or ()) == whole.logprobs
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [whole.finish_reason]
        assert [part.stop_reason for part in parts] == [None] * (len(parts) - 1) + [whole.stop_reason]


def letters(token_ids: Sequence[int]) -> str:
    """A simple tokenizer's decoding: one letter per token."""
    return "".join(chr(ord("A") + token) for token in token_ids)


def from_letters(text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the tokens of a text. Characters other than letters give tokens that are never generated."""
    return [ord(letter) - ord("A") for letter in text]


def prompt_of(request: WorkloadRequest) -> tuple[int, ...]:
    """Return the prompt tokens that the engine uses."""
    most = request.params.truncate_prompt_tokens if isinstance(request.params, SamplingParams) else None
    return request.prompt if most is None else request.prompt[-most:]


def expected_prompt_logprobs(
    request: WorkloadRequest, config: EngineConfig, model: FakeModel
) -> tuple[dict[int, float] | None, ...] | None:
    """Return the expected log-probabilities, from the logits after each beginning of the prompt."""
    asked = request.params.prompt_logprobs if isinstance(request.params, SamplingParams) else None
    if asked is None:
        return None
    prompt = prompt_of(request)
    logits = [model.logits(prompt[:length], config.vocab_size) for length in range(1, len(prompt))]
    return (None, *(one.top_logprobs for one in model.logprobs(logits, prompt[1:], asked)))


def expected_tokens(request: WorkloadRequest, config: EngineConfig, model: FakeModel | None = None) -> list[list[int]]:
    """Return the outputs of one request, served alone by a loop without any cache."""
    params, prompt = request.params, prompt_of(request)
    most = min(params.max_tokens or config.max_model_len, config.max_model_len - len(prompt))
    eos = () if params.ignore_eos else tuple(config.eos_token_ids)
    return [list(output) for output in _alone(prompt, params, most, eos, config.vocab_size, model or numpy_model())]


@lru_cache(maxsize=10_000)
def _alone(
    prompt: tuple[int, ...],
    params: SamplingParams | BeamSearchParams,
    most: int,
    eos: tuple[int, ...],
    vocab_size: int,
    model: FakeModel,
) -> list[list[int]]:
    """Return the outputs, of at most `most` tokens. They are cached: many tests run a workload in several ways."""

    def logits(*outputs: list[int]) -> Logits:
        rows = [model.logits([*prompt, *output], vocab_size) for output in outputs]
        return model.batch(rows, vocab_size)

    if isinstance(params, BeamSearchParams):
        search = model.tier.beam_search(params, len(prompt), len(prompt) + most, eos)
        beams: list[tuple[list[int], float]] = [([], 0.0)]
        ranked: list[tuple[float, list[int]]] = []
        while beams:
            rows = logits(*(tokens for tokens, _ in beams))
            step = search.step(rows, list(range(len(beams))), [logprob for _, logprob in beams])
            ranked += [(score, [*beams[move.parent][0], move.token_id]) for move, score in step.finished]
            beams = [([*beams[m.parent][0], m.token_id], m.cumulative_logprob) for m in step.survivors]
        return [tokens for _, tokens in sorted(ranked, key=lambda r: -r[0])[: params.beam_width]]

    outputs = []
    assert params.seed is not None
    for stream in range(params.n):
        output: list[int] = []
        final = {*params.stop_token_ids, *eos}
        form = params.structured_outputs
        state = None if form is None else RandomGrammar(form, vocab_size).begin(final)
        while len(output) < most:
            forbidden = {*final} if len(output) < params.min_tokens else set()
            for word in params.bad_words:
                if letters(output).endswith(word[:-1]):
                    forbidden.update(from_letters(word[-1], add_special_tokens=False))
            allowed = None if state is None else token_bits(state.bits)
            wanted = SamplingInput(0, params, prompt, output, params.seed, stream, tuple(forbidden), 0, allowed)
            [chosen] = model.tier.sample(logits(output), [wanted])
            output.append(chosen.token_id)
            ended = chosen.token_id in final or letters(output).endswith(tuple(params.stop))
            if state is not None and not ended:
                ended = state.consume(chosen.token_id)
            if ended and len(output) >= params.min_tokens:
                break
        outputs.append(output)
    return outputs


def run_workload(
    seed: int, tier: Tier | None = None, policy: MakePolicy = FirstComeFirstServed, *, steady: bool = True
) -> WorkloadRun:
    """Run the workload of one seed, and check everything that can be checked."""
    run = WorkloadRun(random_workload(seed), tier=tier, policy=policy, steady=steady)
    run.to_the_end()
    run.check_outputs()
    run.check_nothing_leaked()
    return run
