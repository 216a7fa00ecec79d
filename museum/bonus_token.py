"""Exhibit 9 of the bug museum: a draft model guesses worse and worse, and every token of the output is right.

The draft model has a pool and block tables of its own. A pass runs one token per row. After a step in which all its
guesses stood, it is two tokens behind, and not one. The way it catches up has a bug: docs/museum/bonus_token.md.

    python museum/bonus_token.py
"""

from minipaged.course.museum import TellingRunner, try_workloads
from minipaged.engine.drafting import AdaptiveDrafts
from minipaged.engine.drafts import Drafts
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable
from minipaged.testing.content_runner import GivenRow


class DraftModel(TellingRunner):
    """The small model, on memory that remembers its writers. It takes the likeliest token."""

    NUM_BLOCKS, BLOCK_SIZE = 1000, 4

    def __init__(self, vocab_size):
        super().__init__(self.NUM_BLOCKS, 0, self.BLOCK_SIZE, vocab_size)
        self.allocator = BlockAllocator(self.NUM_BLOCKS)

    def one_pass(self, sequence, table, rows):
        """Run the last token of each row, and return the next token of each. The rows are beginnings of one sequence,
        or ways in which it may go on, in the slots of its table."""
        table.append(len(rows[-1]) - table.num_tokens)
        given = []
        for row in rows:
            slots = [table.slot_mapping(len(row) - 1, len(row))]
            given.append(GivenRow(sequence.sequence_id, row[:-1], row[-1:], slots, table.blocks, True, 0, 0))
        return [int(logits.argmax()) for logits in self.compute(given)]


class ModelDrafts(Drafts):
    """Drafts by the draft model."""

    def __init__(self, config, model=DraftModel):
        super().__init__(AdaptiveDrafts(num_speculative_tokens=4))
        self.model = model(config.vocab_size)
        self.tables = {}  # sequence -> its block table in the draft model's pool
        self.ran = {}  # sequence -> its tokens that have keys and values there

    def draft(self, request, sequence, num_sequences):
        """Up to four tokens that may come next."""
        for ended in [one for one in self.tables if one.finish_reason]:
            self.tables.pop(ended).trim(0)
            del self.ran[ended]
        k = self.rule.num_to_draft(sequence.draft_record, num_sequences)
        if not k:
            return []
        rows, table = self.behind(sequence), self.tables[sequence]
        for _ in range(k):
            chosen = self.model.one_pass(sequence, table, rows)
            rows = [[*row, token] for row, token in zip(rows, chosen, strict=True)]
        *self.ran[sequence], _ = rows[-1]  # the last one was chosen, and not run
        return rows[-1][len(sequence.tokens) :]

    def behind(self, sequence):
        """The rows of the first pass: the sequence, up to each of its tokens that has no keys and values yet."""
        tokens, ran = sequence.tokens, self.ran.get(sequence, [])
        table = self.tables.setdefault(sequence, BlockTable(self.model.BLOCK_SIZE, self.model.allocator))
        kept = 0
        while kept < min(len(ran), len(tokens) - 1) and ran[kept] == tokens[kept]:
            kept += 1
        table.trim(kept)  # the slots of guesses that did not stand
        if kept < len(tokens) - 2:  # a prompt, or steps without drafts: all but the latest token in one pass
            self.model.one_pass(sequence, table, [tokens[:n] for n in range(kept + 1, len(tokens))])
            kept = len(tokens) - 1
        return [tokens[:n] for n in range(kept + 1, len(tokens) + 1)]


PARTS = {"drafts": ModelDrafts}

if __name__ == "__main__":
    try_workloads(PARTS)
