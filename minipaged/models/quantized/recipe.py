"""The settings for quantizing a model, checked before any file is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from minipaged.errors import InvalidRequest

Method = Literal["rtn", "gptq", "awq"]
ActOrder = Literal["none", "static", "group"]
BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The method and the grid of a quantization. Raises InvalidRequest for values that are not supported."""

    method: Method = "gptq"
    bits: int = 4
    """Bits per code: 2, 3, 4 or 8."""
    group_size: int = 64
    """Inputs per group; -1: the whole row."""
    symmetric: bool = False
    """Whether the middle code means 0 in every group. Otherwise each group has its own zero."""
    act_order: ActOrder = "static"
    """GPTQ: whether inputs are processed in order of importance. "static": groups are still neighbouring inputs;
    "group": inputs that are processed in sequence form a group, and the file lists the group of each input."""

    def __post_init__(self) -> None:
        for name, known in (("method", get_args(Method)), ("bits", BITS), ("act_order", get_args(ActOrder))):
            if getattr(self, name) not in known:
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}; choose {', '.join(map(str, known))}")
        if self.group_size != -1 and self.group_size < 1:
            raise InvalidRequest(f"group_size is {self.group_size}; give 1 or more inputs, or -1 for the whole row")

    def size(self, num_inputs: int) -> int:
        """Inputs per group in a row of `num_inputs`."""
        return num_inputs if self.group_size == -1 else self.group_size

    @property
    def top(self) -> int:
        """The largest code."""
        return int(2**self.bits - 1)
