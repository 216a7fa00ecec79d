"""What a server tells of itself, for Prometheus: how long requests take, how full the memory is, what paging saves.

Names, labels, buckets and the interval that each time stands for are those of vLLM 0.33 (its `v1/metrics`), so that its
Grafana dashboard works unchanged. What vLLM has no name for is `minipaged:...`: blocks by state, copies on write, what
was swapped and recomputed, and the waste of the paper's Fig. 2.

    arrival      added to the engine   first scheduled        first token            last token
       |                  |-------- queue ----|------- prefill ------|------- decode -------|
       |                                      |------------------ inference ----------------|
       |------------------------ time to first token ----------------|
       |------------------------------------ end to end ------------------------------------|

It listens to no events, because an engine with a listener makes an event of every token. After each step it is told
what the step returned, and what the engine has counted. A scrape shows the state after one step, all of it, because the
engine's thread and the one that scrapes take turns (`_lock`).

A step's tokens are the prompt tokens that it computed and the tokens that it generated. Each generated token is run in
the step after the one that chose it, but for the last, which is never run; so what a step ran says nearly the same, and
what is missing is a token for each sequence: it is counted where the sequence begins.

A request counts once, however many samples it has, because that is what it costs: its prompt is computed once. (In vLLM
each of n samples is a request.)
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
    """1, 2, 5, 10, 20, 50, ... as far as a sequence can be long."""
    return tuple(m * 10**e for e in range(len(str(most))) for m in (1, 2, 5) if m * 10**e <= most)


@dataclass(slots=True)
class _Open:
    """A request that has not ended. Times in seconds on the engine's clock."""

    arrival_time: float
    num_prompt_tokens: int
    n: int
    max_tokens: int
    first_token_time: float | None = None
    last_token_time: float = 0.0
    """Of what its updates have told of, if there is a first."""


class Metrics:
    """The metrics of one engine, with a registry of their own: in one process there may be several.

    On the engine's thread: `added` for each request that the engine has taken (not for one that it refused), `refused`
    for those for which the queue was too full, and `after_step` when a call of `Engine.step` has returned. From any
    thread: `exposition`.

    A request with FINAL_ONLY updates, or a beam search, tells of its tokens when it ends. So its time to first token is
    counted only then, and its inter-token latencies never.
    """

    def __init__(self, model_name: str, config: EngineConfig, *, engine: str = "0") -> None:
        """`engine`: the label by which several are told apart."""
        self.registry = CollectorRegistry()
        self._lock = Lock()
        self._config = config
        self._labels = {"model_name": model_name, "engine": engine}
        self._open: dict[str, _Open] = {}
        self._stats = Stats(blocks_total=config.num_blocks)  # after the latest step
        self._num_begun = 0  # sequences that have a first token
        self._num_in_steps = 0  # tokens that were observed as some step's
        self._num_running = self._num_waiting = self._num_prompt_tokens = self._num_refused = 0
        self._finished = dict.fromkeys(FINISHED_REASONS, 0)
        self._histograms: list[_Histogram] = []
        self._make_histograms(lengths_up_to(config.max_model_len))
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def _make_histograms(self, lengths: Sequence[float]) -> None:
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
            "request_params_max_tokens", lengths, "max_tokens of a request, or what max_model_len leaves it."
        )
        self._n = histogram("request_params_n", SAMPLES, "n of a request, or its beam_width.")
        self._preemptions = histogram("request_num_preemptions", PREEMPTIONS, "How often a request was preempted.")

    # --- On the engine's thread -------------------------------------------------------------------

    def added(
        self, request_id: str, params: SamplingParams | BeamSearchParams, num_prompt_tokens: int, arrival_time: float
    ) -> None:
        """The engine has taken this request. `arrival_time`: when it was added, on the engine's clock."""
        n = params.beam_width if isinstance(params, BeamSearchParams) else params.n
        max_tokens = params.max_tokens or self._config.max_model_len - num_prompt_tokens
        self._open[request_id] = _Open(arrival_time, num_prompt_tokens, n, max_tokens)

    def refused(self, number: int) -> None:
        """The queue was full, and so many requests were not taken."""
        with self._lock:
            self._num_refused += number

    def after_step(
        self, updates: Iterable[RequestUpdate], stats: Stats, num_running: int, num_waiting: int, now: float
    ) -> None:
        """A call of `Engine.step` has returned `updates`. `stats`: the engine's `current_stats()`, which are kept.

        `now`: the time on the engine's clock, at which all of these updates count. A request that was not `added`
        counts nowhere: the first of several prompts, say, of which a later one was refused.
        """
        with self._lock:
            self._num_begun += self._count_tokens(updates, now)
            if steps := stats.steps - self._stats.steps:  # a call can commit two, of which only the sum is known
                total = stats.query_tokens - stats.tokens_recomputed + self._num_begun
                # What the next step recomputes is known before its tokens are: a step has no tokens less for that.
                number = max(0, total - self._num_in_steps)
                self._num_in_steps += number
                self._step_tokens.observe(number / steps, steps)
            self._stats, self._num_running, self._num_waiting = stats, num_running, num_waiting

    def _count_tokens(self, updates: Iterable[RequestUpdate], now: float) -> int:
        """Returns the number of sequences that have their first token.

        Nearly all sequences had their last token at the same time, so a step has few different latencies: each is
        added once, with its number. (A step of 256 sequences takes 35 microseconds; 256 calls of `observe` of
        `prometheus_client`'s own histogram took 176.)"""
        num_begun = 0
        tokens_after: dict[float, int] = {}  # the time of the token before -> how many tokens
        for update in updates:
            request, output = self._open.get(update.request_id), update.output
            if request is None:
                continue
            first: float | None = now
            num_tokens = len(update.completions)  # as many sequences, each of which has one more
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
        """Of what a request did not come to (cancelled while it waited, say), there is no time."""
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
        """The answer to a scrape, and its content type: Prometheus' text, or OpenMetrics if `accept` (the request's
        Accept header) asks for it. Takes some milliseconds, so an event loop has a thread do it."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def collect(self) -> list[Metric]:
        """What `prometheus_client` asks a collector for."""
        with self._lock:
            return [*self._gauges(), *self._counters(), *(h.family(self._labels) for h in self._histograms)]

    def _gauges(self) -> Iterator[Metric]:
        def gauge(name: str, text: str, value: float, **labels: str) -> Metric:
            return self._add(GaugeMetricFamily(name, text, labels=[*self._labels, *labels]), value, labels)

        stats, config = self._stats, self._config
        yield gauge("vllm:num_requests_running", "Requests that run.", self._num_running)
        yield gauge("vllm:num_requests_waiting", "Requests that wait, preempted ones too.", self._num_waiting)
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait: for capacity, or (deferred) for something else, which none does here.",
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
            "How the KV cache is set up; always 1.",
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
            "Block-table entries beyond the first that hold the same block.",
            stats.blocks_saved,
        )
        blocks = GaugeMetricFamily(
            "minipaged:blocks",
            "Blocks of the pool: free, held by sequences, or cached, which is held by the prefix cache only.",
            labels=[*self._labels, "state"],
        )
        free = stats.blocks_total - stats.blocks_used - stats.blocks_cached
        for state, number in {"free": free, "held": stats.blocks_used, "cached": stats.blocks_cached}.items():
            self._add(blocks, number, {"state": state})
        yield blocks
        yield self._waste(stats)

    def _waste(self, stats: Stats) -> Metric:
        family = GaugeMetricFamily(
            "minipaged:kv_slots_share",
            "Share of the slots taken since the start (paper, Fig. 2): as paged, and as a contiguous cache would.",
            labels=[*self._labels, "cache", "kind"],
        )
        for cache, use in {"paged": stats.paged, "contiguous": stats.contiguous}.items():
            for kind in ("tokens", "reserved", "internal_fragmentation"):
                share = getattr(use, kind) / use.taken if use.taken else 0
                self._add(family, share, {"cache": cache, "kind": kind})
        return family

    def _counters(self) -> Iterator[Metric]:
        def counter(name: str, text: str, by: Mapping[str, float] | float, label: str = "") -> Metric:
            """`by`: one value, or one for each value of `label`."""
            family = CounterMetricFamily(name, text, labels=[*self._labels, *([label] if label else [])])
            for value, number in by.items() if isinstance(by, Mapping) else [("", by)]:
                self._add(family, number, {label: value} if label else {})
            return family

        stats = self._stats
        preemptions = {"swap": stats.preempted_by_swap, "recompute": stats.preempted_by_recompute}
        swapped = {"out": stats.blocks_swapped_out, "in": stats.blocks_swapped_in}
        handed_over = {"stored": stats.blocks_stored, "loaded": stats.blocks_loaded}
        yield counter("vllm:prompt_tokens", "Prompt tokens of requests with a first token.", self._num_prompt_tokens)
        yield counter("vllm:generation_tokens", "Tokens generated.", stats.generated_tokens)
        yield counter("vllm:request_success", "Requests that have ended.", self._finished, "finished_reason")
        rejections = CounterMetricFamily(
            "vllm:admission_rejections",
            "Requests refused for a full queue, by its limit: --max-waiting, or one of tokens, which is not here.",
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
        yield counter("minipaged:preemptions", "Preemptions, by the way back.", preemptions, "mode")
        yield counter("minipaged:blocks_copied", "Blocks copied on write.", stats.blocks_copied)
        yield counter("minipaged:blocks_swapped", "Blocks copied to the host and back.", swapped, "direction")
        yield counter(
            "minipaged:blocks_handed_over", "Blocks left for other engines, and had.", handed_over, "direction"
        )
        yield counter("minipaged:tokens_recomputed", "Tokens computed again.", stats.tokens_recomputed)
        yield counter("minipaged:query_tokens", "Tokens that steps have run.", stats.query_tokens)
        yield counter("minipaged:steps", "Steps.", stats.steps)
        yield counter("minipaged:step_seconds", "Time in steps.", stats.step_seconds)

    def _add(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: float, labels: Mapping[str, str]
    ) -> GaugeMetricFamily | CounterMetricFamily:
        family.add_metric([*self._labels.values(), *labels.values()], value)
        return family


class _Histogram:
    """Counts of values by bucket. `prometheus_client.Histogram` adds one value a call; this one, many equal ones."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = [*map(float, bounds), math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add a value, so many times."""
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
    """Why a request ended: "length" as soon as one of its sequences had come to its last token."""
    if output.error is not None:
        return "error"
    if not output.finished:
        return "abort"
    return "length" if any(completion.finish_reason == "length" for completion in output.outputs) else "stop"
