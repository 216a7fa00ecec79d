"""Layers in groups of one size (`models/layer_groups.py`)."""

from __future__ import annotations

from collections import Counter

import pytest

from minipaged.models.layer_groups import LayerGroups, group_layers


def test_layers_that_see_the_same_share_a_group() -> None:
    assert group_layers([None] * 3) == LayerGroups((None,), (0, 0, 0))
    assert group_layers([8, 8]) == LayerGroups((8,), (0, 0))
    assert group_layers([8, None, 8, None]) == LayerGroups((None, 8), (1, 0, 1, 0))


def test_there_are_as_many_layers_in_a_block_as_have_the_rarest_window() -> None:
    groups = group_layers([512, 512, 512, 512, 512, None] * 3)
    assert groups.windows == (None, 512, 512, 512, 512, 512)
    assert groups.layers_per_block == 3
    assert groups.of_layer[:8] == (1, 2, 3, 4, 5, 0, 1, 2)
    assert groups.places[:8] == [0, 0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(("full", "windowed"), [(4, 22), (1, 5), (5, 29), (13, 13), (3, 1)])
def test_no_two_layers_have_the_same_place(full: int, windowed: int) -> None:
    windows = [None] * full + [7] * windowed
    groups = group_layers(windows)
    at = Counter(zip(groups.of_layer, groups.places, strict=True))
    assert max(at.values()) == 1
    assert groups.layers_per_block == min(full, windowed)
    assert [groups.windows[group] for group in groups.of_layer] == windows
    assert len(groups.windows) == -(-full // min(full, windowed)) + -(-windowed // min(full, windowed))


@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_of_a_pipeline_have_about_as_many_layers_of_each_group(num_stages: int) -> None:
    """A stage reserves blocks for the group of which it has most."""
    windows: list[int | None] = [512, 512, 512, 512, 512, None] * 4 + [512, 512]
    groups = group_layers(windows)
    stages = [groups.of_layer[i * 26 // num_stages : (i + 1) * 26 // num_stages] for i in range(num_stages)]
    each = [LayerGroups(groups.windows, stage).layers_per_block for stage in stages]
    assert groups.layers_per_block == 4
    assert sum(each) <= groups.layers_per_block + num_stages
