"""Figs. 4 to 10: the paper's own small examples, each as a recorded run of the engine.

Their numbers are counted, so they must match exactly. Block numbers are not judged: they depend on the order in which
earlier requests freed the pool's blocks. Here the order is set to give the paper's numbers (`Tale.first_blocks`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minipaged.events import BlockCopied, BlocksFreed, PrefixReused, StepFinished, TokensComputed
from minipaged.paper.figure import Blocks, Box, Check, Entry, Figure, FigureResult, Job, Table
from minipaged.paper.telling import WORKERS, RetoldRun, Tale, TaleRequest, entries
from minipaged.replay.state import LiveSequence, State

TOLERANCE = 0.0
"""Tolerance of all checks here: counts must match."""
SPEECH = "Four score and seven years ago our fathers brought forth on this continent a new nation"
MOTHERS = "Four score and seven years ago our mothers crossed the wide and stormy sea in a boat"
TIMES = "It was the best of times it was the worst of times"
PROMPT = "Four score and seven years ago our"
"""The paper's prompt. It has seven tokens, as each word is one."""
PREFIX = (
    "Translate English to French: sea otter => loutre de mer peppermint => menthe poivrée plush girafe => girafe en "
    "peluche"
)
TASKS = ("cheese => fromage .", "I love you => Je t'aime .")
"""Texts after the prefix: the task and its answer."""
STORIES = (
    "It was a dark and stormy noon at sea and calm",
    "It was a dark and stormy night and the rain fell",
    "It was a dark and stormy night and our ship sank",
    "It was a dark and stormy evening when nobody came home",
    "It was a dark and stormy evening when everybody sang along",
    "It was the best of times it was the worst",
)
BEAMS, DIES = 4, 7
"""The search of Fig. 9: the number of beams, and the step in which two of them die."""


class Stepped(Figure):
    """A figure that is a recorded run to step through."""

    tale: Tale

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        return [replace(self.tale, seed=seed)]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        [result] = results.values()
        told = RetoldRun(result)
        return FigureResult(self.pictures(told), self.checks(told), notes=self.notes(told), recording=told.recording)

    @abstractmethod
    def pictures(self, told: RetoldRun) -> list[Blocks]:
        """Return pictures of the run's important moments."""

    @abstractmethod
    def checks(self, told: RetoldRun) -> list[Check]:
        """Return checks of the facts that the paper states about its figure."""

    def notes(self, told: RetoldRun) -> list[str]:
        return []


def exact(what: str, paper: int, ours: int, unit: str = "") -> Check:
    return Check(what, float(paper), float(ours), TOLERANCE, relative=False, unit=unit, kind="exact")


def sequences(state: State) -> list[LiveSequence]:
    """Return the sequences that hold blocks, in order of their numbers."""
    return [state.sequences[number] for number in sorted(state.sequences) if state.sequences[number].table]


def held_by(state: State, number: int) -> set[int]:
    """Return the blocks that exactly `number` sequences hold."""
    return {block for block, holders in state.device.holders.items() if len(holders) == number}


class Fig4(Stepped):
    """One scheduler and one KV cache manager, which send each step to the workers."""

    name = "4"
    title = "Fig. 4: the system: one KV cache manager, several workers"
    section = "4"
    look = (
        "First look at the manager's block tables, then at the workers' views, which result from the steps alone. "
        "Each worker has its own pool for its share of the heads, in which a block has the same number. Step through "
        "the run to see the order of decisions: scheduler, then tables, then the model."
    )
    change_it = (
        "Use four workers (`WORKERS` in `telling.py`): does the manager do more work?",
        "Give the pool 4 blocks (`Fig4.tale`): the second request waits, and no worker learns of it until it runs.",
        "Do not send changes of tables to the workers (`step._replace(tables=())` in `Teller.run`): what fails, and "
        "when?",
    )
    tale = Tale(
        "A scheduler, a KV cache manager, and workers",
        (SPEECH, TIMES),
        (TaleRequest(PROMPT, 5), TaleRequest("It was the best of", 4, after=1)),
        first_blocks=(7, 1, 5, 2, 3),
    )
    moment = 3
    """The step after which the pictures are taken."""

    def pictures(self, told: RetoldRun) -> list[Blocks]:
        state = told.after_step(self.moment)
        manager = told.picture(f"KV cache manager, step {self.moment}", state)
        seen = told.sent[self.moment - 1]["seen"]
        return [manager, *(self._worker(i, one["tables"], manager, state) for i, one in enumerate(seen))]

    def _worker(self, number: int, found: Mapping[str, Sequence[int]], manager: Blocks, state: State) -> Blocks:
        """Return a picture of a worker's view: its block tables and its pool."""
        tables = []
        for name, blocks in found.items():
            filled = [state.device.filled.get(block, 0) for block in blocks]
            label = f"sequence {state.sequences[int(name)].letter}"
            tables.append(Table(label, [Entry(*pair) for pair in zip(blocks, filled, strict=True)]))
        known = {block for blocks in found.values() for block in blocks}
        pool = [
            Box(box.number, box.words if box.number in known else (), sum(box.number in t for t in found.values()))
            for box in manager.pool
        ]
        return Blocks(f"worker {number}: its heads' K and V", manager.block_size, tables, pool)

    def checks(self, told: RetoldRun) -> list[Check]:
        steps, numbers = [event.step for event in told.of(StepFinished)], [sent["step"] for sent in told.sent]
        not_one = sum(numbers.count(step) != 1 for step in steps)
        otherwise, unlike = [0] * WORKERS, 0
        for sent in told.sent:
            state = told.after_step(steps.index(sent["step"]) + 1)
            for worker, seen in enumerate(sent["seen"]):
                unlike += seen["queries"] != sent["seen"][0]["queries"]
                otherwise[worker] += sum(
                    seen["tables"].get(str(sequence.number)) != sequence.table for sequence in sequences(state)
                )
        return [
            *(
                exact(f"block tables of worker {worker} that are not the manager's, in all steps", 0, number)
                for worker, number in enumerate(otherwise)
            ),
            exact("steps for which workers were told of different tokens", 0, unlike),
            exact("steps for which there was not one message (section 4.6)", 0, not_one),
        ]

    def notes(self, told: RetoldRun) -> list[str]:
        rows = ", ".join(f"“{words}”" for words in told.sent[self.moment - 1]["seen"][0]["queries"])
        return [
            f"Step {self.moment} runs: {rows}. A step is data (`steps.py`), and contains only changes. Here the "
            "workers follow it in this process; `parallel/` sends it to other processes."
        ]


class Fig5(Stepped):
    """A query and the blocks that its attention reads."""

    name = "5"
    title = "Fig. 5: attention over blocks that are not side by side"
    section = "4.1"
    look = (
        "The query is that of “forth”. Its keys and values, and those of all tokens before it, are in three blocks, "
        "which can be anywhere in the pool. The block table gives their places and their order. The kernel reads "
        "block after block."
    )
    change_it = (
        "Use blocks of 2 (`block_size` in `Fig5.tale`): how many does the query read now?",
        "Hand out the blocks in another order (`first_blocks`): does anything change except the numbers?",
        "Let the text go on (`TaleRequest(PROMPT, 9)`): when is a fourth block read?",
    )
    tale = Tale("The query of “forth”", (SPEECH,), (TaleRequest(PROMPT, 5),), first_blocks=(4, 1, 2))
    moment = 4
    """The step that computes the query."""

    def pictures(self, told: RetoldRun) -> list[Blocks]:
        [table] = self._read(told)
        said = {block: f"read {number}." for number, block in enumerate(table, 1)}
        state = told.after_step(self.moment)
        return [told.picture("the query “forth” reads three blocks", state, marked=table, said=said)]

    def _read(self, told: RetoldRun) -> list[list[int]]:
        """Return the block tables that the step uses."""
        return list(told.sent[self.moment - 1]["seen"][0]["tables"].values())

    def checks(self, told: RetoldRun) -> list[Check]:
        [table] = self._read(told)
        state = told.after_step(self.moment)
        words = [told.words_in(state, block) for block in table]
        queries = told.sent[self.moment - 1]["seen"][0]["queries"]
        return [
            exact("queries that are “forth”", 1, queries.count("forth")),
            exact("blocks that it reads", 3, len(table)),
            exact("block 0: tokens of “Four score and seven”", 4, agreeing(words, 0, "Four score and seven")),
            exact("block 1: tokens of “years ago our fathers”", 4, agreeing(words, 1, "years ago our fathers")),
            exact("block 2: tokens of “brought forth”", 2, agreeing(words, 2, "brought forth")),
            exact("tokens that it attends to, itself among them", 10, sum(map(len, words))),
        ]

    def notes(self, told: RetoldRun) -> list[str]:
        return [
            "Attention over blocks gives the same result as attention over contiguous memory: tests check it for every "
            "kernel (`tests/agreement/`), and tutorial 3 does it by hand."
        ]


def agreeing(words: Sequence[Sequence[str]], logical: int, text: str) -> int:
    """Return the number of tokens in a logical block that agree with the text."""
    found = words[logical] if logical < len(words) else ()
    return sum(ours == theirs for ours, theirs in zip(found, text.split(), strict=False))


class Fig6(Stepped):
    """A block table that grows token by token."""

    name = "6"
    title = "Fig. 6: block table translation"
    section = "4.3"
    look = (
        "The prompt takes two blocks, and one slot of the second is left. The first new token goes there, so only "
        "#filled changes. The second new token finds the block full, and only now a third block is taken."
    )
    change_it = (
        "A prompt of eight tokens (add a word to `PROMPT`): which step takes the third block?",
        "Use blocks of 16 (`block_size`): how many slots are unused, and for how long?",
        "Use blocks of 2 (`block_size`): which steps take a block now?",
    )
    tale = Tale("Four score and seven years ago our", (SPEECH,), (TaleRequest(PROMPT, 4),), first_blocks=(7, 1, 3))

    def pictures(self, told: RetoldRun) -> list[Blocks]:
        moments = ("after the prompt", "“fathers” fills the last slot", "“brought” takes a block")
        pictures = []
        for step, title in enumerate(moments, 1):
            state, before = told.after_step(step), set(told.after_step(step - 1).device.holders) if step > 1 else set()
            new = set(state.device.holders) - before
            pictures.append(told.picture(title, state, marked=new, said=dict.fromkeys(new, "new")))
        return pictures

    def checks(self, told: RetoldRun) -> list[Check]:
        filled = []
        for step in (1, 2, 3):
            [sequence] = sequences(told.after_step(step))
            filled.append([entry.filled for entry in entries(sequence, told.after_step(step).block_size)])
        prompt, first, second = filled
        return [
            exact("prompt: blocks", 2, len(prompt)),
            exact("prompt: filled slots of logical block 0", 4, prompt[0]),
            exact("prompt: filled slots of logical block 1", 3, sum(prompt[1:2])),
            exact("first new token: blocks taken", 0, len(first) - len(prompt)),
            exact("first new token: filled slots of logical block 1", 4, sum(first[1:2])),
            exact("second new token: blocks taken", 1, len(second) - len(first)),
            exact("second new token: filled slots of logical block 2", 1, sum(second[2:3])),
        ]


class Fig7(Stepped):
    """Two requests whose blocks lie in one pool."""

    name = "7"
    title = "Fig. 7: two requests in one pool"
    section = "4.3"
    look = (
        "Each request has a table. Their blocks are mixed in the pool, in the order in which they were allocated. "
        "Only the end of each last block is unused, and nothing in between."
    )
    change_it = (
        "Let both arrive at the same time (leave `after` out): which request gets which block?",
        "Use blocks of 2 (`block_size`): how many slots are unused, and how many blocks has each request?",
        "Hand out the blocks in order (leave `first_blocks` out): does anything change except their numbers?",
    )
    tale = Tale(
        "Two requests, one pool",
        (SPEECH, TIMES),
        (TaleRequest(PROMPT, 4), TaleRequest("It was the best of", 5, after=1)),
        first_blocks=(7, 1, 5, 2, 3),
    )

    def pictures(self, told: RetoldRun) -> list[Blocks]:
        return [told.picture("A has brought, B times", told.after_step(3))]

    def checks(self, told: RetoldRun) -> list[Check]:
        state = told.after_step(3)
        a, b = sequences(state)
        empty = [len(one.table) * state.block_size - one.num_computed for one in (a, b)]
        return [
            exact("blocks of request A", 3, len(a.table)),
            exact("blocks of request B", 2, len(b.table)),
            exact("blocks that both have", 0, len({*a.table} & {*b.table})),
            exact("empty slots of A's last block", 3, empty[0]),
            exact("empty slots of B's last block", 2, empty[1]),
        ]


class Fig8(Stepped):
    """Two samples of one prompt, with copy-on-write."""

    name = "8"
    title = "Fig. 8: parallel sampling: one prompt, two samples"
    section = "4.4"
    look = (
        "Both samples hold the prompt's blocks, with a reference count of 2. The first sample that writes into the "
        "last block gets a copy to write into. The second one then holds the old block alone, and writes in place. "
        "The full block stays shared."
    )
    change_it = (
        "Use three samples (`samples=3`): how many copies?",
        "Use blocks of 8 (`block_size`): what is still shared when both have written?",
        "Let a third request come one step later (`TaleRequest(PROMPT, 4, after=1)`): does it share anything?",
    )
    tale = Tale(
        "Two samples of one prompt", (SPEECH, MOTHERS), (TaleRequest(PROMPT, 4, samples=2),), first_blocks=(7, 1, 3)
    )

    def pictures(self, told: RetoldRun) -> list[Blocks]:
        before, copies = self._before(told), told.of(BlockCopied)
        said = {copy.source: "in place" for copy in copies}
        said |= {copy.destination: f"copy of {copy.source}" for copy in copies}
        return [
            told.picture("all have the prompt", before, marked={copy.source for copy in copies}),
            told.picture("each has written its token", told.after_step(2), marked=said, said=said),
        ]

    def _before(self, told: RetoldRun) -> State:
        return told.until(lambda event: isinstance(event, BlockCopied), before=True)

    def checks(self, told: RetoldRun) -> list[Check]:
        before, after = self._before(told), told.after_step(2)
        copies, samples = told.of(BlockCopied), sequences(before)
        table = samples[0].table
        full, last = table[0], table[-1]
        together = {block for sample in samples for block in after.sequences[sample.number].table}
        return [
            exact("samples of the prompt", 2, len(samples)),
            exact("blocks of the prompt that all samples have", 2, len(held_by(before, len(samples)))),
            exact("reference count of its full block", 2, before.ref_count(full)),
            exact("reference count of its last block", 2, before.ref_count(last)),
            exact("blocks copied", 1, len(copies)),
            exact("of the block copied, count after", 1, after.ref_count(last)),
            exact("of the copy, count after", 1, after.ref_count(copies[0].destination)),
            exact("of the full block, count after", 2, after.ref_count(full)),
            exact("blocks of all samples together", 3, len(together)),
        ]


class Fig9(Stepped):
    """Beams that fork and die."""

    name = "9"
    title = "Fig. 9: beam search: what dies gives its blocks back"
    section = "4.4"
    look = (
        "Before: four beams share the prompt, and three of them share two more blocks. Then the four most likely "
        "continuations come from only two of the beams. The other two die, and the blocks that only they held are "
        "freed. Nothing is copied: four new blocks are begun."
    )
    change_it = (
        "Use blocks of 3 (`block_size`): now forks come in the middle of a block. How many copies?",
        "Use three beams (`BEAMS`): which two stories are left, and how many blocks does the whole search take?",
        'Make "evening" likelier than "night" (`odds`): which blocks are freed?',
    )
    tale = Tale(
        "Four beams",
        STORIES,
        (TaleRequest("It was", 8, beams=BEAMS),),
        num_blocks=17,
        block_size=2,
        odds=(("a", 9.0), ("noon", 0.25)),
    )

    def pictures(self, told: RetoldRun) -> list[Blocks]:
        before, after, next_ = told.computed_in(DIES), told.after_step(DIES), told.computed_in(DIES + 1)
        freed = set(before.device.holders) - set(after.device.holders)
        new = set(next_.device.holders) - set(after.device.holders)
        beams, dead = sequences(before), self._dead(before, after)
        parents = len(beams) - len(dead)
        return [
            told.picture(f"{len(beams)} beams", before, marked=freed, said=dict.fromkeys(freed, "to be freed")),
            told.picture(
                f"{len(sequences(next_))} of {parents} of them", next_, marked=new, said=dict.fromkeys(new, "new")
            ),
        ]

    def _dead(self, before: State, after: State) -> set[int]:
        """Return the numbers of the beams that did not survive."""
        return {beam.number for beam in sequences(before) if beam.number not in after.sequences}

    def checks(self, told: RetoldRun) -> list[Check]:
        before, after, next_ = told.computed_in(DIES), told.after_step(DIES), told.computed_in(DIES + 1)
        beams, survivors = sequences(before), sequences(next_)
        own_way = [beam for beam in beams if all(before.ref_count(block) == 1 for block in beam.table[1:])]
        freed = set(before.device.holders) - set(after.device.holders)
        return [
            exact("before: candidates", 4, len(beams)),
            exact("before: full blocks of each", 4, same(b.num_computed // before.block_size for b in beams)),
            exact("before: blocks that all have", 1, len(held_by(before, len(beams)))),
            exact("before: further blocks that all but one have", 2, len(held_by(before, len(beams) - 1))),
            exact("before: candidates that went their own way from the second block on", 1, len(own_way)),
            exact("candidates that die", 2, len(self._dead(before, after))),
            exact("blocks freed", 4, len(freed)),
            exact("after: blocks that all have", 3, len(held_by(next_, len(survivors)))),
            exact("after: further blocks that half of them have", 2, len(held_by(next_, len(survivors) // 2))),
            exact("after: blocks begun", 4, len(set(next_.device.holders) - set(after.device.holders))),
            exact("blocks copied", 0, len(told.of(BlockCopied))),
        ]

    def notes(self, told: RetoldRun) -> list[str]:
        dead = self._dead(told.computed_in(DIES), told.after_step(DIES))
        given = [str(list(event.blocks)) for event in told.of(BlocksFreed) if event.sequence in dead]
        return [
            f"The beams that die give back {' and '.join(given)}; other beams still hold some of these. The new blocks "
            "are those that became free, because the latest freed are reused first. The paper's picture has others."
        ]


def same(numbers: Iterable[int]) -> int:
    """Return the number if all are equal, otherwise -1."""
    found = {*numbers}
    return found.pop() if len(found) == 1 else -1


class Fig10(Stepped):
    """A prefix that two requests share."""

    name = "10"
    title = "Fig. 10: a shared prefix"
    section = "4.4"
    look = (
        "The instruction and its examples were computed once, before. Two requests begin with them. Their tables "
        "begin with the same blocks, and only their own words are computed. The reference count of a shared block is "
        "3, because the prefix cache holds it too."
    )
    change_it = (
        "Take a word from `PREFIX`: the last block is no longer full. What does that cost each request?",
        "Turn prefix caching off (`prefix_caching=False`): how many more blocks, how many more tokens?",
        "Let all three arrive at the same time (`after=0`): which request computes the prefix, and what happens to "
        "duplicates?",
    )
    tale = Tale(
        "A prefix, and two tasks",
        tuple(f"{PREFIX} {task}" for task in TASKS),
        (
            TaleRequest(PREFIX, 1),
            TaleRequest(f"{PREFIX} cheese =>", 3, after=1),
            TaleRequest(f"{PREFIX} I love you =>", 3, after=1),
        ),
        num_blocks=14,
        prefix_caching=True,
    )
    moment = 2
    """The step that computes the prompts of both tasks."""

    def pictures(self, told: RetoldRun) -> list[Blocks]:
        state = told.after_step(self.moment)
        return [
            told.picture("the prefix is there", told.after_step(self.moment - 1)),
            told.picture("two requests begin with it", state, marked=held_by(state, 2)),
        ]

    def checks(self, told: RetoldRun) -> list[Check]:
        state = told.after_step(self.moment)
        reused = {event.sequence: event.num_found(state.block_size) for event in told.of(PrefixReused)}
        computed: dict[int, int] = {}
        for event in told.of(TokensComputed):
            computed.setdefault(event.sequence, event.num_tokens - reused.get(event.sequence, 0))
        a, b = sequences(state)
        in_prefix = len(PREFIX.split()) // state.block_size
        return [
            exact("blocks of the prefix that both tables begin with", in_prefix, len(held_by(state, 2))),
            exact("prompt tokens run for “cheese =>”", 2, computed[a.number]),
            exact("prompt tokens run for “I love you =>”", 4, computed[b.number]),
            exact("blocks of the prefix computed for either", 0, len({*a.table[in_prefix:]} & {*b.table[in_prefix:]})),
        ]

    def notes(self, told: RetoldRun) -> list[str]:
        return [
            "In the paper, the provider of the service defines the prefix beforehand, and its last block may be "
            "partly full and marked copy-on-write. Here prefixes are found by their content, as in vLLM today, and "
            "only in full blocks. The prefix above has exactly five."
        ]


FIGS_4_TO_10 = (Fig4(), Fig5(), Fig6(), Fig7(), Fig8(), Fig9(), Fig10())
