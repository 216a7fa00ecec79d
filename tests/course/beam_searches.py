"""Beam searches that students hand in, as sources: right ones, however unusual, and one wrong one for each rule."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from minipaged.tiers import reference_tier

REFERENCE_SOURCE = inspect.getsource(inspect.getmodule(reference_tier().beam_search))  # type: ignore[arg-type]

PLAIN = '''
"""Plain Python in float64: every candidate there is, a heap, no class of ours. Finished ones come worst first."""
import heapq
import math
from collections import namedtuple

from minipaged.contracts import BeamMove, BeamStep
from minipaged.errors import BadLogits

Candidate = namedtuple("Candidate", "cost parent token")


class Mine:
    def __init__(self, params, prompt_length, max_length, eos_token_ids):
        self.p, self.left, self.done = params, max_length - prompt_length, 0
        self.ends = set() if params.ignore_eos else set(eos_token_ids)
        self.heap = []  # of the scores kept, the worst first

    def step(self, logits, rows, sums):
        everything = []
        for parent, (row, total) in enumerate(zip(rows, sums)):
            values = [float(value) for value in logits[row]]
            if any(map(math.isnan, values)) or math.isinf(max(values)):
                raise BadLogits(f"row {row}")
            rest = max(values) + math.log(math.fsum(math.exp(value - max(values)) for value in values))
            everything += [
                Candidate(rest - value - total, parent, token)
                for token, value in enumerate(values)
                if value > -math.inf
            ]
        everything.sort()
        self.done, self.left = self.done + 1, self.left - 1
        goes_on, ended, kept_before = [], [], list(self.heap)
        for rank, one in enumerate(everything):
            move = BeamMove(one.parent, one.token, -one.cost)
            if self.left and one.token not in self.ends:
                goes_on.append(move)
            elif rank < self.p.beam_width:
                ended.append((move, -one.cost / self.done**self.p.length_penalty))
        finished = []
        for move, score in sorted(ended, key=lambda pair: -pair[1]):
            if len(self.heap) < self.p.beam_width:
                heapq.heappush(self.heap, score)
            elif score > self.heap[0]:
                heapq.heapreplace(self.heap, score)
            else:
                continue
            finished.insert(0, (move, score))
        if goes_on and len(self.heap) == self.p.beam_width and self.hopeless(goes_on[0].cumulative_logprob):
            goes_on = []
        return BeamStep(goes_on[: self.p.beam_width], tuple(finished))

    def hopeless(self, best):
        if self.p.early_stopping is True:
            return True
        at_the_end = self.p.early_stopping == "never" and self.p.length_penalty > 0
        length = self.done + self.left if at_the_end else self.done
        return best / length**self.p.length_penalty <= self.heap[0]
'''


@dataclass(frozen=True, slots=True)
class Wrong:
    """The reference's search with one piece replaced, and the test that is to find it."""

    name: str
    test: str
    right: str
    wrong: str

    def source(self) -> str:
        assert REFERENCE_SOURCE.count(self.right) == 1, self.name
        return REFERENCE_SOURCE.replace(self.right, self.wrong)


FIRST, TOGETHER, TIES = "the first step", "beams are ranked together", "ties"
EOS, SCORES, LENGTH = "sequences that end in EOS", "scores and the length penalty", "the maximum length"
OVER, NEVER = "early_stopping True and False", 'early_stopping "never"'
BAD, COPIES = "logits that are no numbers", "a copy goes its own way"

SUM = "sums[:, None] + log_softmax(logits, rows)"
SURVIVORS = "survivors = [move for move, ended in zip(candidates, ends, strict=True) if not ended][:width]"
PATIENT = 'self._params.early_stopping == "never" and self._params.length_penalty > 0'
ENOUGH = "if len(self._finished_scores) < self._params.beam_width:"
KEPT = "return [ended[index - known] for index in sorted(ranking) if index >= known]"

WRONG = (
    Wrong("logits taken for log-probabilities", FIRST, SUM, "sums[:, None] + logits[list(rows)]"),
    Wrong("the likeliest comes last", FIRST, SURVIVORS, f"{SURVIVORS}[::-1]"),
    Wrong("one survivor too few", FIRST, SURVIVORS, SURVIVORS.replace(":width", ":max(1, width - 1)")),
    Wrong("the sums so far are forgotten", TOGETHER, SUM, "0 * sums[:, None] + log_softmax(logits, rows)"),
    Wrong("row i is taken for beam i's", TOGETHER, SUM, "sums[:, None] + log_softmax(logits, range(len(rows)))"),
    Wrong("all stem from the first beam", TOGETHER, "BeamMove(parent, token_id,", "BeamMove(0, token_id,"),
    Wrong(
        "of equals the last comes first", TIES, "largest(flat, count)", "np.argsort(flat, kind='stable')[::-1][:count]"
    ),
    Wrong("as many candidates as beams", EOS, "count = max(2, 1 + len(self._eos_token_ids)) *", "count ="),
    Wrong(
        "an EOS takes a place",
        EOS,
        SURVIVORS,
        SURVIVORS.replace("candidates, ends, strict=True", "candidates[:width], ends"),
    ),
    Wrong("an EOS further down finishes", EOS, "zip(candidates[:width], ends, strict=False)", "zip(candidates, ends)"),
    Wrong(
        "ignore_eos is ignored",
        EOS,
        "= final_token_ids(params, eos_token_ids)",
        "= frozenset(eos_token_ids)",
    ),
    Wrong(
        "only the first EOS token counts",
        EOS,
        "final_token_ids(params, eos_token_ids)",
        "final_token_ids(params, eos_token_ids[:1])",
    ),
    Wrong(
        "the EOS is not counted",
        SCORES,
        "self._score(logits, move, self._generated))",
        "self._score(logits, move, max(1, self._generated - 1)))",
    ),
    Wrong("no length penalty", SCORES, "penalty = length**self._params.length_penalty", "penalty = length"),
    Wrong("the penalty's sign", SCORES, "length**self._params.length_penalty", "length**-self._params.length_penalty"),
    Wrong("max_length without the prompt", LENGTH, "max_length - prompt_length  #", "max_length  #"),
    Wrong("max_tokens, not max_length", LENGTH, "max_length - prompt_length  #", "params.max_tokens  #"),
    Wrong("at the end only EOS finishes", LENGTH, "or self._generated == self._most_tokens", ""),
    Wrong(
        "at the end somebody goes on",
        LENGTH,
        SURVIVORS,
        SURVIVORS.replace("not ended", "move.token_id not in self._eos_token_ids"),
    ),
    Wrong("it never stops early", OVER, ENOUGH, "if True:"),
    Wrong("it stops at the first that finished", OVER, ENOUGH, "if not self._finished_scores:"),
    Wrong("early_stopping True is taken for False", OVER, "self._params.early_stopping is True or ", ""),
    Wrong('"never" is taken for False', NEVER, PATIENT, "False"),
    Wrong(
        '"never" whatever the penalty',
        NEVER,
        f"patient = {PATIENT}",
        'patient = self._params.early_stopping == "never"',
    ),
    Wrong("the best is to be beaten", OVER, "<= self._finished_scores[-1]", "<= self._finished_scores[0]"),
    Wrong("equals are given another chance", OVER, "<= self._finished_scores[-1]", "< self._finished_scores[-1]"),
    Wrong("all that finished are reported", OVER, KEPT, "return ended"),
    Wrong("NaN is let through", BAD, "likeliest_token(logits[row], row)", "int(np.argmax(logits[row]))"),
    Wrong("tokens that are ruled out go on", BAD, "if move.cumulative_logprob > -np.inf]", "if True]"),
    Wrong(
        "a copy is no copy",
        COPIES,
        "    def _best_length(self)",
        "    def __deepcopy__(self, memo: Any) -> Any:\n        return self\n\n    def _best_length(self)",
    ),
    Wrong("the settings are everybody's", COPIES, "self._most_tokens = max", "BeamSearch._most_tokens = max"),
)
