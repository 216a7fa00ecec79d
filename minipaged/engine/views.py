"""Views: the frozen data that a policy receives about requests and about a runner's costs (`scheduling.py`).

A thousand requests may wait, and the policy may look at only one of them. So values that take time to compute are
computed when they are first read, and then stay as they are. A value not read before the policy's method returns cannot
be computed later: reading it raises LookupError.

A late field is one that `__init__` leaves unset. It is computed when it is first read (`WaitingView`, `LateCosts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, fields
from functools import cached_property
from typing import Any, overload

from minipaged.contracts import Runner
from minipaged.engine.memory import Memory
from minipaged.engine.sequence import Request, RequestState
from minipaged.scheduling import Costs, RequestView

TOO_LATE = (
    "read too late: the policy's method has returned, and the engine has changed since; read it within the method"
)


def view_of(request: Request, blocks: Memory) -> RequestView:
    """Return the policy's view of the request."""
    needed, most = _blocks_needed(request, blocks), _most_blocks(request, blocks)
    told = _told(request, blocks)
    groups = blocks.num_groups
    return RequestView(*told, needed, request.priority, request.arrival_time, most_blocks=most, num_groups=groups)


def _told(request: Request, blocks: Memory) -> tuple[str, int, int, int, int, int, bool, int, int]:
    """All fields but the last four, as a tuple: fast, because all running requests are shown at every admission."""
    if len(request.sequences) == 1:  # nothing is shared
        [sequence] = request.sequences
        num_blocks, num_tokens = sequence.num_blocks, sequence.table.num_tokens
        tokens_to_run = len(sequence.tokens) + sequence.pending - num_tokens
        decodes = tokens_to_run <= 1
    else:
        remaining = [n for _, n in request.remaining()]
        behind = [n for n in remaining if n > 1]
        # Sequences whose blocks were dropped catch up one after another.
        tokens_to_run, decodes = sum(remaining) if len(behind) <= 1 else behind[0] - 1, not behind
        num_blocks = len(request.filled_slots(blocks.block_size))
        num_tokens = request.num_tokens_held(blocks.block_size)
    return (
        request.request_id,
        request.order,
        request.num_sequences,
        len(request.prompt_token_ids),
        request.max_output_tokens,
        tokens_to_run,
        decodes,
        num_blocks,
        num_tokens,
    )


def _blocks_needed(request: Request, blocks: Memory) -> int:
    if request.state is RequestState.RUNNING:
        return blocks.blocks_needed(request.remaining())
    return blocks.blocks_to_admit(request)


def _most_blocks(request: Request, blocks: Memory) -> int | None:
    """The value of `RequestView.most_blocks`."""
    return blocks.most_blocks(request) if blocks.has_windows else None


@dataclass(frozen=True, slots=True)
class _Uncounted(RequestView):
    """A view whose `__init__` leaves `blocks_needed` and `num_cached_tokens` unset."""

    blocks_needed: int = field(init=False)
    num_cached_tokens: int = field(init=False)


class WaitingView(_Uncounted):
    """A waiting request. Its blocks and its cached tokens are counted when first read: with a prefix cache, each looks
    up the prompt."""

    _request: Request
    _blocks: Memory
    _is_up_to_date: Callable[[WaitingView], bool]

    def __init__(self, request: Request, blocks: Memory, is_up_to_date: Callable[[WaitingView], bool]) -> None:
        super().__init__(
            *_told(request, blocks),
            priority=request.priority,
            arrival_time=request.arrival_time,
            most_blocks=_most_blocks(request, blocks),
            num_groups=blocks.num_groups,
        )
        # Not by assignment, which a frozen class refuses.
        vars(self).update(_request=request, _blocks=blocks, _is_up_to_date=is_up_to_date)

    @cached_property
    def blocks_needed(self) -> int:
        """Free blocks that it needs. Raises LookupError if it is first read after the policy's method has returned."""
        self._check_in_time()
        return _blocks_needed(self._request, self._blocks)

    @cached_property
    def num_cached_tokens(self) -> int:
        """Tokens that it finds in the prefix cache. Raises LookupError as `blocks_needed` does."""
        self._check_in_time()
        return self._blocks.num_cached_tokens(self._request)

    def _check_in_time(self) -> None:
        if not self._is_up_to_date(self):
            raise LookupError(TOO_LATE)

    @property
    def counted(self) -> bool:
        """Whether `blocks_needed` or `num_cached_tokens` has been read."""
        return not vars(self).keys().isdisjoint(("blocks_needed", "num_cached_tokens"))


class LateViews(Sequence[RequestView]):
    """Views of these requests, made when one of them is first read. `settle` is called before that."""

    def __init__(self, requests: Sequence[Request], blocks: Memory, settle: Callable[[], None]) -> None:
        self._requests: tuple[Request, ...] = tuple(requests)
        self._blocks: Memory | None = blocks
        self._settle = settle
        self._views: list[RequestView] | None = None

    def close(self) -> None:
        """Make no views any more: the policy's method has returned."""
        self._blocks = None

    def _made(self) -> list[RequestView]:
        if self._views is None:
            if self._blocks is None:
                raise LookupError(TOO_LATE)
            self._settle()
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
    """A runner's costs, requested from it when one is first read: the runner may have to measure them."""

    _runner: Runner

    def __init__(self, runner: Runner) -> None:
        vars(self).update(_runner=runner)

    def __getattr__(self, name: str) -> Any:
        """Set all fields. Called when a field is read that is not set yet."""
        if name not in Costs.__slots__:
            raise AttributeError(name)
        super().__init__(*astuple(self._runner.costs()))
        return getattr(self, name)


@overload
def plain(data: RequestView) -> RequestView: ...
@overload
def plain(data: Costs) -> Costs: ...
def plain(data: RequestView | Costs) -> RequestView | Costs:
    """Return a copy with all late fields computed: data that can be sent to another process."""
    kind = RequestView if isinstance(data, RequestView) else Costs
    return kind(*(getattr(data, field.name) for field in fields(kind)))
