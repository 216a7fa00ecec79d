"""Random scenes of an engine at work, for the tests of assignment 4.

A `SchedulerScene` has a few requests: some run, some were preempted, some are new. It is built with the engine's own
requests and block manager, so that the scheduler's views are consistent, and the events up to the scene can be
replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hypothesis import strategies as st

from minipaged import events as ev
from minipaged.course.assignments.scheduler.session import Scenery, SchedulerSettings, draw
from minipaged.engine.block_manager import BlockManager
from minipaged.engine.memory import AllocStatus
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.engine.sequence import Request, RequestState, SequenceState
from minipaged.engine.step_writer import StepWriters
from minipaged.engine.views import view_of
from minipaged.errors import OutOfBlocks
from minipaged.params import EngineConfig, SamplingParams
from minipaged.scheduling import Costs, RequestView
from minipaged.simulation.simulated import simulated_tier
from minipaged.steps import Sampling

NAMES = "ABCDEF"
MAX_MODEL_LEN = 64
State = Literal["running", "swapped", "dropped", "new"]
STATES: tuple[State, ...] = ("running", "swapped", "dropped", "new")


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The plan for one request of a scene."""

    state: State
    prompt_tokens: int
    max_output_tokens: int
    num_sequences: int
    computed: int
    """The number of prompt tokens computed. If the prompt is not longer, it is computed, and the request decodes."""
    generated: int
    """The number of tokens that each sequence has generated, if the request decodes."""


class Kept:
    """An event listener that appends events to a list."""

    heard = True

    def __init__(self, events: list[ev.Event]) -> None:
        self._events = events

    def __call__(self, event: ev.Event) -> None:
        self._events.append(event)


@dataclass(eq=False)
class SchedulerScene:
    """Settings, and requests in the planned states.

    If there are too few blocks for a request, it and all requests after it are new.
    """

    settings: SchedulerSettings
    num_swap_blocks: int
    drawn: Sequence[RequestPlan]
    turned: bool
    """Whether the scheduler's lists have the latest arrivals first."""
    tokens_gone: int
    """Tokens of the batch that are unavailable to admitted requests, in addition to those of running requests."""
    events: list[ev.Event] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = self.settings
        config = EngineConfig(
            num_blocks=settings.num_blocks,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=MAX_MODEL_LEN,
            block_size=settings.block_size,
            num_swap_blocks=self.num_swap_blocks,
            enable_prefix_caching=False,
        )
        self.blocks = BlockManager(config, simulated_tier(), None, StepWriters(), Kept(self.events))
        self.events += [
            ev.EngineStarted(config.num_blocks, config.num_swap_blocks, config.block_size, MAX_MODEL_LEN),
            ev.StepStarted(1),
        ]
        room = min(settings.max_num_seqs, settings.max_num_batched_tokens)
        all_new = False
        for drawn in self.drawn:
            request = self._arrive(drawn)
            if request.num_sequences > room or self.blocks.can_admit(request) is AllocStatus.NEVER:
                del self.events[-1]  # an engine would have refused it
                continue
            self.requests.append(request)
            if drawn.state == "running" and sum(r.num_sequences for r in [*self.running, request]) > room:
                all_new = True
            if not all_new and drawn.state != "new":
                before = len(self.events)
                try:
                    self._run(request, drawn)
                except OutOfBlocks:
                    all_new = True
                    del self.events[before:]
                    self._take_back(request)

    def _arrive(self, drawn: RequestPlan) -> Request:
        order = len(self.requests)
        prompt = tuple(range(drawn.prompt_tokens))
        params = SamplingParams(n=drawn.num_sequences, max_tokens=drawn.max_output_tokens)
        request = Request(
            request_id=NAMES[order],
            order=order,
            arrival_time=0.0,
            prompt=None,
            prompt_token_ids=prompt,
            params=params,
            sampling=Sampling(params, seed=0, stream=0),
            final_token_ids=frozenset(),
            max_output_tokens=drawn.max_output_tokens,
            priority=0,
            sequences=[SequenceState(10 * order, list(prompt), [], self.blocks.new_table())],
        )
        number = request.sequences[0].sequence_id
        self.events.append(ev.RequestArrived(request.request_id, number, prompt, drawn.num_sequences))
        return request

    def _run(self, request: Request, drawn: RequestPlan) -> None:
        """Compute the prompt, or a part of it, and some tokens; then preempt the request if planned.

        Raises OutOfBlocks.
        """
        self.events.append(ev.RequestAdmitted(request.request_id))
        request.state = RequestState.RUNNING
        [first] = request.sequences
        # A request that generates a single token never decodes, so its prompt is not fully computed yet.
        num_computed = min(drawn.computed, drawn.prompt_tokens - (drawn.max_output_tokens == 1))
        if num_computed:
            self.blocks.append(first, num_computed)
        if num_computed == drawn.prompt_tokens:
            self._decode(request, min(drawn.generated, drawn.max_output_tokens - 1))
        if drawn.state == "running":
            return
        filled = request.filled_slots(self.blocks.block_size)
        can_swap = filled and self.blocks.can_swap_out(request)
        mode: Literal["swap", "recompute"] = "swap" if drawn.state == "swapped" and can_swap else "recompute"
        self.events.append(ev.RequestPreempted(request.request_id, mode, len(filled), sum(filled.values()), 1))
        request.num_preemptions = 1
        if mode == "swap":
            self.blocks.swap_out(request)
            request.state = RequestState.SWAPPED
        else:
            self._take_back(request)

    def _decode(self, request: Request, num_tokens: int) -> None:
        """Fork the sequences, and generate `num_tokens` tokens for each; the last token is not computed yet."""
        first = request.sequences[0]
        for number in range(1, request.num_sequences):
            child = SequenceState(first.sequence_id + number, list(first.tokens), [], self.blocks.new_table())
            self.blocks.fork(request, first, child)
            request.sequences.append(child)
        request.prompt_computed = True
        for step in range(num_tokens):
            for sequence in request.sequences:
                if step:
                    self.blocks.append(sequence, 1)
                token = sequence.sequence_id  # siblings differ
                sequence.tokens.append(token)
                sequence.output_token_ids.append(token)
                self.events.append(ev.TokenGenerated(request.request_id, sequence.sequence_id, token, 0.0))

    def _take_back(self, request: Request) -> None:
        for sequence in request.sequences:
            self.blocks.free(sequence)
        request.state = RequestState.WAITING

    # --- Queries ----------------------------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        return [request for request in self.requests if request.state is RequestState.RUNNING]

    def views(self, *states: RequestState) -> list[RequestView]:
        """Return the scheduler's views of the requests in these states."""
        requests = [request for request in self.requests if request.state in states]
        views = [view_of(request, self.blocks) for request in requests]
        return views[::-1] if self.turned else views

    def scenery(self, message: str) -> Scenery:
        """Return the scene's drawing and events for a failure."""
        names = tuple(request.request_id for request in self.requests)
        return Scenery(draw(self.requests, self.blocks), (*self.events, ev.StepFailed(1, message, names)))


# --- Random scenes --------------------------------------------------------------------------------

PRICES = Costs(
    seconds_per_copy=1, copies_per_block=1, block_bytes=1, link_bytes_per_second=1, prefill_tokens_per_second=1
)
"""Costs for tests that do not depend on them."""


def costs() -> st.SearchStrategy[Costs]:
    """Return a strategy for costs of small numbers, which can be worked out by hand."""
    return st.builds(
        Costs,
        seconds_per_copy=st.integers(0, 2),
        copies_per_block=st.sampled_from([1, 2, 4]),
        block_bytes=st.integers(1, 8),
        link_bytes_per_second=st.sampled_from([1, 2, 4, 8]),
        prefill_tokens_per_second=st.sampled_from([0.125, 0.25, 0.5, 1.0, 2.0]),
    )


@st.composite
def scenes(
    draw_: st.DrawFn,
    *,
    states: Sequence[State] = STATES,
    num_requests: tuple[int, int] = (1, 5),
    num_sequences: Sequence[int] = (1, 1, 2, 3),
    pool: tuple[int, int] = (1, 16),
    beyond_most: bool = False,
    room: tuple[int, int] = (1, 8),
    tokens: tuple[int, int] = (1, 24),
    with_costs: bool = False,
) -> SchedulerScene:
    """Draw a scene.

    `pool` is the range of the number of blocks; with `beyond_most` it is relative to the most blocks that all requests
    together can hold. `room` and `tokens` are the ranges of the sequences and tokens of a batch.
    """
    requests = st.builds(
        RequestPlan,
        state=st.sampled_from(states),
        prompt_tokens=st.integers(1, 8),
        max_output_tokens=st.sampled_from([2, 3, 4, 5, 6, 1]),
        num_sequences=st.sampled_from(num_sequences),
        computed=st.sampled_from([8, 8, 1, 2, 3, 4, 5, 6, 7]),
        generated=st.integers(1, 5),
    )
    fewest, most = num_requests
    drawn = draw_(st.lists(requests, min_size=fewest, max_size=most))
    settings = SchedulerSettings(
        num_blocks=draw_(st.integers(*pool)),
        block_size=draw_(st.sampled_from([1, 2, 3, 4, 4])),
        max_num_seqs=draw_(st.integers(*room)),
        max_num_batched_tokens=draw_(st.integers(*tokens)),
        costs=draw_(costs()) if with_costs else PRICES,
    )
    if beyond_most:
        scheduler = FirstComeFirstServed(*settings.as_arguments())
        num_blocks = settings.num_blocks + sum(
            scheduler.most_blocks(RequestView("", 0, one.num_sequences, one.prompt_tokens, one.max_output_tokens))
            for one in drawn
        )
        settings = replace(settings, num_blocks=max(1, num_blocks))
    # First come, first served: running requests arrived before preempted ones, and these before new ones.
    ranks = {"running": 0, "swapped": 1, "dropped": 1, "new": 2}
    in_order = sorted(drawn, key=lambda one: ranks[one.state])
    return SchedulerScene(
        settings, draw_(st.integers(0, 9)), in_order, draw_(st.booleans()), draw_(st.sampled_from([0, 0, 2, 4, 99]))
    )
