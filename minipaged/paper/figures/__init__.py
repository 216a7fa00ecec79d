"""The figures, one file for each kind. `FIGURES` has them by name, in the paper's order."""

from __future__ import annotations

from minipaged.paper.figure import Figure
from minipaged.paper.figures.fig12 import FIG_12

FIGURES: dict[str, Figure] = {figure.name: figure for figure in (*FIG_12,)}
