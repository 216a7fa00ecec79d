"""The picture that the home page opens with: the same requests, in contiguous memory and in paged memory.

Two engines of this project are given the same requests at the same steps, until each has let one wait. They differ in
nothing but their memory: `paper.orca_memory.OrcaMemory`, a contiguous chunk for each request as long as the longest
text that the model can make, and `engine.block_manager.BlockManager`, a block when one is needed. What is drawn is
folded from their events. The machine is simulated, so that the picture is the same at every build.

It is a still, of the last step. All that came after the first one says when it came (`--at`, a step), and `site.css`
lets it appear at that time where `site.js` has found that things may move.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase

import numpy as np
from rich.color import Color

from minipaged.demo.view import COLORS
from minipaged.engine.engine import Engine
from minipaged.events import RequestArrived, RequestFinished, RequestPreempted, TokensComputed
from minipaged.paper.orca import Orca
from minipaged.paper.workloads import draw_lengths
from minipaged.params import EngineConfig, SamplingParams
from minipaged.simulation.simulated import OPT_13B_ON_AN_A100, SimulatedRunner, simulated_tier

BLOCK_SIZE, NUM_BLOCKS = 64, 128
"""Tokens of a block, and blocks of each pool: room for four texts of the model's longest."""
LONGEST = OPT_13B_ON_AN_A100.max_model_len
STEPS_BETWEEN = 4
"""From one arrival to the next."""
SEED = 21
"""Of a draw in which no request ends before both pools have let one wait, so that squares only fill."""
COLUMNS, CELL = 16, 22
"""Blocks in a row, and the side of one: at 358 pixels, as wide as a phone's page, about as many pixels."""
HATCH = '<pattern id="opening-hatch" width="6" height="6" patternUnits="userSpaceOnUse"><path d="M0 6L6 0"/></pattern>'


# --- The two runs ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Served:
    """One engine's run. Requests are numbers, in order of arrival."""

    steps: int = 0
    """How many there were."""
    arrived: list[int] = field(default_factory=list)
    """The step of each request's arrival."""
    lengths: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Of each request that runs: (step, tokens in memory from then on)."""
    tables: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Of each request that runs: its blocks, and from which step on it has each."""

    @property
    def waiting(self) -> list[int]:
        return [request for request in range(len(self.arrived)) if request not in self.tables]

    def tokens_at(self, step: int) -> int:
        """In memory, then."""
        then = ([tokens for since, tokens in lengths if since <= step] for lengths in self.lengths.values())
        return sum(tokens[-1] for tokens in then if tokens)

    def running_at(self, step: int) -> int:
        return sum(lengths[0][0] <= step for lengths in self.lengths.values())


def serve(steps: int | None = None, *, contiguous: bool) -> Served:
    """Serve the requests for so many steps, or until one has to wait."""
    orca, served = Orca("Orca (Max)"), Served()
    doors = {"memory": orca.memory, "policy": orca.policy} if contiguous else {}
    runner = SimulatedRunner(OPT_13B_ON_AN_A100, BLOCK_SIZE)
    config = EngineConfig(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=LONGEST,
        vocab_size=LONGEST,
        enable_prefix_caching=False,
    )
    engine = Engine(config, simulated_tier(), runner, clock=runner.clock, **doors)  # type: ignore[arg-type]

    def listen(event: object) -> None:
        if isinstance(event, RequestArrived):
            served.arrived.append(served.steps)
        elif isinstance(event, TokensComputed):  # a request is one sequence, of the same number
            served.lengths.setdefault(event.sequence, []).append((served.steps, event.num_tokens))
            served.tables.setdefault(event.sequence, []).extend((block, served.steps) for block in event.new_blocks)
        elif isinstance(event, RequestFinished | RequestPreempted):
            raise ValueError(f"the opening draws squares that only fill, but there was a {event.name}: change SEED")

    engine.listeners.append(listen)
    for prompt, output in draw_lengths("ShareGPT", len(ascii_uppercase), np.random.default_rng(SEED)):
        engine.add_request(range(prompt), SamplingParams(max_tokens=output, ignore_eos=True))
        for _ in range(STEPS_BETWEEN):
            engine.step()
            served.steps += 1
            if served.steps == steps or (steps is None and engine.scheduler.waiting):
                return served
    raise ValueError("the opening has run out of letters: change SEED")


# --- Drawing --------------------------------------------------------------------------------------


def opening() -> str:
    """The picture, as HTML."""
    paged = serve(contiguous=False)
    contiguous = serve(paged.steps, contiguous=True)
    left = _pool(
        contiguous,
        "Contiguous",
        "room for the longest text, for each",
        f"From {ascii_uppercase[contiguous.waiting[0]]} on, none finds that room",
    )
    (last,) = paged.waiting
    free = NUM_BLOCKS - sum(map(len, paged.tables.values()))
    right = _pool(
        paged,
        "Paged",
        "a block for each, when it needs one",
        f"From {ascii_uppercase[last]} on, too: the {free} blocks left are for those that run to grow",
    )
    return (
        f'<figure class="opening"><div>{left}{right}</div>'
        f"<figcaption>The same {len(paged.arrived)} requests in the same memory. "
        f"One comes every {STEPS_BETWEEN} steps, and a step adds a token to each that runs. "
        f"A square is a block of {BLOCK_SIZE} tokens, the longest text has {LONGEST:,}. Hatched: reserved, and empty. "
        "Framed: a colour's second request. "
        "Recorded from this project's engine when the page was made; the lengths are drawn from "
        "the paper's histogram of ShareGPT."
        '<button type="button" class="md-button" hidden>Pause</button></figcaption></figure>'
    )


def _pool(served: Served, name: str, rule: str, refusal: str) -> str:
    per_cent = [100 * served.tokens_at(step) / (NUM_BLOCKS * BLOCK_SIZE) for step in range(served.steps + 1)]
    running, waiting, share = len(served.tables), served.waiting, f"{per_cent[-1]:.0f}%"
    run = _counts([served.running_at(step) for step in range(served.steps + 1)])
    result = f"{run} requests run, {_counts(per_cent, '%')} of the memory holds tokens"
    chips = "".join(
        f"<b {_came(served.arrived[r], f'chip {_again(r)}', hue(r))}>{ascii_uppercase[r]}</b>" for r in waiting
    )
    told = f"<span {_came(served.arrived[waiting[0]])}>{refusal}. Waiting: </span>"
    drawn = "".join(_request(served, r) for r in served.tables)
    pattern = HATCH if "hatch" in drawn else ""  # once in the page
    words = html.escape(f"{name} memory at the end: {running} requests run, {len(waiting)} wait, {share} holds tokens")
    height = NUM_BLOCKS // COLUMNS * CELL
    return (
        f'<section><p><b>{name}</b>: {rule}</p><svg viewBox="0 0 {COLUMNS * CELL} {height}" role="img" '
        f'aria-label="{words}"><defs>{pattern}</defs>{_empty()}{drawn}</svg>'
        f'<p class="result">{result}</p><p>{told}{chips}</p></section>'
    )


def _counts(numbers: Sequence[float], unit: str = "") -> str:
    """The last of the numbers, which come one after the other, a step each, while the picture plays."""
    last = round(numbers[-1])
    curve = ",".join(f"{number / numbers[-1]:.3g}" for number in numbers)
    timing = f"--so-far:{last};--for:{len(numbers) - 1};--curve:linear({curve});--unit:'{unit}'"
    return f'<b class="count" style="{timing}"><span>{last}{unit}</span></b>'


def _again(request: int) -> str:
    """The class of a request whose colour another one had before."""
    return "again" if request >= len(COLORS) else ""


def hue(request: int) -> str:
    """Its colour, of the demo's palette, and black or white for what is written on it."""
    color = Color.from_ansi(COLORS[request % len(COLORS)]).get_truecolor()
    red, green, blue = ((part / 255) ** 2.2 for part in color)
    ink = "#000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "#fff"
    return f"--hue:{color.hex};--ink:{ink}"


def _came(step: int, name: str = "", style: str = "") -> str:
    """The attributes of what is there from a step on."""
    if step == 0:
        return f'class="{name}" style="{style}"'
    return f'class="{name} at" style="--at:{step};{style}"'


def _empty() -> str:
    return "".join(f'<path class="free" d="{_box(block)}"/>' for block in range(NUM_BLOCKS))


def _box(block: int, filled: float = 1.0) -> str:
    """A block's square, or as much of it, from below, as is filled."""
    x, y = block % COLUMNS * CELL + 1, block // COLUMNS * CELL + 1
    side = CELL - 2
    return f"M{x} {y + side}h{side}v{-side * filled:.3g}h{-side}z"


def _request(served: Served, request: int) -> str:
    """Its blocks: reserved from its first step on, and filled as its tokens come."""
    lengths, drawn = served.lengths[request], []
    for logical, (block, taken) in enumerate(served.tables[request]):
        first, box = logical * BLOCK_SIZE, _box(block)
        inside = [(step, min(BLOCK_SIZE, tokens - first)) for step, tokens in lengths if tokens > first]
        drawn.append(f'<g {_came(taken)}><path class="reserved" d="{box}"/>')
        if not inside or inside[0][0] > taken:
            drawn.append(f'<path class="hatch" d="{box}"/>')
        if inside:
            drawn.append(_filled(request, block, inside))
        drawn.append("</g>")
    return f'<g class="{_again(request)}" style="{hue(request)}">{"".join(drawn)}</g>'


def _filled(request: int, block: int, inside: Sequence[tuple[int, int]]) -> str:
    """The tokens in a block, as they come. `inside`: (step, tokens in it from then on), of which there are some."""
    (since, before), (_, tokens) = inside[0], inside[-1]
    until = next(step for step, there in inside if there == tokens)
    timing = f"--at:{since};--for:{until - since};--from:{before / tokens:.3g}"
    grows = f' class="grows" style="{timing}"' if until > since else ""
    x, y = block % COLUMNS * CELL + CELL // 2, block // COLUMNS * CELL + CELL // 2 + 4
    partly = "" if tokens == BLOCK_SIZE else ' class="partly"'
    return (
        f'<g {_came(since)}><path{grows} d="{_box(block, tokens / BLOCK_SIZE)}"/>'
        f'<text x="{x}" y="{y}"{partly}>{ascii_uppercase[request]}</text></g>'
    )
