"""The figures, one file for each kind. `FIGURES` has them by name, in the paper's order."""

from __future__ import annotations

from minipaged.paper.figure import Figure
from minipaged.paper.figures.fig12 import FIG_12
from minipaged.paper.figures.fig14 import FIG_14
from minipaged.paper.figures.fig16 import FIG_16
from minipaged.paper.figures.fig17 import FIG_17

FIGURES: dict[str, Figure] = {figure.name: figure for figure in (*FIG_12, *FIG_14, *FIG_16, FIG_17)}
