"""Text-of-all in the whole engine: whole, streamed, forked, by beams, with stop strings, for each kind of tokenizer."""

from __future__ import annotations

import pytest

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.engine.detokenizer import NOT_WHOLE, text_without_end
from minipaged.llm import LoadedModel
from minipaged.outputs import RequestOutput
from tests.models import tokenizers
from tests.tiny_model import make_tiny_model

KINDS = {
    "byte-level": tokenizers.byte_level,
    "bytes to fall back to": tokenizers.bpe_with_byte_fallback,
    "Metaspace": tokenizers.unigram_with_metaspace,
    "WordPiece": tokenizers.word_piece,
}
TEXT = "the €é the 😀the"
ROUNDS = 6


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A random model with this tokenizer."""
    made = request.param()
    folder = make_tiny_model(tmp_path_factory.mktemp("text"), vocab_size=made.get_vocab_size(), eos_token_id=None)
    tokenizers.write(made, folder)
    return LLM(LoadedModel.load(folder, tier="reference"), num_blocks=128, block_size=4)


def cuts(llm: LLM) -> list[list[int]]:
    """Prompts of token ids that end everywhere, within characters too; and one of special tokens alone."""
    token_ids = llm.need_tokenizer().encode(TEXT)
    return [[1, 1], *(token_ids[:end] for end in range(1, len(token_ids) + 1))]


def check(llm: LLM, outputs: list[RequestOutput]) -> None:
    """Their texts, behind their prompts', are the texts of all tokens."""
    decode = llm.need_tokenizer().decode
    for output in outputs:
        prompt = text_without_end(output.prompt_token_ids, decode)
        for one in output.outputs:
            whole = decode([*output.prompt_token_ids, *one.token_ids])
            if whole.startswith(prompt) and NOT_WHOLE not in whole:  # else some decoders take back what they showed
                assert prompt + one.text == whole


def test_every_output_begins_where_its_prompt_ends(llm: LLM) -> None:
    prompts = cuts(llm)
    params = SamplingParams(n=3, seed=1, max_tokens=ROUNDS, ignore_eos=True)
    whole = llm.generate(prompts, params, use_tqdm=False)
    check(llm, whole)
    streamed = [list(llm.stream(prompt, params)) for prompt in prompts]
    for output, updates in zip(whole, streamed, strict=True):
        assert updates[-1].output is not None
        assert [one.text for one in updates[-1].output.outputs] == [one.text for one in output.outputs]
    check(llm, llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=ROUNDS, ignore_eos=True)))


def test_a_stop_string_is_found_from_the_first_character_on(llm: LLM) -> None:
    """A text's own beginning stops it at once, the space before its first word included."""
    for prompt in cuts(llm):
        params = SamplingParams(temperature=0, max_tokens=ROUNDS, ignore_eos=True)
        [output] = llm.generate([prompt], params, use_tqdm=False)
        text = output.outputs[0].text
        for length in range(1, len(text.rstrip(NOT_WHOLE)) + 1):
            stopping = SamplingParams(temperature=0, max_tokens=ROUNDS, ignore_eos=True, stop=[text[:length]])
            [stopped] = llm.generate([prompt], stopping, use_tqdm=False)
            assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("", text[:length])
