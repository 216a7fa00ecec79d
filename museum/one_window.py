"""Exhibit 8 of the bug museum: a layer that should see everything forgets, and every block is right.

A model has layers with a window and a layer that sees everything. A setting puts all of them into one group, whose
block table keeps everything. Which tokens a layer reads has a bug: docs/museum/one_window.md.

    python museum/one_window.py
"""

from minipaged.course.museum import try_workloads
from minipaged.engine.grouped_table import first_seen
from minipaged.testing.content_runner import ContentRunner


class Layer:
    """A layer. `window`: the number of tokens that a token sees, itself included; None: it sees everything."""

    def __init__(self, window):
        self.window = window

    def first_read(self, position, group):
        """The first position that the token at `position` reads in this layer."""
        window = group.window if group.window is not None else self.window
        return first_seen(window, position)


class Group:
    """Layers that share a block table. It keeps everything, because one of them sees everything."""

    def __init__(self, *layers):
        self.layers = layers
        [self.window] = {layer.window for layer in layers if layer.window is not None}


class Runner(ContentRunner):
    """A model of three layers. Its next token depends on every token that at least one layer reads."""

    GROUP = Group(Layer(32), Layer(32), Layer(None))

    def _read(self, sequence, blocks, tokens, start):
        """The tokens whose keys and values the layers read when the last token is run."""
        found = super()._read(sequence, blocks, tokens, start)
        first = min(layer.first_read(len(tokens) - 1, self.GROUP) for layer in self.GROUP.layers)
        return found[first:]


PARTS = {"runner": Runner}

if __name__ == "__main__":
    try_workloads(PARTS)
