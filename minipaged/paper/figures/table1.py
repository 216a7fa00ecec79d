"""Table 1: models and servers, and the number of tokens that their KV memory holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minipaged.paper.figure import Check, Figure, FigureResult, Job, Line, Plot
from minipaged.paper.machines import SETTINGS, machine

PRINTED = {"OPT-13B": (26, 12, 15.7), "OPT-66B": (132, 21, 9.7), "OPT-175B": (346, 264, 60.1)}
"""The numbers printed in Table 1: weights in GB, memory for K and V in GB, and slots of one token in thousands."""
TOLERANCE = 0.02
"""Tolerance of the number of slots, as a fraction."""
PARAMETERS = {"OPT-13B": 13e9, "OPT-66B": 66e9, "OPT-175B": 175e9}
WEIGHTS_TOLERANCE = 0.02
TOKEN_TOLERANCE = 0.0
"""Tolerance of the size of a token's K and V. It follows from the number of layers and their width."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A job that computes the sizes of one model's machine."""

    model: str
    block_size: int = 16

    def run(self) -> Sized:
        """Compute the sizes."""
        made, setting = machine(self.model), SETTINGS[self.model]
        return Sized(
            weight_bytes=2 * PARAMETERS[self.model],
            kv_bytes_per_token=setting.kv_bytes_per_token,
            slots=made.num_blocks(self.block_size) * self.block_size,
        )


@dataclass(frozen=True, slots=True)
class Sized:
    """Sizes of one model's machine."""

    weight_bytes: float
    """Two bytes for each parameter, whose number is in the model's name."""
    kv_bytes_per_token: int
    """Bytes of one token's K and V in all layers."""
    slots: int
    """Tokens that whole blocks in the KV memory hold."""


class Table1(Figure):
    """Sizes of the weights and slots of the KV memory. The size of the KV memory is taken from the paper."""

    name = "table1"
    title = "Table 1: model sizes and server configurations"
    section = "6.1"
    look = (
        "Few tokens fit. OPT-66B has the least room: its four GPUs leave little memory beside the weights, and its "
        "tokens are almost three times as large as OPT-13B's. So it gains most from paging (Fig. 12b)."
    )
    change_it = (
        "Keep K and V in 8 bits: halve `Setting.kv_bytes_per_token` in paper/machines.py, and run 12a again.",
        "Use blocks of 256 tokens (`Sizes(model, block_size=256)`): what does rounding to whole blocks lose?",
        "Add a column: your GPU, and the model you would serve on it. How many chats of 2,000 tokens fit?",
    )

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        return [Sizes(model) for model in PRINTED]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        checks: list[Check] = []
        paper: list[tuple[float, float]] = []
        ours: list[tuple[float, float]] = []
        for i, (model, (weights, _, slots)) in enumerate(PRINTED.items()):
            found = results[Sizes(model)]
            per_token = found["kv_bytes_per_token"] / 1024
            checks += [
                Check(
                    f"{model}: weights",
                    weights,
                    found["weight_bytes"] / 1e9,
                    WEIGHTS_TOLERANCE,
                    unit=" GB",
                    kind="exact",
                ),
                Check(f"{model}: slots, in thousands", slots, found["slots"] / 1e3, TOLERANCE, unit="K", kind="exact"),
                Check(
                    f"{model}: K and V of a token",
                    800 if i == 0 else None,
                    per_token,
                    TOKEN_TOLERANCE if i == 0 else None,
                    unit=" KiB",
                    kind="exact",
                ),
            ]
            paper.append((i, slots))
            ours.append((i, found["slots"] / 1e3))
        plot = Plot(
            "KV cache slots",
            "",
            "thousands of tokens",
            [Line("paging", "ours", ours), Line("Table 1", "paper", paper)],
            groups=list(PRINTED),
        )
        memory = ", ".join(f"{kv} GB for {model}" for model, (_, kv, _) in PRINTED.items())
        return FigureResult(
            [plot],
            checks,
            notes=[
                f"The size of the KV memory is the paper's, read as GiB ({memory}): only this gives the paper's slots. "
                "It is an input, so there is nothing to judge."
            ],
        )


TABLE_1 = Table1()
