"""What can go wrong, by name: the invariants and the exceptions.

The lowest floor of the house: everything may import it, it imports nothing of ours.
"""

from __future__ import annotations

from enum import StrEnum

# --- The invariants -------------------------------------------------------------------------------


class Invariant(StrEnum):
    """What holds after every step. Docs, grader and tests use these names."""

    CONSERVATION = "conservation"
    """`num_free` + number of blocks with `ref_count > 0` = `num_blocks`."""
    EXACT_REFERENCES = "exact-references"
    """`ref_count(b)` = number of block-table entries that hold b + prefix-cache holds."""
    EXCLUSIVE_WRITE = "exclusive-write"
    """A slot is written only in a block whose `ref_count` is 1."""
    CONTENT = "content"
    """The slot of position p in a sequence's table holds the K/V of exactly that sequence's tokens 0..p."""
    ATOMIC_FAILURE = "atomic-failure"
    """A call that raises leaves everything as it was."""
    LIVENESS = "liveness"
    """Every admitted request finishes; preemption always terminates."""
    SCHEDULING_INVARIANCE = "scheduling-invariance"
    """Greedy tokens do not depend on block size, pool size, preemption mode, chunk size, arrival order,
    prefix caching or tier."""
    STREAM_EQUALS_FINAL = "stream-equals-final"
    """The updates of a request, joined, are its final tokens and text."""
    TEXT_OF_ALL = "text-of-all"
    """The text of a prompt and the text of its output, joined, are the text of all their tokens, wherever the prompt
    ends."""
    NO_ORPHAN = "no-orphan"
    """Whatever ends a request (its reader gone, an error, a signal), its blocks are free before the next step, and its
    reader is told."""
    PARALLEL_INVARIANCE = "parallel-invariance"
    """Ranks in several processes give what the same shards give in one, bit for bit; and the tokens that one rank
    gives."""


# --- The exceptions -------------------------------------------------------------------------------


class MinipagedError(Exception):
    """Every error that minipaged raises on purpose."""


class OutOfBlocks(MinipagedError):
    """No free block is left in the pool."""


class BlockNotAllocated(MinipagedError):
    """A block that nobody holds was freed, shared or copied, or a number outside the pool was named."""


class InvariantViolation(MinipagedError):
    """A component (a student's allocator, say) broke one of the named invariants."""

    def __init__(self, invariant: Invariant, message: str) -> None:
        super().__init__(f"invariant '{invariant}' broken: {message}")
        self.invariant = invariant


class InvalidRequest(MinipagedError, ValueError):
    """A request or a setting that cannot be served as it stands; the message says what to change."""


class QueueFull(MinipagedError):
    """So many requests wait already that no more are taken."""


class ShuttingDown(MinipagedError):
    """The server ends, and takes no new requests."""


class EngineDead(MinipagedError):
    """The thread that steps the engine has died; the message says what of."""


class WorkerFailed(MinipagedError):
    """A process that ran a part of the model has died, or hangs; the message says which, and its last words."""


class NoReplica(MinipagedError):
    """Of several engines behind one endpoint none can take a request."""


class NotAnAllocator(MinipagedError, TypeError):
    """What was given as a block allocator lacks some of its members."""


class RequestFailed(MinipagedError):
    """What ends the request that it happened to, and no other."""


class BadLogits(RequestFailed, ValueError):
    """Logits by which no token can be chosen: the model's own, or what a request leaves of them."""


class DetokenizerFailed(RequestFailed):
    """The tokenizer could not turn tokens into text."""


class BadRecording(MinipagedError, ValueError):
    """A file that is no recording of steps, or not a whole one, or not of this model; the message says which."""


class ModelError(MinipagedError):
    """A model that cannot be found, fetched, read or run; the message names the file, tensor or setting."""
