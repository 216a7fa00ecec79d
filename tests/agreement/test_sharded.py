"""A model in parts on both wings: the same logits, whatever the ranks and the stages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minipaged.models.loading import load_config
from minipaged.params import EngineConfig
from minipaged.tiers import ReferenceTier
from tests.effort import quick_cases
from tests.parallel.one_process import ShardsInOneProcess
from tests.parallel.test_ranks import logits_of, random_model


@quick_cases(2)
@pytest.mark.parametrize(("seed", "tensor", "pipeline"), [(0, 3, 1), (1, 2, 2), (2, 4, 1), (3, 1, 2), (4, 2, 1)])
def test_both_wings_compute_the_same_parts(tmp_path: Path, seed: int, tensor: int, pipeline: int) -> None:
    folder = random_model(tmp_path / "m", seed, num_hidden_layers=2)
    tier = ReferenceTier.on("cpu", "float32")
    model = load_config(folder)
    config = EngineConfig(
        block_size=4,
        num_blocks=48,
        num_swap_blocks=4,
        max_model_len=64,
        vocab_size=model.vocab_size,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
    )
    fast = logits_of(ShardsInOneProcess(folder, "float32", config), seed, model.vocab_size)
    reference = logits_of(tier.make_runner(model, tier.load_weights(folder, model), config), seed, model.vocab_size)
    for ours, theirs in zip(fast, reference, strict=True):
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
