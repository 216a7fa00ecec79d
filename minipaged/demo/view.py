"""Draw a state: the memory map of a run, for a terminal of any size.

    title, and a hint on what to watch for
    device memory     a tile per block: its sequence's letter and colour; the filled part of the block is solid
    block tables      a line per sequence: the blocks of its logical blocks 0, 1, 2 ...; then its words
    paged, contiguous the slots taken, compared with the slots that a contiguous cache would have reserved
    queues            the requests that run, wait, or are swapped out
    what happened     the last sentences of the ticker
    keys

A tile's letter names the sequence that holds the block; `×3` means that three sequences hold it (its reference count).
`▯` is a drafted token, or the part of a block that drafted tokens fill: hollow until a step has verified them.
Nothing relies on colour alone or on the background: tiles are in reverse video, in colours that stand out from black
and from white.

`StateView.frame` makes a `Frame`, which rich can print, or which gives its lines with escape sequences.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

from rich.cells import cell_len, chop_cells
from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style

from minipaged.demo.ticker import printable
from minipaged.engine.detokenizer import Decode, text_of
from minipaged.events import HOLE
from minipaged.replay.state import LETTERS, NO_LETTER, LiveRequest, LiveSequence, PoolState, State
from minipaged.replay.teller import Sentence

Line = list[Segment]

COLORS = (33, 166, 28, 127, 30, 160, 99, 130, 67, 162, 100, 65)
"""Colours of a 256-colour terminal: neither light nor dark, with neighbours that look different."""
BASIC_COLORS = (4, 3, 2, 5, 6, 1)
"""Colours of a 16-colour terminal that are not black, white or grey."""
GLOSSARY = (
    ("block", "room for the keys and values of a few tokens"),
    ("block table", "which blocks a sequence has, in the order of its tokens"),
    ("shared block", "held by several, stored once; ×3: by three"),
    ("copy-on-write", "who writes into a shared block gets a copy first"),
    ("preemption", "when blocks run out, the latest that runs gives up its own"),
)
"""Terms to explain while there is nothing else to show."""
PLAIN = Style()
BOLD = Style(bold=True)
DIM = Style(dim=True)
BLOCKS_OF_EIGHT = "▁▂▃▄▅▆▇█"
ASCII = str.maketrans(
    {
        "─": "-",
        "│": "|",
        "·": ".",
        "×": "x",
        "→": ">",
        "←": "<",
        "▸": ">",
        "…": "~",
        "░": ":",
        "▪": "o",
        "█": "#",
        "▯": "?",
    }
)
"""Replacements for signs that the terminal's encoding lacks. (All eighths become #.)"""
ASCII |= dict.fromkeys(map(ord, BLOCKS_OF_EIGHT), "#")


@dataclass(frozen=True, slots=True)
class Caption:
    """The texts around the state."""

    title: str = ""
    watch: str = ""
    """A sentence that says what to watch for."""
    run: str = ""
    """The name of the run within the scene."""
    measured: tuple[str, ...] = ()
    """The measurements at the end of a scene, which replace the ticker."""
    ranks: tuple[str, ...] = ()
    """A label for each rank of a model in parts, such as its KV heads. A pool is drawn for each rank."""
    beside: State | None = None
    """The state of the first of two engines, whose pool is drawn first. `ranks` are then the engines' names."""


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence of the ticker, with its position in the run."""

    position: int
    """The number of events up to and including the one that the sentence describes."""
    step: int
    sentence: Sentence


@dataclass(frozen=True, slots=True)
class PlayerStatus:
    """The player's position in the run."""

    position: int = 0
    total: int = 0
    paused: bool = False
    keys: str = ""
    """The line that explains the keys; empty if there is no user to press them."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The picture of one screen: its lines, all `width` columns wide."""

    width: int
    lines: list[Line]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for line in self.lines:
            yield from line
            yield Segment.line()

    def ansi(self, color_system: ColorSystem | None) -> list[str]:
        """The lines with escape sequences, or the text alone if `color_system` is None."""
        return [
            "".join((style or PLAIN).render(text, color_system=color_system) for text, style, _ in line)
            for line in self.lines
        ]

    def text(self) -> str:
        """The lines without any style."""
        return "\n".join("".join(text for text, _, _ in line).rstrip() for line in self.lines)


BEHIND = 12
"""The number of tokens to decode before the first one shown, because a character may begin in them."""


@dataclass(slots=True)
class StateView:
    """Draws states. `decode` converts token ids to text (None: they are shown as numbers)."""

    decode: Decode | None = None
    colors: Sequence[int] = COLORS
    """The colours of the sequences' letters, in turn; empty: no colours."""
    unicode: bool = True
    questions: Mapping[str, str] = field(default_factory=dict)
    """The prompt to display for each request, without the chat template around it."""
    _words: Callable[..., str] = field(init=False)
    """A cached function for the text of tokens, optionally given the tokens before them."""

    def __post_init__(self) -> None:
        decode = self.decode or (lambda tokens: "".join(f" {token}" for token in tokens))
        self._words = lru_cache(maxsize=4096)(lambda tokens, behind=(): printable(text_of(tokens, decode, behind)))

    def word(self, token: int) -> str:
        """The text of one token."""
        return self._words((token,))

    def frame(
        self, state: State, width: int, height: int, caption: Caption, notes: Sequence[Note], status: PlayerStatus
    ) -> Frame:
        """Draw the state. `notes`: the sentences of the ticker, oldest first."""
        roomy = height >= 34
        head = [self._title(state, width, caption, status), *_watch(caption, width, 3 if roomy else 2)]
        keys = [[Segment(f" {status.keys}", DIM)]] if status.keys else []
        bars = [_rule("memory taken", width), *self._bars(state, width)]
        low = [*bars[0 if roomy else 1 :], *self._queues(state, width)]
        news = self._news(caption, notes, width, 6 if roomy else 3)
        room = height - len(head) - len(low) - len(news) - len(keys) - 2 * roomy
        touched = notes[-1].sentence if notes else None
        rows = max(3, min(room - 4, round(room * 0.5)))
        if caption.ranks:
            states = [caption.beside, state] if caption.beside else [state] * len(caption.ranks)
            memory = self._pools(states, width, rows, touched, caption.ranks)
        else:
            memory = self._memory(state, width, rows, touched)
        tables = self._tables(state, width, room - len(memory))
        blank: list[Line] = [[]] if roomy else []
        tables += [[] for _ in range(room - len(memory) - len(tables))]
        lines = [*head, *blank, *memory, *tables, *low, *blank, *news, *keys]
        if len(lines) > height:  # in a very low terminal the ticker and the keys take precedence
            lines = [*lines[: max(0, height - len(news) - len(keys))], *news, *keys][:height]
        # Names, reasons and prompts come from outside, and must not contain commands for the terminal.
        as_text = printable if self.unicode else _ascii
        lines = [[Segment(as_text(text), style) for text, style, _ in line] for line in lines]
        lines = [Segment.adjust_line_length(line, width) for line in lines]
        return Frame(width, lines)

    # --- The head ---------------------------------------------------------------------------------

    def _title(self, state: State, width: int, caption: Caption, status: PlayerStatus) -> Line:
        left = f" {caption.title}" + (f": {caption.run}" if caption.run else "")
        speed = state.tokens_per_second()
        right = f"step {state.step}  " + (f"{speed:.0f} tokens/s  " if speed else "")
        right += "PAUSED " if status.paused else ""
        if status.paused:
            right += f"event {status.position}/{status.total} "
        return _spread([Segment(left, BOLD)], [Segment(right, BOLD if status.paused else PLAIN)], width)

    # --- Memory -----------------------------------------------------------------------------------

    def _memory(self, state: State, width: int, rows: int, touched: Sentence | None) -> list[Line]:
        """The header, tiles and legend of the device's pool, and the host's to the right, in at most `rows` rows."""
        pool, host = state.device, state.host
        cached = [f"{state.num_cached_only} cached"] if state.cached else []
        counts = ", ".join([f"{len(pool.holders)} held", *cached, f"{state.num_free} free"])
        host_width = min(max(24, width // 4), width // 3) if host.num_blocks else 0
        grid_width = width - host_width - (3 if host_width else 0)
        title = f"device: {pool.num_blocks} blocks of {state.block_size} slots: {counts}"
        if len(title) > grid_width - 4:
            title = title.replace(" slots:", ":").removeprefix("device: ")
        legend_rows = 1 if rows > 4 else 0
        now = (set(touched.blocks), set(touched.host_blocks)) if touched else (set(), set())
        tiles, legend = self._grid(state, pool, grid_width, rows - 1 - legend_rows, now[0])
        lines: list[Line] = [_rule(title, grid_width), *tiles]
        if host_width:
            beside, _ = self._grid(state, host, host_width, len(tiles), now[1])
            right = [_rule(f"host: {len(host.holders)} of {host.num_blocks} held", host_width), *beside]
            right += [[] for _ in range(len(lines) - len(right))]
            lines = _beside([lines, right], grid_width)
        if legend_rows:
            lines.append([Segment(f" {legend}", DIM)])
        return lines

    def _pools(
        self, states: Sequence[State], width: int, rows: int, touched: Sentence | None, ranks: Sequence[str]
    ) -> list[Line]:
        """The pools of several ranks, which share one block table, or of two engines, side by side. Only the last
        pool marks the blocks of the latest event."""
        each = max(1, (width - 3 * (len(ranks) - 1)) // len(ranks))
        legend_rows = 1 if rows > 4 else 0
        pools: list[list[Line]] = []
        for rank, state in zip(ranks, states, strict=True):
            now = set(touched.blocks) if touched and state is states[-1] else set()
            tiles, legend = self._grid(state, state.device, each, rows - 1 - legend_rows, now)
            counts = f"{len(state.device.holders)} of {state.device.num_blocks}"
            pools.append([_rule(f"{rank}: {counts}", each), *tiles])
        most = max(map(len, pools))
        lines = _beside([[*pool, *([] for _ in range(most - len(pool)))] for pool in pools], each)
        return [*lines, [Segment(f" {legend}", DIM)]] if legend_rows else lines

    def _grid(self, state: State, pool: PoolState, width: int, rows: int, touched: set[int]) -> tuple[list[Line], str]:
        """The blocks of one pool in at most `rows` rows, and a legend for the signs."""
        total, used = pool.num_blocks, pool.highest + 1
        digits = len(str(total)) + 1
        for tile in (16, 8, 4, 3, 2):
            per_row = (width - digits) // (tile + 1)
            cropped = [min(total, _round_up(used + per_row // 2, per_row))] if tile <= 4 else []
            for shown in (total, *cropped):
                more = shown < total
                most = rows if tile <= 4 else rows * 3 // 5  # large tiles must leave room for the words
                if per_row and -(-shown // per_row) + more <= most:
                    lines = [
                        [
                            Segment(f"{first:>{digits}}", DIM),
                            *self._tiles(state, pool, range(first, min(shown, first + per_row)), tile, touched),
                        ]
                        for first in range(0, shown, per_row)
                    ]
                    if more:
                        text = f"{shown:>{digits}} to {total - 1} not used yet"
                        lines.append([Segment(text[:width], DIM)])
                    return lines, self._legend(state, tile)
        per_cell = max(1, -(-total // max(1, width * rows)))
        cells = [
            self._cell(state, pool, range(first, min(total, first + per_cell))) for first in range(0, total, per_cell)
        ]
        lines = [_merged(cells[first : first + width]) for first in range(0, len(cells), width)]
        if per_cell == 1:
            return lines, "a letter is a block of that sequence, underlined: shared   ░ cached only   · free"
        legend = f"a sign is {per_cell} blocks: a letter if all are that sequence's, "
        legend += f"{BLOCKS_OF_EIGHT} by the share in use, · all free"
        return lines, legend

    def _legend(self, state: State, tile: int) -> str:
        shared = "A×3" if tile > 2 else "A3"
        parts = ["A·· partly filled", f"{shared} held by 3{' (cache too)' if state.cached else ''}"]
        parts += ["(c) cached"] if state.cached else []
        parts += ["▯ drafted"] if state.counts["tokens_drafted"] else []
        return "  ".join([*parts, "· free", "▸ just now"])

    def _tiles(self, state: State, pool: PoolState, blocks: Iterable[int], width: int, touched: set[int]) -> Line:
        """A row of tiles, with a mark before each block of the latest event."""
        line: Line = []
        for block in blocks:
            line.append(Segment("▸", BOLD) if block in touched else Segment(" ", DIM))
            line += self._tile(state, pool, block, width)
        return line

    def _tile(self, state: State, pool: PoolState, block: int, width: int) -> Line:
        holders = pool.holders.get(block)
        if not holders:
            if pool is state.device and block in state.cached:
                return [Segment("(c)".ljust(width)[:width], DIM)]
            return [Segment("·".ljust(width), DIM)]
        letter = state.sequences[holders[0]].letter
        count = state.ref_count(block) if pool is state.device else len(holders)
        text = letter
        if count > 1:
            text += f"×{count}" if width > 2 else str(count) if count < 10 else "+"
            if len(text) > width:
                text = f"{letter}×+"
        filled = pool.filled[block]
        taken = solid = width if filled >= state.block_size else max(1, width * filled // state.block_size)
        sequence = state.sequences[holders[0]]
        if sequence.drafted:
            drafted = sequence.unverified(sequence.table.index(block), state.block_size)
            solid = min(taken - (drafted > 0), width * (filled - drafted) // state.block_size)
        text = text.ljust(solid).ljust(taken, "▯").ljust(width, "·")
        style = self.style(letter)
        tile = [Segment(text[:solid], style + REVERSED)]
        if solid < width:
            tile.append(Segment(text[solid:], style))
        return tile

    def _cell(self, state: State, pool: PoolState, blocks: range) -> Segment:
        """One sign for several blocks."""
        held = [block for block in blocks if block in pool.holders]
        if not held:
            cached = pool is state.device and any(block in state.cached for block in blocks)
            return Segment("░" if cached else "·", DIM)
        letters = {state.sequences[pool.holders[block][0]].letter for block in held}
        if len(letters) == 1 and len(held) == len(blocks) and NO_LETTER not in letters:
            letter = letters.pop()
            shared = len(held) == 1 and len(pool.holders[held[0]]) > 1
            return Segment(letter, self.style(letter) + (REVERSED_UNDERLINED if shared else REVERSED))
        return Segment(BLOCKS_OF_EIGHT[-(-len(held) * 8 // len(blocks)) - 1], PLAIN)

    def style(self, letter: str) -> Style:
        """The style of a sequence, given its letter."""
        place = LETTERS.find(letter)
        if place < 0 or not self.colors:
            return PLAIN
        return _color(self.colors[place % len(self.colors)])

    # --- Block tables and words -------------------------------------------------------------------

    def _tables(self, state: State, width: int, rows: int) -> list[Line]:
        size = state.block_size
        lines = [_rule(f"block tables: entry i is the block that holds tokens {size}i to {size}i+{size - 1}", width)]
        if size == 1:
            lines = [_rule("block tables: entry i is the block that holds token i", width)]
        live = [s for queue in (state.running, state.waiting) for r in queue for s in r.sequences if s.letter]
        ended = [s for request in reversed(state.finished) for s in request.done if s.letter]
        room = rows - 1
        if not live and not ended:
            lines += [[Segment(f" {term:<15}", BOLD), Segment(_beginning(text, width - 17))] for term, text in GLOSSARY]
        elif len(live) == 1 and room >= 4:
            lines += self._one_table(state, live[0], width, room)
        elif not live and len(ended) == 1 and room >= 4:
            lines += self._one_table(state, ended[0], width, room)
        else:
            each = max(1, min(5, room // max(1, len(live) or len(ended))))
            shown = [*live, *ended][: max(0, room // each)]
            if len(live) > len(shown):
                shown = shown[:-1]
            tables = [self._entries(state, sequence, width - 6 if each > 1 else width * 3 // 5) for sequence in shown]
            widest = max((Segment.get_line_length(table) for table in tables), default=0)
            for sequence, table in zip(shown, tables, strict=True):
                lines += self._sequence(sequence, table, width, each, widest)
            if len(live) > len(shown):
                lines.append([Segment(f" … and {len(live) - len(shown)} more sequences", DIM)])
        return lines[: max(0, rows)]

    def _sequence(self, sequence: LiveSequence, table: Line, width: int, rows: int, widest: int) -> list[Line]:
        """The block table of a sequence, with its words below, or to the right if there is only one row."""
        head = [Segment(" "), Segment(f" {sequence.letter} ", self.style(sequence.letter) + REVERSED), Segment(" ")]
        style = DIM if sequence.ended else PLAIN
        if rows == 1:
            words = self._text(sequence, width - 8 - widest)
            return [[*head, *Segment.adjust_line_length(table, widest), Segment("  "), Segment(words, style)]]
        most = rows - 1 - (rows > 3)  # leave an empty line if there is room
        words = self._text(sequence, most * (width - 8))
        wrapped = _wrap_cells(words, width - 6)[-most:]
        lines = [[*head, *table], *([Segment(f"     {line}", style)] for line in wrapped)]
        return [*lines, *([] for _ in range(rows - len(lines)))]

    def _entries(self, state: State, sequence: LiveSequence, width: int) -> Line:
        """The block numbers of a block table with their reference counts, and the filled slots of the last block."""
        size = state.block_size
        if sequence.ended:
            return [Segment(f"has ended: {len(sequence.blocks)} blocks given back", DIM)]
        if not sequence.table:
            return [Segment("no blocks: waits to be computed again", DIM)]
        pool = state.host if sequence.swapped else state.device
        items: list[Segment] = []
        for block in sequence.table:
            if block == HOLE:
                items.append(Segment(" - ", DIM))
                continue
            holders = pool.holders[block]
            count = len(holders) if sequence.swapped else state.ref_count(block)
            text = f" {block}×{count} " if count > 1 else f" {block} "
            items.append(Segment(text, self.style(state.sequences[holders[0]].letter) + REVERSED))
        filled = sequence.filled(len(sequence.table) - 1, size)
        line: Line = [Segment("on the host ", BOLD)] if sequence.swapped else []
        tail = f"{filled} of {size} filled"
        kept = _fitting(items, width - len(tail) - Segment.get_line_length(line))
        for place, item in enumerate(items):
            if place in kept:
                line += [item, Segment(" ")]
            elif place - 1 in kept:
                line.append(Segment("… "))
        return [*line, Segment(tail, DIM)]

    def _text(self, sequence: LiveSequence, width: int) -> str:
        """The end of a sequence's text, after the question if there is room."""
        kept = sequence.output[-max(40, width // 2) :]
        cut = len(kept) < len(sequence.output)
        text = self._words(tuple(kept), tuple(sequence.tokens[: len(sequence.tokens) - len(kept)][-BEHIND:])).strip()
        question = self.questions.get(sequence.request.name, "")
        if not question and not sequence.output:
            question = self._words(tuple(sequence.prompt[-60:])).strip()
        room = max(0, width - 3 - cell_len(text))
        if question and not cut and room > 12:
            return f"{_beginning(question, min(room, max(24, width // 3)) if text else room)} → {text}".rstrip(" →")
        return _end(text, width)

    def _one_table(self, state: State, sequence: LiveSequence, width: int, rows: int) -> list[Line]:
        """The block table of a single sequence as in Fig. 6, with the tokens in each block. With several groups of
        layers: a block for each, or a hole."""
        size, style = state.block_size, self.style(sequence.letter)
        column = "its words" if self.decode else "its token ids"
        table, more = list(zip(*sequence.tables(), strict=True)), 5 * (sequence.num_groups - 1)  # columns
        lines: list[Line] = [[Segment(f"   logical    block{' ' * more}   filled   refs   {column}", DIM)]]
        pool = state.host if sequence.swapped else state.device
        tokens, num_verified = [*sequence.tokens, *sequence.drafted], sequence.num_verified
        first = max(0, len(table) - (rows - 1))
        if first:
            first += 1
            lines.append([Segment(f"         0 to {first - 1} are full, and out of sight", DIM)])
        for logical, blocks in list(enumerate(table))[first:]:
            here = tokens[logical * size : min((logical + 1) * size, sequence.num_computed)]
            words = [self.word(token).strip(" ") for token in here]
            solid = max(0, num_verified - logical * size)
            slots = "|".join([*words[:solid], *(f"▯{word}" for word in words[solid:])]) + "|·" * (size - len(here))
            refs = max(state.ref_count(block) if pool is state.device else 1 for block in blocks)
            count = "-" if sequence.ended else str(refs)
            cells = "".join(f"{'-' if block == HOLE else block:>4} " for block in blocks)
            lines.append(
                [
                    Segment(f"{logical:>10}    "),
                    Segment(cells, style + REVERSED),
                    Segment(f"{f'{len(here)}/{size}':>9}{count:>7}   "),
                    Segment(_beginning(slots, max(0, width - 38 - more)), style if not sequence.ended else DIM),
                ]
            )
        return lines

    # --- Bars and queues --------------------------------------------------------------------------

    def _bars(self, state: State, width: int) -> list[Line]:
        """Bars of the slots taken now, with paging and with a contiguous cache that reserves max_model_len for each
        sequence."""
        pool, size = state.device, state.block_size
        slots = max(1, pool.num_blocks * size)
        held = len(pool.holders) * size
        whole = state.max_model_len * len(state.group_windows)  # it has slots in every layer
        reserved = state.num_on_device * whole
        share = f"{100 * pool.num_filled / held:.0f} % of them filled" if held else "nothing taken"
        fits = slots // whole
        paged = f"{held} of {slots} slots taken, {share}"
        others = f"{state.num_on_device} × {whole} slots reserved, of which {fits} fit"
        bar = max(10, width - 14 - max(len(paged), len(others)) - 2)
        cached = state.num_cached_only * size
        return [
            self._bar(
                "paged", [("█", pool.num_filled), ("░", held - pool.num_filled), ("▪", cached)], slots, bar, paged
            ),
            self._bar(
                "contiguous",
                [("█", state.contiguous_tokens), ("░", reserved - state.contiguous_tokens)],
                slots,
                bar,
                others,
            ),
        ]

    def _bar(self, label: str, parts: list[tuple[str, int]], total: int, width: int, text: str) -> Line:
        line = [Segment(f" {label:<11}")]
        ends, taken = 0, 0
        for sign, amount in parts:
            taken += amount
            end = min(width, max(ends + (amount > 0), round(width * taken / total)))
            line.append(Segment(sign * (end - ends), DIM if sign == "▪" else PLAIN))
            ends = end
        line.append(Segment("·" * (width - ends), DIM))
        line.append(Segment("▸ " if taken > total else "  ", BOLD))
        line.append(Segment(text))
        return line

    def _queues(self, state: State, width: int) -> list[Line]:
        line = [Segment(" ")]
        waiting = [request for request in state.waiting if request.queue == "waiting"][:30]
        queues = (
            ("running", state.running, len(state.running)),
            ("waiting", waiting, len(state.waiting) - state.num_swapped),
            ("swapped", state.swapped if state.num_swapped else [], state.num_swapped),
        )
        for label, requests, number in queues:
            if label == "swapped" and not state.host.num_blocks:
                continue
            line.append(Segment(f"{label} {number}: ", BOLD if number else DIM))
            room = width // 3 - len(label) - 8
            for shown, request in enumerate(requests):
                parts = self._request(request)
                room -= sum(len(text) for text, _, _ in parts) + 1
                if room < 0:
                    line.append(Segment(f"+{number - shown} "))
                    break
                line += [*parts, Segment(" ")]
            line.append(Segment("  "))
        return [line]

    def _request(self, request: LiveRequest) -> Line:
        """The letters of a request's sequences, or its id before they have any."""
        letters = [s.letter for s in request.sequences if s.letter]
        return [Segment(letter, self.style(letter) + BOLD) for letter in letters] or [Segment(request.name)]

    # --- The ticker -------------------------------------------------------------------------------

    def _news(self, caption: Caption, notes: Sequence[Note], width: int, rows: int) -> list[Line]:
        if caption.measured:
            lines: list[Line] = [_rule("measured", width)]
            for text in caption.measured:
                lines += [
                    [Segment(part, BOLD)]
                    for part in textwrap.wrap(text, max(4, width - 2), initial_indent=" ", subsequent_indent="   ")
                ]
            return lines + [[] for _ in range(rows + 1 - len(lines))]
        lines = []
        for note in reversed(notes):
            head = f" step {note.step}  "
            latest = note is notes[-1]
            wrapped = textwrap.wrap(
                note.sentence.text,
                max(len(head) + 1, width - 1),
                initial_indent=head,
                subsequent_indent=" " * len(head),
            )
            if len(lines) + len(wrapped) > rows:
                if latest:
                    lines = [[Segment(part, BOLD)] for part in wrapped[:rows]]
                break
            lines = [[Segment(part, BOLD if latest else DIM)] for part in wrapped] + lines
        lines = [[] for _ in range(rows - len(lines))] + lines
        return [_rule("what just happened", width), *lines]


def changes(lines: list[str], shown: list[str]) -> str:
    """The output that changes a screen from `shown` to `lines`: the changed lines, or all lines if the size differs."""
    clear = "" if len(lines) == len(shown) else "\x1b[2J"
    return clear + "".join(
        f"\x1b[{row};1H{line}\x1b[0m\x1b[K"
        for row, line in enumerate(lines, start=1)
        if clear or shown[row - 1] != line
    )


# --- Pieces of lines ------------------------------------------------------------------------------

REVERSED = Style(reverse=True, bold=True)
REVERSED_UNDERLINED = Style(reverse=True, bold=True, underline=True)


@cache
def _color(number: int) -> Style:
    return Style(color=f"color({number})")


def _rule(title: str, width: int) -> Line:
    return [
        Segment("── ", DIM),
        Segment(title[: width - 4], BOLD),
        Segment(" " + "─" * max(0, width - 4 - len(title)), DIM),
    ]


def _beside(columns: Sequence[list[Line]], width: int) -> list[Line]:
    """Join columns with equal numbers of lines side by side. All but the last become `width` wide."""
    divider = Segment(" │ ", DIM)
    *others, last = columns
    lines = last
    for column in reversed(others):
        lines = [[*Segment.adjust_line_length(a, width), divider, *b] for a, b in zip(column, lines, strict=True)]
    return lines


def _watch(caption: Caption, width: int, rows: int) -> list[Line]:
    wrapped = textwrap.wrap(caption.watch, max(3, width - 2), max_lines=rows, placeholder=" …")
    return [[Segment(" " + line, Style(italic=True))] for line in wrapped]


def _spread(left: Line, right: Line, width: int) -> Line:
    """Put `left` at the left edge and `right` at the right edge. If there is too little room, `left` is cut first."""
    room = max(0, width - Segment.get_line_length(right) - 1)
    return [*Segment.adjust_line_length(left, room), Segment(" "), *right]


def _merged(cells: list[Segment]) -> Line:
    """Merge neighbouring cells of the same style, which turns thousands of cells into a few hundred segments."""
    return list(Segment.simplify(cells))


def _fitting(items: list[Segment], width: int) -> set[int]:
    """The indices of the items to show: all, or the last two and as many of the first as fit."""
    if sum(len(item.text) + 1 for item in items) <= width:
        return set(range(len(items)))
    kept: set[int] = set()
    room = width - 2
    for place in (len(items) - 1, len(items) - 2, *range(len(items) - 2)):
        room -= len(items[place].text) + 1
        if room < 0:
            break
        kept.add(place)
    return kept


def _round_up(number: int, multiple: int) -> int:
    return -(-number // max(1, multiple)) * multiple


def _ascii(text: str) -> str:
    return printable(text).translate(ASCII).encode("ascii", "replace").decode()


def _wrap_cells(text: str, width: int) -> list[str]:
    """Wrap text to lines of at most `width` columns. (`textwrap` counts characters, and some are two columns wide.)"""
    lines = [""]
    for word in text.split():
        for piece in chop_cells(word, max(2, width)):
            longer = f"{lines[-1]} {piece}".strip()
            if cell_len(longer) <= width:
                lines[-1] = longer
            else:
                lines.append(piece)
    return lines if lines[0] else lines[1:]


def _beginning(text: str, width: int) -> str:
    """The beginning of the text that fits `width` columns."""
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > width - 1:
        text = text[: -max(1, (cell_len(text) - width) // 2)]
    return text + "…" if width > 0 else ""


def _end(text: str, width: int) -> str:
    """The end of the text that fits `width` columns."""
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > width - 1:
        text = text[max(1, (cell_len(text) - width) // 2) :]
    return "…" + text if width > 0 else ""
