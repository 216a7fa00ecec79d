"""The tiers as the tests run them, and the random workloads that the project's tests share with its grader."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from minipaged.contracts import BeamStep, Sampled, SamplingInput, Tier
from minipaged.fast.sampling import Choosing
from minipaged.outputs import RequestOutput, RequestUpdate
from minipaged.params import SamplingParams, StructuredOutputsParams
from minipaged.testing.workloads import (
    Workload,
    WorkloadRequest,
    WorkloadRun,
    check_stream,
    letters,
    random_workload,
    run_workload,
)
from minipaged.tiers import fast_tier, reference_tier

__all__ = [
    "FAST",
    "REFERENCE",
    "TIERS",
    "Workload",
    "WorkloadRequest",
    "WorkloadRun",
    "check_stream",
    "ended",
    "letters",
    "random_workload",
    "run_workload",
    "structured",
    "windowed",
]

REFERENCE = reference_tier()

GROUPS: tuple[tuple[int | None, ...], ...] = (
    (None, 5),
    (7,),
    (None, 4, 4),
    (3, None),
    (None, 1),
    (9, 2),
    (None, None, 6),
    (16,),
)
"""Windows of the groups of layers that `windowed` chooses from."""


def windowed(seed: int) -> Workload:
    """The random workload of this seed, on a model whose layers are in groups."""
    r, workload = random.Random(f"windows of {seed}"), random_workload(seed)
    groups, config = r.choice(GROUPS), workload.config
    config = replace(
        config,
        group_windows=groups,
        num_blocks=max(1, round(config.num_blocks * len(groups) * r.choice([0.7, 1.0, 1.0, 1.3]))),
        num_swap_blocks=config.num_swap_blocks * r.choice([1, len(groups)]),
        async_scheduling=r.random() < 0.4,
        pipeline_parallel_size=r.choice([1, 1, 1, 3]),
    )
    return replace(workload, config=config)


def structured(seed: int) -> Workload:
    """The random workload of this seed, in which most of the requests that sample have a grammar."""
    r, workload = random.Random(f"grammars of {seed}"), random_workload(seed)
    requests = []
    for request in workload.requests:
        if isinstance(params := request.params, SamplingParams) and r.random() < 0.8:
            form = StructuredOutputsParams(grammar=f"grammar {r.randrange(3)}")
            more = {"structured_outputs": form, "min_tokens": 0, "allowed_token_ids": None, "bad_words": ()}
            request = replace(request, params=replace(params, **more))
        requests.append(request)
    config = replace(
        workload.config,
        num_blocks=max(1, round(workload.config.num_blocks * r.choice([0.6, 0.8, 1]))),  # outputs may end sooner
        async_scheduling=r.random() < 0.4,
        pipeline_parallel_size=r.choice([1, 1, 1, 2, 3]),
    )
    return replace(workload, requests=tuple(requests), config=config)


_fast = fast_tier()


class FastBeamSearch(_fast.beam_search):  # type: ignore[misc, name-defined]
    """The fast tier's, given the arrays that a model without weights makes."""

    def step(self, logits: np.ndarray, rows: Sequence[int], cumulative_logprobs: Sequence[float]) -> BeamStep:
        return super().step(torch.from_numpy(logits), rows, cumulative_logprobs)


_kept: list[Choosing | None] = [None]


def fast_sample(logits: np.ndarray, inputs: Sequence[SamplingInput]) -> Sequence[Sampled]:
    """The fast tier's, given arrays. What was worked out for the same inputs is used again, as `Llama.sample` does."""
    table = torch.from_numpy(logits)
    if not inputs:
        return []
    _kept[0] = Choosing.of(inputs, table, _kept[0])
    return _kept[0].sample(table)


FAST = Tier("fast", _fast.block_allocator, _fast.block_table, FastBeamSearch, fast_sample)


def ended(updates: Sequence[RequestUpdate]) -> list[RequestOutput]:
    """The outputs of those requests that have ended."""
    return [update.output for update in updates if update.output]


TIERS = {tier.name: tier for tier in [REFERENCE, FAST]}
"""One test, every tier: the tests of what both wings have to do are run over all of these."""


def find_a_failure(workloads: int = 500) -> int:
    """The seed of the first workload that fails."""
    for seed in range(workloads):
        try:
            run_workload(seed)
        except (TypeError, AttributeError):
            raise  # the bug was planted wrongly: this is no finding
        except Exception:  # whatever shows it
            return seed
    raise AssertionError(f"not found in {workloads} workloads")
