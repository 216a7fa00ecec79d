"""A sentence that comes again with another end: most of what prompt lookup drafts for it stands, and some does not."""

from minipaged import SamplingParams
from minipaged.contracts import Batch
from minipaged.engine.drafting import AdaptiveDrafts
from minipaged.engine.drafts import LookupDrafts
from minipaged.events import BlocksRolledBack, TokensAccepted
from minipaged.params import SpeculativeConfig
from minipaged.stepper import Storyteller, record

TEXT = "the cat sat on the mat . the cat sat on the sofa . the cat sat on the rug ."


class Reader(Storyteller):
    """A model that knows one text by heart. Its tokens are words, so a word that comes again is the same token."""

    def _learn(self, words: list[str]) -> None:
        self.words = list(dict.fromkeys(words))
        self.text = self.encode(" ".join(words))

    def encode(self, text: str) -> list[int]:
        return [self.words.index(word) for word in text.split()]

    def next_tokens(self, batch: Batch) -> list[list[int]]:
        rows = [row for row in batch if row.wants_logits]
        return [[token] for row in rows for token in self.text[row.context_len - row.num_drafted : row.context_len + 1]]


model = Reader([TEXT])
with record("Drafted, then verified", model.decode) as run:
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_max=2)
    engine = model.engine(num_blocks=8, block_size=4, speculative_config=drafts)
    engine.scheduler.drafts = LookupDrafts(AdaptiveDrafts(4, hope=0.9), 2, 2)  # the default would begin with three
    engine.add_request(model.encode("the cat sat on the mat . the cat"), SamplingParams(temperature=0, max_tokens=12))
    while engine.has_unfinished_requests():
        engine.step()
start = "tokens_drafted"  # where the stepper begins

verified = [event for event in run.events if isinstance(event, TokensAccepted)]
assert [(event.num_drafted, event.num_accepted) for event in verified] == [(4, 2), (4, 4)]
assert [event.blocks for event in run.events if isinstance(event, BlocksRolledBack)] == [(3,)]
