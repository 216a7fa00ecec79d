"""The figures, with one file for each kind. `FIGURES` maps names to figures, in the paper's order."""

from __future__ import annotations

from minipaged.paper.figure import Figure
from minipaged.paper.figures.beyond import BEYOND
from minipaged.paper.figures.calibration import CALIBRATION
from minipaged.paper.figures.fig01 import FIG_1
from minipaged.paper.figures.fig02 import FIG_2
from minipaged.paper.figures.fig03 import FIG_3
from minipaged.paper.figures.fig11 import FIG_11
from minipaged.paper.figures.fig12 import FIG_12
from minipaged.paper.figures.fig13 import FIG_13
from minipaged.paper.figures.fig14 import FIG_14
from minipaged.paper.figures.fig15 import FIG_15
from minipaged.paper.figures.fig16 import FIG_16
from minipaged.paper.figures.fig17 import FIG_17
from minipaged.paper.figures.fig18 import FIG_18
from minipaged.paper.figures.fig19 import FIG_19
from minipaged.paper.figures.prefix_caching import PrefixCaching
from minipaged.paper.figures.real_requests import REAL_REQUESTS
from minipaged.paper.figures.routing import Routing
from minipaged.paper.figures.steppers import FIGS_4_TO_10
from minipaged.paper.figures.table1 import TABLE_1

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        FIG_1,
        FIG_2,
        FIG_3,
        *FIGS_4_TO_10,
        FIG_11,
        *FIG_12,
        FIG_13,
        *FIG_14,
        FIG_15,
        *FIG_16,
        FIG_17,
        *FIG_18,
        *FIG_19,
        TABLE_1,
        CALIBRATION,
        *BEYOND,
        Routing(),
        PrefixCaching(),
        *REAL_REQUESTS,
    )
}
