"""What is said of events: every kind has its sentence, and the sentences say what happened."""

from __future__ import annotations

import pytest

from minipaged.events import (
    EVENT_TYPES,
    HOLE,
    BeamFinished,
    BlockCached,
    BlockCopied,
    BlockDeduplicated,
    BlockDemoted,
    BlockEvicted,
    BlocksFreed,
    BlocksLoaded,
    BlocksPassed,
    BlocksPromoted,
    BlocksRolledBack,
    BlocksStored,
    EngineStarted,
    Event,
    HostBlockDropped,
    PrefixReused,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    RequestRefused,
    SequenceFinished,
    SequenceForked,
    StepFailed,
    StepFinished,
    StepScheduled,
    StepStarted,
    SwappedIn,
    SwappedOut,
    TokenGenerated,
    TokensAccepted,
    TokensComputed,
    TokensDrafted,
)
from minipaged.replay.state import State
from minipaged.replay.teller import explain, letter, tell
from minipaged.stepper.page import sentences_of

RUN: list[tuple[Event, str]] = [
    (
        EngineStarted(8, 8, 2, 16),
        "The engine starts. Its pool has 8 blocks, each with room for 2 tokens; all are free.",
    ),
    (
        RequestArrived("a", 0, (1, 2, 3), 2),
        "Request a (A) arrives with 3 prompt tokens and asks for 2 sequences. It waits and holds no block.",
    ),
    (RequestArrived("b", 9, (7,), 1), "Request b (J) arrives with 1 prompt token. It waits and holds no block."),
    (RequestRefused("c", "it has 99 tokens"), "Request c is refused: it has 99 tokens."),
    (StepStarted(1), "Engine step 1 begins: the scheduler decides who runs."),
    (RequestAdmitted("a"), "Request a (A) is admitted: there are blocks for it, so it moves to running."),
    (TokensComputed(0, 3, (0, 1), 0), "Sequence A needs 3 more slots: blocks 0 and 1 are taken from the free ones."),
    (BlockCached(0, 0, 0), "Block 0 is full, so the prefix cache holds it too: a later prompt may begin with it."),
    (SequenceForked("a", 0, 1), "Sequence B is forked from sequence A: it shares 2 blocks, and nothing is copied."),
    (
        TokenGenerated("a", 1, 5, -1.0),
        "The next token of sequence B is five. It is known, but its keys and values are not in the cache yet.",
    ),
    (
        StepScheduled(1, 1, 3, 2, 2, 0, 1),
        "Engine step 1 is scheduled: running sequences: 1; different blocks that they hold: 2.",
    ),
    (StepFinished(1, 1, 3, 0.5), "Engine step 1 is over: it ran 3 tokens of 1 sequence."),
    (
        BlockCopied(1, 1, 1, 2, 2),
        "Copy-on-write: sequence B is about to write into block 1, which has 2 holders. It gets a copy, block 2, and "
        "lets go of block 1.",
    ),
    (
        TokensComputed(1, 4, (), 1),
        "Sequence B needs 1 more slot. Its last block, 2, has room, so nothing is allocated. 1 token had been computed "
        "before.",
    ),
    (BeamFinished("a", 1, 6, -0.12345), "Sequence B followed by six is kept as a finished beam, with score -0.123."),
    (SequenceFinished("a", 1, "dropped"), "Sequence B ends: its beam does not go on."),
    (BlocksFreed(1, (0, 2)), "Sequence B lets go of blocks 0 and 2; 0 has other holders and stays."),
    (
        RequestPreempted("a", "swap", 2, 3, 1),
        "The pool is 1 block short, so request a (A) is preempted (swap): it gives up 2 blocks with 3 tokens.",
    ),
    (SwappedOut("a", ((0, 4), (1, 5))), "Request a (A) is swapped out: 2 blocks copied to the host."),
    (RequestAdmitted("b"), "Request b (J) is admitted: there are blocks for it, so it moves to running."),
    (PrefixReused(9, (0,), "cache"), "Sequence J begins with block 0, already computed (prefix cache)."),
    (TokensComputed(9, 3, (3,), 0), "Sequence J needs 1 more slot: block 3 is taken from the free ones."),
    (SwappedIn("a", ((4, 6), (5, 7))), "Request a (A) is swapped in: 2 blocks copied back, and it runs."),
    (
        BlockDeduplicated(0, 0, 6, 0),
        "Sequence A computed what the prefix cache has already: it takes block 0 and gives back its own, 6.",
    ),
    (SequenceFinished("a", 0, "stop"), "Sequence A ends: it has come to its end."),
    (BlocksFreed(0, (0, 7)), "Sequence A lets go of blocks 0 and 7; 0 has other holders and stays."),
    (RequestFinished("a", "finished"), "Request a (A) is finished."),
    (BlocksFreed(9, (0, 3)), "Sequence J lets go of blocks 0 and 3; 0 has other holders and stays."),
    (BlockDemoted(0, 2), "Block 0 is copied to host block 2, where a later prompt may find it."),
    (BlockEvicted(0), "The prefix cache lets go of block 0, to make room."),
    (StepFailed(2, "OSError()", ("b",)), "Engine step 2 failed with OSError(); request b (J) will be recomputed."),
    (
        TokensComputed(9, 1, (3,), 1),
        "Sequence J needs 1 more slot: block 3 is taken from the free ones. 1 token had been computed before.",
    ),
    (BlocksFreed(9, (3,)), "Sequence J lets go of block 3, free again from now on."),
    (
        BlocksLoaded(9, (3, 1)),
        "Another engine has computed more of sequence J: blocks 3 and 1 are taken from the free ones, and written with "
        "what it has left.",
    ),
    (BlocksStored(9, (1,)), "What is in block 1 of sequence J is left for other engines."),
    (
        BlocksPromoted(9, ((2, 5),)),
        "More of sequence J is kept on the host: block 5 is taken from the free ones, and filled from there.",
    ),
    (HostBlockDropped(2, "to disk"), "Host block 2 is given back, to make room: its content is written to disk."),
    (
        BlocksLoaded(9, (6,), "disk"),
        "More of sequence J is kept on disk: block 6 is taken from the free ones, and filled from there.",
    ),
    (
        BlocksPassed(9, (0, 1), (3, 1)),
        "No layer will see blocks 3 and 1 of sequence J again: the window has passed. What is given back leaves a hole "
        "in the table.",
    ),
    (TokensComputed(9, 9, (4,), 0), "Sequence J needs 1 more slot: block 4 is taken from the free ones."),
    (
        TokensDrafted(9, (5, 6)),
        "2 tokens are drafted for sequence J: five and six. The step runs them too, and says how many stand.",
    ),
    (
        TokensComputed(9, 10, (), 0),
        "Sequence J needs 1 more slot for drafted tokens. Its last block, 4, has room, so nothing is allocated.",
    ),
    (
        TokensAccepted(9, 2, 1),
        "1 of 2 drafted tokens of sequence J stands: five. The step also gives the token in the place of six.",
    ),
    (
        BlocksRolledBack(9, 8, (4,)),
        "Sequence J gives back the slots of drafted tokens that do not stand, and keeps those of 8 tokens. It lets "
        "go of block 4, free again from now on.",
    ),
    (BlocksFreed(9, (5, 6)), "Sequence J lets go of blocks 5 and 6, free again from now on."),
    (RequestFinished("b", "failed"), "Request b (J) has failed."),
]


def test_every_kind_of_event_is_explained_in_whole_sentences() -> None:
    state, words = State(), {5: "five", 6: "six"}
    for event, sentence in RUN:
        assert explain(state, event, words.__getitem__) == sentence
        tell(state, event, words.__getitem__)
        state.apply(event)
    assert {event.name for event, _ in RUN} == EVENT_TYPES.keys()


def test_the_groups_of_layers_are_told_at_the_start_if_there_are_several_or_a_window() -> None:
    whole = explain(State(), EngineStarted(8, 8, 2, 16))
    assert "groups" not in whole
    assert [
        explain(State(), EngineStarted(8, 8, 2, 16, windows)).removeprefix(whole).strip().split(". ")[0]
        for windows in [(5,), (None, 5), (None, 4, 4)]
    ] == [
        "The layers are in one group, which sees the last 5",
        "The layers are in 2 groups, which see all tokens and the last 5",
        "The layers are in 3 groups, which see all tokens, the last 4 and the last 4",
    ]


def test_what_windows_have_passed_is_told_with_its_blocks() -> None:
    state = State()
    for event in (
        EngineStarted(8, 0, 2, 16, (2,)),
        RequestArrived("a", 0, (1, 2, 3, 4), 1),
        TokensComputed(0, 4, (5, 3), 0),
    ):
        state.apply(event)
    told = tell(state, BlocksPassed(0, (0,), (5,)))
    assert told is not None
    assert (told.topic, told.text, told.blocks) == ("pass", "windows have passed block 5 of A: given back", (5,))


def test_drafts_are_told_with_what_became_of_them() -> None:
    state = State()
    for event in (EngineStarted(8, 0, 2, 16), RequestArrived("a", 0, (1, 2), 1), TokensComputed(0, 5, (5, 3, 1), 0)):
        state.apply(event)
    events = TokensDrafted(0, (7, 8)), TokensAccepted(0, 2, 0), BlocksRolledBack(0, 3, (1,)), BlocksRolledBack(0, 3, ())
    told = [tell(state, event) for event in events]
    assert [(each.topic, each.text, each.blocks) if each else None for each in told] == [
        ("draft", "2 tokens drafted for A, and run to be verified", ()),
        ("accept", "0 of 2 drafted tokens of A stand, and one more token is known", ()),
        ("roll back", "A rolls back to 3 tokens: block 1 given back", (1,)),
        None,
    ]
    told = tell(state, events[0], {7: "on", 8: "the"}.__getitem__)
    assert told
    assert told.text == "2 tokens drafted for A, and run to be verified: 'on' and 'the'"


def test_a_page_tells_which_drafted_tokens_stand_and_that_they_are_in_the_cache() -> None:
    state, sentences = State(), list[str]()
    state.apply(EngineStarted(8, 0, 2, 16))
    for event in (
        RequestArrived("a", 0, (1, 2), 1),
        TokensComputed(0, 2, (5,), 0),
        TokensDrafted(0, (7, 8)),
        TokensComputed(0, 4, (6,), 0),
        TokensAccepted(0, 2, 2),
        TokenGenerated("a", 0, 7, -0.1),
        TokenGenerated("a", 0, 8, -0.1),
        TokenGenerated("a", 0, 9, -0.1),
        TokensDrafted(0, (7,)),
        TokensAccepted(0, 1, 0),
    ):
        sentences.append(explain(state, event))
        state.apply(event)
    in_cache = "as drafted. Its keys and values are in the cache already."
    assert sentences[2:] == [
        "2 tokens are drafted for sequence A: 7 and 8. The step runs them too, and says how many stand.",
        "Sequence A needs 2 more slots for drafted tokens: block 6 is taken from the free ones.",
        "2 of 2 drafted tokens of sequence A stand: 7 and 8. The step also gives the token after them.",
        f"The next token of sequence A is 7, {in_cache}",
        f"The next token of sequence A is 8, {in_cache}",
        "The next token of sequence A is 9. It is known, but its keys and values are not in the cache yet.",
        "1 token is drafted for sequence A: 7. The step runs it, and says whether it stands.",
        "0 of 1 drafted token of sequence A stand. The step also gives the token in the place of 7.",
    ]


def test_holes_are_no_blocks_in_what_is_told() -> None:
    state = State()
    for event in (EngineStarted(8, 0, 2, 16, (None, 2)), RequestArrived("a", 0, (1, 2, 3, 4, 5), 1)):
        state.apply(event)
    reused = PrefixReused(0, (0, HOLE, 2, 5), "cache", 4)
    told = tell(state, reused)
    assert told is not None
    assert told.text.endswith("finds 4 of its 5 prompt tokens in the prefix cache: blocks 0, 2, 5")
    assert told.blocks == (0, 2, 5)
    assert explain(state, reused) == "Sequence A begins with blocks 0, 2 and 5, already computed (prefix cache)."


def test_a_table_of_holes_only_is_given_up_too() -> None:
    state = State()
    for event in (
        EngineStarted(8, 0, 2, 16, (1,)),
        RequestArrived("a", 0, (1, 2), 1),
        TokensComputed(0, 2, (5,), 0),
        BlocksPassed(0, (0,), (5,)),
    ):
        state.apply(event)
    freed = BlocksFreed(0, ())
    told = tell(state, freed)
    assert told is not None
    assert told.text == "A gives back its table"
    assert explain(state, freed) == "Sequence A lets go of its table, which holds no block any more."
    state.apply(freed)
    assert (state.sequences[0].table, state.sequences[0].num_computed) == ([], 0)


def test_a_page_quotes_words_so_that_they_can_be_seen() -> None:
    events = [EngineStarted(4, 0, 2, 8), RequestArrived("a", 0, (1,), 1)]
    events += [TokenGenerated("a", 0, token, 0.0) for token in (1, 2, 3, 4)]
    said = sentences_of(events, {1: " a word", 2: "\n\n", 3: "  "})
    assert [sentence.split(". ")[0].rpartition(" is ")[2] for sentence in said[2:]] == [
        "“a word”",
        "“↵↵”",
        "“␣␣”",
        "“4”",
    ]
    assert "sequence A is 1." in sentences_of(events)[2]  # without words: the number of the token


def test_letters_go_on_when_there_are_no_more() -> None:
    assert [letter(number) for number in (0, 25, 26, 701, 702)] == ["A", "Z", "AA", "ZZ", "AAA"]


def test_where_a_run_contradicts_itself_the_page_says_so_from_there_on() -> None:
    """A recording of a faulty part is shown all the same."""
    events = [event for event, _ in RUN[:8]]
    wrong = [*events, BlocksFreed(0, (0, 3)), StepFinished(1, 1, 3, 0.5)]
    said = sentences_of(wrong)
    assert said[:8] == sentences_of(events)
    contradiction = "does not follow from what happened before: sequence A holds blocks [0, 1], not [0, 3]."
    assert said[8:] == [f"This (blocks_freed) {contradiction}", f"This (step_finished) {contradiction}"]


def test_a_request_is_called_with_the_letters_of_its_sequences_where_its_name_is_another() -> None:
    events: list[Event] = [
        EngineStarted(8, 8, 2, 16),
        RequestArrived("A", 0, (1,), 1),
        RequestArrived("1", 1, (1, 2), 2),
        StepStarted(1),
        RequestAdmitted("1"),
        TokensComputed(1, 2, (0,), 0),
        SequenceForked("1", 1, 2),
        SwappedOut("1", ((0, 4),)),
        StepFailed(1, "OSError()", ("1",)),
    ]
    said = sentences_of(events)
    assert said[1].startswith("Request A arrives")
    assert said[4].startswith("Request 1 (B) is admitted")
    assert said[7].startswith("Request 1 (B, C) is swapped out")
    assert said[8].endswith("; request 1 (B, C) will be recomputed.")


def test_what_an_allocator_disowns_is_not_told_as_a_fact() -> None:
    events = [event for event, _ in RUN]
    last = max(i for i, event in enumerate(events) if isinstance(event, BlocksFreed))
    assert sentences_of(events, doubted={last: {7}})[last] == RUN[last][1]
    told = sentences_of(events, doubted={last: {6}})[last]
    assert told == "Sequence J lets go of blocks 5 and 6, which should be free again from now on."


@pytest.mark.parametrize(
    ("num_tokens", "block"), [(4, "has room, so nothing"), (5, "has 1 slot left, and yet nothing")]
)
def test_a_table_that_takes_no_block_where_it_needs_one_has_no_room(num_tokens: int, block: str) -> None:
    state = State()
    for event in (EngineStarted(8, 8, 4, 16), RequestArrived("A", 0, (1,) * 9, 1), TokensComputed(0, 3, (2,), 0)):
        state.apply(event)
    assert f"Its last block, 2, {block} is allocated." in explain(state, TokensComputed(0, num_tokens, (), 0))
    state.apply(TokensComputed(0, 4, (), 0))
    assert "Its last block, 2, is full, and yet nothing is allocated." in explain(state, TokensComputed(0, 5, (), 0))


@pytest.mark.parametrize("event", [TokensComputed(7, 1, (0,), 0), SequenceForked("a", 7, 8), BlocksFreed(7, (0,))])
def test_what_is_said_of_nobody_is_refused(event: Event) -> None:
    with pytest.raises(LookupError):
        explain(State(), event)
