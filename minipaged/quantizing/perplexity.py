"""How well a model knows a text: its perplexity, the measure by which quantized models are compared.

    perplexity = exp(mean over tokens of -log p(token | the tokens before it))

A model that chose among so many tokens at random would do as well: 12 is better than 16, and 1 is to know it all. The
text is cut into windows, and each token sees those before it in its own window; the first of a window is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from minipaged.api.prompts import TokensPrompt
from minipaged.errors import InvalidRequest, ModelError
from minipaged.llm import LLM
from minipaged.params import SamplingParams

WINDOW = 2048
"""As in what is published of quantized models."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Of a model on a text."""

    value: float
    num_tokens: int
    """That were told, given those before them."""


def perplexity(llm: LLM, token_ids: list[int], window: int | None = None) -> Perplexity:
    """Of `token_ids`, two at least, in windows of so many; the last one may be shorter. None: 2048, or what there is
    room for.

    Raises InvalidRequest for a window that is longer than what the LLM can take, or too short to tell of anything.
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
            if logprobs is not None:  # of the first there are none
                lost, told = lost - logprobs[token], told + 1
    return Perplexity(math.exp(lost / told), told)
