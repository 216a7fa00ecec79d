"""The groups of a model's layers: layers of a group see the same tokens, and share a block table.

A layer sees everything, or a window of the last tokens. Blocks that no layer of a group sees any more are given back
(`engine/grouped_table.py`). All groups take their blocks from one pool of equal blocks, so a block has the same number
of layers in each group:

    26 layers: every 6th sees everything (4 layers), and the others have a window (22 layers)
    group 0         the 4 layers that see everything
    groups 1 to 6   the 22 layers with a window, dealt out in turn: two groups get 3, and have room for a fourth

vLLM's hybrid KV cache manager does the same, for the same reason: with pools of different blocks, memory would have to
be divided between them before anyone knows how long sequences become.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class LayerGroups(NamedTuple):
    """The groups of some layers: all of a model, or those of a pipeline's stage."""

    windows: tuple[int | None, ...]
    """The window of each group, in tokens; None: its layers see everything."""
    of_layer: tuple[int, ...]
    """The group of each layer."""

    @property
    def places(self) -> list[int]:
        """For each layer, its place among the layers of a block: the number of layers of its group before it."""
        return [self.of_layer[:layer].count(group) for layer, group in enumerate(self.of_layer)]

    @property
    def layers_per_block(self) -> int:
        return max(self.places) + 1


def group_layers(windows: Sequence[int | None]) -> LayerGroups:
    """Divide layers into groups of one size: the number of layers with the rarest window. `windows`: of each layer."""
    size = min(Counter(windows).values())
    group_windows: list[int | None] = []
    for window, count in sorted(Counter(windows).items(), key=lambda kind: (kind[0] is not None, kind[0] or 0)):
        group_windows += [window] * -(-count // size)  # rounded up
    before: Counter[int | None] = Counter()
    of_layer: list[int] = []
    for window in windows:
        # Dealt out, so that each stage of a pipeline has about as many of every group.
        of_layer.append(group_windows.index(window) + before[window] % group_windows.count(window))
        before[window] += 1
    return LayerGroups(tuple(group_windows), tuple(of_layer))
