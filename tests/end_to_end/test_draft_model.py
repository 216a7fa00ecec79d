"""A draft model on real models, in both tiers: how requests are scheduled, and how much is drafted, never shows."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minipaged import LLM, InvalidRequest, ModelError, SamplingParams, StructuredOutputsParams
from minipaged.engine.drafting import AdaptiveDrafts, DraftRecord
from minipaged.engine.drafts import ModelDrafts
from minipaged.engine.engine import Engine
from minipaged.engine.sequence import Request, SequenceState
from minipaged.handover.shared_storage import SharedStorageConnector
from minipaged.llm import LoadedModel
from minipaged.scheduling import Costs
from minipaged.steps import TO_DRAFT
from tests.end_to_end.small_llama import make_small_llama
from tests.end_to_end.test_scheduling_invariance import (
    DTYPE,
    JOBS,
    check_nothing_is_held,
    check_same,
    every_kind,
    largest_need,
    outputs_alone,
    run,
)


@pytest.fixture(scope="module")
def near(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that often guesses right: the model with noise on its weights."""
    folder = tmp_path_factory.mktemp("draft") / "near"
    shutil.copytree(small_llama, folder)
    generator = torch.Generator().manual_seed(1)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if weight.dim() == 2:
                weights[name] = weight + 0.06 * weight.std() * torch.randn(weight.shape, generator=generator)
        save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model of other sizes, whose part of a block is smaller."""
    folder = tmp_path_factory.mktemp("draft") / "smaller"
    return make_small_llama(folder, seed=3, num_hidden_layers=1, hidden_size=32, num_key_value_heads=1)


class RandomNumber(ModelDrafts):
    """Drafts of a random number of tokens."""

    def __init__(self) -> None:
        super().__init__(AdaptiveDrafts(4))
        self.num_drafted = self.num_accepted = 0
        self._random = random.Random(0)

    def draft(self, request: Request, sequence: SequenceState, num_sequences: int) -> list[int]:
        return [TO_DRAFT] * self._random.randrange(6)

    def note(self, sequence: SequenceState, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted


def asked(folder: Path, num_tokens: int = 4) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": num_tokens}


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@every_kind
def test_no_schedule_and_no_number_of_drafts_shows_in_the_tokens(
    small_llama: Path, near: Path, tier: str, kind: str, preemption: Any
) -> None:
    """Sampled tokens are those of the same seed alone, where other numbers are drafted; greedy ones and beams are those
    without a draft model."""
    jobs, dtype = JOBS[kind], DTYPE[kind]
    draft_model = asked(near, 2) if kind == "sampled" else None
    alone = outputs_alone(small_llama, jobs, dtype, speculative_config=draft_model)
    llm = LLM(
        small_llama,
        tier=tier,
        dtype=dtype,
        block_size=4,
        num_blocks=largest_need(jobs, 4) + 4,
        num_swap_blocks=100,
        preemption=preemption,
        max_num_batched_tokens=11,
        max_model_len=128,
        speculative_config=asked(near),
        debug=True,
    )
    drafts = RandomNumber()
    llm.engine = Engine(llm.config, llm.loaded.tier, llm.engine.runner, drafts=drafts)
    check_same(small_llama, jobs, run(llm, jobs, [0, 0, 0, 0, 5, 5, 9]), alone)
    check_nothing_is_held(llm)
    stats = llm.stats()
    assert stats.prefix_cache_hit_tokens > 0
    assert (stats.preempted_by_swap if preemption == "swap" else stats.preempted_by_recompute) > 0
    assert kind == "beams" or 0.3 < drafts.num_accepted / drafts.num_drafted < 0.95


@pytest.mark.parametrize("tier", ["reference", "fast"])
def test_a_draft_model_of_any_size_changes_no_greedy_token(
    small_llama: Path, near: Path, smaller: Path, tier: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
    found = []
    for draft in (None, near, smaller):
        sizes: dict[str, Any] = {"speculative_config": asked(draft)} if draft else {}
        llm = LLM(small_llama, tier=tier, dtype="float32", num_blocks=32, block_size=4, debug=True, **sizes)
        [output] = llm.generate([[5, 6, 7, 8]], params)
        found.append((output.outputs[0].token_ids, llm.stats()))
    (plain, _), (of_near, stats), (of_smaller, others) = found
    assert of_near == of_smaller == plain
    assert stats.steps < 25
    assert stats.tokens_accepted > 5
    assert others.tokens_accepted < others.tokens_drafted


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("tier", ["reference", "fast"])
def test_both_parts_of_a_block_are_handed_over(
    small_llama: Path, smaller: Path, tmp_path: Path, tier: str, kv_cache_dtype: Any
) -> None:
    """A second engine finds the first one's blocks, and goes on as the first would. One without a draft
    model is refused."""
    prompt, params = list(range(20, 60)), SamplingParams(temperature=1, seed=5, max_tokens=20, ignore_eos=True)

    def output(draft: dict[str, Any] | None) -> tuple[tuple[int, ...], int]:
        llm = LLM(
            small_llama,
            tier=tier,
            dtype="float32",
            num_blocks=32,
            block_size=4,
            kv_cache_dtype=kv_cache_dtype,
            debug=True,
            speculative_config=draft,
            kv_connector=SharedStorageConnector(tmp_path),
        )
        [one] = llm.generate([prompt], params)
        assert one.num_cached_tokens is not None
        return one.outputs[0].token_ids, one.num_cached_tokens

    first, second = output(asked(smaller)), output(asked(smaller))
    assert first[1] == 0
    assert second == (first[0], 36)
    with pytest.raises(InvalidRequest, match="has blocks of another kind"):
        output(None)


def test_a_model_can_be_loaded_once_for_engines_with_and_without_a_draft_model(small_llama: Path, near: Path) -> None:
    first = LLM(small_llama, tier="reference", num_blocks=8, speculative_config=asked(near))
    second = LLM(first.loaded, num_blocks=8)
    third = LLM(first.loaded, num_blocks=8, speculative_config=asked(near))
    assert second.loaded.draft is None
    assert third.loaded is first.loaded
    assert LLM(second.loaded, num_blocks=8).loaded is second.loaded
    params = SamplingParams(temperature=0, max_tokens=6)
    outputs = [llm.generate([[5, 6]], params)[0].outputs[0].token_ids for llm in (first, second, third)]
    assert outputs[0] == outputs[1] == outputs[2]
    assert [llm.stats().num_drafts > 0 for llm in (first, second, third)] == [True, False, True]


def test_a_draft_model_as_large_as_the_model_drafts_less_than_a_smaller_one(
    small_llama: Path, near: Path, smaller: Path
) -> None:
    """Its passes take about as long as the steps that they save."""
    drafted = []
    for draft in (near, smaller):
        llm = LLM(small_llama, tier="reference", num_blocks=32, speculative_config=asked(draft))
        drafts = llm.engine.scheduler.drafts
        assert drafts
        drafted.append(drafts.rule.num_to_draft(DraftRecord(num_tested=100, num_accepted=90), 1))
    assert drafted[0] < drafted[1] == 4


PARAMETERS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "a bias": {"logit_bias": {7: 3.0, 9: -5.0}},
    "bad words": {"bad_words": ["the", "a b"]},
    "few tokens": {"allowed_token_ids": list(range(10, 60))},
    "at least ten tokens": {"min_tokens": 10, "ignore_eos": False, "stop_token_ids": list(range(40, 100))},
    "a stop string": {"stop": ["e"], "include_stop_str_in_output": True},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "logprobs of given tokens": {"logprob_token_ids": [5, 6]},
    "a schema": {"structured_outputs": StructuredOutputsParams(regex="[a-z]{12,20}")},
    "samples": {"n": 3},
}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("tier", ["reference", "fast"])
def test_every_parameter_goes_with_a_draft_model(small_llama: Path, near: Path, tier: str, name: str) -> None:
    """Greedy outputs and what is told of them are those without; sampled ones do not depend on the number of drafts."""
    loaded, prompts = LoadedModel.load(small_llama, tier, dtype="float32"), [[5, 6, 7, 8, 40, 41], [70, 71]]
    for temperature in (0.0, 0.9):
        known: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "seed": 3, "temperature": temperature}
        params = SamplingParams(**known | PARAMETERS[name] | ({"n": 1} if temperature == 0 else {}))
        configs = [asked(near, 1), asked(near, 4), asked(near, 4) | {"disable_by_batch_size": 2}]
        found = []
        for config in configs if temperature else [None, *configs[:2]]:
            sizes = {"num_blocks": 60, "block_size": 4, "max_num_batched_tokens": 16, "debug": True}
            llm = LLM(loaded, speculative_config=config, **sizes)
            if config:
                loaded = llm.loaded  # with its draft model
            found.append(llm.generate(prompts, params))
            check_nothing_is_held(llm)
        for others in found[1:]:
            for one, other in zip(found[0], others, strict=True):
                assert other.error is None
                assert [each.token_ids for each in other.outputs] == [each.token_ids for each in one.outputs]
                assert [each.text for each in other.outputs] == [each.text for each in one.outputs]
                assert [each.finish_reason for each in other.outputs] == [each.finish_reason for each in one.outputs]
                for mine, theirs in zip(one.outputs, other.outputs, strict=True):
                    assert (mine.logprobs is None) == (theirs.logprobs is None) == ("logprob" not in name)
                    for known_ones, told in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
                        assert told.keys() == known_ones.keys()
                assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)


def test_costs_are_those_of_both_models_together(small_llama: Path, near: Path, smaller: Path) -> None:
    def costs(draft: Path | None) -> Costs:
        config = asked(draft) if draft else None
        llm = LLM(small_llama, tier="reference", num_blocks=8, block_size=4, speculative_config=config)
        assert llm.engine.runner.costs().block_bytes == llm.loaded.block_bytes(4)
        return llm.engine.runner.costs()

    alone, twice, more = costs(None), costs(near), costs(smaller)
    assert twice.block_bytes == 2 * alone.block_bytes
    assert twice.copies_per_block == more.copies_per_block == 2 * alone.copies_per_block
    assert alone.block_bytes < more.block_bytes < twice.block_bytes


# --- What is refused --------------------------------------------------------------------------------------


def test_a_draft_model_with_another_vocabulary_is_refused_before_weights_are_read(
    small_llama: Path, tmp_path: Path
) -> None:
    other = make_small_llama(tmp_path / "other", vocab_size=160)
    folder = shutil.copytree(small_llama, tmp_path / "model")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(InvalidRequest, match=r"vocabulary of 160 tokens, and the model one of 128"):
        LLM(folder, speculative_config=asked(other))


def test_a_draft_model_with_other_tokens_is_refused(small_llama: Path, near: Path, tmp_path: Path) -> None:
    other = shutil.copytree(near, tmp_path / "other")
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace('"~"', '"§"'))
    with pytest.raises(InvalidRequest, match=r"has other tokens than .*: their tokenizers differ"):
        LLM(small_llama, tier="reference", num_blocks=8, speculative_config=asked(other))


def test_a_draft_model_for_shorter_texts_is_refused_and_shortens_what_is_left_open(
    small_llama: Path, tmp_path: Path
) -> None:
    short = make_small_llama(tmp_path / "short", max_position_embeddings=32)
    with pytest.raises(InvalidRequest, match=r"max_model_len is 33; the draft model .* made for at most 32 tokens"):
        LLM(small_llama, tier="reference", num_blocks=8, max_model_len=33, speculative_config=asked(short))
    llm = LLM(small_llama, tier="reference", num_blocks=8, speculative_config=asked(short))
    assert llm.config.max_model_len == 32


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_several_ranks_are_refused(name: str) -> None:
    sizes: dict[str, Any] = {name: 2}
    with pytest.raises(InvalidRequest, match=f"names a draft model and {name} is 2"):
        LLM("no such model", speculative_config=asked(Path("some")), **sizes)


def test_an_engine_whose_runner_has_no_draft_model_says_so(small_llama: Path, near: Path) -> None:
    llm = LLM(small_llama, tier="reference", num_blocks=8)
    llm.engine = Engine(llm.config, llm.loaded.tier, llm.engine.runner, drafts=ModelDrafts(AdaptiveDrafts(4)))
    [output] = llm.generate([[5, 6]], SamplingParams(max_tokens=8))
    assert output.error == "this runner has no draft model; leave speculative_config out"
    check_nothing_is_held(llm)


def test_a_draft_model_that_is_not_there_is_an_error(small_llama: Path) -> None:
    with pytest.raises(ModelError, match="there is no file or folder"):
        LLM(small_llama, speculative_config=asked(Path("/no/such/folder")))
