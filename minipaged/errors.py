"""The invariants and the exceptions, by name.

This is the lowest module: every other one may import it, and it imports none of them.
"""

from __future__ import annotations

from enum import StrEnum

# --- The invariants -------------------------------------------------------------------------------


class Invariant(StrEnum):
    """A condition that holds after every step. Docs, grader and tests use these names."""

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
    """A request's blocks are free before the next step, and its reader is informed, whatever ended the request (its
    reader left, an error, a signal)."""
    PINNED_IN_FLIGHT = "pinned-in-flight"
    """A block that a transfer reads or writes is neither freed nor handed out until the transfer is known to be
    done."""
    WINDOW_CONTENT = "window-content"
    """A sequence holds each block that a layer of the block's group sees from its next token on, and none that no layer
    of the group sees."""
    PARALLEL_INVARIANCE = "parallel-invariance"
    """Ranks in several processes compute the same bits as the same shards in one process, and choose the same tokens
    as a single rank."""


# --- The exceptions -------------------------------------------------------------------------------


class MinipagedError(Exception):
    """The base class of all errors that minipaged raises on purpose."""


class OutOfBlocks(MinipagedError):
    """No free block is left in the pool."""


class BlockNotAllocated(MinipagedError):
    """A free block was freed, shared or copied, or a block number is outside the pool."""


class InvariantViolation(MinipagedError):
    """A component (a student's allocator, say) broke one of the named invariants."""

    def __init__(self, invariant: Invariant, message: str) -> None:
        super().__init__(f"invariant '{invariant}' broken: {message}")
        self.invariant = invariant


class InvalidRequest(MinipagedError, ValueError):
    """A request or a setting that cannot be served as it stands; the message says what to change."""


class QueueFull(MinipagedError):
    """The waiting queue is full, so that a new request is refused."""


class ShuttingDown(MinipagedError):
    """The server is shutting down and takes no new requests."""


class EngineDead(MinipagedError):
    """The thread that steps the engine has died; the message gives the cause."""


class WorkerFailed(MinipagedError):
    """A process that runs a part of the model has died or hangs; the message names it and gives its last output."""


class NoReplica(MinipagedError):
    """None of the engines behind one endpoint can take a request."""


class NotAnAllocator(MinipagedError, TypeError):
    """An object that was given as a block allocator lacks some of its members."""


class RequestFailed(MinipagedError):
    """An error that ends the request in which it happened, and no other."""


class BadLogits(RequestFailed, ValueError):
    """Logits from which no token can be chosen: the model's own, or those that the request has changed."""


class DetokenizerFailed(RequestFailed):
    """The tokenizer could not turn tokens into text."""


class BadRecording(MinipagedError, ValueError):
    """A file that is not a recording of steps, is incomplete, or is of another model; the message says which."""


class ModelError(MinipagedError):
    """A model that cannot be found, fetched, read or run; the message names the file, tensor or setting."""
