"""The results of scenes as plain lines of at most 80 columns, and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from minipaged.demo.measures import Measures
from minipaged.demo.scenes import GroupTable, RankPool, Scene, SceneResult, TableRow, Text
from minipaged.demo.stage import Stage
from minipaged.demo.ticker import printable
from minipaged.events import HOLE
from minipaged.replay.state import State
from minipaged.replay.teller import blocks_only

WIDTH = 80
INDENT = "  "

# --- Lines ----------------------------------------------------------------------------------------


def opening(stage: Stage) -> list[str]:
    """Lines to print before the first scene: facts that apply to all scenes."""
    model = stage.model
    text = (
        f"minipaged demo: {model.folder.name} on the {model.tier.name} tier. The keys and values of one token take "
        f"{stage.bytes_per_token:,} bytes{_format(stage)}. Each scene compares paging with a contiguous cache of the "
        f"same size, which reserves {stage.max_model_len} tokens (max_model_len) for every sequence, as systems did "
        "before."
    )
    return [*_wrap(text, indent=""), ""]


def _format(stage: Stage) -> str:
    """The size of keys and values in 8 bits compared with the model's dtype; "" if they are not in 8 bits."""
    if stage.kv_cache_dtype == "auto":
        return ""
    dtype, plain = stage.model.tier.dtype, replace(stage, kv_cache_dtype="auto").bytes_per_token
    blocks = 100 * plain // stage.bytes_per_token
    return f" in {stage.kv_cache_dtype} ({plain:,} in {dtype}, so the memory of 100 blocks holds {blocks})"


def heading(number: int, total: int, scene: Scene) -> list[str]:
    """Lines to print before a scene."""
    title = f"=== {number}/{total} {scene.title} ({scene.name}) "
    return [title.ljust(WIDTH, "="), *_wrap(scene.watch, indent=""), ""]


def outcome_lines(outcome: SceneResult) -> list[str]:
    """Lines to print after a scene."""
    lines = [*_text_lines(outcome.texts), ""]
    if outcome.tree:
        tree = [line if len(line) <= WIDTH - 4 else line[: WIDTH - 8] + " ..." for line in outcome.tree]
        lines += [f"{INDENT}where the beams part, and their scores", *(INDENT + line for line in tree), ""]
    lines += [wrapped for line in outcome.story for wrapped in _wrap(line, hang=10)]
    lines += [*_table_lines(outcome.block_table), *_pool_lines(outcome.rank_pools)]
    lines += [*_group_lines(outcome.group_tables), ""]
    fullest = max(outcome.runs, key=lambda run: run.peak_blocks_used / run.num_blocks)
    for run in outcome.runs if outcome.group_tables else [fullest]:
        lines += [*_memory_lines(run, named=len(outcome.runs) > 1), ""]
    lines += _count_lines(outcome.runs)
    if outcome.findings:
        lines += ["", *(line for finding in outcome.findings for line in _wrap("=> " + finding, hang=3))]
    return [*lines, ""]


def _text_lines(texts: list[Text]) -> Iterator[str]:
    """The prompts and outputs. A single one gets more lines than each of several."""
    most_lines = 3 if len(texts) == 1 else 2
    for text in texts:
        yield from _wrap(f"> {text.prompt}", hang=2)
        for output, score in zip(text.outputs, text.scores, strict=True):
            mark = "- " if len(text.outputs) > 1 else "  "
            scored = "" if score is None else f"({score:.2f}) "
            yield from _wrap(mark + scored + _one_line(output), hang=2, most_lines=most_lines)


def _table_lines(rows: Sequence[TableRow], most_rows: int = 8) -> Iterator[str]:
    """A block table as in Fig. 6, with the tokens in each block."""
    if not rows:
        return
    yield f"{INDENT}block table at the end"
    yield f"{INDENT}{'logical':>10}  physical  filled  tokens"
    for row in rows[:most_rows]:
        line = f"{INDENT}{row.logical:>10}  {row.physical:>8}  {row.filled:>6}  {_one_line('|'.join(row.tokens))}"
        yield line if len(line) <= WIDTH else line[: WIDTH - 4] + " ..."
    if len(rows) > most_rows:
        yield f"{INDENT}{'':10}... and {len(rows) - most_rows} more"


def _pool_lines(pools: Sequence[RankPool]) -> Iterator[str]:
    """A table of the ranks' pools."""
    if not pools:
        return
    yield f"{INDENT}{'':<8}{'KV heads':>10}{'bytes a block':>16}   blocks written"
    for pool in pools:
        rank, heads = f"rank {pool.rank}", blocks_only(pool.kv_heads)
        line = f"{INDENT}{rank:<8}{heads:>10}{pool.block_bytes:>16,}   {blocks_only(pool.blocks_written)}"
        yield line if len(line) <= WIDTH else line[: WIDTH - 4] + " ..."


def _group_lines(tables: Sequence[GroupTable]) -> Iterator[str]:
    """The block tables of groups of layers, with their holes, run by run."""
    if not tables:
        return
    yield f"{INDENT}{'tables':<12}{'layers':>7}{'see':>5}{'bytes':>11}  blocks at the end"
    for table in tables:
        blocks = "".join("-" if block == HOLE else f" {block}" for block in table.entries).lstrip()
        seen = "all" if table.window is None else str(table.window)
        line = f"{INDENT}{table.run:<12}{table.num_layers:>7}{seen:>5}{table.num_bytes:>11,}  {blocks}"
        yield line if len(line) <= WIDTH else line[: WIDTH - 4] + " ..."


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _memory_lines(run: Measures, *, named: bool) -> list[str]:
    """A table of the KV memory by use, as in Fig. 2."""
    unit, name = (1e6, "MB") if run.pool_bytes >= 1e6 else (1e3, "KB")

    def row(label: str, field: str) -> str:
        cells = ""
        for memory in (run.paged, run.contiguous):
            size = getattr(memory, field)
            share = 100 * size / run.pool_bytes
            cells += f"{size / unit:>10.2f} {name} {share:>7.1f} %" if size >= 0 else f"{'none':>23}"
        return f"{INDENT}{label:<26}{cells}"

    too_much = 1 - run.contiguous.free / run.pool_bytes
    shares = "".join(f"{100 * memory.share_of_tokens:>21.1f} %" for memory in (run.paged, run.contiguous))
    pool = f"{run.pool_bytes / unit:.1f} {name}"
    return [
        *([f"{INDENT}{run.run}:"] if named else []),
        f"{INDENT}{'KV memory, mean of steps':<26}{'paged':>23}{'contiguous':>23}",
        row("tokens", "tokens"),
        row("internal fragmentation", "internal_fragmentation"),
        row("reserved", "reserved"),
        row(f"free of {pool}", "free"),
        f"{INDENT}{'of what is taken, tokens':<26}{shares}",
        *([f"{INDENT}(contiguous does not fit: it takes {too_much:.1f} times the pool)"] if too_much > 1 else []),
    ]


def _count_lines(runs: list[Measures]) -> list[str]:
    """A table of the counts: two pairs of columns for one run, or a column for each of several runs."""
    rows: dict[str, list[str]] = {
        "most sequences at once": [f"{run.most_sequences}" for run in runs],
        "contiguous has room for": [f"{run.contiguous_sequences}" for run in runs],
        "most blocks in use": [f"{run.peak_blocks_used} of {run.num_blocks}" for run in runs],
        "blocks saved by sharing": [f"{run.blocks_saved:.1f} = {100 * run.share_saved:.1f} %" for run in runs],
        "steps, seconds": [f"{run.steps}, {run.seconds:.1f} s" for run in runs],
        "blocks copied on write": [f"{run.blocks_copied}" for run in runs],
        "blocks swapped out, in": [f"{run.blocks_swapped_out}, {run.blocks_swapped_in}" for run in runs],
        "tokens recomputed": [f"{run.tokens_recomputed}" for run in runs],
        "tokens found in cache": [f"{run.prefix_cache_hit_tokens}" for run in runs],
        "tokens generated": [f"{run.generated_tokens}, {run.generated_tokens / run.seconds:.0f} / s" for run in runs],
    }
    if len(runs) == 1:
        cells = [f"{label:<23}{values[0]:>14}" for label, values in rows.items()]
        half = len(cells) // 2
        return [f"{INDENT}{left}    {right}" for left, right in zip(cells[:half], cells[half:], strict=True)]
    names = "".join(f"{run.run:>17}" for run in runs)
    return [
        f"{INDENT}{'':<26}{names}",
        *(f"{INDENT}{label:<26}" + "".join(f"{cell:>17}" for cell in values) for label, values in rows.items()),
    ]


def closing(num_scenes: int, seconds: float) -> str:
    return f"{num_scenes} scene{'s' if num_scenes > 1 else ''}, {seconds:.0f} s."


def summary(played: Iterable[tuple[Scene, SceneResult]]) -> list[str]:
    """Lines to print after the live view: each scene's title and findings."""
    lines: list[str] = []
    for scene, outcome in played:
        lines += [f"{scene.title} ({scene.name})"]
        lines += [wrapped for finding in outcome.findings for wrapped in _wrap("=> " + finding, hang=3)]
    return lines


def run_lines(state: State) -> list[str]:
    """The counts of a run, computed from its events alone."""
    counts, pool = state.counts, state.device
    return [
        f"{counts['step_finished']} steps, {state.num_generated} tokens generated for "
        f"{state.num_arrived} request{'' if state.num_arrived == 1 else 's'}; at "
        f"most {state.most_sequences} sequences at once in {pool.most_used} of {pool.num_blocks} blocks.",
        f"{counts['sequence_forked']} forks, {counts['block_copied']} copies on write, "
        f"{counts['tokens found in cache']} tokens found in the prefix cache.",
        f"Preempted {counts['preempted by swap']} times by swap ({counts['blocks swapped out']} blocks out, "
        f"{counts['blocks swapped in']} in) and {counts['preempted by recompute']} times by recompute "
        f"({counts['tokens recomputed']} tokens computed again).",
    ]


def _wrap(text: str, *, indent: str = INDENT, hang: int = 0, most_lines: int = 20) -> list[str]:
    """Wrap `text` to lines of at most WIDTH columns, and cut it off after `most_lines`."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + " " * hang,
        max_lines=most_lines,
        placeholder=" ...",
    )


# --- JSON -----------------------------------------------------------------------------------------


def document(stage: Stage, played: Iterable[tuple[Scene, SceneResult]]) -> str:
    """All results as one JSON object, including the events of each run (docs/events.md).

    Times are in seconds, memory in bytes, shares between 0 and 1.
    """
    scenes: list[dict[str, Any]] = []
    for scene, outcome in played:
        fields = asdict(replace(outcome, events=()))
        del fields["events"]
        for run, events in zip(fields["runs"], outcome.events, strict=True):
            run["events"] = [json.loads(event.to_json()) for event in events]
        scenes.append({"name": scene.name, "title": scene.title, "watch": scene.watch, **fields})
    head = {
        "model": stage.model.folder.name,
        "tier": stage.model.tier.name,
        "seed": stage.seed,
        "kv_cache_dtype": stage.kv_cache_dtype,
        "bytes_per_token": stage.bytes_per_token,
        "max_model_len": stage.max_model_len,
    }
    return json.dumps({**head, "scenes": scenes}, indent=2)
