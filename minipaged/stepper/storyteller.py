"""A model without weights that recites a few texts, for runs in which blocks matter and words do not.

A token is a word of its texts together with all words before it. Texts with the same beginning therefore share tokens,
and where they branch, all branches are equally likely. Samples and beams of one prompt thus diverge as with a real
model. A finished text repeats its last word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from minipaged.contracts import Batch, BlockAllocator, BlockTable, Logits, Sampled, SamplingInput, Tier
from minipaged.engine.engine import Engine
from minipaged.mirror import MirroredRunner
from minipaged.params import EngineConfig
from minipaged.scheduling import Costs
from minipaged.steps import BlockMoves
from minipaged.tiers import reference_tier


@dataclass
class Storyteller(MirroredRunner):
    """A model that runs batches without reading or writing any memory."""

    texts: Sequence[str]
    words: list[str] = field(default_factory=list)
    """The text of each token."""
    following: list[list[int]] = field(default_factory=list)
    """The tokens that may follow each token."""

    def __post_init__(self) -> None:
        super().__init__()
        self._tokens: dict[tuple[int, str], int] = {}  # by predecessor (-1: the start of a text) and word
        for text in self.texts:
            self._learn(text.split())

    def _learn(self, words: list[str]) -> None:
        before = -1
        for word in words:
            if (before, word) not in self._tokens:
                token = self._tokens[before, word] = len(self.words)
                self.words.append(word)
                self.following.append([])
                if before >= 0:
                    self.following[before].append(token)
            before = self._tokens[before, word]

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, which must be the beginning of a known text. Raises ValueError for any other."""
        tokens: list[int] = []
        for word in text.split() or [""]:
            token = self._tokens.get((tokens[-1] if tokens else -1, word))
            if token is None:
                raise ValueError(f"none of the texts begins with {text!r}")
            tokens.append(token)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in tokens)

    def engine(
        self,
        *,
        allocator: Callable[[int], Any] | None = None,
        block_table: Callable[[int, BlockAllocator], Any] | None = None,
        **sizes: Any,
    ) -> Engine:
        """A reference engine with this model. `sizes` are fields of EngineConfig; `max_model_len` may be left out.

        `allocator`, `block_table`: classes that replace the reference's.
        """
        sizes = {"max_model_len": sizes["num_blocks"] * sizes["block_size"], "enable_prefix_caching": False} | sizes
        config = EngineConfig(vocab_size=len(self.words), **sizes)
        tier = self.tier()
        if block_table is not None:
            tier = replace(tier, block_table=cast("type[BlockTable]", block_table))
        return Engine(config, tier, self, allocator=allocator, decode=self.decode, steady=False)

    def tier(self) -> Tier:
        """The tier of the model's engines."""
        return reference_tier()

    # --- Runner -----------------------------------------------------------------------------------

    def move(self, moves: BlockMoves) -> None:
        """Do nothing, because there is no memory."""

    def forward(self, batch: Batch) -> Any:
        """Logits [rows that need them, words]: equal for the tokens that may come next, very low for all others."""
        import numpy as np

        rows = self.next_tokens(batch)
        logits = np.full((len(rows), len(self.words)), -1e4, np.float32)  # [rows, words]
        for i, tokens in enumerate(rows):
            logits[i, tokens] = 0
        return logits

    def next_tokens(self, batch: Batch) -> list[list[int]]:
        """The tokens that may come next, for each row of logits: after the last token of a sequence, before which there
        are its drafted tokens; then after each of them."""
        rows = [row for row in batch if row.wants_logits]
        last = [int(token) for row in rows for token in row.token_ids[-1 - row.num_drafted :]]
        return [self.following[token] or [token] for token in last]

    def sample(self, logits: Logits, inputs: Sequence[SamplingInput]) -> Sequence[Sampled]:
        return self.tier().sample(logits, inputs)

    def costs(self) -> Costs:
        """Costs with which swapping is cheaper than recomputing: a microsecond per block, a millisecond per token."""
        return Costs(5e-7, copies_per_block=1, block_bytes=0, link_bytes_per_second=1, prefill_tokens_per_second=1e3)
