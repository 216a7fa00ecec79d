"""Describes an event in plain English, from the event and the state before it.

`tell` returns a line for a live display, and the blocks that the line is about. It names sequences by their letters, as
the demo draws them. Some lines sum up many events: which beams of a search continue is known only when the step has
finished, so the line for `StepFinished` names all of them.

`explain` returns whole sentences for a page that steps through a run. It derives letters from sequence numbers, because
a page keeps all sequences in view. The demo reuses the letter of a sequence that is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from minipaged import events as ev
from minipaged.events import Event
from minipaged.replay.state import LiveRequest, LiveSequence, State

Topic = Literal[
    "start", "step", "arrive", "admit", "join", "grow", "fill", "token", "end", "give back", "pass", "leave", "refuse",
    "prefix", "cache", "same", "evict", "fork", "child", "copy", "beams", "drop", "keep",
    "preempt", "swap", "return", "fail", "load", "store", "draft", "accept", "roll back",
]  # fmt: skip
Words = Callable[[int], str]
"""Returns the text of a token id."""


@dataclass(frozen=True, slots=True)
class Sentence:
    topic: Topic
    text: str
    blocks: tuple[int, ...] = ()
    """The device blocks that the text is about."""
    host_blocks: tuple[int, ...] = ()
    """The host blocks that the text is about."""


def tell(state: State, event: Event, words: Words | None = None) -> Sentence | None:
    """Return a sentence about an event that is about to change `state`; None if the event has no sentence."""
    match event:
        case ev.TokensComputed():
            return _tell_computed(state, state.sequences[event.sequence], event)
        case ev.TokenGenerated():
            sequence = state.sequences[event.sequence]
            return Sentence("token", f"{name(sequence)} goes on with {_word(event.token_id, words)}")
        case ev.StepStarted():
            running = _some(_names(state.running))
            return Sentence("step", f"step {event.step} begins" + (f" with {running} running" if running else ""))
        case ev.StepFinished():
            return _tell_forks(state)
        case ev.BlockCopied():
            return _tell_copy(state, event)
        case ev.BlocksPassed():
            text = f"windows have passed {numbers(event.blocks)} of {name(state.sequences[event.sequence])}: given back"
            return Sentence("pass", text, event.blocks)
        case ev.BlocksFreed():
            return _tell_freed(state, state.sequences[event.sequence], event.blocks)
        case ev.SequenceForked():
            return _tell_fork(state, state.sequences[event.parent])
        case ev.SequenceFinished():
            return _tell_end(state.sequences[event.sequence], event.reason)
        case ev.PrefixReused():
            return _tell_prefix(state, state.sequences[event.sequence], event)
        case ev.BlockCached():
            full = event.num_tokens in (0, state.block_size)
            what = "is full" if full else f"holds {_count(event.num_tokens, 'token')} at the end"
            text = f"block {event.block} {what}: the prefix cache holds it too now, so that others can find it"
            return Sentence("cache", text, (event.block,))
        case ev.BlockDeduplicated():
            text = f"block {event.own} has the content of cached block {event.cached}: given back"
            return Sentence("same", text, (event.own, event.cached))
        case ev.BlockEvicted():
            full = len(state.cached.get(event.block, ())) == state.block_size
            which = "the one unused for longest" if full else "which is not full"
            text = {
                "room": f"room is needed: the prefix cache gives back block {event.block}, {which}",
                "taken over": f"the prefix cache gives up block {event.block} to the next one that writes into it",
                "redundant": f"the prefix cache gives back block {event.block}: a longer one begins with its tokens",
            }[event.reason]
            return Sentence("evict", text, (event.block,))
        case ev.BlockDemoted():
            text = f"before it is given back, block {event.block} is copied to host block {event.host_block}"
            return Sentence("evict", text, (event.block,))
        case ev.BlocksPromoted():
            sequence, blocks = state.sequences[event.sequence], tuple(block for _, block in event.pairs)
            found = _count(len(blocks) * state.block_size, "token")
            text = f"request {sequence.request.name} has {found} from the host, into {numbers(blocks)}"
            return Sentence("load", text, blocks)
        case ev.HostBlockDropped():
            why = {
                "room": "unused for longest",
                "to disk": "whose content is on disk now",
                "lost": "whose step failed",
            }[event.reason]
            return Sentence("evict", f"the host gives back block {event.host_block}, {why}")
        case ev.BlocksLoaded():
            sequence = state.sequences[event.sequence]
            found = _count(len(event.blocks) * state.block_size, "token")
            source = {"engine": "another engine", "disk": "the disk"}[event.source]
            text = f"request {sequence.request.name} has {found} from {source}, into {numbers(event.blocks)}"
            return Sentence("load", text, event.blocks)
        case ev.BlocksStored():
            owner = state.sequences[event.sequence].request.name
            return Sentence("store", f"{numbers(event.blocks)} of request {owner} left for other engines", event.blocks)
        case ev.BeamFinished():
            beam = name(state.sequences[event.sequence])
            text = f"{beam} followed by {_word(event.token_id, words)} is kept for the ranking, score {event.score:.2f}"
            return Sentence("keep", text)
        case ev.TokensDrafted() | ev.TokensAccepted() | ev.BlocksRolledBack():
            return _tell_drafts(name(state.sequences[event.sequence]), event, words)
    return _tell_of_request(state, event)


DraftEvent = ev.TokensDrafted | ev.TokensAccepted | ev.BlocksRolledBack


def _tell_drafts(who: str, event: DraftEvent, words: Words | None) -> Sentence | None:
    match event:
        case ev.TokensDrafted():
            tokens = f": {listed(_word(token, words) for token in event.token_ids)}" if words else ""
            drafted = _count(len(event.token_ids), "token")
            return Sentence("draft", f"{drafted} drafted for {who}, and run to be verified{tokens}")
        case ev.TokensAccepted():
            drafted, stand = _count(event.num_drafted, "drafted token"), _verb(event.num_accepted, "stand")
            return Sentence(
                "accept", f"{event.num_accepted} of {drafted} of {who} {stand}, and one more token is known"
            )
        case ev.BlocksRolledBack() if event.blocks:
            text = f"{who} rolls back to {_count(event.num_tokens, 'token')}: {numbers(event.blocks)} given back"
            return Sentence("roll back", text, event.blocks)
    return None


def _tell_of_request(state: State, event: Event) -> Sentence | None:
    match event:
        case ev.EngineStarted():
            text = f"the engine starts with {_count(event.num_blocks, 'block')} of {_count(event.block_size, 'slot')}"
            return Sentence("start", text + ", all free")
        case ev.RequestArrived():
            prompt = _count(len(event.prompt_token_ids), "prompt token")
            return Sentence("arrive", f"request {event.request} arrives with {prompt}, and waits")
        case ev.RequestAdmitted():
            why = "there are blocks for all its tokens"
            return Sentence("admit", f"request {event.request} may run: {why}")
        case ev.RequestRefused():
            return Sentence("refuse", f"request {event.request} is refused: {event.reason}")
        case ev.RequestPreempted():
            return _tell_preemption(state.requests[event.request], event)
        case ev.SwappedOut():
            hosts = tuple(host for _, host in event.pairs)
            names = _some(_names([state.requests[event.request]]))
            text = f"{numbers(block for block, _ in event.pairs)} of {names} are copied to host {numbers(hosts)}"
            return Sentence("swap", text, tuple(block for block, _ in event.pairs), hosts)
        case ev.SwappedIn():
            request = state.requests[event.request]
            text = f"{called(request)} is back: {_count(len(event.pairs), 'block')} copied in again, none computed"
            return Sentence("return", text, tuple(block for _, block in event.pairs))
        case ev.RequestFinished():
            return _tell_departure(state, state.requests[event.request], event)
        case ev.StepFailed():
            lost = f"; {_requests(event.requests)} to be computed again" if event.requests else ""
            return Sentence("fail", f"step {event.step} failed with {event.error}{lost}")
    return None


# --- Blocks ---------------------------------------------------------------------------------------


def _tell_computed(state: State, sequence: LiveSequence, event: ev.TokensComputed) -> Sentence:
    size, start = state.block_size, sequence.num_computed
    count = event.num_tokens - start
    blocks = event.new_blocks
    here = name(sequence)
    if event.recomputed and sequence.request.preempted:
        again = f"{_count(event.recomputed, 'token')} computed again in one go"
        return Sentence("return", f"{called(sequence.request)} is back: {again}", blocks)
    if sequence.request.joining:
        former = _former_holders(state, blocks)
        first = start // size * sequence.num_groups
        blocks = (*sequence.table[first:], *blocks)  # it may begin in a block that it found
        text = f"request {sequence.request.name} joins: {_count(count, 'token')} into {numbers(blocks)}{former}"
        return Sentence("join", text, blocks)
    tokens = f"tokens {start}-{event.num_tokens - 1}" if count > 1 else f"token {start}"
    if blocks:
        before, after = (n // sequence.num_groups for n in (len(sequence.table), len(sequence.table) + len(blocks)))
        logical = numbers(range(before, after))
        full = f"{here}'s last block is full; " if start and start % size == 0 else f"{here} grows; "
        return Sentence("grow", f"{full}{tokens}: logical {logical} -> physical {numbers(blocks)}", blocks)
    last = sequence.table[(event.num_tokens - 1) // size * sequence.num_groups]
    slot = (event.num_tokens - 1) % size + 1
    return Sentence("fill", f"{tokens} of {here} into block {last}: {slot} of {_count(size, 'slot')} filled", (last,))


def _former_holders(state: State, blocks: Iterable[int]) -> str:
    """Name the requests that last held these blocks, in brackets; empty if there are none."""
    former = sorted({state.device.last_request[block] for block in blocks if block in state.device.last_request})
    return f" (once request {listed(former)}'s)" if former else ""


def _tell_copy(state: State, event: ev.BlockCopied) -> Sentence:
    writer = state.sequences[event.sequence]
    others = [number for number in state.device.holders[event.source] if number != writer.number]
    rest = ""
    if event.holders == 2:
        alone = name(state.sequences[others[0]]) if others else "the prefix cache"
        rest = f"; {alone} now has it alone"
    text = (
        f"{name(writer)} writes into block {event.source}, shared by {event.holders}: copied to block "
        f"{event.destination}{rest}"
    )
    return Sentence("copy", text, (event.source, event.destination))


def _tell_prefix(state: State, sequence: LiveSequence, event: ev.PrefixReused) -> Sentence:
    found, wanted = event.num_found(state.block_size), len(sequence.tokens)
    what = "prompt tokens" if not sequence.output else "tokens"
    where = "in the prefix cache" if event.source == "cache" else "with a sibling"
    text = f"request {sequence.request.name} finds {found} of its {wanted} {what} {where}: {numbers(event.held)}"
    if part := found % state.block_size:
        text += f", the last one for {_count(part, 'token')}"
    return Sentence("prefix", text, event.held)


def _tell_freed(state: State, sequence: LiveSequence, blocks: tuple[int, ...]) -> Sentence:
    if sequence.swapped:
        return Sentence("give back", f"{name(sequence)} gives back host {numbers(blocks)}", host_blocks=blocks)
    free = [block for block in blocks if not _others_hold(state, sequence, block)]
    rest = len(blocks) - len(free)
    kept = f"; others still hold {rest}" if rest else ""
    text = (
        f"{name(sequence)} gives back its table: {numbers(free)} free"
        if free
        else f"{name(sequence)} gives back its table"
    )
    return Sentence("give back", text + kept, tuple(free))


# --- Forks and beams ------------------------------------------------------------------------------


def _tell_fork(state: State, parent: LiveSequence) -> Sentence:
    child = state.letters[0] if state.letters else "another"
    text = (
        f"{name(parent)} forks: {child} gets a copy of its table, and shares its {_count(len(parent.blocks), 'block')}"
    )
    return Sentence("child", text, tuple(parent.blocks))


def _tell_end(sequence: LiveSequence, reason: str) -> Sentence:
    why = {
        "stop": "it said its last word",
        "length": "it has all the tokens it was to have",
        "abort": "it was cancelled",
        "error": "its request has failed",
        "dropped": "other beams score better",
    }[reason]
    if reason == "dropped":
        return Sentence("drop", f"beam {name(sequence)} is dropped: {why}")
    return Sentence("end", f"{name(sequence)} ends: {why}")


def _tell_forks(state: State) -> Sentence | None:
    """Sum up a step at its end: which beams of a search continue, or how a prompt was forked."""
    if state.dropped:
        held = sorted({block for _, blocks in state.dropped.values() for block in blocks})
        free = [block for block in held if block not in state.device.holders]
        which = f"{numbers(free)} free again" if free else "all their blocks are shared: none free"
        return Sentence("beams", f"{_survival(state)}; {which}", tuple(free))
    if state.forks:
        parent, children = state.forks[0][0], [name(child) for _, child in state.forks]
        shared = _count(len(parent.blocks), "block")
        text = f"{name(parent)} forks into {listed(children)}: {shared} shared, none copied"
        return Sentence("fork", text, tuple(parent.blocks))
    return None


def _survival(state: State) -> str:
    forks = Counter(name(parent) for parent, _ in state.forks)
    goes_on = [f"{parent} goes on {_times(count + 1)}" for parent, count in forks.items()]
    many = "beams" if len(state.dropped) > 1 else "beam"
    dropped = [name(sequence) for sequence, _ in state.dropped.values()]
    return ", ".join([*goes_on, f"{many} {listed(dropped)} dropped"])


# --- Requests -------------------------------------------------------------------------------------


def _tell_preemption(request: LiveRequest, event: ev.RequestPreempted) -> Sentence:
    what = {
        "swap": f"swap, {_count(event.num_blocks, 'block')} to the host",
        "recompute": f"recompute, {_count(event.num_tokens, 'token')} dropped",
    }[event.mode]
    short = _count(event.blocks_short, "block")
    blocks = tuple(block for sequence in request.sequences for block in sequence.blocks)
    text = f"{short} short: {called(request)}, the latest of those that run, is preempted by {what}"
    return Sentence("preempt", text, tuple(dict.fromkeys(blocks)))


def _tell_departure(state: State, request: LiveRequest, event: ev.RequestFinished) -> Sentence:
    ended = {"finished": "has finished", "aborted": "was cancelled", "failed": "has failed"}[event.reason]
    blocks = tuple(sorted({block for s in request.done if not s.swapped for block in s.blocks}))
    back = f" and gives back {numbers(blocks)}" if blocks else ""
    return Sentence("leave", f"{called(request)} {ended}{back}", blocks)


# --- Sentences for a page -------------------------------------------------------------------------


def explain(state: State, event: Event, words: Words | None = None, doubted: Collection[int] = ()) -> str:
    """Explain an event that is about to change `state`, in whole sentences.

    `words` returns the quoted text of a token. `doubted` holds the blocks for which the allocator, asked after the
    event, contradicts the events. Raises LookupError if the event is not possible after the ones before it.
    """
    match event:
        case ev.EngineStarted():
            return (
                f"The engine starts. Its pool has {_count(event.num_blocks, 'block')}, each with room for "
                f"{_count(event.block_size, 'token')}; all are free.{_explain_groups(event.group_windows)}"
            )
        case ev.StepStarted():
            return f"Engine step {event.step} begins: the scheduler decides who runs."
        case ev.StepScheduled():
            held = f"running sequences: {event.num_sequences}; different blocks that they hold: {event.blocks_used}"
            return f"Engine step {event.step} is scheduled: {held}."
        case ev.StepFinished():
            ran = f"{_count(event.num_query_tokens, 'token')} of {_count(event.num_sequences, 'sequence')}"
            return f"Engine step {event.step} is over: it ran {ran}."
        case ev.StepFailed():
            many = "requests" if len(event.requests) > 1 else "request"
            lost = f"; {many} {listed(_lettered(state, name) for name in event.requests)} will be recomputed"
            return f"Engine step {event.step} failed with {event.error}{lost if event.requests else ''}."
        case ev.TokensComputed():
            return _explain_computed(state.sequences[event.sequence], event, state.block_size)
        case ev.BlockCopied():
            return (
                f"Copy-on-write: sequence {letter(event.sequence)} is about to write into block {event.source}, which "
                f"has {event.holders} holders. It gets a copy, block {event.destination}, and lets go of block "
                f"{event.source}."
            )
        case ev.PrefixReused():
            where = "prefix cache" if event.source == "cache" else "by a sibling"
            begins = f"Sequence {letter(event.sequence)} begins with {_blocks(event.held)}, already computed ({where})."
            return begins + _explain_part(state, event)
        case ev.BlocksPassed():
            return (
                f"No layer will see {_blocks(event.blocks)} of sequence {letter(event.sequence)} again: the window has "
                "passed. What is given back leaves a hole in the table."
            )
        case ev.TokensDrafted() | ev.TokensAccepted() | ev.BlocksRolledBack():
            return _explain_drafts(state.sequences[event.sequence], event, words)
        case ev.BlocksFreed():
            return _explain_freed(state, state.sequences[event.sequence], event.blocks, doubted)
        case ev.BlockCached():
            if event.num_tokens not in (0, state.block_size):
                return (
                    f"Sequence {letter(event.sequence)} is about to end, with {_count(event.num_tokens, 'token')} in "
                    f"block {event.block}. The prefix cache holds it too: a later prompt may begin with them."
                )
            return f"Block {event.block} is full, so the prefix cache holds it too: a later prompt may begin with it."
        case ev.BlockDeduplicated():
            return (
                f"Sequence {letter(event.sequence)} computed what the prefix cache has already: it takes block "
                f"{event.cached} and gives back its own, {event.own}."
            )
        case ev.BlockEvicted():
            why = {
                "room": ", to make room",
                "taken over": ": the next sequence needs only the beginning of it, and will write into it",
                "redundant": ": another cached block begins with the same tokens",
            }
            return f"The prefix cache lets go of block {event.block}{why[event.reason]}."
        case ev.BlockDemoted():
            return f"Block {event.block} is copied to host block {event.host_block}, where a later prompt may find it."
        case ev.BlocksPromoted():
            blocks = tuple(block for _, block in event.pairs)
            are = "is" if len(blocks) == 1 else "are"
            return (
                f"More of sequence {letter(event.sequence)} is kept on the host: {_blocks(blocks)} {are} taken from "
                "the free ones, and filled from there."
            )
        case ev.HostBlockDropped():
            because = {
                "room": ", to make room",
                "to disk": ", to make room: its content is written to disk",
                "lost": ": the step that moved it has failed",
            }
            return f"Host block {event.host_block} is given back{because[event.reason]}."
        case ev.BlocksLoaded():
            are = "is" if len(event.blocks) == 1 else "are"
            if event.source == "disk":
                return (
                    f"More of sequence {letter(event.sequence)} is kept on disk: {_blocks(event.blocks)} {are} taken "
                    "from the free ones, and filled from there."
                )
            return (
                f"Another engine has computed more of sequence {letter(event.sequence)}: {_blocks(event.blocks)} {are} "
                "taken from the free ones, and written with what it has left."
            )
        case ev.BlocksStored():
            return f"What is in {_blocks(event.blocks)} of sequence {letter(event.sequence)} is left for other engines."
    return _explain_sequence(state, event, words)


def _explain_drafts(sequence: LiveSequence, event: DraftEvent, words: Words | None) -> str:
    who = letter(sequence.number)
    match event:
        case ev.TokensDrafted():
            tokens = listed(_quoted(token, words) for token in event.token_ids)
            if len(event.token_ids) == 1:
                return f"1 token is drafted for sequence {who}: {tokens}. The step runs it, and says whether it stands."
            drafted = f"{len(event.token_ids)} tokens are drafted for sequence {who}"
            return f"{drafted}: {tokens}. The step runs them too, and says how many stand."
        case ev.TokensAccepted():
            words_of = [_quoted(token, words) for token in sequence.drafted]
            standing, refused = words_of[: event.num_accepted], words_of[event.num_accepted :]
            which = f": {listed(standing)}" if standing else ""
            place = f"in the place of {refused[0]}" if refused else "after them"
            drafted = f"{event.num_accepted} of {_count(event.num_drafted, 'drafted token')} of sequence {who}"
            return f"{drafted} {_verb(event.num_accepted, 'stand')}{which}. The step also gives the token {place}."
        case ev.BlocksRolledBack():
            back = f" It lets go of {_blocks(event.blocks)}, free again from now on." if event.blocks else ""
            return (
                f"Sequence {who} gives back the slots of drafted tokens that do not stand, and keeps those of "
                f"{_count(event.num_tokens, 'token')}.{back}"
            )


def _explain_part(state: State, event: ev.PrefixReused) -> str:
    """Say what becomes of a last block that the sequence shares only in part; empty if it shares all of it."""
    if not (part := event.num_found(state.block_size) % state.block_size):
        return ""
    shared = f" {part} of {_count(state.block_size, 'token')} are shared"
    if state.ref_count(event.blocks[-1]):
        return f"{shared}; the block is copied at the first write."
    return f"{shared}; nobody else holds the block, so the sequence writes into it."


def _explain_groups(windows: tuple[int | None, ...]) -> str:
    if windows == (None,):
        return ""
    see = listed("all tokens" if window is None else f"the last {window}" for window in windows)
    groups = "one group, which sees" if len(windows) == 1 else f"{len(windows)} groups, which see"
    return f" The layers are in {groups} {see}. Each group has block tables of its own, over the one pool."


def _explain_sequence(state: State, event: Event, words: Words | None) -> str:
    match event:
        case ev.SequenceForked():
            shared = _count(len(state.sequences[event.parent].blocks), "block")
            return (
                f"Sequence {letter(event.child)} is forked from sequence {letter(event.parent)}: it shares {shared}, "
                "and nothing is copied."
            )
        case ev.TokenGenerated():
            token = _quoted(event.token_id, words)
            if state.sequences[event.sequence].num_standing:
                known = "as drafted. Its keys and values are in the cache already."
                return f"The next token of sequence {letter(event.sequence)} is {token}, {known}"
            return (
                f"The next token of sequence {letter(event.sequence)} is {token}. It is known, but its keys and values "
                "are not in the cache yet."
            )
        case ev.SequenceFinished():
            return f"Sequence {letter(event.sequence)} ends: {_WHY_IT_ENDS[event.reason]}."
        case ev.BeamFinished():
            return (
                f"Sequence {letter(event.sequence)} followed by {_quoted(event.token_id, words)} is kept as a finished "
                f"beam, with score {event.score:.3f}."
            )
    return _explain_request(state, event)


RequestEvent = ev.RequestAdmitted | ev.RequestPreempted | ev.SwappedOut | ev.SwappedIn | ev.RequestFinished


def _explain_request(state: State, event: Event) -> str:
    match event:
        case ev.RequestArrived():
            prompt = _count(len(event.prompt_token_ids), "prompt token")
            several = f" and asks for {event.num_sequences} sequences" if event.num_sequences > 1 else ""
            named = _beside(event.request, [event.sequence])
            return f"Request {named} arrives with {prompt}{several}. It waits and holds no block."
        case ev.RequestRefused():
            return f"Request {event.request} is refused: {event.reason}."
        case ev.RequestAdmitted():
            return f"Request {_of(state, event)} is admitted: there are blocks for it, so it moves to running."
        case ev.RequestPreempted():
            return (
                f"The pool is {_count(event.blocks_short, 'block')} short, so request {_of(state, event)} is "
                f"preempted ({event.mode}): it gives up {_count(event.num_blocks, 'block')} with "
                f"{_count(event.num_tokens, 'token')}."
            )
        case ev.SwappedOut():
            copied = _count(len(event.pairs), "block")
            return f"Request {_of(state, event)} is swapped out: {copied} copied to the host."
        case ev.SwappedIn():
            copied = _count(len(event.pairs), "block")
            return f"Request {_of(state, event)} is swapped in: {copied} copied back, and it runs."
        case ev.RequestFinished():
            return f"Request {_of(state, event)} {'has' if event.reason == 'failed' else 'is'} {event.reason}."
    raise TypeError(f"{type(event).__name__} has no sentence")


_WHY_IT_ENDS = {
    "stop": "it has come to its end",
    "length": "it has all the tokens that were asked for",
    "abort": "it was cancelled",
    "error": "its request has failed",
    "dropped": "its beam does not go on",
}


def _explain_computed(sequence: LiveSequence, event: ev.TokensComputed, block_size: int) -> str:
    needs = f"Sequence {letter(event.sequence)} needs {_count(event.num_tokens - sequence.num_computed, 'more slot')}"
    needs += " for drafted tokens" if sequence.drafted else ""
    again = f" {_count(event.recomputed, 'token')} had been computed before." if event.recomputed else ""
    if event.new_blocks:
        are = "is" if len(event.new_blocks) == 1 else "are"
        return f"{needs}: {_blocks(event.new_blocks)} {are} taken from the free ones.{again}"
    slots = len(sequence.table) // sequence.num_groups * block_size
    last, room = sequence.table[-1], slots - sequence.num_computed
    if room < event.num_tokens - sequence.num_computed:  # a faulty table
        has = f"has {_count(room, 'slot')} left" if room > 0 else "is full"
        return f"{needs}. Its last block, {last}, {has}, and yet nothing is allocated.{again}"
    return f"{needs}. Its last block, {last}, has room, so nothing is allocated.{again}"


def _explain_freed(state: State, sequence: LiveSequence, blocks: tuple[int, ...], doubted: Collection[int]) -> str:
    if not blocks:  # windows have passed all of them
        return f"Sequence {letter(sequence.number)} lets go of its table, which holds no block any more."
    kept = [block for block in blocks if _others_hold(state, sequence, block)]
    verbs = ("has", "stays") if len(kept) == 1 else ("have", "stay")
    should = not sequence.swapped and set(blocks) & set(doubted)
    free = ", which should be free again from now on." if should else ", free again from now on."
    after = f"; {listed(kept)} {verbs[0]} other holders and {verbs[1]}." if kept else free
    return (
        f"Sequence {letter(sequence.number)} lets go of {'host ' if sequence.swapped else ''}{_blocks(blocks)}{after}"
    )


def _others_hold(state: State, sequence: LiveSequence, block: int) -> bool:
    """Whether another sequence, or the prefix cache, also holds this block of the sequence."""
    if sequence.swapped:
        return len(state.host.holders[block]) > 1
    return state.ref_count(block) > 1


# --- Words ----------------------------------------------------------------------------------------

MOST_RUNS = 6
"""The largest number of runs of neighbouring blocks that a sentence lists."""


def letter(number: int) -> str:
    """Return a sequence's letter on a page, from its number: A to Z, AA, AB ..."""
    return (letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def name(sequence: LiveSequence) -> str:
    """Return a sequence's letter, or "sequence 17", with its number, if it has none. It has none if it never held a
    block, or if all letters were taken."""
    return sequence.letter if sequence.letter.isalpha() else f"sequence {sequence.number}"


def called(request: LiveRequest) -> str:
    """Name a request with the letters of its sequences: "request 3 (D)"."""
    letters = [s.letter for s in request.sequences or request.done if s.letter.isalpha()]
    return f"request {request.name} ({_some(letters)})" if letters else f"request {request.name}"


def _of(state: State, event: RequestEvent) -> str:
    return _lettered(state, event.request)


def _lettered(state: State, request: str) -> str:
    """Return a request's name with the letters that its sequences have on a page: "3 (D, E)"."""
    live = state.requests[request]
    return _beside(request, sorted(sequence.number for sequence in live.sequences or live.done))


def _beside(request: str, sequences: Iterable[int]) -> str:
    letters = [letter(number) for number in sequences]
    return f"{request} ({', '.join(letters)})" if letters and letters != [request] else request


def numbers(blocks: Iterable[int]) -> str:
    """List block numbers, with neighbours joined: "blocks 0-3, 7"."""
    blocks = list(blocks)
    return f"block{'' if len(blocks) == 1 else 's'} {blocks_only(blocks)}"


def blocks_only(blocks: Iterable[int]) -> str:
    """List block numbers as `numbers` does, without the word "blocks"."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:MOST_RUNS]]
    more = sum(last - first + 1 for first, last in runs[MOST_RUNS:])
    return ", ".join(shown) + (f" and {more} more" if more else "") if shown else "none"


def _names(requests: Iterable[LiveRequest]) -> list[str]:
    return [name(sequence) for request in requests for sequence in request.sequences if sequence.letter]


def _requests(names: tuple[str, ...]) -> str:
    return f"request{'s' if len(names) > 1 else ''} {_some(names)} {'wait' if len(names) > 1 else 'waits'}"


def _word(token_id: int, words: Words | None) -> str:
    return repr(words(token_id)) if words else f"token {token_id}"


def _quoted(token_id: int, words: Words | None) -> str:
    return words(token_id) if words else str(token_id)


def _blocks(blocks: Iterable[int]) -> str:
    """List each block number: "blocks 0, 1 and 2"."""
    blocks = list(blocks)
    return f"{'block' if len(blocks) == 1 else 'blocks'} {listed(blocks)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _verb(count: int, verb: str) -> str:
    return f"{verb}s" if count == 1 else verb


def _times(count: int) -> str:
    return {2: "twice"}.get(count, f"{count} times")


def listed(items: Iterable[object]) -> str:
    """Join items into a list: "0, 1 and 2"."""
    named = [str(item) for item in items]
    return f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else "".join(named)


def _some(items: Iterable[str], most: int = 8) -> str:
    """Join items into a list that names the first few and counts the rest; "" for no items."""
    items = list(items)
    return listed(items) if len(items) <= most else f"{', '.join(items[:most])} and {len(items) - most} more"
