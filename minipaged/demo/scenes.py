"""The scenes: each has a hint on what to watch for, requests to serve, and findings to report.

Each scene shows one idea of the paper's section 4 on the real model, in the smallest setting that can show it. Scenes
adapt to the model and to the user's sizes: pools are sized in tokens. The pool for preemption is sized by the prompts,
so that it is always a little too small. The six scenes turn prefix caching off, except for the one that is about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from minipaged.demo.measures import Measures
from minipaged.demo.stage import Arrival, DemoRun, Stage
from minipaged.demo.ticker import printable
from minipaged.engine.detokenizer import Decode, text_of
from minipaged.errors import InvalidRequest
from minipaged.events import HOLE, Event
from minipaged.handover.shared_storage import SharedStorageConnector
from minipaged.models.shards import Shard, shard_of
from minipaged.outputs import RequestOutput
from minipaged.params import BeamSearchParams, PreemptionMode, SamplingParams
from minipaged.replay.state import LiveSequence
from minipaged.replay.teller import Topic, blocks_only

FOUR_SCORE = "Four score and seven years ago our"
"""The prompt in the paper's Fig. 6 and Fig. 8. It has seven tokens in this model, too."""

QUESTIONS = (
    "Give me a title for a book about trains.",
    "Write a haiku about the sea.",
    "Why is the sky blue?",
    "Explain in one sentence what memory paging is.",
    "How does a bicycle stay upright?",
    "What is the capital of France?",
    "What is a good name for a grey cat?",
    "Name three things that a cache is good for.",
)

TEACHER = (
    "You are a patient teacher who explains the world to young children. Use short sentences and simple words. Never "
    "use numbers or formulas. Say first what the thing is, then what it is good for. If a question is about an animal, "
    "say where it lives and what it eats. If it is about a machine, say what makes it move. Be kind, be cheerful, and "
    "never tell more than two sentences at a time, because the children would rather go out and see for themselves."
)
CHILDREN = (
    "What is a train?",
    "What is a clock?",
    "What is a whale?",
    "What is a ship?",
    "What is a lighthouse?",
)

MISSPELT = (
    "The cat sat on the mat, and the dog lay on teh sofa. When the cat saw the dog, the cat ran from the mat to teh "
    "door."
)
"""A text of which most is to be repeated, and some is not."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and all its outputs, in the order of their scores (beam search) or of the samples."""

    prompt: str
    outputs: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[str, ...]
    scores: tuple[float | None, ...]
    """The outputs' scores. Only beam search has scores."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One entry of a block table, with the tokens in its block."""

    logical: int
    physical: int
    filled: int
    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankPool:
    """The pool of one rank of a model at the end of a run."""

    rank: int
    kv_heads: tuple[int, ...]
    """The KV heads whose keys and values the rank stores."""
    block_bytes: int
    blocks_written: tuple[int, ...]
    """The blocks that are not empty."""


@dataclass(frozen=True, slots=True)
class GroupTable:
    """The block table of one group of layers at the end of a sequence."""

    run: str
    num_layers: int
    window: int | None
    """The number of tokens that its layers see; None: all."""
    entries: tuple[int, ...]
    """The blocks, with -1 for each that was given back because the window had passed it."""
    num_bytes: int
    """The bytes of the blocks."""


@dataclass(frozen=True, slots=True)
class SceneResult:
    """The results of a scene."""

    texts: list[Text]
    story: list[str]
    """The events of the runs in plain lines."""
    runs: list[Measures]
    findings: list[str]
    """Sentences that state what the runs show, with numbers computed from the runs."""
    holds: bool = True
    """Whether the findings are what paging promises."""
    events: tuple[list[Event], ...] = ()
    """The events of each run."""
    block_table: tuple[TableRow, ...] = ()
    """The block table of the first sequence at its end. Only the scene about block tables has it."""
    rank_pools: tuple[RankPool, ...] = ()
    """The pools of the ranks. Only the scene with several ranks has them."""
    group_tables: tuple[GroupTable, ...] = ()
    """The block tables of the groups of layers. Only the scene about windows has them."""
    tree: tuple[str, ...] = ()
    """The beams as a tree, in lines. Only the scene about beam search has it."""


@dataclass(frozen=True, slots=True)
class Scene:
    name: str
    title: str
    watch: str
    """A hint on what to watch for, with the section of the paper."""
    play: Callable[[Stage], SceneResult]


# --- One request ----------------------------------------------------------------------------------


def one_request(stage: Stage) -> SceneResult:
    """Serve one request, with the prompt and the block size (4) of Fig. 6."""
    arrivals = [stage.complete(FOUR_SCORE, SamplingParams(temperature=0, max_tokens=stage.tokens(24)))]
    size = stage.block_size_or(4)
    run = stage.run(
        "one request",
        arrivals,
        {"join": 1, "grow": 4},
        block_size=size,
        num_blocks=stage.blocks_of(1024, size),
        num_swap_blocks=0,
        enable_prefix_caching=False,
    )
    paged, contiguous = run.measures.paged, run.measures.contiguous
    finding = (
        f"Of the memory it took, paging wasted {percent(1 - paged.share_of_tokens)}, all of it in the last block. "
        f"Reserving {stage.max_model_len} slots wasted {percent(1 - contiguous.share_of_tokens)}; in the paper, "
        "earlier systems wasted 61.8 % to 79.6 % (Fig. 2)."
    )
    table = block_table(stage, run.state.finished[0].done[0], size)
    return outcome_of(arrivals, run, [finding], block_table=table)


def block_table(stage: Stage, sequence: LiveSequence, block_size: int) -> tuple[TableRow, ...]:
    """The block table of a sequence at its end."""
    words = [stage.tokenizer.decode([token]) for token in sequence.tokens[: sequence.num_computed]]
    rows = []
    for logical, physical in enumerate(sequence.table):
        here = words[logical * block_size : (logical + 1) * block_size]
        rows.append(TableRow(logical, physical, len(here), tuple(here)))
    return tuple(rows)


# --- A continuous batch ---------------------------------------------------------------------------


def continuous_batch(stage: Stage) -> SceneResult:
    """Serve requests of different lengths, which come and go (Fig. 7)."""
    arrivals = [
        stage.ask(
            question,
            SamplingParams(
                temperature=0.7, top_p=0.9, seed=stage.seed + i, max_tokens=stage.tokens((20, 30, 40, 20)[i % 4])
            ),
            step=0 if i < 4 else 24,
        )
        for i, question in enumerate(QUESTIONS)
    ]
    size = stage.block_size_or(16)
    run = stage.run(
        "continuous batch",
        arrivals,
        {"join": 8, "leave": 3, "preempt": 2, "return": 2},
        block_size=size,
        num_blocks=stage.blocks_of(1024, size),
        num_swap_blocks=0,
        enable_prefix_caching=False,
    )
    measures = run.measures
    finding = (
        f"Up to {measures.most_sequences} sequences ran at once in "
        f"{percent(measures.peak_blocks_used / measures.num_blocks)} of the pool; with {stage.max_model_len} slots "
        f"reserved for each it has room for {measures.contiguous_sequences}."
    )
    return outcome_of(arrivals, run, [finding])


# --- Parallel sampling ----------------------------------------------------------------------------


def parallel_sampling(stage: Stage) -> SceneResult:
    """Generate four samples of one prompt, which share its blocks until they write (Fig. 8)."""
    params = SamplingParams(n=4, temperature=0.8, top_p=0.9, seed=stage.seed, max_tokens=stage.tokens(32))
    arrivals = [stage.ask("Write the first sentence of a story about a lighthouse.", params)]
    size = stage.block_size_or(16)
    run = stage.run(
        "parallel sampling",
        arrivals,
        {"fork": 1, "copy": 4},
        block_size=size,
        num_blocks=stage.blocks_of(1024, size),
        num_swap_blocks=0,
        enable_prefix_caching=False,
    )
    finding = saved(run.measures, "6.1 % to 9.8 % for Alpaca, 16.2 % to 30.5 % for ShareGPT")
    return outcome_of(arrivals, run, [finding])


def saved(measures: Measures, paper: str) -> str:
    """A finding: the blocks that sharing saved, compared with the paper."""
    return (
        f"Sharing saved {percent(measures.share_saved)} of the blocks (of {measures.block_size} tokens each), at the "
        f"cost of {measures.blocks_copied} copies; in the paper {paper} (Fig. 15)."
    )


# --- Beam search ----------------------------------------------------------------------------------


def beam_search(stage: Stage) -> SceneResult:
    """Search the four best continuations: beams fork and are dropped at almost every step (Fig. 9)."""
    params = BeamSearchParams(beam_width=4, max_tokens=stage.tokens(24))
    arrivals = [stage.ask("Write the first sentence of a story about a lighthouse.", params)]
    size = stage.block_size_or(4)
    run = stage.run(
        "beam search",
        arrivals,
        {"fork": 1, "beams": 5, "copy": 2},
        block_size=size,
        num_blocks=stage.blocks_of(1024, size),
        num_swap_blocks=0,
        enable_prefix_caching=False,
    )
    finding = saved(run.measures, "37.6 % to 55.2 % for Alpaca, 44.3 % to 66.3 % for ShareGPT")
    outcome = outcome_of(arrivals, run, [finding])
    beams = [
        (token_ids, score)
        for text in outcome.texts
        for token_ids, score in zip(text.token_ids, text.scores, strict=True)
        if score is not None
    ]
    if not beams:  # the run was cut short before it kept any
        return outcome
    winner = f'The winner, score {beams[0][1]:.2f}: "{printable(" ".join(outcome.texts[0].outputs[0].split()))}"'
    return replace(outcome, tree=tuple(beam_tree(stage.tokenizer.decode, beams)), findings=[finding, winner])


def beam_tree(decode: Decode, beams: Sequence[tuple[Sequence[int], float]], start: int = 0) -> Iterator[str]:
    """The beams, best first, as a tree in lines: common beginnings are written once, and each leaf has its score."""
    groups: dict[int, list[tuple[Sequence[int], float]]] = {}
    for i, (tokens, score) in enumerate(beams):
        goes_on = tokens[start] if start < len(tokens) else -1 - i  # a beam that ends here is a separate branch
        groups.setdefault(goes_on, []).append((tokens, score))
    for i, same in enumerate(groups.values()):
        end, shortest = start, min(len(tokens) for tokens, _ in same)
        while end < shortest and len({tokens[end] for tokens, _ in same}) == 1:
            end += 1
        last = i == len(groups) - 1
        words = " ".join(text_of(same[0][0][start:end], decode, same[0][0][:start]).split())
        scored = f"({same[0][1]:.2f}) " if len(same) == 1 else ""
        yield f"{'`' if last else '|'}- {scored}{printable(words)}".rstrip()
        if len(same) > 1:
            yield from (f"{' ' if last else '|'}  {line}" for line in beam_tree(decode, same, end))


# --- A shared system prompt -----------------------------------------------------------------------


def shared_prompt(stage: Stage) -> SceneResult:
    """Ask questions with one system prompt, which is computed once and then found in the prefix cache (Fig. 10)."""
    params = SamplingParams(temperature=0, max_tokens=stage.tokens(32))
    arrivals = [stage.ask(question, params, step=min(i, 1) * 2, system=TEACHER) for i, question in enumerate(CHILDREN)]
    size = stage.block_size_or(16)
    run = stage.run(
        "shared prompt",
        arrivals,
        {"prefix": 5},
        block_size=size,
        num_blocks=stage.blocks_of(1024, size),
        num_swap_blocks=0,
        enable_prefix_caching=True,
    )
    prompts = sum(len(arrival.prompt) for arrival in arrivals)
    found = run.measures.prefix_cache_hit_tokens
    findings = [f"Of {prompts} prompt tokens {found} were found in the cache and {prompts - found} computed."]
    return outcome_of(arrivals, run, findings, holds=found > 0)


# --- Preemption -----------------------------------------------------------------------------------


def preemption(stage: Stage) -> SceneResult:
    """Serve the same requests three times: with room for all, then in a pool too small, by swapping and recomputing."""
    num_tokens = stage.tokens(48)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, min_tokens=num_tokens)
    arrivals = [stage.ask(question, params, step=i) for i, question in enumerate(QUESTIONS[:5])]
    size = stage.block_size_or(16)
    ample, small = pool_sizes(arrivals, num_tokens, size)
    small = small if stage.num_blocks is None else stage.num_blocks

    def play(name: str, num_blocks: int, preemption: PreemptionMode) -> DemoRun:
        return stage.run(
            name,
            arrivals,
            {"preempt": 3, "return": 3},
            block_size=size,
            num_blocks=num_blocks,
            shown_as=name,
            paced=num_blocks < ample,
            num_swap_blocks=ample,
            preemption=preemption,
            enable_prefix_caching=False,
        )

    plenty = play("plenty of room", ample, "auto")
    swap = play("small, swap", small, "swap")
    recompute = play("small, recompute", small, "recompute")
    findings, holds = compare(plenty, [swap, recompute])
    story = [f"{small} blocks, preemption by swap:", *swap.story]
    story += [f"{small} blocks, preemption by recompute:", *recompute.story]
    runs = (plenty, swap, recompute)
    texts = texts_of(arrivals, plenty.outputs)
    measures, events = [run.measures for run in runs], tuple(run.events for run in runs)
    return SceneResult(texts, story, measures, findings, holds, events)


def pool_sizes(arrivals: list[Arrival], num_tokens: int, block_size: int) -> tuple[int, int]:
    """The sizes of an ample pool and a small one, in blocks. In the small one every request can start, but there is
    room for only half of the growth of all."""
    start = [-(-len(arrival.prompt) // block_size) for arrival in arrivals]
    # The last token is chosen but never computed, so it needs no slot.
    end = [-(-(len(arrival.prompt) + num_tokens - 1) // block_size) for arrival in arrivals]
    return 2 * sum(end), max(*end, (sum(start) + sum(end)) // 2)


def compare(reference: DemoRun, others: list[DemoRun]) -> tuple[list[str], bool]:
    """Compare the generated tokens with those of the `reference` run. Returns findings, and whether all are equal."""
    findings, all_same = [], True
    for run in others:
        measures = run.measures
        how_often = measures.preempted_by_swap + measures.preempted_by_recompute
        differences = [
            f"request {output.request_id} from token {position} on"
            for expected, output in zip(reference.outputs, run.outputs, strict=True)
            if (position := first_difference(expected, output)) is not None
        ]
        total = sum(len(output.outputs[0].token_ids) for output in run.outputs)
        verdict = "DIFFERENT: " + ", ".join(differences) if differences else f"the same {total} tokens as with room"
        often = f"{how_often} preemptions" if how_often else "nothing preempted: this pool is not small enough"
        findings.append(f"{measures.run}, {often}: {verdict}.")
        all_same = all_same and not differences
    return findings, all_same


def first_difference(expected: RequestOutput, actual: RequestOutput) -> int | None:
    """The position of the first token in which the two first outputs differ, or None if they are equal."""
    a, b = expected.outputs[0].token_ids, actual.outputs[0].token_ids
    if not (expected.finished and actual.finished):  # cut short: compare the common length
        a, b = a[: len(b)], b[: len(a)]
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# --- Several ranks --------------------------------------------------------------------------------


def tensor_parallel(stage: Stage) -> SceneResult:
    """Serve the same requests on one rank, then on two or more: each has a pool, and there is one block table
    (section 4.6)."""
    num_tokens = stage.tokens(24)
    lighthouse = "Write the first sentence of a story about a lighthouse."
    samples = SamplingParams(n=2, temperature=0.8, top_p=0.9, seed=stage.seed, max_tokens=num_tokens)
    arrivals = [stage.ask(lighthouse, samples)]
    arrivals += [stage.ask(QUESTIONS[4], SamplingParams(temperature=0, max_tokens=num_tokens), step=4)]
    size = stage.block_size_or(8)
    single = stage.in_one_process(1)
    parted = single.in_one_process(max(2, stage.tensor_parallel_size))

    def play(name: str, on: Stage, ranks: Sequence[str] = ()) -> DemoRun:
        return on.run(
            name,
            arrivals,
            {"join": 2, "fork": 1, "copy": 1, "grow": 2, "leave": 2},
            block_size=size,
            num_blocks=stage.blocks_of(1024, size),
            shown_as=name,
            paced=bool(ranks),
            ranks=ranks,
            num_swap_blocks=0,
            enable_prefix_caching=False,
        )

    shards = [
        shard_of(stage.model.config, rank, parted.tensor_parallel_size) for rank in range(parted.tensor_parallel_size)
    ]
    one = play("1 rank", single)
    several = play(f"{len(shards)} ranks", parted, [f"rank {shard.rank}: {heads_of(shard)}" for shard in shards])
    whole = pool_of(shard_of(stage.model.config, 0, 1), one.runner)
    pools = tuple(map(pool_of, shards, several.runner.stages[0]))  # type: ignore[attr-defined]
    in_tables = tuple(sorted({*several.state.device.holders, *several.state.device.last_request}))
    same_blocks = all(pool.blocks_written == in_tables for pool in (whole, *pools))
    alone, together = ([each.token_ids for output in run.outputs for each in output.outputs] for run in (one, several))
    counts = " and ".join(str(len(pool.blocks_written)) for pool in pools)
    sizes = " + ".join(f"{pool.block_bytes:,}" for pool in pools)
    verdict = "the same" if alone == together else "DIFFERENT"
    findings = [
        f"The block tables named {len(in_tables)} blocks; {counts} were written on the ranks, "
        + ("the very same ones, as on a single rank." if same_blocks else "DIFFERENT ones."),
        f"A block takes {sizes} bytes on the ranks, each for its KV heads; on a single one {whole.block_bytes:,}.",
        f"{sum(map(len, together))} tokens on {len(shards)} ranks: {verdict} as on one.",
    ]
    runs = (one, several)
    texts, measures, events = (
        texts_of(arrivals, several.outputs),
        [run.measures for run in runs],
        tuple(run.events for run in runs),
    )
    holds = same_blocks and alone == together
    return SceneResult(texts, several.story, measures, findings, holds, events, rank_pools=pools)


def heads_of(shard: Shard) -> str:
    """The KV heads of a rank, in words."""
    return f"KV head{'s' * (len(shard.kv_heads) > 1)} {blocks_only(shard.kv_heads)}"


def pool_of(shard: Shard, rank: Any) -> RankPool:
    """The pool of `rank`, a Llama of the reference tier, with the blocks that it has written."""
    cache = rank.kv_cache
    written = tuple(block for block in range(cache.num_blocks) if cache.device_blocks[block].tobytes().strip(b"\0"))
    return RankPool(shard.rank, tuple(shard.kv_heads), cache.block_bytes, written)


# --- Windows --------------------------------------------------------------------------------------


def windows(stage: Stage) -> SceneResult:
    """Serve a request on a model in which five of six layers see only the last tokens, as in Gemma 3: with one block
    table for all layers, then with one for each group. (vLLM has groups too; models of the paper's time had no
    windows.)"""
    params = SamplingParams(temperature=0, max_tokens=stage.tokens(120), ignore_eos=True)
    arrivals = [stage.complete(FOUR_SCORE, params)]
    size = stage.block_size_or(8)
    window = min(4 * size, stage.max_model_len // 4)
    seen = [window if layer % 6 else None for layer in range(stage.model.config.num_hidden_layers)]
    single = stage.in_one_process(1)

    def play(name: str, *, in_groups: bool) -> tuple[DemoRun, list[GroupTable]]:
        on = single.with_windows(seen, in_groups=in_groups)
        groups = on.model.config.groups
        run = on.run(
            name,
            arrivals,
            {"join": 1, "grow": 2, "pass": 3},
            block_size=size,
            num_blocks=stage.blocks_of(1024, size) * len(groups.windows),  # each as large as the layers of one group
            shown_as=name,
            paced=in_groups,
            num_swap_blocks=0,
            enable_prefix_caching=False,
        )
        block_bytes = run.measures.pool_bytes // run.measures.num_blocks
        tables = run.state.finished[0].done[0].tables()
        return run, [
            GroupTable(
                name, groups.of_layer.count(group), window, tuple(table), block_bytes * (len(table) - table.count(HOLE))
            )
            for group, (window, table) in enumerate(zip(groups.windows, tables, strict=True))
        ]

    (one, whole), (grouped, parts) = play("one table", in_groups=False), play("with groups", in_groups=True)
    before, after = (
        run.measures.pool_bytes * run.measures.peak_blocks_used // run.measures.num_blocks for run in (one, grouped)
    )
    same = all(first_difference(*pair) is None for pair in zip(one.outputs, grouped.outputs, strict=True))
    findings = [
        f"The keys and values took at most {before:,} bytes with one table for all layers, and {after:,} with groups "
        f"({percent(after / before)}): {grouped.state.counts['blocks passed']} blocks were given back on the way.",
        f"{sum(len(output.outputs[0].token_ids) for output in grouped.outputs)} tokens with groups: "
        f"{'the same' if same else 'DIFFERENT'} as with one table. This is not the text of {stage.model.folder.name}, "
        "which was trained without windows.",
    ]
    runs = (one, grouped)
    measures, events = [run.measures for run in runs], tuple(run.events for run in runs)
    texts = texts_of(arrivals, grouped.outputs)
    return SceneResult(texts, grouped.story, measures, findings, same, events, group_tables=(*whole, *parts))


# --- Two engines ----------------------------------------------------------------------------------


def disaggregated(stage: Stage) -> SceneResult:
    """Serve the same requests on one engine, then on two: one computes the prompts, and the other continues from its
    blocks, which are passed in files. (Section 4.6 has one engine; DistServe and vLLM have such pairs.)"""
    params = SamplingParams(temperature=0, max_tokens=stage.tokens(24))
    arrivals = [stage.ask(question, params, step=2 * i, system=TEACHER) for i, question in enumerate(CHILDREN)]
    size = stage.block_size_or(16)
    sizes: dict[str, Any] = {"block_size": size, "num_blocks": stage.blocks_of(1024, size), "num_swap_blocks": 0}
    alone = stage.run("one engine", arrivals, {}, shown_as="one engine", paced=False, **sizes)
    memory = Path("/dev/shm")
    with TemporaryDirectory(prefix="minipaged-", dir=memory if memory.is_dir() else None) as folder:
        connectors = (
            SharedStorageConnector(folder, "kv_producer"),
            SharedStorageConnector(folder, "kv_consumer"),
        )
        topics: dict[Topic, int] = {"store": 3, "load": 5, "prefix": 5, "join": 2}
        first, second = stage.run_disaggregated(arrivals, topics, connectors, **sizes)
        num_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.block"))
    pairs = zip(alone.outputs, second.outputs, strict=False)  # if cut short, the second engine may have received fewer
    same = all(first_difference(expected, output) is None for expected, output in pairs)
    begun = [output for output in second.outputs if output.outputs[0].token_ids]
    all_had = all(output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // size * size for output in begun)
    prompts = sum(len(output.prompt_token_ids) for output in begun)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in second.outputs)
    loaded = second.state.counts["blocks loaded"]
    found = second.measures.prefix_cache_hit_tokens
    computed = prompts - loaded * size - found
    findings = [
        f"{first.state.counts['blocks stored']} blocks, {num_bytes:,} bytes, were left by the prefilling engine.",
        f"Of {prompts} prompt tokens the decoding engine had {loaded * size} from there and found {found} in its own "
        f"prefix cache; it computed {computed}, which fill no block, or are the last of a prompt.",
        f"{num_tokens} tokens of two engines: {'the same' if same else 'DIFFERENT'} as of one.",
    ]
    story = ["prefilling engine:", *first.story, "decoding engine:", *second.story]
    runs = (alone, first, second)
    measures, events = [run.measures for run in runs], tuple(run.events for run in runs)
    return SceneResult(texts_of(arrivals, second.outputs), story, measures, findings, same and all_had, events)


# --- Drafts ---------------------------------------------------------------------------------------


def speculation(stage: Stage) -> SceneResult:
    """Serve one request twice: first without drafts, then with tokens drafted from its own prompt. One step verifies a
    whole draft. (This is not in the paper.)"""
    params = SamplingParams(temperature=0, max_tokens=stage.tokens(48))
    arrivals = [stage.ask(f"Correct the spelling in this text and repeat it: {MISSPELT}", params)]
    size = stage.block_size_or(4)

    def play(name: str, drafts: dict[str, Any] | None) -> DemoRun:
        return stage.run(
            name,
            arrivals,
            {"draft": 3, "accept": 3, "roll back": 3},
            block_size=size,
            num_blocks=stage.blocks_of(1024, size),
            shown_as=name,
            paced=drafts is not None,
            num_swap_blocks=0,
            enable_prefix_caching=False,
            speculative_config=drafts,
        )

    lookup = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    plain, drafted = play("without drafts", None), play("with drafts", lookup)
    counts, (expected, output) = drafted.state.counts, (run.outputs[0] for run in (plain, drafted))
    same = first_difference(expected, output) is None
    findings = [
        f"Of {counts['tokens drafted']} drafted tokens {counts['tokens accepted']} stood, and "
        f"{counts['blocks rolled back']} blocks went back. The answer took {drafted.measures.steps} steps instead of "
        f"{plain.measures.steps}.",
        f"{len(output.outputs[0].token_ids)} tokens with drafts: {'the same' if same else 'DIFFERENT'} as without.",
    ]
    measures, events = [run.measures for run in (plain, drafted)], (plain.events, drafted.events)
    return SceneResult(texts_of(arrivals, drafted.outputs), drafted.story, measures, findings, same, events)


# --- The user's own prompts ------------------------------------------------------------------------


def yours(stage: Stage) -> SceneResult:
    """Sample the user's prompts together."""
    if not stage.prompts:
        raise InvalidRequest('this scene needs prompts: minipaged demo --scene yours "My first prompt" "Another one"')
    num_tokens = stage.tokens(64)
    arrivals = [
        stage.ask(
            prompt, SamplingParams(temperature=0.8, top_p=0.9, seed=stage.seed + i, max_tokens=num_tokens), step=i
        )
        for i, prompt in enumerate(stage.prompts)
    ]
    size = stage.block_size_or(16)
    run = stage.run(
        "your prompts",
        arrivals,
        {"prefix": 3, "join": 8, "leave": 3, "preempt": 3, "return": 3},
        block_size=size,
        num_blocks=stage.blocks_of(1024, size),
        num_swap_blocks=max(1, stage.blocks_of(1024, size) // 4),
        enable_prefix_caching=True,
    )
    measures = run.measures
    finding = (
        f"{percent(measures.paged.share_of_tokens)} of the memory that paging took held tokens; of what contiguous "
        f"reservation would have taken, {percent(measures.contiguous.share_of_tokens)}."
    )
    return outcome_of(arrivals, run, [finding])


# --- All of them ----------------------------------------------------------------------------------


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def outcome_of(
    arrivals: list[Arrival],
    run: DemoRun,
    findings: list[str],
    *,
    holds: bool = True,
    block_table: tuple[TableRow, ...] = (),
) -> SceneResult:
    """The result of a scene with a single run."""
    texts = texts_of(arrivals, run.outputs)
    return SceneResult(texts, run.story, [run.measures], findings, holds, (run.events,), block_table)


def texts_of(arrivals: list[Arrival], outputs: list[RequestOutput]) -> list[Text]:
    """The prompts and outputs, without requests that did not arrive because the run was cut short."""
    return [
        Text(
            prompt=arrival.shown,
            outputs=tuple(completion.text for completion in output.outputs),
            token_ids=tuple(completion.token_ids for completion in output.outputs),
            finish_reasons=tuple(completion.finish_reason for completion in output.outputs),
            scores=tuple(completion.score for completion in output.outputs),
        )
        for arrival, output in zip(arrivals, outputs, strict=False)
    ]


SCENES = (
    Scene(
        "one-request",
        "One request",
        "Watch the block table grow: a new block is taken only when the last one is full, so that at most one is "
        "partly empty (paper, section 4.3, Fig. 6).",
        one_request,
    ),
    Scene(
        "continuous-batch",
        "A continuous batch",
        "Watch requests join and leave between steps: the blocks of those that left go to others, and none needs "
        "neighbouring blocks (section 4.3, Fig. 7).",
        continuous_batch,
    ),
    Scene(
        "parallel-sampling",
        "Parallel sampling, with copy-on-write",
        "Watch four samples share the prompt's blocks: only its last, half-filled block is copied, when they first "
        "write into it (section 4.4, Fig. 8).",
        parallel_sampling,
    ),
    Scene(
        "beam-search",
        "Beam search",
        "Watch beams fork without copying what they share, and the blocks of dropped beams come free in the same "
        "step (section 4.4, Fig. 9).",
        beam_search,
    ),
    Scene(
        "shared-prompt",
        "A shared system prompt",
        "Watch all requests but the first find the system prompt computed already: its full blocks are in the prefix "
        "cache (section 4.4, Fig. 10).",
        shared_prompt,
    ),
    Scene(
        "preemption",
        "A pool too small",
        "Watch the latest request lose its blocks when the pool runs out, and come back later, by swapping or "
        "recomputing, with the same text (section 4.5).",
        preemption,
    ),
)

TENSOR_PARALLEL = Scene(
    "tensor-parallel",
    "Several ranks, one block table",
    "Watch the pools of the ranks, each with its own KV heads: a block has the same number in all of them (section "
    "4.6). This scene computes on the reference tier, whatever the others do, one rank and several alike: there all "
    "ranks are in this process and take their turns, so the times below compare no tiers and show no speed-up.",
    tensor_parallel,
)
"""Not in SCENES, because a large model would be loaded a second time, into NumPy."""
WINDOWS = Scene(
    "windows",
    "Windows, and a block table for each group of layers",
    "Watch holes (-) appear in the table: five of six layers see only the last tokens, and give back the blocks that "
    "their window has passed. The model gets these windows for this scene, so its text is not its own. It is computed "
    "on the reference tier, whatever the others do, so the times below compare no tiers.",
    windows,
)
"""Not in SCENES, for the same reason."""
DISAGGREGATED = Scene(
    "disaggregated",
    "One engine prefills, another decodes",
    "Watch two pools: prompts are computed in the first, and the second begins with what was computed there. Only full "
    "blocks travel, by their hashes, into whatever blocks are free.",
    disaggregated,
)
"""Not in SCENES, because it is about two engines."""
SPECULATION = Scene(
    "speculation",
    "Drafted tokens, verified in one step",
    "Watch hollow tokens: they are drafted, and one step verifies all of them. Those that stand turn solid. The others "
    "vanish, and blocks that are empty then go back.",
    speculation,
)
"""Not in SCENES, because it is not in the paper."""
YOURS = Scene(
    "yours",
    "Your prompts",
    "Watch your prompts being answered together: each holds only the blocks that its words need, and takes another "
    "when the last one is full.",
    yours,
)
"""Not in SCENES, because it needs prompts."""
