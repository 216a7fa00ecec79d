"""A prefilling LLM and a decoding one, with a folder between them, on both tiers: tokens, logits and pools."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipaged import LLM, BeamSearchParams, InvalidRequest, RequestOutput, SamplingParams
from minipaged.errors import BadRecording, ModelError
from minipaged.fast import handover as fast_handover
from minipaged.fast.kv_cache import KVCache as FastCache
from minipaged.handover.shared_storage import SharedStorageConnector
from minipaged.llm import LoadedModel
from minipaged.models.hub import fingerprint
from minipaged.recordings.replay_steps import open_replay
from minipaged.recordings.step_files import Header, StepRecorder, decode, encode, read_recording
from minipaged.reference import handover
from minipaged.reference.kv_cache import KVCache
from minipaged.steps import BlockMoves, StepInput
from minipaged.tiers import ReferenceTier
from tests.effort import quick_cases, thorough
from tests.tiny_model import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ONE_TOKEN = replace(GREEDY, max_tokens=1)
SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 96, "num_swap_blocks": 48, "debug": True}


@pytest.fixture(scope="module", params=["reference", pytest.param("fast", marks=thorough)])
def model(tiny_model: Path, request: pytest.FixtureRequest) -> LoadedModel:
    return LoadedModel.load(tiny_model, request.param, "cpu", "float32")


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> LoadedModel:
    return LoadedModel.load(tiny_model, "reference", "cpu", "float32")


def prompts_of(seed: int, count: int, stem: int = 20, rest: int = 10) -> list[list[int]]:
    """Some that begin with the same tokens."""
    r = random.Random(seed)
    common = [r.randrange(3, 250) for _ in range(stem)]
    return [[*common, *(r.randrange(3, 250) for _ in range(r.randint(1, rest)))] for _ in range(count)]


def connected(model: LoadedModel, folder: Path, role: Any = "kv_both", **options: Any) -> LLM:
    return LLM(model, **SIZES | options, kv_connector=SharedStorageConnector(folder, role))


def prefilled(model: LoadedModel, folder: Path, prompts: Sequence[Any], **options: Any) -> LLM:
    llm = connected(model, folder, "kv_producer", **options)
    llm.generate(prompts, ONE_TOKEN)
    return llm


def read(cache: Any, blocks: Sequence[int]) -> list[bytes]:
    return (fast_handover if isinstance(cache, FastCache) else handover).read_blocks(cache, blocks)


def write(cache: Any, blocks: Sequence[tuple[int, bytes]]) -> None:
    (fast_handover if isinstance(cache, FastCache) else handover).write_blocks(cache, blocks)


def tokens(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [[each.token_ids for each in output.outputs] for output in outputs]


def test_another_engine_finds_a_salted_prompt_with_its_salt_only(model: LoadedModel, tmp_path: Path) -> None:
    [prompt] = prompts_of(1, 1)
    most = (len(prompt) - 1) // 4 * 4
    prefilled(model, tmp_path, [{"prompt_token_ids": prompt, "cache_salt": "mine"}])
    for salt, found in ((None, 0), ("theirs", 0), ("mine", most)):
        llm = connected(model, tmp_path, "kv_consumer")
        given = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        [output] = llm.generate(given, ONE_TOKEN)
        assert output.num_cached_tokens == found
        assert llm.stats().blocks_loaded == found // 4


def read_host(cache: Any, blocks: Sequence[int]) -> list[bytes]:
    return (fast_handover if isinstance(cache, FastCache) else handover).read_host_blocks(cache, blocks)


def is_clean(llm: LLM) -> bool:
    """Nothing is held but by the prefix cache."""
    llm.engine.check_invariants()
    blocks = llm.engine.blocks
    host = blocks.host_allocator
    return blocks.num_used == 0 and (host is None or host.num_free == host.num_blocks)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_logits_are_those_of_an_engine_that_computed_the_blocks_itself(
    model: LoadedModel, tmp_path: Path, kv_cache_dtype: str
) -> None:
    """Bit for bit: the K/V are the same bytes, and what is left to compute is the same."""
    [prompt] = prompts_of(1, 1)
    params = replace(GREEDY, logprobs=259)
    assert len(prompt) % 4
    full = prompt[: len(prompt) // 4 * 4]  # a block that is not full is cached, but not handed over
    first = prefilled(model, tmp_path, [full], kv_cache_dtype=kv_cache_dtype)
    second = connected(model, tmp_path, "kv_consumer", kv_cache_dtype=kv_cache_dtype)
    [own], [had] = first.generate([prompt], params), second.generate([prompt], params)
    assert own.outputs[0].logprobs == had.outputs[0].logprobs  # of every token, after each step
    assert own.num_cached_tokens == had.num_cached_tokens == (len(prompt) - 1) // 4 * 4
    assert second.stats().blocks_loaded == len(prompt) // 4 - (len(prompt) % 4 == 0)
    assert second.stats().query_tokens == len(prompt) - had.num_cached_tokens + 11
    alone = LLM(model, **SIZES, kv_cache_dtype=kv_cache_dtype).generate([prompt], params)
    assert tokens(alone) == tokens([had])
    assert is_clean(first)
    assert is_clean(second)


def test_several_requests_of_every_kind_some_of_whose_blocks_are_there_already(
    model: LoadedModel, tmp_path: Path
) -> None:
    prompts = prompts_of(2, 6)
    sampled = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9)
    second = connected(model, tmp_path, "kv_consumer")
    second.generate([prompts[0][:13]], GREEDY)  # three blocks of the stem
    prefilled(model, tmp_path, prompts)
    alone = LLM(model, **SIZES)
    assert tokens(second.generate(prompts[:4], GREEDY)) == tokens(alone.generate(prompts[:4], GREEDY))
    assert 0 < second.stats().blocks_loaded < sum(len(prompt) // 4 for prompt in prompts[:4]) - 3
    assert tokens(second.generate(prompts[4:5], sampled)) == tokens(alone.generate(prompts[4:5], sampled))
    beams = BeamSearchParams(beam_width=3, max_tokens=8)
    assert tokens(second.beam_search(prompts[5:], beams)) == tokens(alone.beam_search(prompts[5:], beams))
    assert is_clean(second)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_decoder_whose_pool_is_too_small(model: LoadedModel, tmp_path: Path, preemption: Any) -> None:
    prompts, params = prompts_of(3, 4, stem=12, rest=9), replace(GREEDY, max_tokens=24)
    prefilled(model, tmp_path, prompts)
    second = connected(model, tmp_path, "kv_consumer", num_blocks=20, preemption=preemption)
    assert tokens(second.generate(prompts, params)) == tokens(LLM(model, **SIZES).generate(prompts, params))
    stats = second.stats()
    assert (stats.preempted_by_swap > 0, stats.preempted_by_recompute > 0) == (
        preemption == "swap",
        preemption == "recompute",
    )
    assert stats.blocks_loaded
    assert is_clean(second)


def test_with_steps_in_flight(model: LoadedModel, tmp_path: Path) -> None:
    prompts = prompts_of(4, 5)
    prefilled(model, tmp_path, prompts, async_scheduling=True)
    second = connected(model, tmp_path, async_scheduling=True, max_num_batched_tokens=16)
    assert tokens(second.generate(prompts, GREEDY)) == tokens(LLM(model, **SIZES).generate(prompts, GREEDY))
    assert second.stats().blocks_loaded


def test_who_is_cancelled_or_fails_after_loading_leaves_nothing(model: LoadedModel, tmp_path: Path) -> None:
    prompts = prompts_of(5, 3)
    prefilled(model, tmp_path, prompts)
    for in_flight in (False, True):
        second = connected(model, tmp_path, "kv_consumer", async_scheduling=in_flight)
        names = [second.engine.add_request(prompt, GREEDY) for prompt in prompts]
        second.engine.step()
        assert second.engine.blocks.num_used
        for name in names:
            second.engine.abort(name)
        assert is_clean(second)
        assert tokens(second.generate(prompts, GREEDY)) == tokens(LLM(model, **SIZES).generate(prompts, GREEDY))


@given(data=st.data())
def test_whatever_the_prompts_the_block_size_and_what_is_lost(reference: LoadedModel, data: st.DataObject) -> None:
    """Tokens are those of one engine."""
    size = data.draw(st.sampled_from([1, 2, 3, 5, 8, 16]), "block size")
    letters = st.integers(3, 6)
    prompts = data.draw(st.lists(st.lists(letters, min_size=1, max_size=40), min_size=1, max_size=4), "prompts")
    sizes = {"block_size": size, "num_blocks": 400 // size, "num_swap_blocks": 4}
    params = replace(GREEDY, max_tokens=4)
    with tempfile.TemporaryDirectory() as folder:
        prefilled(reference, Path(folder), prompts, **sizes)
        blocks = sorted(Path(folder).glob("*.block"))
        assert len(blocks) == len({tuple(p[:end]) for p in prompts for end in range(size, len(p) + 1, size)})
        for path in data.draw(st.lists(st.sampled_from(blocks), unique=True) if blocks else st.just([]), "lost"):
            path.unlink()
        second = connected(reference, Path(folder), "kv_consumer", **sizes)
        had = second.generate(prompts, params)
        assert second.stats().blocks_loaded <= len(list(Path(folder).glob("*.block"))) * len(prompts)
    assert tokens(had) == tokens(LLM(reference, **SIZES | sizes).generate(prompts, params))
    assert is_clean(second)


def test_what_was_lost_is_stored_again_by_who_has_it(model: LoadedModel, tmp_path: Path) -> None:
    [prompt] = prompts_of(6, 1)
    first = prefilled(model, tmp_path, [prompt])
    before = {path: path.read_bytes() for path in tmp_path.glob("*.block")}
    assert len(before) == first.stats().blocks_stored == len(prompt) // 4
    for path in before:
        path.unlink()
    first.generate([prompt], ONE_TOKEN)  # its prefix cache has all but the last block, and that one it computes
    after = {path: path.read_bytes() for path in tmp_path.glob("*.block")}
    assert {path: after[path] for path in before if path in after} == after
    assert len(after) >= (len(prompt) - 1) // 4
    assert all(before[path] == after[path] for path in after)


def test_no_more_than_prompts_is_handed_over(model: LoadedModel, tmp_path: Path) -> None:
    """What is generated is offered when it comes again, in a prompt."""
    [prompt] = prompts_of(7, 1)
    first = connected(model, tmp_path)
    [output] = first.generate([prompt], GREEDY)
    assert first.stats().blocks_stored == len(prompt) // 4
    longer = [*prompt, *output.outputs[0].token_ids, 7]
    first.generate([longer], ONE_TOKEN)
    assert first.stats().blocks_stored == len(longer) // 4


def test_prompt_logprobs_take_nothing_from_elsewhere(model: LoadedModel, tmp_path: Path) -> None:
    [prompt] = prompts_of(8, 1)
    prefilled(model, tmp_path, [prompt])
    second = connected(model, tmp_path)
    [output] = second.generate([prompt], replace(ONE_TOKEN, prompt_logprobs=1))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    assert second.stats().blocks_loaded == 0


# --- Two tiers, two processes ---------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_are_the_same_bytes_on_both_tiers(kv_cache_dtype: str, dtype: str) -> None:
    """[layers, 2, block_size, kv_heads, head_dim], however a tier lays them out; the other blocks are left alone."""
    sizes = (3, 6, 4, 2, 8)  # layers, blocks, block_size, kv_heads, head_dim
    one = FastCache(*sizes, dtype=getattr(torch, dtype), kv_cache_dtype=kv_cache_dtype)
    other = FastCache(*sizes, dtype=getattr(torch, dtype), kv_cache_dtype=kv_cache_dtype)
    k, v = torch.randn(2, 3, 24, 2, 8, generator=torch.Generator().manual_seed(0)).to(one.dtype)
    for layer in range(3):
        one.write(layer, torch.arange(24), k[layer], v[layer])
    content = read(one, [4, 1])
    assert {len(block) for block in content} == {one.block_bytes}
    write(other, [(0, content[0]), (5, content[1])])
    assert read(other, [0, 5]) == content
    assert other.device_blocks[1:5].count_nonzero() == 0
    for layer in range(3):
        mine = torch.stack(one.read(layer, torch.tensor([[4, 1]])))
        assert torch.equal(mine, torch.stack(other.read(layer, torch.tensor([[0, 5]]))))
    if dtype == "float32":
        reference = KVCache(*sizes, kv_cache_dtype=kv_cache_dtype)
        write(reference, [(0, content[0]), (5, content[1])])
        assert read(reference, [0, 5]) == content
        assert not any(reference.device_blocks[block].tobytes().strip(b"\0") for block in range(1, 5))
        for layer in range(3):
            found = np.stack(reference.read(layer, np.array([[0, 5]])))
            assert np.array_equal(torch.stack(one.read(layer, torch.tensor([[4, 1]]))).numpy(), found)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("make", [KVCache, FastCache])
def test_a_block_is_the_same_bytes_on_the_host(make: Any, kv_cache_dtype: str) -> None:
    cache = make(3, 6, 4, 2, 8, 5, kv_cache_dtype=kv_cache_dtype)
    content = [random.Random(i).randbytes(cache.block_bytes) for i in range(2)]
    write(cache, [(1, content[0]), (4, content[1])])
    cache.swap_out([(1, 3), (4, 0)])
    assert read_host(cache, [3, 0]) == content
    for wrong in (-1, 5):
        with pytest.raises(IndexError, match=f"block {wrong} is outside the host pool's 5 blocks"):
            read_host(cache, [0, wrong])


@pytest.mark.parametrize("make", [KVCache, FastCache])
def test_a_block_of_another_size_or_place_is_refused_before_anything_is_written(make: Any) -> None:
    cache = make(2, 4, 4, 2, 8)
    content = b"\1" * cache.block_bytes
    with pytest.raises(ValueError, match=r"a block of 1,023 bytes was loaded; here it has 1,024"):
        write(cache, [(0, content), (1, content[:-1])])
    for wrong in (-1, 4):
        with pytest.raises(IndexError, match=f"block {wrong} is outside the device pool's 4 blocks"):
            write(cache, [(0, content), (wrong, content)])
        with pytest.raises(IndexError, match=f"block {wrong} is outside the device pool's 4 blocks"):
            read(cache, [wrong])
    assert read(cache, [0]) == [bytes(cache.block_bytes)]


@quick_cases(1)
@pytest.mark.parametrize("tiers", [("reference", "fast"), ("fast", "reference")])
def test_one_tier_prefills_and_the_other_decodes(tiny_model: Path, tmp_path: Path, tiers: tuple[str, str]) -> None:
    prompts = prompts_of(9, 3)
    one, other = (LoadedModel.load(tiny_model, tier, "cpu", "float32") for tier in tiers)
    prefilled(one, tmp_path, prompts)
    second = connected(other, tmp_path, "kv_consumer")
    assert tokens(second.generate(prompts, GREEDY)) == tokens(LLM(other, **SIZES).generate(prompts, GREEDY))
    assert second.stats().blocks_loaded


PREFILL = """
import sys
from minipaged import LLM, SamplingParams
from minipaged.handover.shared_storage import SharedStorageConnector

model, folder, *prompts = sys.argv[1:]
llm = LLM(model, tier="reference", block_size=4, num_blocks=96, kv_connector=SharedStorageConnector(folder))
llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
"""


@thorough
def test_another_process_prefills(reference: LoadedModel, tmp_path: Path) -> None:
    """Hashes of strings differ from process to process; those of blocks do not."""
    text = "Blocks travel, and so do lists of them."
    command = [sys.executable, "-c", PREFILL, str(reference.folder), str(tmp_path), text]
    subprocess.run(command, check=True, timeout=120)
    second = connected(reference, tmp_path, "kv_consumer")
    assert tokens(second.generate([text], GREEDY)) == tokens(LLM(reference, **SIZES).generate([text], GREEDY))
    assert second.stats().blocks_loaded == len(text) // 4


# --- What does not go together --------------------------------------------------------------------


def test_settings_that_do_not_go_with_it_are_refused_with_the_way_out(tmp_path: Path) -> None:
    connector = SharedStorageConnector(tmp_path)
    with pytest.raises(InvalidRequest, match=r"enable_prefix_caching is False; .* leave one of them out"):
        LLM("/no/such/model", kv_connector=connector, enable_prefix_caching=False)
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        with pytest.raises(InvalidRequest, match=f"{name} is 2, where each rank has a part of every block"):
            LLM("/no/such/model", kv_connector=connector, **{name: 2})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="'a folder', which has no check, open, lacking, store, load"):
        LLM("/no/such/model", kv_connector="a folder")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"is the class SharedStorageConnector; give an instance, as in"):
        LLM("/no/such/model", kv_connector=SharedStorageConnector)  # type: ignore[arg-type]


def test_what_is_wrong_with_the_folder_is_told_before_loading(
    reference: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_weights(*_: Any) -> None:
        pytest.fail("the weights were loaded")

    prefilled(reference, tmp_path / "kv", prompts_of(13, 1))
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(ReferenceTier, "load_weights", load_weights)
    for name, said in (("file", "file cannot be used"), ("kv", "block_size is 4 there and 16 here")):
        connector = SharedStorageConnector(tmp_path / name)
        with pytest.raises(InvalidRequest, match=said):
            LLM(reference.folder, tier="reference", dtype="float32", kv_connector=connector)


@pytest.mark.parametrize("where", ["load_weights", "make_runner"])
def test_an_engine_that_comes_to_nothing_leaves_the_folder_to_any_model(
    reference: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: Any) -> None:
        raise ModelError("a file is cut")

    prompts, settings = prompts_of(14, 1), SIZES | {"tier": "reference", "dtype": "float32"}
    with monkeypatch.context() as while_it_fails:
        while_it_fails.setattr(ReferenceTier, where, fail)
        with pytest.raises(ModelError, match="a file is cut"):
            LLM(reference.folder, **settings, kv_connector=SharedStorageConnector(tmp_path / "kv"))
    assert not (tmp_path / "kv").exists()
    other = make_tiny_model(tmp_path / "other", seed=1)
    llm = LLM(other, **settings, kv_connector=SharedStorageConnector(tmp_path / "kv"))
    llm.generate(prompts, GREEDY)
    assert llm.stats().blocks_stored


def test_engines_that_do_not_fit_are_told_both_values(reference: LoadedModel, tmp_path: Path) -> None:
    prefilled(reference, tmp_path, prompts_of(10, 1))
    with pytest.raises(InvalidRequest, match="block_size is 4 there and 8 here"):
        connected(reference, tmp_path, block_size=8)
    with pytest.raises(InvalidRequest, match="kv_cache_dtype is 'auto' there and 'int8' here"):
        connected(reference, tmp_path, kv_cache_dtype="int8")


def test_another_model_of_the_same_shape_does_not_fit(reference: LoadedModel, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    prefilled(reference, folder, prompts_of(11, 1))
    other = make_tiny_model(tmp_path / "other", seed=1)
    mine = fingerprint(reference.folder)
    assert fingerprint(other) != mine == fingerprint(reference.folder)
    with pytest.raises(InvalidRequest, match=f"model is {mine!r} there and {fingerprint(other)!r} here"):
        connected(LoadedModel.load(other, "reference"), folder)


# --- Steps as data --------------------------------------------------------------------------------


def test_a_step_that_loads_is_the_same_after_its_encoding() -> None:
    step = StepInput(3, moves=BlockMoves(load=((5, b"\0\1\2"), (1, b""))))
    assert decode(encode(step)) == step


def test_a_recording_has_the_blocks_in_it(reference: LoadedModel, tiny_model: Path, tmp_path: Path) -> None:
    """So it runs again without the folder, and on the other tier."""
    prompts, file = prompts_of(12, 2), tmp_path / "steps"
    prefilled(reference, tmp_path / "kv", prompts)
    second = connected(reference, tmp_path / "kv", "kv_consumer")
    with file.open("wb") as stream:
        header = Header.of("tiny", second)
        recorder = StepRecorder(second.engine.runner, stream, header)
        second.engine.runner = recorder
        second.generate(prompts, GREEDY)
        recorder.close()
    assert second.stats().blocks_loaded
    for path in (tmp_path / "kv").iterdir():
        path.unlink()
    for tier in ("reference", "fast"):
        replay = open_replay(*read_recording(file), LoadedModel.load(tiny_model, tier, "cpu", "float32"))
        assert [difference for difference in replay if difference.objection] == []
        assert replay.num_choices == 24
    replay = open_replay(*read_recording(file), LoadedModel.load(tiny_model, "reference", dtype="float64"))
    with pytest.raises(BadRecording, match="step 1 loads blocks in float32, but this model computes in float64"):
        list(replay)
