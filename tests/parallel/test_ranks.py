"""parallel-invariance: N processes give what the same shards give in one, bit for bit; and what one rank gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from minipaged.contracts import Runner
from minipaged.fast.cpu import threads
from minipaged.fast.cpu.threads import use_threads
from minipaged.llm import LoadedModel
from minipaged.models import hub
from minipaged.parallel import tier as tier_module
from minipaged.parallel.options import Options
from minipaged.parallel.tier import ParallelTier
from minipaged.params import EngineConfig
from minipaged.steps import LOGITS, Begun, BlockMoves, ChosenToken, Row, StepInput, TableChange
from minipaged.tiers import FastTier, choose_tier
from tests.effort import one_case_in, scaled, seeds, thorough
from tests.parallel.one_process import ShardsInOneProcess
from tests.tiny_model import make_tiny_model

BLOCK_SIZE = 4


def random_model(folder: Path, seed: int, **shape: int) -> Path:
    """Sizes that hardly ever divide. `shape`: what is not left to chance."""
    rng = random.Random(seed)
    heads, kv_heads = rng.choice([(4, 1), (4, 2), (6, 2), (6, 3), (9, 3), (9, 3), (5, 5)])
    chosen = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([4, 8]),
        "hidden_size": heads * rng.choice([4, 6]),
        "intermediate_size": rng.choice([37, 50, 64]),
        "num_hidden_layers": rng.choice([1, 2, 3]),
        "tie_word_embeddings": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.3,
        "mlp_bias": rng.random() < 0.3,
    }
    return make_tiny_model(folder, seed=seed, **chosen | shape)


def random_steps(seed: int, vocab_size: int) -> Iterator[StepInput]:
    """Prompts of several lengths in one batch, then tokens at random, blocks copied and swapped on the way. All of them
    ask for logits."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 11) for _ in range(4)]
    tables = [tuple(range(8 * i, 8 * i + 8)) for i in range(len(lengths))]
    prompts = [tuple(rng.randrange(vocab_size) for _ in range(length)) for length in lengths]
    begun = tuple(Begun(i, prompt, len(prompt), tables[i], None) for i, prompt in enumerate(prompts))
    yield StepInput(0, fresh=True, begun=begun, added=tuple(Row(i, 0, n, LOGITS) for i, n in enumerate(lengths)))
    for number in range(1, 9):
        told = tuple(ChosenToken(i, n + number - 1, rng.randrange(vocab_size)) for i, n in enumerate(lengths))
        changed, moves = (), BlockMoves()
        if number == 4:  # the first block of sequence 0 goes to the host and comes back elsewhere; one is copied
            changed = (TableChange(0, 0, (40, *tables[0][1:])), TableChange(1, 0, (41, *tables[1][1:])))
            moves = BlockMoves(swap_out=((0, 2),), swap_in=((2, 40),), copy=((8, 41),))
        yield StepInput(number, told=told, tables=changed, moves=moves)


def logits_of(runner: Runner, seed: int, vocab_size: int) -> list[np.ndarray]:
    return [torch.as_tensor(runner.run(step).logits).float().numpy() for step in random_steps(seed, vocab_size)]


def sizes(vocab_size: int, size: int) -> EngineConfig:
    return EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=48,
        num_swap_blocks=4,
        max_model_len=64,
        vocab_size=vocab_size,
        tensor_parallel_size=size,
    )


def check_bits(folder: Path, size: int, dtype: str, seed: int, *, large: bool = False) -> None:
    """`large`: this process has no room for the model twice, and what freeing it leaves behind."""
    loaded = LoadedModel.load(folder, "fast", "cpu", dtype, size)
    with closing(loaded):
        config = sizes(loaded.config.vocab_size, size)
        apart = logits_of(loaded.tier.make_runner(loaded.config, loaded.weights, config), seed, config.vocab_size)
    together, one_rank = (
        (in_a_process_of_its_own if large else call)(work, folder, config, dtype, seed)
        for work in (logits_of_shards, logits_of_one_rank)
    )
    assert len(apart) == len(together) == 9
    for one, other in zip(apart, together, strict=True):
        assert one.tobytes() == other.tobytes()
    for one, other in zip(apart, one_rank, strict=True):
        assert np.linalg.norm(one - other) <= (1e-5 if dtype == "float32" else 0.05) * np.linalg.norm(other)


Work = Callable[[Path, EngineConfig, str, int], list[np.ndarray]]


def logits_of_shards(folder: Path, config: EngineConfig, dtype: str, seed: int) -> list[np.ndarray]:
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // config.tensor_parallel_size))  # as each worker does
    try:
        return logits_of(ShardsInOneProcess(folder, dtype, config), seed, config.vocab_size)
    finally:
        torch.set_num_threads(before)


def logits_of_one_rank(folder: Path, config: EngineConfig, dtype: str, seed: int) -> list[np.ndarray]:
    whole = LoadedModel.load(folder, "fast", "cpu", dtype)
    return logits_of(whole.tier.make_runner(whole.config, whole.weights, config), seed, config.vocab_size)


def call(work: Work, folder: Path, config: EngineConfig, dtype: str, seed: int) -> list[np.ndarray]:
    return work(folder, config, dtype, seed)


def in_a_process_of_its_own(work: Work, folder: Path, config: EngineConfig, dtype: str, seed: int) -> list[np.ndarray]:
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=use_threads) as process:
        return process.submit(work, folder, config, dtype, seed).result()


@thorough  # four processes that import torch: 9 to 11 s of processor
def test_three_processes_give_the_bits_of_three_shards_in_one(tmp_path: Path) -> None:
    """Nine heads, three KV heads, and an MLP that does not divide."""
    folder = make_tiny_model(
        tmp_path / "m", num_attention_heads=9, num_key_value_heads=3, hidden_size=36, intermediate_size=50
    )
    check_bits(folder, 3, "float32", 0)


@thorough
@one_case_in(3)
@scaled
@pytest.mark.parametrize("seeds", seeds(6, 1, tried=False))
def test_random_models(tmp_path: Path, seeds: range) -> None:
    """In turns on 2, 3 and 4 ranks, and in both types, if the processor has bfloat16."""
    dtypes = ("float32", choose_tier("fast", "cpu").dtype)
    for seed in seeds:
        check_bits(random_model(tmp_path / "m", seed), 2 + seed % 3, dtypes[seed % 2], seed)


@thorough
@pytest.mark.model
def test_smollm2_on_as_many_ranks_as_it_has_kv_heads() -> None:
    check_bits(hub.resolve("smollm2-135m-instruct"), 3, "float32", 0, large=True)


def test_blocks_on_gpus_are_as_large_as_the_largest_rank_s_and_on_the_host_as_all_of_them(tmp_path: Path) -> None:
    """Two KV heads over three ranks: each rank keeps one of them."""
    config = LoadedModel.load(make_tiny_model(tmp_path / "model"), tier="reference").config
    one_head = 4 * config.num_hidden_layers * 2 * config.head_dim * 4
    sizes = {}
    for device in ("cpu", "cuda"):
        cut = ParallelTier.over(FastTier.on("cpu", "float32"), 3, 1, worker_timeout=60)
        tier = replace(cut, device=device)
        sizes[device] = tier.block_bytes(config, 4), tier.block_bytes(config, 4, on_host=True)
    assert config.num_key_value_heads == 2
    assert sizes == {"cpu": (3 * one_head, 3 * one_head), "cuda": (one_head, 3 * one_head)}


def test_ranks_share_the_cores_that_a_container_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has a thread for each core of the machine."""
    folder, begun = make_tiny_model(tmp_path / "model"), []

    def begin(options: list[Options], timeout: float) -> None:
        begun.extend(options)
        raise NotImplementedError

    tier = ParallelTier.over(FastTier.on("cpu", "float32"), 2, 1, worker_timeout=60)
    monkeypatch.setattr(ParallelTier, "kernels_compiled", lambda tier: nullcontext())
    monkeypatch.setattr(tier_module, "RankProcesses", begin)
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    monkeypatch.setattr(threads, "_threads", threads.Threads(0))
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    with pytest.raises(NotImplementedError):
        tier.load_weights(folder, LoadedModel.load(folder, tier="reference").config)
    assert [rank.num_threads for rank in begun] == [2, 2]
    assert "(4 threads)" in tier.description
