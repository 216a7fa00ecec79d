"""Text-of-all in the whole engine: whole, streamed, forked, by beams, with stop strings, for each kind of tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.engine.detokenizer import text_without_end
from minipaged.llm import LoadedModel
from tests.models import tokenizers
from tests.tiny_model import make_successor_model

TEXT = "the €é😀the"
KINDS = {
    "byte-level": (tokenizers.byte_level, TEXT),
    "bytes to fall back to": (tokenizers.bpe_with_byte_fallback, TEXT),
    "Metaspace": (tokenizers.unigram_with_metaspace, TEXT),
    "WordPiece": (tokenizers.word_piece, "the inner the"),
}
"""Tokenizers and texts. The tokens of a text are all different; but the last, which nothing follows, may come again."""


@dataclass(frozen=True)
class Case:
    """A model that goes on with a text, wherever it is cut."""

    llm: LLM
    token_ids: list[int]

    def cuts(self) -> Iterator[tuple[list[int], list[int], str]]:
        """Each prompt, what comes after it, and the text of that."""
        decode = self.llm.need_tokenizer().decode
        whole = decode(self.token_ids)
        for cut in range(1, len(self.token_ids)):
            prompt, output = self.token_ids[:cut], self.token_ids[cut:]
            yield prompt, output, whole.removeprefix(text_without_end(prompt, decode))


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    make, text = request.param
    made = make()
    token_ids = made.encode(text).ids
    successors = dict(pairwise(token_ids))
    assert [successors[one] for one in token_ids[:-1]] == token_ids[1:]
    folder = make_successor_model(tmp_path_factory.mktemp("text"), made.get_vocab_size(), successors)
    tokenizers.write(made, folder)
    return Case(LLM(LoadedModel.load(folder, tier="reference"), num_blocks=128, block_size=4), token_ids)


@pytest.mark.parametrize("n", [1, 3])
def test_every_output_begins_where_its_prompt_ends(case: Case, n: int) -> None:
    for prompt, output, text in case.cuts():
        params = SamplingParams(n=n, temperature=0, max_tokens=len(output))
        [whole] = case.llm.generate([prompt], params, use_tqdm=False)
        *_, last = streamed = list(case.llm.stream(prompt, params))
        assert last.output is not None
        for outputs in (whole.outputs, last.output.outputs):
            assert [(list(one.token_ids), one.text) for one in outputs] == [(output, text)] * n
        for index in range(n):
            pieces = [new.new_text for update in streamed for new in update.completions if new.index == index]
            assert "".join(pieces) == text
        [beams] = case.llm.beam_search([prompt], BeamSearchParams(beam_width=n, max_tokens=len(output)))
        assert beams.outputs[0].text == text


def test_a_stop_string_is_found_from_the_first_character_on(case: Case) -> None:
    """A text's own beginning stops it at once, the space before its first word included."""
    for prompt, output, text in case.cuts():
        for length in range(1, len(text) + 1):
            params = SamplingParams(temperature=0, max_tokens=len(output), stop=[text[:length]])
            [stopped] = case.llm.generate([prompt], params, use_tqdm=False)
            assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("", text[:length])


def test_behind_special_tokens_alone_a_text_begins_as_any_other(case: Case) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    [plain, behind] = case.llm.generate([case.token_ids[:1], [1, 1, case.token_ids[0]]], params, use_tqdm=False)
    assert plain.outputs == behind.outputs
