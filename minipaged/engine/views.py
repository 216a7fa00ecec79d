"""What a policy is shown: requests, and the costs of a runner, as frozen data (`scheduling.py`) that is made late.

A thousand may wait, and the policy may look at one of them: so what takes time to find out is found out when somebody
looks, and stays as it was then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, overload

from minipaged.contracts import Runner
from minipaged.engine.block_manager import BlockManager
from minipaged.engine.sequence import Request, RequestState
from minipaged.scheduling import Costs, RequestView


class LateView(RequestView):
    """A view whose `blocks_needed` are counted when somebody looks: with a prefix cache, by a walk along the prompt."""

    __slots__ = ("_count", "counted")
    _count: Callable[[], int]
    counted: bool
    """Whether somebody has looked."""

    def __getattr__(self, name: str) -> Any:
        """Called for what is not there yet."""
        if name != "blocks_needed":
            raise AttributeError(name)
        object.__setattr__(self, "counted", True)
        object.__setattr__(self, "blocks_needed", self._count())
        return self.blocks_needed


def view_of(request: Request, blocks: BlockManager) -> LateView:
    """The request as a policy is told of it."""
    remaining = [sequence.num_remaining for sequence in request.sequences]
    behind = [number for number in remaining if number > 1]
    if len(request.sequences) == 1:  # nothing is shared
        table = request.sequences[0].table
        num_blocks, num_tokens = len(table.blocks), table.num_tokens
    else:
        filled = request.filled_slots(blocks.block_size)
        num_blocks, num_tokens = len(filled), sum(filled.values())
    view = LateView(
        request_id=request.request_id,
        arrival=request.order,
        num_sequences=request.num_sequences,
        prompt_tokens=len(request.prompt_token_ids),
        max_output_tokens=request.max_output_tokens,
        # Siblings that were dropped catch up one after another.
        tokens_to_run=sum(remaining) if len(behind) <= 1 else behind[0] - 1,
        decodes=not behind,
        num_blocks=num_blocks,
        num_tokens=num_tokens,
        priority=request.priority,
    )

    def count() -> int:
        if request.state is RequestState.RUNNING:
            return blocks.blocks_needed(list(zip(request.sequences, remaining, strict=True)))
        return blocks.blocks_to_admit(request)

    object.__delattr__(view, "blocks_needed")
    object.__setattr__(view, "_count", count)
    object.__setattr__(view, "counted", False)
    return view


class LateViews(Sequence[RequestView]):
    """Views of these requests, made when somebody looks at one."""

    def __init__(self, requests: Sequence[Request], blocks: BlockManager) -> None:
        self._requests, self._blocks = tuple(requests), blocks
        self._views: list[RequestView] | None = None

    def _made(self) -> list[RequestView]:
        if self._views is None:
            self._views = [view_of(request, self._blocks) for request in self._requests]
        return self._views

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._made())

    @overload
    def __getitem__(self, index: int) -> RequestView: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestView]: ...
    def __getitem__(self, index: int | slice) -> RequestView | list[RequestView]:
        return self._made()[index]


class LateCosts(Costs):
    """What the runner's two answers come to, as costs: they are proportional to blocks and to tokens.

    The runner is asked when somebody looks, because it may have to measure.
    """

    __slots__ = ("_runner",)
    _runner: Runner

    def __init__(self, runner: Runner) -> None:
        object.__setattr__(self, "_runner", runner)

    def __getattr__(self, name: str) -> Any:
        """Called for what is not there yet."""
        if name not in Costs.__slots__:
            raise AttributeError(name)
        measured = Costs(
            seconds_per_copy=self._runner.swap_seconds(1) / 2,
            copies_per_block=1,
            block_bytes=0,
            link_bytes_per_second=1.0,
            prefill_tokens_per_second=1 / self._runner.recompute_seconds(1),
        )
        for field in fields(Costs):
            object.__setattr__(self, field.name, getattr(measured, field.name))
        return getattr(self, name)


@overload
def plain(data: RequestView) -> RequestView: ...
@overload
def plain(data: Costs) -> Costs: ...
def plain(data: RequestView | Costs) -> RequestView | Costs:
    """The same with all that is found out late found out now: data that can be sent to another process."""
    kind = RequestView if isinstance(data, RequestView) else Costs
    return kind(*(getattr(data, field.name) for field in fields(kind)))
