"""Beam searches: the reference's, a right one written differently, and wrong ones for each rule."""

from __future__ import annotations

from minipaged.course.grader.mutants import seeded, source_of

REFERENCE = source_of("reference/beam_search")

PLAIN = '''
"""Plain Python in float64: all candidates, a heap, none of our classes. Finished sequences come worst first."""
import heapq
import math
from collections import namedtuple

from minipaged.contracts import BeamMove, BeamStep
from minipaged.errors import BadLogits

Candidate = namedtuple("Candidate", "cost parent token")


class BeamSearch:
    def __init__(self, params, prompt_length, max_length, eos_token_ids):
        self.p, self.left, self.done = params, max_length - prompt_length, 0
        self.ends = set() if params.ignore_eos else set(eos_token_ids)
        self.heap = []  # the scores kept, the worst first

    def step(self, logits, rows, sums):
        everything = []
        for parent, (row, total) in enumerate(zip(rows, sums)):
            values = [float(value) for value in logits[row]]
            most = max(values)
            if any(map(math.isnan, values)) or math.isinf(most):
                raise BadLogits(f"row {row}")
            rest = most + math.log(math.fsum(math.exp(value - most) for value in values))
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


FIRST, TOGETHER, TIES = "the first step", "beams are ranked together", "ties"
EOS, SCORES, LENGTH = "sequences that end in EOS", "scores and the length penalty", "the maximum length"
OVER, NEVER = "early_stopping True and False", 'early_stopping "never"'
BAD, COPIES = "logits that are no numbers", "a copy goes its own way"

SUM = "sums[:, None] + log_softmax(logits, rows)"
SURVIVORS = "survivors = [move for move, ended in zip(candidates, ends, strict=True) if not ended][:width]"
PATIENT = 'self._params.early_stopping == "never" and self._params.length_penalty > 0'
ENOUGH = "if len(self._finished_scores) < self._params.beam_width:"
KEPT = "return [ended[index - known] for index in sorted(ranking) if index >= known]"

BUGS = {
    "logits taken for log-probabilities": (FIRST, SUM, "sums[:, None] + logits[list(rows)]"),
    "the likeliest comes last: survivors are ordered from worst to best": (FIRST, SURVIVORS, f"{SURVIVORS}[::-1]"),
    "one survivor too few": (FIRST, SURVIVORS, SURVIVORS.replace(":width", ":max(1, width - 1)")),
    "the sums so far are forgotten: cumulative_logprobs is not added": (
        TOGETHER,
        SUM,
        "0 * sums[:, None] + log_softmax(logits, rows)",
    ),
    "row i is taken for beam i's: rows is ignored": (
        TOGETHER,
        SUM,
        "sums[:, None] + log_softmax(logits, range(len(rows)))",
    ),
    "all stem from the first beam: every move has parent 0": (
        TOGETHER,
        "BeamMove(parent, token_id,",
        "BeamMove(0, token_id,",
    ),
    "of equals the last comes first: of equal candidates the last one is chosen first": (
        TIES,
        "largest(flat, count)",
        "np.argsort(flat, kind='stable')[::-1][:count]",
    ),
    "as many candidates as beams: too few candidates are left when some end in EOS": (
        EOS,
        "count = max(2, 1 + len(self._eos_token_ids)) *",
        "count =",
    ),
    "an EOS takes a place: a candidate that ends in EOS takes a survivor's place": (
        EOS,
        SURVIVORS,
        SURVIVORS.replace("candidates, ends, strict=True", "candidates[:width], ends"),
    ),
    "an EOS further down finishes: a candidate that ends in EOS finishes at any rank": (
        EOS,
        "zip(candidates[:width], ends, strict=False)",
        "zip(candidates, ends)",
    ),
    "ignore_eos is ignored": (EOS, "= final_token_ids(params, eos_token_ids)", "= frozenset(eos_token_ids)"),
    "only the first EOS token counts": (
        EOS,
        "final_token_ids(params, eos_token_ids)",
        "final_token_ids(params, eos_token_ids[:1])",
    ),
    "the EOS is not counted: the length in the score leaves out the EOS": (
        SCORES,
        "self._score(logits, move, self._generated))",
        "self._score(logits, move, max(1, self._generated - 1)))",
    ),
    "no length penalty: length_penalty is ignored": (
        SCORES,
        "penalty = length**self._params.length_penalty",
        "penalty = length",
    ),
    "the penalty's sign: length_penalty has the wrong sign": (
        SCORES,
        "length**self._params.length_penalty",
        "length**-self._params.length_penalty",
    ),
    "max_length without the prompt: max_length is taken as a number of generated tokens": (
        LENGTH,
        "max_length - prompt_length  #",
        "max_length  #",
    ),
    "max_tokens, not max_length: the search ends at max_tokens": (
        LENGTH,
        "max_length - prompt_length  #",
        "params.max_tokens  #",
    ),
    "at the end only EOS finishes: candidates of the maximum length do not finish": (
        LENGTH,
        "or self._generated == self._most_tokens",
        "",
    ),
    "at the end somebody goes on: beams of the maximum length survive": (
        LENGTH,
        SURVIVORS,
        SURVIVORS.replace("not ended", "move.token_id not in self._eos_token_ids"),
    ),
    "it never stops early": (OVER, ENOUGH, "if True:"),
    "it stops at the first that finished": (OVER, ENOUGH, "if not self._finished_scores:"),
    "early_stopping True is taken for False": (OVER, "self._params.early_stopping is True or ", ""),
    '"never" is taken for False': (NEVER, PATIENT, "False"),
    '"never" whatever the penalty: early_stopping "never" ignores the sign of length_penalty': (
        NEVER,
        f"patient = {PATIENT}",
        'patient = self._params.early_stopping == "never"',
    ),
    "the best is to be beaten: the search ends unless a beam can beat the best finished score": (
        OVER,
        "<= self._finished_scores[-1]",
        "<= self._finished_scores[0]",
    ),
    "equals are given another chance: the search goes on if a beam can only equal the worst score kept": (
        OVER,
        "<= self._finished_scores[-1]",
        "< self._finished_scores[-1]",
    ),
    "all that finished are reported: sequences with scores too low to be kept are reported": (
        OVER,
        KEPT,
        "return ended",
    ),
    "NaN is let through: a row with NaN does not raise BadLogits": (
        BAD,
        "likeliest_token(logits[row])",
        "int(np.argmax(logits[row]))",
    ),
    "tokens that are ruled out go on: a token with logit minus infinity survives": (
        BAD,
        "if move.cumulative_logprob > -np.inf]",
        "if True]",
    ),
    "a copy is no copy: a deep copy is the search itself": (
        COPIES,
        "    def _best_length(self)",
        "    def __deepcopy__(self, memo: Any) -> Any:\n        return self\n\n    def _best_length(self)",
    ),
    "the settings are everybody's: the settings are kept in the class, not in the object": (
        COPIES,
        "self._most_tokens = max",
        "BeamSearch._most_tokens = max",
    ),
}

SEEDED = seeded({"the reference": REFERENCE, "plain Python and a heap": PLAIN}, BUGS)
