"""The metrics say what the outputs and the statistics say, under vLLM's names and in its buckets."""

from __future__ import annotations

import json
import random
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from minipaged.engine.engine import Engine
from minipaged.engine.stats import Stats
from minipaged.errors import InvalidRequest
from minipaged.events import HOLE, BlocksPassed, Event, RequestPreempted
from minipaged.outputs import RequestOutput, RequestUpdate
from minipaged.params import BeamSearchParams, EngineConfig, RequestOutputKind, SamplingParams, SpeculativeConfig
from minipaged.serve.metrics import Metrics
from minipaged.steps import StepInput
from minipaged.testing.content_runner import ContentRunner, GivenRow
from minipaged.testing.workloads import with_salts
from tests.effort import examples, scaled
from tests.engine.test_failure_injection import WORKLOADS, Fault
from tests.workloads import REFERENCE, Workload, letters, random_workload, windowed

ROOT = Path(__file__).parent.parent.parent
Params = SamplingParams | BeamSearchParams
DELTA, FINAL_ONLY = RequestOutputKind
CONFIG = EngineConfig(
    num_blocks=12,
    num_swap_blocks=8,
    max_model_len=40,
    vocab_size=11,
    block_size=4,
    max_num_batched_tokens=16,
    debug=True,
)

# --- vLLM's names, as data ------------------------------------------------------------------------

SECONDS_TO_FIRST_TOKEN = """
    0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0 +Inf
"""
SECONDS_OF_A_TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 +Inf"
SECONDS_OF_A_REQUEST = """
    0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0 +Inf
"""
UP_TO_40 = "1.0 2.0 5.0 10.0 20.0 +Inf"
BUCKETS = {
    "vllm:time_to_first_token_seconds": SECONDS_TO_FIRST_TOKEN,
    "vllm:inter_token_latency_seconds": SECONDS_OF_A_TOKEN,
    "vllm:request_time_per_output_token_seconds": SECONDS_OF_A_TOKEN,
    "vllm:e2e_request_latency_seconds": SECONDS_OF_A_REQUEST,
    "vllm:request_queue_time_seconds": SECONDS_OF_A_REQUEST,
    "vllm:request_inference_time_seconds": SECONDS_OF_A_REQUEST,
    "vllm:request_prefill_time_seconds": SECONDS_OF_A_REQUEST,
    "vllm:request_decode_time_seconds": SECONDS_OF_A_REQUEST,
    "vllm:iteration_tokens_total": """
        1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0 +Inf
    """,
    "vllm:request_prompt_tokens": UP_TO_40,
    "vllm:request_generation_tokens": UP_TO_40,
    "vllm:request_max_num_generation_tokens": UP_TO_40,
    "vllm:request_params_max_tokens": UP_TO_40,
    "vllm:request_params_n": "1.0 2.0 5.0 10.0 20.0 +Inf",
    "vllm:request_num_preemptions": "1.0 2.0 3.0 4.0 5.0 10.0 20.0 +Inf",
}
"""The histograms, each with its buckets, where a sequence has at most 40 tokens."""
COUNTERS = {
    "vllm:prompt_tokens": (),
    "vllm:generation_tokens": (),
    "vllm:admission_rejections": ("reason",),
    "vllm:num_preemptions": (),
    "vllm:prefix_cache_queries": (),
    "vllm:prefix_cache_hits": (),
    "vllm:request_success": ("finished_reason",),
    "minipaged:prefix_cache_evictions": (),
    "minipaged:prefix_cache_salts": (),
    "minipaged:preemptions": ("mode",),
    "minipaged:blocks_copied": (),
    "minipaged:blocks_passed": (),
    "minipaged:blocks_handed_over": ("direction",),
    "minipaged:floor_blocks": ("direction",),
    "minipaged:blocks_swapped": ("direction",),
    "minipaged:tokens_recomputed": (),
    "minipaged:query_tokens": (),
    "minipaged:steps": (),
    "minipaged:step_seconds": (),
}
COUNTERS_OF_DRAFTS = {
    "vllm:spec_decode_num_drafts": (),
    "vllm:spec_decode_num_draft_tokens": (),
    "vllm:spec_decode_num_accepted_tokens": (),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("position",),
    "minipaged:blocks_rolled_back": (),
}
"""Metrics that only an engine with drafts has."""
GAUGES = {
    "vllm:num_requests_running": (),
    "vllm:num_requests_waiting": (),
    "vllm:num_requests_waiting_by_reason": ("reason",),
    "vllm:kv_cache_usage_perc": (),
    "vllm:cache_config_info": (
        *("block_size", "num_gpu_blocks", "num_cpu_blocks", "enable_prefix_caching"),
        *("kv_cache_size_tokens", "kv_cache_max_concurrency"),
    ),
    "minipaged:blocks": ("state",),
    "minipaged:blocks_saved": (),
    "minipaged:table_entries": ("group", "window"),
    "minipaged:kv_slots_share": ("cache", "kind"),
}
READ_BY_VLLMS_DASHBOARD = """
    vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum
    vllm:e2e_request_latency_seconds_count vllm:prompt_tokens_total vllm:generation_tokens_total
    vllm:inter_token_latency_seconds_bucket vllm:inter_token_latency_seconds_sum
    vllm:inter_token_latency_seconds_count vllm:num_requests_running vllm:num_requests_waiting
    vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_sum
    vllm:time_to_first_token_seconds_count vllm:kv_cache_usage_perc vllm:request_prompt_tokens_bucket
    vllm:request_generation_tokens_bucket vllm:request_success_total vllm:request_queue_time_seconds_sum
    vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum
    vllm:request_max_num_generation_tokens_sum
"""
"""What the expressions of examples/observability/prometheus_grafana/grafana.json in vLLM's repository name."""

# --- A server without HTTP ------------------------------------------------------------------------

Sample = tuple[str, frozenset[tuple[str, str]]]


def read(metrics: Metrics) -> dict[Sample, float]:
    """What a scrape tells of the engine: sample and labels -> value. The labels that all have are checked, and left
    out."""
    found = {}
    for family in parse_text(metrics.exposition()[0].decode()):
        for sample in family.samples:
            if sample.name.startswith(("vllm:", "minipaged:")):
                labels = dict(sample.labels)
                assert labels.pop("model_name") == "tiny"
                if sample.name != "vllm:admission_rejections_total":  # vLLM counts these before it chooses an engine
                    assert labels.pop("engine") == "0"
                found[sample.name, frozenset(labels.items())] = sample.value
    return found


class Reading:
    """The latest scrape, to be asked for a value: `reading("vllm:request_success_total", finished_reason="stop")`."""

    def __init__(self, metrics: Metrics) -> None:
        self.values = read(metrics)

    def __call__(self, name: str, **labels: str) -> float:
        return self.values[name, frozenset(labels.items())]

    def buckets(self, name: str) -> dict[str, float]:
        """Upper bound -> how many values are not above it."""
        return {dict(labels)["le"]: n for (sample, labels), n in self.values.items() if sample == f"{name}_bucket"}


class Server:
    """An engine with metrics, on a clock of its own. `seconds`: how long each pass through the model takes."""

    def __init__(self, config: EngineConfig = CONFIG, seconds: Callable[[], float] = lambda: 0.25) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.nan_in_pass = self.fails_in_pass = 0
        self.updates: list[tuple[float, RequestUpdate]] = []
        self.arrived: dict[str, tuple[float, Params, int, RequestOutputKind]] = {}
        self.num_passes = 0
        sizes = (config.num_blocks, config.num_swap_blocks, config.block_size, config.vocab_size)
        server = self

        class Slow(ContentRunner):
            def run(self, step: StepInput) -> Any:
                server.now += server.seconds()
                return super().run(step)

            def compute(self, rows: Sequence[GivenRow]) -> np.ndarray:
                logits: np.ndarray = super().compute(rows)
                server.num_passes += 1
                if server.num_passes == server.fails_in_pass:
                    raise Fault
                if server.num_passes == server.nan_in_pass:
                    logits[:1, 1:] = np.nan
                return logits

        runner = Slow(*sizes, windows=config.group_windows)
        self.engine = Engine(config, REFERENCE, runner, decode=letters, clock=lambda: self.now)
        runner.engine = self.engine
        self.metrics = Metrics("tiny", config)

    def add(
        self,
        params: Params,
        prompt: Sequence[int] = (1, 2, 3),
        kind: RequestOutputKind = DELTA,
        waited: float = 0.0,
        cache_salt: str | None = None,
    ) -> str:
        """`waited`: for so long it was in the server before the engine got it."""
        name = self.engine.add_request(prompt, params, output_kind=kind, cache_salt=cache_salt)
        self.metrics.added(name, params, len(prompt), self.now - waited)
        self.arrived[name] = (self.now - waited, params, len(prompt), kind)
        return name

    def step(self) -> list[RequestUpdate]:
        engine = self.engine
        try:
            updates = engine.step()
        except Fault:
            return []
        queues = (len(engine.scheduler.running), len(engine.scheduler.waiting))
        self.metrics.after_step(updates, engine.current_stats(), *queues, self.now)
        self.updates += [(self.now, update) for update in updates]
        return updates

    def finish(self) -> Reading:
        while self.engine.has_unfinished_requests():
            self.step()
        return Reading(self.metrics)

    @property
    def outputs(self) -> dict[str, tuple[float, RequestOutput]]:
        """Those that have ended, and when that was told."""
        return {update.request_id: (now, update.output) for now, update in self.updates if update.output}


# --- Everything at once ---------------------------------------------------------------------------


def values_of(server: Server) -> dict[str, list[float]]:
    """What should be in each histogram but that of the steps: reckoned from the outputs and the times of the updates,
    sequence by sequence."""
    values: dict[str, list[float]] = defaultdict(list)
    told: dict[tuple[str, int], list[float]] = defaultdict(list)
    for now, update in server.updates:
        for news in update.completions:
            if news.new_token_ids:
                told[update.request_id, news.index].append(now)
    for name, (end, output) in server.outputs.items():
        arrived, params, num_prompt_tokens, kind = server.arrived[name]
        streams = kind is DELTA and isinstance(params, SamplingParams)
        sequences = [told[name, i] for i in range(params.n)] if streams else []
        times = sorted(time for sequence in sequences for time in sequence)
        lengths = [len(one.token_ids) for one in output.outputs]
        first = output.metrics.first_token_time
        if times and times[0] < end:
            first = times[0]
        last = times[-1] if times else end
        values["vllm:inter_token_latency_seconds"] += [
            after - before for sequence in sequences for before, after in pairwise(sequence)
        ]
        values["vllm:e2e_request_latency_seconds"].append(end - arrived)
        values["vllm:request_prompt_tokens"].append(num_prompt_tokens)
        values["vllm:request_generation_tokens"].append(sum(lengths))
        values["vllm:request_max_num_generation_tokens"].append(max(lengths, default=0))
        room = server.engine.config.max_model_len - num_prompt_tokens
        values["vllm:request_params_max_tokens"].append(room if params.max_tokens is None else params.max_tokens)
        n = params.beam_width if isinstance(params, BeamSearchParams) else params.n
        values["vllm:request_params_n"].append(n)
        values["vllm:request_num_preemptions"].append(output.metrics.num_preemptions)
        values["sequences"].append(sum(map(bool, sequences or lengths)))
        values["sequences heard of at the end"].append(0 if streams else sum(map(bool, lengths)))
        scheduled = output.metrics.first_scheduled_time
        if scheduled is not None:
            values["vllm:request_queue_time_seconds"].append(scheduled - output.metrics.arrival_time)
        if first is not None and scheduled is not None:
            values["vllm:time_to_first_token_seconds"].append(first - arrived)
            values["vllm:request_prefill_time_seconds"].append(first - scheduled)
            values["vllm:request_decode_time_seconds"].append(last - first)
            values["vllm:request_inference_time_seconds"].append(last - scheduled)
            if max(lengths, default=0) > 1:
                values["vllm:request_time_per_output_token_seconds"].append((last - first) / (max(lengths) - 1))
    return values


def check_histograms(server: Server, reading: Reading) -> None:
    values = values_of(server)
    for name in BUCKETS.keys() - {"vllm:iteration_tokens_total"}:
        assert reading(f"{name}_count") == len(values[name]), name
        assert reading(f"{name}_sum") == pytest.approx(sum(values[name])), name
        at_most = {le: sum(value <= float(le) for value in values[name]) for le in reading.buckets(name)}
        assert reading.buckets(name) == at_most, name


def check_counts(server: Server, reading: Reading) -> None:
    """What the engine has counted, in the exposition; and that it adds up with what the outputs say."""
    stats, blocks = server.engine.current_stats(), server.engine.blocks
    outputs = [output for _, output in server.outputs.values()]
    reasons = Counter(
        "error"
        if output.error
        else "abort"
        if not output.finished
        else max((one.finish_reason for one in output.outputs), key=["stop", "length"].index)
        for output in outputs
    )
    for reason in ("stop", "length", "abort", "error"):
        assert reading("vllm:request_success_total", finished_reason=reason) == reasons[reason]
    started = {name for name, (_, output) in server.outputs.items() if output.metrics.first_token_time is not None}
    started |= {update.request_id for _, update in server.updates if not update.output}
    assert reading("vllm:prompt_tokens_total") == sum(server.arrived[name][2] for name in started)
    assert reading("vllm:generation_tokens_total") == stats.generated_tokens
    assert reading("vllm:num_preemptions_total") == stats.preempted_by_swap + stats.preempted_by_recompute
    waiting = len(server.engine.scheduler.waiting)
    assert reading("vllm:num_requests_waiting_by_reason", reason="capacity") == waiting
    assert reading("vllm:num_requests_waiting_by_reason", reason="deferred") == 0
    assert reading("minipaged:preemptions_total", mode="swap") == stats.preempted_by_swap
    assert reading("minipaged:preemptions_total", mode="recompute") == stats.preempted_by_recompute
    hits, queries = reading("vllm:prefix_cache_hits_total"), reading("vllm:prefix_cache_queries_total")
    assert (hits, queries) == (stats.prefix_cache_hit_tokens, stats.prefix_cache_query_tokens)
    assert 0 <= hits <= queries
    assert reading("minipaged:prefix_cache_evictions_total") == stats.prefix_cache_evictions
    assert reading("minipaged:prefix_cache_salts_total") == stats.prefix_cache_salts
    assert reading("minipaged:blocks_copied_total") == stats.blocks_copied
    assert reading("minipaged:blocks_passed_total") == stats.blocks_passed
    check_groups(server, reading)
    assert reading("minipaged:blocks_swapped_total", direction="out") == stats.blocks_swapped_out
    assert reading("minipaged:blocks_swapped_total", direction="in") == stats.blocks_swapped_in
    assert reading("minipaged:blocks_handed_over_total", direction="stored") == stats.blocks_stored
    assert reading("minipaged:blocks_handed_over_total", direction="loaded") == stats.blocks_loaded
    assert reading("minipaged:floor_blocks_total", direction="down") == stats.blocks_demoted
    assert reading("minipaged:floor_blocks_total", direction="up") == stats.blocks_promoted
    assert reading("minipaged:tokens_recomputed_total") == stats.tokens_recomputed
    assert reading("minipaged:steps_total") == stats.steps
    assert reading("minipaged:step_seconds_total") == pytest.approx(stats.step_seconds)
    assert reading("minipaged:query_tokens_total") == stats.query_tokens
    values = values_of(server)
    if not server.engine.has_unfinished_requests():
        lacking = stats.query_tokens - stats.tokens_recomputed + sum(values["sequences"])
        lacking -= reading("vllm:iteration_tokens_total_sum")
        # Who hears of a request at its end only, after the last step, hears too late.
        assert -0.01 < lacking <= sum(values["sequences heard of at the end"]) + 0.01
    assert reading("vllm:iteration_tokens_total_count") == stats.steps
    used = {state: reading("minipaged:blocks", state=state) for state in ("free", "held", "cached")}
    assert used == {"free": blocks.allocator.num_free, "held": blocks.num_used, "cached": blocks.num_cached}
    assert reading("vllm:kv_cache_usage_perc") == blocks.num_used / blocks.allocator.num_blocks
    assert reading("minipaged:blocks_saved") == blocks.num_entries - blocks.num_used
    for cache, use in (("paged", stats.paged), ("contiguous", stats.contiguous)):
        for kind in ("tokens", "reserved", "internal_fragmentation"):
            share = getattr(use, kind) / (use.taken or 1)
            assert reading("minipaged:kv_slots_share", cache=cache, kind=kind) == pytest.approx(share)


def only_grow(reading: Reading) -> dict[Sample, float]:
    endings = ("_total", "_bucket", "_count", "_sum")
    return {sample: value for sample, value in reading.values.items() if sample[0].endswith(endings)}


def serve(workload: Workload, seed: int) -> Server:
    """The workload's requests, with steps of different lengths; after each, what only grows has not shrunk."""
    r = random.Random(seed)
    server = Server(workload.config, lambda: r.choice([1 / 64, 1 / 8, 0.5, 3.0]))
    server.nan_in_pass, server.fails_in_pass = r.choice([0, r.randint(1, 20)]), r.choice([0, r.randint(1, 20)])
    names: dict[int, str] = {}
    before = only_grow(Reading(server.metrics))
    step = 0
    while step <= max(one.arrives for one in workload.requests) or server.engine.has_unfinished_requests():
        for i, one in enumerate(workload.requests):
            if one.arrives == step:
                try:
                    kind, waited = r.choice([DELTA, FINAL_ONLY]), r.choice([0, 0.5])
                    names[i] = server.add(one.params, one.prompt, kind, waited, one.cache_salt)
                except InvalidRequest:
                    continue
            if one.cancelled == step and i in names:
                server.engine.abort(names[i])
        server.step()
        step += 1
        if step % 4 == 0:
            after = only_grow(Reading(server.metrics))
            assert all(after[sample] >= value for sample, value in before.items())
            before = after
    return server


def check_groups(server: Server, reading: Reading) -> None:
    """The entries of each group of layers are those of the tables, and add up to the blocks that sequences hold."""
    engine, windows = server.engine, server.engine.config.group_windows
    tables = [s.entries for request in engine._requests.values() for s in request.sequences if not s.swapped]
    entries = [
        reading("minipaged:table_entries", group=str(group), window=str(window or "all"))
        for group, window in enumerate(windows)
    ]
    assert entries == [
        sum(block != HOLE for table in tables for block in table[group :: len(windows)])
        for group in range(len(windows))
    ]
    assert sum(entries) == reading("minipaged:blocks", state="held") + reading("minipaged:blocks_saved")


def test_entries_of_tables_are_counted_by_group_of_layers_and_what_windows_give_back_too() -> None:
    happened: Counter[str] = Counter()
    for seed in (2, 9, 17, 21, 22, 37):
        heard: list[Event] = []
        server = Server(windowed(seed).config)
        server.engine.listeners.append(heard.append)
        for one in windowed(seed).requests:
            with suppress(InvalidRequest):
                server.add(one.params, one.prompt)
        while server.engine.has_unfinished_requests():
            server.step()
            check_groups(server, Reading(server.metrics))
        passed = sum(len(event.blocks) for event in heard if isinstance(event, BlocksPassed))
        assert Reading(server.metrics)("minipaged:blocks_passed_total") == passed
        happened.update(event.name for event in heard)
    assert happened["blocks_passed"] > 50
    assert happened["swapped_out"]
    assert happened["prefix_reused"]
    assert happened["sequence_forked"]


@scaled
def test_the_metrics_are_what_outputs_and_statistics_say() -> None:
    """Over crowded workloads: preemption both ways, sharing, beams, requests that are cancelled, fail or are refused,
    steps that raise."""
    happened: Counter[str] = Counter()
    workloads = [*WORKLOADS.values(), *map(random_workload, range(examples(120, least=12)))]
    workloads[-1] = with_salts(workloads[-1], 0)
    for seed, workload in enumerate(workloads):
        server = serve(workload, seed)
        reading = Reading(server.metrics)
        try:
            check_histograms(server, reading)
            check_counts(server, reading)
        except AssertionError as error:
            error.add_note(f"in workload {seed}")
            raise
        happened.update(
            {f"{name} {sorted(labels)}": int(value > 0) for (name, labels), value in reading.values.items()}
        )
    never = [sample for sample, number in happened.items() if number == 0 and "_bucket" not in sample]
    # Paging reserves nothing; when all has ended, nobody runs, waits or holds blocks; there is no other engine, and no
    # window.
    assert sorted(never) == [
        "minipaged:blocks [('state', 'held')]",
        "minipaged:blocks_handed_over_total [('direction', 'loaded')]",
        "minipaged:blocks_handed_over_total [('direction', 'stored')]",
        "minipaged:blocks_passed_total []",
        "minipaged:blocks_saved []",
        "minipaged:floor_blocks_total [('direction', 'down')]",
        "minipaged:floor_blocks_total [('direction', 'up')]",
        "minipaged:kv_slots_share [('cache', 'paged'), ('kind', 'reserved')]",
        "minipaged:table_entries [('group', '0'), ('window', 'all')]",
        "vllm:admission_rejections_total [('reason', 'max_num_queued_reqs')]",
        "vllm:admission_rejections_total [('reason', 'max_num_queued_tokens')]",
        "vllm:kv_cache_usage_perc []",
        "vllm:num_requests_running []",
        "vllm:num_requests_waiting []",
        "vllm:num_requests_waiting_by_reason [('reason', 'capacity')]",
        "vllm:num_requests_waiting_by_reason [('reason', 'deferred')]",
    ]


NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)


def test_what_became_of_drafts_is_counted_as_vllm_does() -> None:
    server = Server(replace(CONFIG, speculative_config=NGRAM))
    server.add(SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logit_bias={1: 100.0}), [0, 1, 1] * 3)
    reading = server.finish()
    stats = server.engine.stats
    assert reading("vllm:spec_decode_num_drafts_total") == stats.num_drafts
    assert reading("vllm:spec_decode_num_draft_tokens_total") == stats.tokens_drafted
    assert reading("vllm:spec_decode_num_accepted_tokens_total") == stats.tokens_accepted
    by_place = [
        reading("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(place)) for place in range(3)
    ]
    assert sum(by_place) == stats.tokens_accepted
    assert stats.num_drafts >= by_place[0] >= by_place[1] >= by_place[2] > 0
    assert reading("minipaged:blocks_rolled_back_total") == stats.blocks_rolled_back > 0
    names = {name.removesuffix("_total") for name, _ in reading.values}
    assert {*COUNTERS_OF_DRAFTS} <= names
    assert not {*COUNTERS_OF_DRAFTS} & {name.removesuffix("_total") for name, _ in Server().finish().values}
    # Tokens of steps: those of prompts and those generated, without refused drafts.
    assert reading("vllm:iteration_tokens_total_sum") == 9 + 30 < stats.query_tokens


def test_while_requests_run_wait_and_share_the_gauges_say_so() -> None:
    server = Server()
    server.add(SamplingParams(n=3, max_tokens=8, ignore_eos=True, seed=1), range(1, 9))
    server.add(SamplingParams(max_tokens=20, seed=1), range(1, 9))
    for _ in range(3):
        server.step()
    check_counts(server, reading := Reading(server.metrics))
    assert reading("minipaged:blocks_saved") >= 4  # two samples beyond the first hold the prompt's two blocks
    assert (reading("vllm:num_requests_running"), reading("vllm:num_requests_waiting")) == (2, 0)
    server.add(SamplingParams(max_tokens=8, seed=1), [7] * 24)
    server.step()
    reading = Reading(server.metrics)
    assert reading("vllm:num_requests_running") == len(server.engine.scheduler.running)
    assert reading("vllm:num_requests_waiting") == len(server.engine.scheduler.waiting) > 0


# --- By hand --------------------------------------------------------------------------------------


def only(reading: Reading, name: str) -> float:
    """The one value in a histogram."""
    assert reading(f"vllm:{name}_count") == 1, name
    return reading(f"vllm:{name}_sum")


def test_each_time_is_the_interval_that_vllm_means() -> None:
    """The server has the request for 0.5 s, the engine for 1 s before it runs; a step takes 2 s, the third 4 s."""
    server = Server(seconds=iter([2.0, 2.0, 4.0]).__next__)
    server.now = 10.0
    server.add(SamplingParams(max_tokens=3, ignore_eos=True), waited=0.5)
    server.now += 1
    reading = server.finish()
    assert only(reading, "request_queue_time_seconds") == 1
    assert only(reading, "time_to_first_token_seconds") == 0.5 + 1 + 2
    assert only(reading, "request_prefill_time_seconds") == 2
    assert (reading("vllm:inter_token_latency_seconds_sum"), reading("vllm:inter_token_latency_seconds_count")) == (
        6,
        2,
    )
    assert only(reading, "request_decode_time_seconds") == 6
    assert only(reading, "request_time_per_output_token_seconds") == 3
    assert only(reading, "request_inference_time_seconds") == 8
    assert only(reading, "e2e_request_latency_seconds") == 0.5 + 1 + 8


def test_a_request_without_updates_on_the_way_has_its_first_token_when_it_had_it() -> None:
    server = Server()
    server.add(SamplingParams(max_tokens=4, ignore_eos=True), kind=FINAL_ONLY)
    server.step()
    assert Reading(server.metrics)("vllm:time_to_first_token_seconds_count") == 0
    reading = server.finish()
    assert only(reading, "time_to_first_token_seconds") == 0.25
    assert only(reading, "request_decode_time_seconds") == 0.75
    assert reading("vllm:inter_token_latency_seconds_count") == 0


def test_a_request_cancelled_while_it_waits_has_an_end_and_no_other_time() -> None:
    server = Server()
    server.engine.abort(server.add(SamplingParams(max_tokens=4)))
    reading = server.finish()
    assert reading("vllm:request_success_total", finished_reason="abort") == 1
    assert only(reading, "e2e_request_latency_seconds") == 0
    for name in ("request_queue_time_seconds", "time_to_first_token_seconds", "request_decode_time_seconds"):
        assert reading(f"vllm:{name}_count") == 0
    assert reading("vllm:prompt_tokens_total") == 0


def test_a_refused_request_counts_nowhere() -> None:
    server = Server()
    server.add(SamplingParams(max_tokens=4))
    before = server.finish().values
    with pytest.raises(InvalidRequest):
        server.add(SamplingParams(max_tokens=4), [1] * 40)
    server.step()
    assert read(server.metrics) == before


def test_the_tokens_of_an_admitted_request_are_looked_up_in_the_prefix_cache() -> None:
    """Ten tokens, of which the cache has two full blocks of four and the last block; one is left to run."""
    server = Server()
    for _ in range(2):
        server.add(SamplingParams(max_tokens=1), range(1, 11))
        reading = server.finish()
    assert (reading("vllm:prefix_cache_queries_total"), reading("vllm:prefix_cache_hits_total")) == (20, 9)


def test_after_a_recomputation_all_tokens_of_the_request_are_looked_up_again() -> None:
    server = Server(EngineConfig(num_blocks=6, max_model_len=16, vocab_size=11, block_size=4, preemption="recompute"))
    preempted: list[RequestPreempted] = []

    def listen(event: Event) -> None:
        if isinstance(event, RequestPreempted):
            preempted.append(event)

    server.engine.listeners.append(listen)
    for first in (1, 2):
        server.add(SamplingParams(max_tokens=10, ignore_eos=True), [first, 3, 4, 5, 6])
    reading = server.finish()
    [event] = preempted
    tokens = event.num_tokens + 1  # its newest was not computed yet
    assert reading("vllm:prefix_cache_queries_total") == 5 + 5 + tokens


def test_without_a_prefix_cache_nothing_is_looked_up() -> None:
    server = Server(EngineConfig(num_blocks=8, max_model_len=16, vocab_size=11, enable_prefix_caching=False))
    server.add(SamplingParams(max_tokens=2))
    assert server.finish()("vllm:prefix_cache_queries_total") == 0


def test_max_tokens_left_open_is_what_fits() -> None:
    server = Server()
    server.add(SamplingParams(max_tokens=None, ignore_eos=True), range(1, 11))
    assert only(server.finish(), "request_params_max_tokens") == 30


TEN = EngineConfig(num_blocks=64, max_model_len=32, vocab_size=11, block_size=4, max_num_batched_tokens=16)


@pytest.mark.parametrize("size", [1, 7, 16])
def test_a_steps_tokens_are_the_prompts_it_computed_and_what_it_generated(size: int) -> None:
    """Ten requests of nine tokens that generate ten: 190 as vLLM counts them, of which the last ten are never run."""
    server = Server(replace(TEN, max_num_batched_tokens=size, enable_prefix_caching=False))
    for _ in range(10):
        server.add(SamplingParams(max_tokens=10, ignore_eos=True), range(1, 10))
    reading = server.finish()
    assert reading("minipaged:query_tokens_total") == 10 * (9 + 9)
    assert reading("vllm:iteration_tokens_total_sum") == 190
    assert reading("vllm:prompt_tokens_total") + reading("vllm:generation_tokens_total") == 190


def test_what_the_prefix_cache_had_is_none_of_a_steps_tokens() -> None:
    """The cache has two blocks of four of the nine tokens."""
    server = Server(TEN)
    for _ in range(2):
        server.add(SamplingParams(max_tokens=10, ignore_eos=True), range(1, 10))
        reading = server.finish()
    assert reading("vllm:iteration_tokens_total_sum") == (9 + 10) + (1 + 10)


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
def test_each_sample_has_a_token_that_the_prompts_pass_generates(kind: RequestOutputKind) -> None:
    server = Server(TEN)
    server.add(SamplingParams(n=3, max_tokens=10, ignore_eos=True, seed=1), range(1, 10), kind)
    assert server.finish()("vllm:iteration_tokens_total_sum") == 9 + 3 * 10


def test_what_is_computed_again_after_a_preemption_is_none_of_a_steps_tokens() -> None:
    server = Server(EngineConfig(num_blocks=6, max_model_len=16, vocab_size=11, block_size=4, preemption="recompute"))
    for first in (1, 2):
        server.add(SamplingParams(max_tokens=10, ignore_eos=True), [first, 3, 4, 5, 6])
    reading = server.finish()
    assert reading("minipaged:tokens_recomputed_total") > 0
    assert reading("vllm:iteration_tokens_total_sum") == 2 * (5 + 10)
    assert reading("vllm:request_num_preemptions_count") == 2
    assert reading("vllm:request_num_preemptions_sum") == reading("vllm:num_preemptions_total") > 0


def test_no_step_has_less_than_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step computes again is counted when it is launched, its other tokens when it is done: with asynchronous
    scheduling that is later."""
    sizes: dict[str, Any] = {"num_blocks": 12, "max_model_len": 40, "vocab_size": 11, "block_size": 4}
    server = Server(EngineConfig(**sizes, async_scheduling=True, preemption="recompute"))
    observed: list[float] = []
    histogram = server.metrics._step_tokens
    observe = histogram.observe

    def watched(value: float, times: int = 1) -> None:
        observed.append(value)
        observe(value, times)

    monkeypatch.setattr(histogram, "observe", watched)
    for first in range(6):
        server.add(SamplingParams(max_tokens=20, ignore_eos=True, seed=first), [first, 3, 4, 5, 6])
    reading = server.finish()
    assert reading("minipaged:tokens_recomputed_total") > 0
    assert min(observed) >= 0
    assert reading("vllm:iteration_tokens_total_sum") == 6 * (5 + 20)


def test_the_sizes_of_the_cache_are_told_in_tokens_and_sequences() -> None:
    """64 blocks of 4 tokens, of which a sequence of 30 takes 8."""
    text = Metrics("tiny", replace(TEN, max_model_len=30)).exposition()[0].decode()
    [line] = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info")]
    assert 'kv_cache_size_tokens="256"' in line
    assert 'kv_cache_max_concurrency="8.0"' in line


def test_with_asynchronous_scheduling_the_steps_and_their_tokens_add_up() -> None:
    server = Server(EngineConfig(num_blocks=12, max_model_len=40, vocab_size=11, block_size=4, async_scheduling=True))
    for _ in range(3):
        server.add(SamplingParams(max_tokens=7, ignore_eos=True))
    check_counts(server, server.finish())


def test_of_two_steps_that_one_call_has_committed_each_has_half_of_the_tokens() -> None:
    metrics = Metrics("tiny", CONFIG)
    metrics.after_step([], Stats(blocks_total=12, steps=2, query_tokens=10), 0, 0, 0.0)
    reading = Reading(metrics)
    assert reading("vllm:iteration_tokens_total_sum") == 10
    assert reading.buckets("vllm:iteration_tokens_total")["1.0"] == 0
    assert reading.buckets("vllm:iteration_tokens_total")["8.0"] == 2


# --- The form -------------------------------------------------------------------------------------


def test_names_labels_and_buckets_are_these_and_no_others() -> None:
    server = Server()
    server.add(SamplingParams(max_tokens=2))
    reading = server.finish()
    labels = {"_total": COUNTERS, "": GAUGES}
    expected = {(name + ending, by) for ending, names in labels.items() for name, by in names.items()}
    for name in BUCKETS:
        expected |= {(f"{name}_bucket", ("le",)), (f"{name}_sum", ()), (f"{name}_count", ())}
    assert {(name, frozenset(by)) for name, by in expected} == {
        (name, frozenset(dict(labels))) for name, labels in reading.values
    }
    for name, bounds in BUCKETS.items():
        assert list(reading.buckets(name)) == bounds.split(), name


def test_what_vllms_dashboard_reads_is_there() -> None:
    names = {name for name, _ in Reading(Server().metrics).values}
    assert set(READ_BY_VLLMS_DASHBOARD.split()) <= names


@pytest.mark.parametrize(
    ("accept", "content_type", "parse"),
    [
        ("", "text/plain; version=0.0.4", parse_text),
        ("text/html", "text/plain; version=0.0.4", parse_text),
        (
            "application/openmetrics-text; version=1.0.0,text/plain;q=0.5",
            "application/openmetrics-text",
            parse_openmetrics,
        ),
    ],
)
def test_the_form_is_the_one_that_is_asked_for(accept: str, content_type: str, parse: Callable[[str], Any]) -> None:
    text, given = Server().metrics.exposition(accept)
    assert given.startswith(content_type)
    assert {"vllm:generation_tokens", "vllm:iteration_tokens_total", "process_resident_memory_bytes"} <= {
        family.name for family in parse(text.decode())
    }


def test_two_engines_in_one_process_have_metrics_each() -> None:
    one, other = Server(), Server()
    one.add(SamplingParams(max_tokens=2))
    assert one.finish()("vllm:prompt_tokens_total") == 3
    assert Reading(other.metrics)("vllm:prompt_tokens_total") == 0


def test_a_scrape_in_the_middle_of_a_step_waits_for_the_whole_of_it() -> None:
    server = Server()
    name = server.add(SamplingParams(max_tokens=2, ignore_eos=True))
    seen: list[Reading] = []
    scrape = threading.Thread(target=lambda: seen.append(Reading(server.metrics)))

    def slowly(updates: list[RequestUpdate]) -> Iterator[RequestUpdate]:
        yield from updates
        scrape.start()
        scrape.join(timeout=0.05)
        assert not seen

    updates = server.engine.step()
    assert [update.request_id for update in updates] == [name]
    server.metrics.after_step(slowly(updates), server.engine.current_stats(), 1, 0, server.now)
    scrape.join()
    assert seen[0]("vllm:time_to_first_token_seconds_count") == seen[0]("vllm:generation_tokens_total") == 1


def test_a_request_that_was_taken_back_at_once_is_no_request() -> None:
    """The first of several prompts, of which a later one was refused: it is cancelled before it was `added`."""
    server = Server()
    server.engine.abort(server.engine.add_request([1, 2], SamplingParams(max_tokens=1)))
    reading = server.finish()
    assert [update.output is not None for _, update in server.updates] == [True]
    assert reading("vllm:request_success_total", finished_reason="abort") == 0
    assert reading("vllm:e2e_request_latency_seconds_count") == 0


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    server = Server()
    for _ in range(5):
        server.add(SamplingParams(max_tokens=2))
    server.engine.abort(server.add(SamplingParams(max_tokens=2)))
    server.finish()
    assert not server.metrics._open


def test_before_the_first_step_all_blocks_are_free() -> None:
    metrics = Metrics("tiny", CONFIG)
    assert Reading(metrics)("minipaged:blocks", state="free") == CONFIG.num_blocks
    assert Stats(blocks_total=CONFIG.num_blocks) == metrics._stats


# --- The dashboard and the docs -------------------------------------------------------------------


def test_every_expression_of_the_dashboard_names_what_is_exposed() -> None:
    """Names and labels, in every panel; and every panel has an expression."""
    samples = defaultdict(set)
    for name, labels in Reading(Server().metrics).values:
        samples[name] |= {"model_name", "engine", *dict(labels)}
    dashboard = json.loads((ROOT / "docs" / "assets" / "grafana.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) >= 10
    for panel in panels:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        assert panel["description"]
        for target in panel["targets"]:
            expression = target["expr"]
            named = re.findall(r"((?:vllm|minipaged):\w+)\{([^}]*)\}", expression)
            assert len(named) == len(re.findall(r"(?:vllm|minipaged):", expression)) >= 1, expression
            for name, selectors in named:
                assert name in samples, f"{panel['title']}: {name}"
                assert set(re.findall(r"(\w+)=", selectors)) <= samples[name], expression
                assert 'model_name="$model_name"' in selectors, expression
            for grouped in re.findall(r"\bby ?\(([^)]*)\)", expression):
                assert set(re.split(r",\s*", grouped)) <= set.union(*(samples[name] for name, _ in named)), expression
            for shown in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert shown in set.union(*(samples[name] for name, _ in named)), expression
    variables = {variable["name"]: variable["type"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource": "datasource", "model_name": "query"}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    dashboard = json.loads((ROOT / "docs" / "assets" / "grafana.json").read_text())
    taken: Counter[tuple[int, int]] = Counter()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        taken.update(
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
    assert set(taken.values()) == {1}


def test_the_table_of_the_docs_has_every_metric_with_its_labels() -> None:
    page, _, _ = (ROOT / "docs" / "serving.md").read_text().partition("## Tuning")
    rows = re.findall(r"^\| `((?:vllm|minipaged):\w+)`([^|]*)\|", page, flags=re.MULTILINE)
    documented = {name: tuple(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    assert len(rows) == len(documented)
    counters = {f"{name}_total": labels for name, labels in (COUNTERS | COUNTERS_OF_DRAFTS).items()}
    assert documented == {**GAUGES, **counters, **dict.fromkeys(BUCKETS, ())}


def test_every_metric_and_setting_of_the_tuning_table_exists() -> None:
    from minipaged.setup.settings import Settings

    page = (ROOT / "docs" / "serving.md").read_text()
    _, _, table = page.partition("## Tuning")
    names = {name for name, _ in Reading(Server().metrics).values}
    named = re.findall(r"`((?:vllm|minipaged):\w+)", table)
    assert len(named) >= 10
    for name in named:
        assert name in names or f"{name}_count" in names, name
    options = re.findall(r"`--([\w-]+)", table)
    assert len(options) >= 8
    fields = set(Settings.__dataclass_fields__)
    of_the_server = {"max_waiting", "scheduling_policy", "port"}
    assert {option.replace("-", "_") for option in options} <= fields | of_the_server
