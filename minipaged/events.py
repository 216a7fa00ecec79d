"""Events: what the engine did, as data, in one schema for the demo, the docs, the grader and the tests.

Each event is a small frozen dataclass; in JSON Lines it is an object whose "event" is the event's name. The events of a
run are complete: folding them from the first on gives every block table, reference count, queue and token that the
engine had (`minipaged/replay/` does so). Blocks are physical block numbers; `host` blocks are numbers of the swap pool.
Each sequence has a unique number, each request an id.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Literal, Protocol, get_args, get_origin, get_type_hints


class Emit(Protocol):
    """A callable with which a part of the engine reports its events."""

    @property
    def heard(self) -> bool:
        """Whether there is a listener. Without one, the events of single tokens and of every step are not made."""

    def __call__(self, event: Event) -> None: ...


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""

    name: ClassVar[str] = ""

    def to_json(self) -> str:
        """The event as one line of JSON, without the newline."""
        fields = {each.name: getattr(self, each.name) for each in fields_of(self)}
        return json.dumps({"event": self.name, **fields}, separators=(",", ":"))


Listener = Callable[["Event"], None]

HOLE = -1
"""An entry of a block table whose block was given back, because no layer of its group sees its tokens any more."""


# --- Steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineStarted(Event):
    """The first event of every run: its sizes."""

    name: ClassVar[str] = "engine_started"
    num_blocks: int
    num_swap_blocks: int
    block_size: int
    max_model_len: int
    group_windows: tuple[int | None, ...] = (None,)
    """For each group of layers, the number of tokens that a token sees in them; None: all. With several groups a block
    table has an entry in each for every logical block, one after another, and events number its entries."""


@dataclass(frozen=True, slots=True)
class StepStarted(Event):
    name: ClassVar[str] = "step_started"
    step: int


@dataclass(frozen=True, slots=True)
class StepScheduled(Event):
    """The batch is decided and has its blocks. The fields count the memory of all running requests, in the batch or
    not."""

    name: ClassVar[str] = "step_scheduled"
    step: int
    num_sequences: int
    num_tokens: int
    """Tokens with a slot, summed over the sequences."""
    table_entries: int
    """Block table entries, summed over the sequences."""
    blocks_used: int
    """Different blocks in those tables."""
    blocks_cached: int
    """Blocks that only the prefix cache holds."""
    slots_unfilled: int
    """Slots of the used blocks that hold no token."""


@dataclass(frozen=True, slots=True)
class StepFinished(Event):
    name: ClassVar[str] = "step_finished"
    step: int
    num_sequences: int
    """Sequences in the batch."""
    num_query_tokens: int
    seconds: float = field(compare=False)
    """Wall time of the whole step; ignored when events are compared."""
    num_generated: int = 0
    """Tokens that were appended to sequences since the step before finished."""


@dataclass(frozen=True, slots=True)
class StepFailed(Event):
    """A step raised an error. Every request in `requests` waits to be recomputed; none is lost."""

    name: ClassVar[str] = "step_failed"
    step: int
    error: str
    requests: tuple[str, ...]


# --- Requests and sequences -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestArrived(Event):
    """A request joined the waiting queue, with its first sequence."""

    name: ClassVar[str] = "request_arrived"
    request: str
    sequence: int
    prompt_token_ids: tuple[int, ...]
    num_sequences: int
    """The number of sequences that it will have: `n` or `beam_width`."""


@dataclass(frozen=True, slots=True)
class RequestRefused(Event):
    """A request was refused because it could never be served (NEVER)."""

    name: ClassVar[str] = "request_refused"
    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class RequestAdmitted(Event):
    """The request goes from waiting to running, because its blocks are free now (OK)."""

    name: ClassVar[str] = "request_admitted"
    request: str
    num_looked_up: int = 0
    """Tokens of its sequences that are looked up in the prefix cache; 0 without a prefix cache."""


@dataclass(frozen=True, slots=True)
class RequestPreempted(Event):
    """The request goes from running to waiting, to make room. The moves of its blocks follow."""

    name: ClassVar[str] = "request_preempted"
    request: str
    mode: Literal["swap", "recompute"]
    num_blocks: int
    """Different blocks that it held."""
    num_tokens: int
    """Tokens whose K/V those blocks held; a shared token counts once."""
    blocks_short: int
    """The number of blocks that the next step lacked."""


@dataclass(frozen=True, slots=True)
class RequestFinished(Event):
    name: ClassVar[str] = "request_finished"
    request: str
    reason: Literal["finished", "aborted", "failed"]


@dataclass(frozen=True, slots=True)
class SequenceForked(Event):
    """A sequence was forked: `child` now holds every block of `parent` too, and has the same tokens."""

    name: ClassVar[str] = "sequence_forked"
    request: str
    parent: int
    child: int


@dataclass(frozen=True, slots=True)
class TokenGenerated(Event):
    name: ClassVar[str] = "token_generated"
    request: str
    sequence: int
    token_id: int
    logprob: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class SequenceFinished(Event):
    """A sequence ended; its blocks are freed next. `reason`: "stop", "length", "abort", "error" (its request failed),
    or "dropped" (a beam that does not go on)."""

    name: ClassVar[str] = "sequence_finished"
    request: str
    sequence: int
    reason: Literal["stop", "length", "abort", "error", "dropped"]
    slot_steps_reserved: int = 0
    """Slots that a contiguous cache would have reserved for tokens still to come, summed over the sequence's steps."""


@dataclass(frozen=True, slots=True)
class BeamFinished(Event):
    """A beam search keeps `sequence`, followed by `token_id`, in its ranking. `sequence` itself may still go on."""

    name: ClassVar[str] = "beam_finished"
    request: str
    sequence: int
    token_id: int
    score: float = field(compare=False)


# --- Blocks ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokensComputed(Event):
    """The sequence's table was extended to `num_tokens` filled slots, by `new_blocks` at its end."""

    name: ClassVar[str] = "tokens_computed"
    sequence: int
    num_tokens: int
    new_blocks: tuple[int, ...]
    recomputed: int
    """The number of new tokens that had been computed before and dropped."""


@dataclass(frozen=True, slots=True)
class BlockCopied(Event):
    """Copy-on-write: the sequence is about to write into its last block, which was shared, so it gets a copy."""

    name: ClassVar[str] = "block_copied"
    sequence: int
    logical_block: int
    source: int
    destination: int
    holders: int
    """The reference count of `source` before the copy."""


@dataclass(frozen=True, slots=True)
class PrefixReused(Event):
    """The sequence's empty table begins with computed blocks, taken from the prefix cache or from a sibling. All are
    full for it, but perhaps the last."""

    name: ClassVar[str] = "prefix_reused"
    sequence: int
    blocks: tuple[int, ...]
    source: Literal["cache", "sibling"]
    num_tokens: int = 0
    """The number of its tokens that are in the blocks. (0 in older recordings: then all blocks are full.)"""

    def num_found(self, block_size: int) -> int:
        """Return the number of its tokens that are in the blocks."""
        return self.num_tokens or len(self.blocks) * block_size

    @property
    def held(self) -> tuple[int, ...]:
        """The blocks without the holes."""
        return tuple(block for block in self.blocks if block != HOLE)


@dataclass(frozen=True, slots=True)
class BlocksPassed(Event):
    """The windows of some layers have passed these blocks of the sequence, and it gave them back. Their table entries
    are holes now."""

    name: ClassVar[str] = "blocks_passed"
    sequence: int
    entries: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokensDrafted(Event):
    """These tokens are guessed to come next in the sequence. Its step runs them, to verify them; they get
    slots next. (If a draft model guesses them, in that step, they have their slots already.)"""

    name: ClassVar[str] = "tokens_drafted"
    sequence: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokensAccepted(Event):
    """The sequence's drafted tokens were verified: the first `num_accepted` of them stand. Those are generated next,
    and one token more."""

    name: ClassVar[str] = "tokens_accepted"
    sequence: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class BlocksRolledBack(Event):
    """The sequence gave back the slots of drafted tokens that do not stand. Its table has `num_tokens` filled slots
    now, and lost `blocks` at its end."""

    name: ClassVar[str] = "blocks_rolled_back"
    sequence: int
    num_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksFreed(Event):
    """The sequence gave back all its blocks (device blocks, or host blocks if it was swapped out)."""

    name: ClassVar[str] = "blocks_freed"
    sequence: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwappedOut(Event):
    """The request's blocks are copied to the host and freed. A block that several sequences share is copied once."""

    name: ClassVar[str] = "swapped_out"
    request: str
    pairs: tuple[tuple[int, int], ...]
    """(device block, host block)."""


@dataclass(frozen=True, slots=True)
class SwappedIn(Event):
    """A request that was swapped out goes from waiting to running, and its blocks are copied to the device."""

    name: ClassVar[str] = "swapped_in"
    request: str
    pairs: tuple[tuple[int, int], ...]
    """(host block, device block)."""


@dataclass(frozen=True, slots=True)
class BlockCached(Event):
    """The prefix cache took a reference on a full block of the sequence, or on the last one of a sequence that ends."""

    name: ClassVar[str] = "block_cached"
    sequence: int
    logical_block: int
    block: int
    block_hash: int = 0
    """The chained hash that identifies a full block's content (`block_hashes.py`); 0 for a block that is not full."""
    num_tokens: int = 0
    """The number of tokens that can be found in the block. (0 in older recordings: it is full.)"""


@dataclass(frozen=True, slots=True)
class BlockDeduplicated(Event):
    """The sequence computed a block that is already in the prefix cache; it holds that one now and freed its own."""

    name: ClassVar[str] = "block_deduplicated"
    sequence: int
    logical_block: int
    own: int
    cached: int


@dataclass(frozen=True, slots=True)
class BlockEvicted(Event):
    """The prefix cache gave up its reference on a block, which was the only one.

    `reason`: "room" was needed; a sequence that begins with some of its tokens has "taken over" the block, and will
    write into it; or the entry is "redundant", because another one begins with the same tokens.
    """

    name: ClassVar[str] = "block_evicted"
    block: int
    reason: Literal["room", "taken over", "redundant"] = "room"


@dataclass(frozen=True, slots=True)
class BlockDemoted(Event):
    """A cached block that is about to be evicted is copied to a host block, in which the floor below the prefix cache
    keeps it."""

    name: ClassVar[str] = "block_demoted"
    block: int
    host_block: int


@dataclass(frozen=True, slots=True)
class BlocksPromoted(Event):
    """The sequence's table was extended by full blocks, which are copied from the floor below the prefix cache. The
    floor keeps them too."""

    name: ClassVar[str] = "blocks_promoted"
    sequence: int
    pairs: tuple[tuple[int, int], ...]
    """(host block, device block)."""


@dataclass(frozen=True, slots=True)
class HostBlockDropped(Event):
    """The floor below the prefix cache gave up a host block: "room" was needed, for which its content went "to disk" or
    nowhere; or its step failed and its content is "lost"."""

    name: ClassVar[str] = "host_block_dropped"
    host_block: int
    reason: Literal["room", "to disk", "lost"]


@dataclass(frozen=True, slots=True)
class BlocksStored(Event):
    """These full blocks of the sequence were read out of the pool, for other engines (`kv_connector.py`)."""

    name: ClassVar[str] = "blocks_stored"
    sequence: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksLoaded(Event):
    """The sequence's table was extended by these full blocks, which another engine computed, or which the disk kept."""

    name: ClassVar[str] = "blocks_loaded"
    sequence: int
    blocks: tuple[int, ...]
    source: Literal["engine", "disk"] = "engine"


# --- JSON Lines -----------------------------------------------------------------------------------

EVENT_TYPES: dict[str, type[Event]] = {event.name: event for event in Event.__subclasses__()}


def _to_tuple(value: Any) -> Any:
    return tuple(_to_tuple(item) for item in value) if isinstance(value, list) else value


def from_json(line: str) -> Event:
    """Return the event that `Event.to_json` wrote as this line. Raises ValueError for any other text."""
    fields = json.loads(line)
    event_type = EVENT_TYPES.get(fields.pop("event", None)) if isinstance(fields, dict) else None
    if event_type is None:
        raise ValueError(f"not an event of minipaged: {line[:80]!r}")
    try:
        event = event_type(**{key: _to_tuple(value) for key, value in fields.items()})
    except TypeError as error:
        raise ValueError(f"not a valid {event_type.name} event: {error}") from error
    for name, is_right in _checks(event.name):
        if not is_right(getattr(event, name)):
            raise ValueError(f"not a valid {event_type.name} event: its {name} is {getattr(event, name)!r:.80}")
    return event


@cache
def _checks(name: str) -> list[tuple[str, Callable[[Any], bool]]]:
    """Return the name of each field of an event, with a function that checks a value against its annotation."""
    hints = get_type_hints(EVENT_TYPES[name])
    return [(each.name, _check(hints[each.name])) for each in fields_of(EVENT_TYPES[name])]


def _check(hint: Any) -> Callable[[Any], bool]:
    """Return a function that checks a value against an annotation: a number, a string, a Literal, or tuples of them."""
    of = get_args(hint)
    if get_origin(hint) is Literal:
        return lambda value: value in of
    if get_origin(hint) is tuple and of[-1] is ...:
        item_is_right = _check(of[0])
        return lambda value: isinstance(value, tuple) and all(map(item_is_right, value))
    if get_origin(hint) is tuple:
        checks = [_check(each) for each in of]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(checks)
            and all(is_right(item) for is_right, item in zip(checks, value, strict=True))
        )
    if get_origin(hint) is UnionType:
        of_any = [_check(each) for each in of]
        return lambda value: any(is_right(value) for is_right in of_any)
    types = (int, float) if hint is float else (hint,)
    return lambda value: type(value) in types


def read_jsonl(lines: Iterable[str]) -> Iterator[Event]:
    """The events of a JSON Lines file, blank lines skipped."""
    return (from_json(line) for line in lines if line.strip())
