"""The server's metrics for Prometheus: latencies of requests, use of the KV memory, and savings by paging.

Names, labels, buckets and the interval of each latency are those of vLLM 0.33 (its `v1/metrics`), so that its Grafana
dashboard works unchanged. Metrics that vLLM does not have are named `minipaged:...`: blocks by state, entries of block
tables by group of layers, copies on write, blocks that windows have passed, swapped blocks, recomputed tokens, and the
waste of the paper's Fig. 2.

    arrival      added to the engine   first scheduled        first token            last token
       |                  |-------- queue ----|------- prefill ------|------- decode -------|
       |                                      |------------------ inference ----------------|
       |------------------------ time to first token ----------------|
       |------------------------------------ end to end ------------------------------------|

The metrics are not computed from events, because an engine with a listener makes an event for every token. Instead
`after_step` receives the updates and the statistics of each step. A scrape shows the consistent state after one step,
because the engine's thread and the scraping thread share a lock (`_lock`).

The tokens of a step are the prompt tokens that it computed and the tokens that it generated. They are derived from the
query tokens that it ran. A generated token is run in the step after the one that chose it, except the last one of a
sequence, which is never run. So query tokens miss one token per sequence, which is added when the sequence has its
first token.

A request counts once, regardless of its number of samples, because its prompt is computed once. (In vLLM each of n
samples is a request.)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from minipaged.engine.stats import Stats
from minipaged.outputs import RequestOutput, RequestUpdate
from minipaged.params import BeamSearchParams, EngineConfig, SamplingParams

FINISHED_REASONS = ("stop", "length", "abort", "error")
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_TOKENS = (1, *(8 << i for i in range(12)))  # 8 to 16384
SAMPLES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


def lengths_up_to(most: int) -> tuple[int, ...]:
    """Return the bucket bounds 1, 2, 5, 10, 20, 50, ... up to `most`."""
    return tuple(m * 10**e for e in range(len(str(most))) for m in (1, 2, 5) if m * 10**e <= most)


@dataclass(slots=True)
class _Open:
    """A request that has not ended. Times are in seconds on the engine's clock."""

    arrival_time: float
    num_prompt_tokens: int
    n: int
    max_tokens: int
    first_token_time: float | None = None
    last_token_time: float = 0.0
    """The time of the latest token in its updates, once there is a first."""


class Metrics:
    """The metrics of one engine. They have their own registry, because one process may have several engines.

    Call these on the engine's thread: `added` for each request that the engine has accepted, `refused` for requests
    that did not fit in the queue, and `after_step` when a call of `Engine.step` has returned. Any thread may call
    `exposition`.

    A request with FINAL_ONLY updates and a beam search report their tokens only at the end. So their time to first
    token is counted then, and their inter-token latencies never.
    """

    def __init__(self, model_name: str, config: EngineConfig, *, engine: str = "0") -> None:
        """`engine`: the label that distinguishes several engines."""
        self.registry = CollectorRegistry()
        self._lock = Lock()
        self._config = config
        self._labels = {"model_name": model_name, "engine": engine}
        self._open: dict[str, _Open] = {}
        self._stats = Stats(blocks_total=config.num_blocks)  # after the latest step
        self._num_begun = 0  # sequences that have a first token
        self._num_in_steps = 0  # tokens that `_step_tokens` has observed so far
        self._num_running = self._num_waiting = self._num_prompt_tokens = self._num_refused = 0
        self._finished = dict.fromkeys(FINISHED_REASONS, 0)
        self._histograms: list[_Histogram] = []
        self._make_histograms(lengths_up_to(config.max_model_len))
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def _make_histograms(self, lengths: Sequence[float]) -> None:
        """Make the histograms. All of them have vLLM's names."""

        def histogram(name: str, bounds: Sequence[float], text: str) -> _Histogram:
            self._histograms.append(_Histogram(f"vllm:{name}", text, bounds))
            return self._histograms[-1]

        self._first_token = histogram(
            "time_to_first_token_seconds", FIRST_TOKEN_SECONDS, "From a request's arrival to its first token."
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds", TOKEN_SECONDS, "From one token of a sequence to its next."
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            TOKEN_SECONDS,
            "Decode time of a request / tokens of its longest sequence after the first.",
        )
        self._end_to_end = histogram(
            "e2e_request_latency_seconds", REQUEST_SECONDS, "From a request's arrival to its end."
        )
        self._queue = histogram(
            "request_queue_time_seconds", REQUEST_SECONDS, "From the engine's queue to the first step."
        )
        self._prefill = histogram("request_prefill_time_seconds", REQUEST_SECONDS, "First step to first token.")
        self._decode = histogram("request_decode_time_seconds", REQUEST_SECONDS, "First token to last token.")
        self._inference = histogram("request_inference_time_seconds", REQUEST_SECONDS, "First step to last token.")
        self._step_tokens = histogram(
            "iteration_tokens_total", STEP_TOKENS, "Prompt tokens computed and tokens generated by a step."
        )
        self._prompt_tokens = histogram("request_prompt_tokens", lengths, "Tokens of a request's prompt.")
        self._generation_tokens = histogram(
            "request_generation_tokens", lengths, "Tokens generated for a request, of all its sequences."
        )
        self._longest = histogram(
            "request_max_num_generation_tokens", lengths, "Tokens of the longest sequence generated for a request."
        )
        self._max_tokens = histogram(
            "request_params_max_tokens", lengths, "max_tokens of a request, or its room below max_model_len."
        )
        self._n = histogram("request_params_n", SAMPLES, "n of a request, or its beam_width.")
        self._preemptions = histogram("request_num_preemptions", PREEMPTIONS, "Number of preemptions of a request.")

    # --- On the engine's thread -------------------------------------------------------------------

    def added(
        self, request_id: str, params: SamplingParams | BeamSearchParams, num_prompt_tokens: int, arrival_time: float
    ) -> None:
        """Note a request that the engine has accepted. `arrival_time`: when it was added, on the engine's clock."""
        n = params.beam_width if isinstance(params, BeamSearchParams) else params.n
        max_tokens = params.max_tokens or self._config.max_model_len - num_prompt_tokens
        self._open[request_id] = _Open(arrival_time, num_prompt_tokens, n, max_tokens)

    def refused(self, number: int) -> None:
        """Count requests that were refused because the queue was full."""
        with self._lock:
            self._num_refused += number

    def after_step(
        self, updates: Iterable[RequestUpdate], stats: Stats, num_running: int, num_waiting: int, now: float
    ) -> None:
        """Count the updates that a call of `Engine.step` has returned, and keep the engine's `current_stats()`.

        `now` is the time of all these updates, on the engine's clock. Updates of a request that was not `added` are
        ignored, e.g. of an earlier prompt in a body that was refused for a later one.
        """
        with self._lock:
            self._num_begun += self._count_tokens(updates, now)
            if steps := stats.steps - self._stats.steps:  # a call can commit two steps; only their sum is known
                num_refused = stats.tokens_drafted - stats.tokens_accepted
                total = stats.query_tokens - num_refused - stats.tokens_recomputed + self._num_begun
                # tokens_recomputed is known one step before query_tokens, so the difference may be negative.
                number = max(0, total - self._num_in_steps)
                self._num_in_steps += number
                self._step_tokens.observe(number / steps, steps)
            self._stats, self._num_running, self._num_waiting = stats, num_running, num_waiting

    def _count_tokens(self, updates: Iterable[RequestUpdate], now: float) -> int:
        """Count the tokens of the updates, and return the number of sequences that got their first token.

        Nearly all sequences got their last token at the same time, so a step has few different latencies. Each is added
        once, with its number of tokens. (A step of 256 sequences takes 35 microseconds; 256 calls of `observe` of
        `prometheus_client`'s own histogram took 176.)"""
        num_begun = 0
        tokens_after: dict[float, int] = {}  # time of the previous token -> number of tokens
        for update in updates:
            request, output = self._open.get(update.request_id), update.output
            if request is None:
                continue
            first: float | None = now
            num_tokens = len(update.completions)  # each has one more token, or with drafts several at one time
            if output:
                first = output.metrics.first_token_time
                num_tokens = sum(1 for news in update.completions if news.new_token_ids)
            if request.first_token_time is None:
                if first is not None:
                    self._note_first_token(request, first)
                    request.last_token_time = now
                    num_begun += sum(1 for each in output.outputs if each.token_ids) if output else num_tokens
            elif num_tokens:
                last, request.last_token_time = request.last_token_time, now
                tokens_after[last] = tokens_after.get(last, 0) + num_tokens
            if output:
                del self._open[update.request_id]
                self._note_end(request, output, now)
        for last, number in tokens_after.items():
            self._inter_token.observe(now - last, number)
        return num_begun

    def _note_first_token(self, request: _Open, at: float) -> None:
        request.first_token_time = at
        self._first_token.observe(at - request.arrival_time)
        self._num_prompt_tokens += request.num_prompt_tokens

    def _note_end(self, request: _Open, output: RequestOutput, now: float) -> None:
        """Count a request that has ended. A phase that it did not reach, e.g. because it was cancelled, has no time."""
        self._finished[_finished_reason(output)] += 1
        lengths = [len(completion.token_ids) for completion in output.outputs]
        longest = max(lengths, default=0)
        self._end_to_end.observe(now - request.arrival_time)
        self._prompt_tokens.observe(request.num_prompt_tokens)
        self._generation_tokens.observe(sum(lengths))
        self._longest.observe(longest)
        self._n.observe(request.n)
        self._preemptions.observe(output.metrics.num_preemptions)
        self._max_tokens.observe(request.max_tokens)
        scheduled, first, last = output.metrics.first_scheduled_time, request.first_token_time, request.last_token_time
        if scheduled is None:
            return
        self._queue.observe(scheduled - output.metrics.arrival_time)
        if first is None:
            return
        self._prefill.observe(first - scheduled)
        self._decode.observe(last - first)
        self._inference.observe(last - scheduled)
        if longest > 1:
            self._per_token.observe((last - first) / (longest - 1))

    # --- At a scrape ------------------------------------------------------------------------------

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return the answer to a scrape and its content type: Prometheus' text, or OpenMetrics if `accept` (the
        request's Accept header) asks for it. It takes some milliseconds, so do not call it in an event loop."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def collect(self) -> list[Metric]:
        """Return all metrics. Called by `prometheus_client`."""
        with self._lock:
            return [*self._gauges(), *self._counters(), *(h.family(self._labels) for h in self._histograms)]

    def _gauges(self) -> Iterator[Metric]:
        def gauge(name: str, text: str, value: float, **labels: str) -> Metric:
            return self._add(GaugeMetricFamily(name, text, labels=[*self._labels, *labels]), value, labels)

        stats, config = self._stats, self._config
        yield gauge("vllm:num_requests_running", "Running requests.", self._num_running)
        yield gauge("vllm:num_requests_waiting", "Waiting requests, including preempted ones.", self._num_waiting)
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests by reason: capacity, or deferred, which is always 0 here.",
            labels=[*self._labels, "reason"],
        )
        for reason, number in {"capacity": self._num_waiting, "deferred": 0}.items():
            self._add(waiting, number, {"reason": reason})
        yield waiting
        yield gauge(
            "vllm:kv_cache_usage_perc",
            "Blocks that sequences hold / all blocks; 1 is full.",
            stats.blocks_used / stats.blocks_total,
        )
        yield gauge(
            "vllm:cache_config_info",
            "Configuration of the KV cache, in the labels; always 1.",
            1,
            block_size=str(config.block_size),
            num_gpu_blocks=str(config.num_blocks),
            num_cpu_blocks=str(config.num_swap_blocks),
            enable_prefix_caching=str(config.enable_prefix_caching),
            kv_cache_size_tokens=str(config.num_blocks * config.block_size),
            kv_cache_max_concurrency=str(config.num_blocks / -(-config.max_model_len // config.block_size)),
        )
        yield gauge(
            "minipaged:blocks_saved",
            "Blocks saved by sharing: block-table entries minus distinct blocks.",
            stats.blocks_saved,
        )
        blocks = GaugeMetricFamily(
            "minipaged:blocks",
            "Blocks of the pool: free, held by sequences, or cached (held only by the prefix cache).",
            labels=[*self._labels, "state"],
        )
        free = stats.blocks_total - stats.blocks_used - stats.blocks_cached
        for state, number in {"free": free, "held": stats.blocks_used, "cached": stats.blocks_cached}.items():
            self._add(blocks, number, {"state": state})
        yield blocks
        entries = GaugeMetricFamily(
            "minipaged:table_entries",
            "Block-table entries by group of layers, with the group's window in tokens. A shared block counts in each.",
            labels=[*self._labels, "group", "window"],
        )
        for group, window in enumerate(config.group_windows):
            number = stats.entries_by_group[group] if stats.entries_by_group else 0
            self._add(entries, number, {"group": str(group), "window": "all" if window is None else str(window)})
        yield entries
        yield self._waste(stats)

    def _waste(self, stats: Stats) -> Metric:
        family = GaugeMetricFamily(
            "minipaged:kv_slots_share",
            "Share of all slots taken since the start (paper, Fig. 2), in the paged and in a contiguous cache.",
            labels=[*self._labels, "cache", "kind"],
        )
        for cache, use in {"paged": stats.paged, "contiguous": stats.contiguous}.items():
            for kind in ("tokens", "reserved", "internal_fragmentation"):
                share = getattr(use, kind) / use.taken if use.taken else 0
                self._add(family, share, {"cache": cache, "kind": kind})
        return family

    def _counters(self) -> Iterator[Metric]:
        def counter(name: str, text: str, by: Mapping[str, float] | float, label: str = "") -> Metric:
            """Make a counter. `by`: its value, or its values by the values of `label`."""
            family = CounterMetricFamily(name, text, labels=[*self._labels, *([label] if label else [])])
            for value, number in by.items() if isinstance(by, Mapping) else [("", by)]:
                self._add(family, number, {label: value} if label else {})
            return family

        stats = self._stats
        preemptions = {"swap": stats.preempted_by_swap, "recompute": stats.preempted_by_recompute}
        swapped = {"out": stats.blocks_swapped_out, "in": stats.blocks_swapped_in}
        handed_over = {"stored": stats.blocks_stored, "loaded": stats.blocks_loaded}
        floors = {"down": stats.blocks_demoted, "up": stats.blocks_promoted}
        yield counter("vllm:prompt_tokens", "Prompt tokens of requests with a first token.", self._num_prompt_tokens)
        yield counter("vllm:generation_tokens", "Tokens generated.", stats.generated_tokens)
        yield counter("vllm:request_success", "Requests that have ended.", self._finished, "finished_reason")
        rejections = CounterMetricFamily(
            "vllm:admission_rejections",
            "Requests refused for a full queue, by limit: of requests (--max-waiting) or of tokens (none here).",
            labels=["model_name", "reason"],
        )
        for reason, number in {"max_num_queued_reqs": self._num_refused, "max_num_queued_tokens": 0}.items():
            rejections.add_metric([self._labels["model_name"], reason], number)
        yield rejections
        yield counter("vllm:num_preemptions", "Preemptions.", sum(preemptions.values()))
        yield counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_cache_query_tokens
        )
        yield counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_cache_hit_tokens)
        yield counter("minipaged:prefix_cache_evictions", "Cached blocks given up.", stats.prefix_cache_evictions)
        yield counter("minipaged:prefix_cache_salts", "Different salts, up to 65,536.", stats.prefix_cache_salts)
        yield counter("minipaged:preemptions", "Preemptions by mode.", preemptions, "mode")
        yield counter("minipaged:blocks_copied", "Blocks copied on write.", stats.blocks_copied)
        yield counter("minipaged:blocks_passed", "Blocks given back because windows passed them.", stats.blocks_passed)
        yield counter("minipaged:blocks_swapped", "Blocks copied to the host and back.", swapped, "direction")
        yield counter(
            "minipaged:blocks_handed_over",
            "Blocks stored for and loaded from other engines or the disk.",
            handed_over,
            "direction",
        )
        yield counter("minipaged:floor_blocks", "Blocks moved to and from the host floor.", floors, "direction")
        yield counter("minipaged:tokens_recomputed", "Tokens computed again.", stats.tokens_recomputed)
        if speculation := self._config.speculative_config:
            at = dict.fromkeys(map(str, range(speculation.num_speculative_tokens)), 0)
            at |= {str(place): number for place, number in enumerate(stats.tokens_accepted_at)}
            yield counter("vllm:spec_decode_num_drafts", "Drafts, one per sequence and step.", stats.num_drafts)
            yield counter("vllm:spec_decode_num_draft_tokens", "Tokens of those drafts.", stats.tokens_drafted)
            yield counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that stood.", stats.tokens_accepted)
            yield counter(
                "vllm:spec_decode_num_accepted_tokens_per_pos", "Those by their place in the draft.", at, "position"
            )
            yield counter(
                "minipaged:blocks_rolled_back", "Blocks of tokens that did not stand.", stats.blocks_rolled_back
            )
        yield counter("minipaged:query_tokens", "Tokens that steps have run.", stats.query_tokens)
        yield counter("minipaged:steps", "Steps.", stats.steps)
        yield counter("minipaged:step_seconds", "Time in steps.", stats.step_seconds)

    def _add(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: float, labels: Mapping[str, str]
    ) -> GaugeMetricFamily | CounterMetricFamily:
        family.add_metric([*self._labels.values(), *labels.values()], value)
        return family


class _Histogram:
    """A histogram that can add many equal values in one call, unlike `prometheus_client.Histogram`."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = [*map(float, bounds), math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add a value `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, labels: Mapping[str, str]) -> Metric:
        buckets, count = [], 0
        for bound, number in zip(self._bounds, self._counts, strict=True):
            count += number
            buckets.append((floatToGoString(bound), count))  # type: ignore[no-untyped-call]
        family = HistogramMetricFamily(self._name, self._text, labels=[*labels])
        family.add_metric([*labels.values()], buckets, self._sum)
        return family


def _finished_reason(output: RequestOutput) -> str:
    """Return why a request ended: "length" if at least one of its sequences reached its length limit."""
    if output.error is not None:
        return "error"
    if not output.finished:
        return "abort"
    return "length" if any(completion.finish_reason == "length" for completion in output.outputs) else "stop"
