"""Perplexity: how well a model predicts a text. Quantized models are compared by it.

    perplexity = exp(mean over tokens of -log p(token | the tokens before it))

A perplexity of 12 is that of a random choice among 12 tokens; lower is better, and 1 is perfect. The text is cut into
windows. Each token is predicted from those before it in its window; the first token of a window is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from minipaged.api.prompts import TokensPrompt
from minipaged.errors import InvalidRequest, ModelError
from minipaged.llm import LLM
from minipaged.params import SamplingParams

WINDOW = 2048
"""Tokens per window, as in published results of quantized models."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of a model on a text."""

    value: float
    num_tokens: int
    """The number of tokens that were predicted."""


def perplexity(llm: LLM, token_ids: list[int], window: int | None = None) -> Perplexity:
    """Measure a model's perplexity on `token_ids`, in windows of `window` tokens; the last one may be shorter. None:
    2048 tokens, or fewer if `max_model_len` is smaller.

    Raises InvalidRequest for fewer than 2 tokens, and for windows of fewer than 2 or of more than the model can run.
    """
    if len(token_ids) < 2:
        raise InvalidRequest(f"a perplexity needs two tokens at least; there are {len(token_ids)}")
    longest = llm.config.max_model_len - 1  # a token is generated after each
    window = min(WINDOW, longest) if window is None else window
    if not 2 <= window <= longest:
        raise InvalidRequest(f"window is {window}; give 2 to {longest} tokens")
    windows = [token_ids[i : i + window] for i in range(0, len(token_ids), window)]
    windows = [each for each in windows if len(each) > 1]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    lost, told = 0.0, 0
    for output in llm.generate([TokensPrompt(prompt_token_ids=each) for each in windows], params):
        if output.error:
            raise ModelError(f"the text could not be run: {output.error}")
        for token, logprobs in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True):
            if logprobs is not None:  # the first token has none
                lost, told = lost - logprobs[token], told + 1
    return Perplexity(math.exp(lost / told), told)
