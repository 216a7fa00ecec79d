"""What preemption pays for on the fast tier is measured when the model is made."""

from __future__ import annotations

import pytest

from minipaged import LLM, SamplingParams
from minipaged.contracts import Batch
from minipaged.engine.policy import recompute_seconds, swap_seconds
from minipaged.fast import preemption as fast
from minipaged.fast.kv_cache import KVCache
from minipaged.llm import LoadedModel
from tests.agreement.kernels import KernelSet, every_kernel_set


@pytest.mark.parametrize(("block_size", "kv_cache_dtype"), [(1, "auto"), (16, "auto"), (16, "int8"), (256, "auto")])
@every_kernel_set
def test_measuring_gives_a_devices_plausible_speeds_and_copies_nothing_of_the_cache(
    kernel_set: KernelSet, block_size: int, kv_cache_dtype: str
) -> None:
    shape = (2, 80, block_size, 2, 64)
    where = {"device": kernel_set.device, "kernels": kernel_set.kernels}
    cache = KVCache(*shape, kv_cache_dtype=kv_cache_dtype, **where)  # type: ignore[arg-type]
    asked: list[Batch] = []
    costs = fast.measure(cache, asked.append)
    assert 1e-8 < costs.seconds_per_copy < 1e-1
    assert 1e7 < costs.link_bytes_per_second < 1e13
    assert costs.block_bytes == cache.block_bytes
    for (prompt,) in asked:
        assert len(prompt.blocks) * block_size >= len(prompt.token_ids) == len(prompt.slots(block_size))
    assert not cache.device_blocks.any()


def test_the_costs_are_measured_when_the_model_is_made_and_not_when_they_are_asked_for(tiny_model: object) -> None:
    llm = LLM(tiny_model, tier="fast", num_blocks=32)  # type: ignore[arg-type]
    runner = llm.engine.runner
    runner.forward = None  # type: ignore[method-assign, assignment]  # asking must not run the model
    costs = runner.costs()
    assert 0 < swap_seconds(costs, 1) < swap_seconds(costs, 100) < 10
    assert 0 < recompute_seconds(costs, 1) < recompute_seconds(costs, 100) < 100


def test_measuring_leaves_no_trace_in_what_is_generated(tiny_model: object) -> None:
    """The probe runs the model over block 0 and takes a row of the device's tables: neither may show."""
    loaded = LoadedModel.load(tiny_model, "fast", dtype="float32")  # type: ignore[arg-type]
    exact = LoadedModel.load(tiny_model, "reference")  # type: ignore[arg-type]
    prompt, params = [[3, 4, 5]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = [
        LLM(model, num_blocks=8, debug=True).generate(prompt, params, use_tqdm=False) for model in (loaded, exact)
    ]
    assert outputs[0][0].outputs[0].token_ids == outputs[1][0].outputs[0].token_ids


def test_an_empty_batch_is_no_work(tiny_model: object) -> None:
    llm = LLM(tiny_model, tier="fast", num_blocks=8)  # type: ignore[arg-type]
    assert llm.engine.runner.forward([]).shape == (0, llm.config.vocab_size)


@pytest.mark.parametrize("max_model_len", [1, 33, 63])
def test_the_probe_fits_any_longest_sequence(tiny_model: object, max_model_len: int) -> None:
    llm = LLM(tiny_model, tier="fast", num_blocks=64, max_model_len=max_model_len)  # type: ignore[arg-type]
    assert recompute_seconds(llm.engine.runner.costs(), 1) > 0
