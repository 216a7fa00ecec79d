"""How a model is to be quantized: what can be asked for, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from minipaged.errors import InvalidRequest

Method = Literal["rtn", "gptq", "awq"]
ActOrder = Literal["none", "static", "group"]
BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Method and grid. Raises InvalidRequest for what there is not."""

    method: Method = "gptq"
    bits: int = 4
    """Of a code: 2, 3, 4 or 8."""
    group_size: int = 64
    """Inputs of a group; -1: all of a row."""
    symmetric: bool = False
    """The code in the middle means 0 in each group; else each group has a zero of its own."""
    act_order: ActOrder = "static"
    """GPTQ: whether the inputs that weigh most come first. "static": and groups are of neighbours all the same;
    "group": and those that follow one another are a group, which the file has to say for each input."""

    def __post_init__(self) -> None:
        for name, known in (("method", get_args(Method)), ("bits", BITS), ("act_order", get_args(ActOrder))):
            if getattr(self, name) not in known:
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}; choose {', '.join(map(str, known))}")
        if self.group_size != -1 and self.group_size < 1:
            raise InvalidRequest(f"group_size is {self.group_size}; give 1 or more inputs, or -1 for all of a row")

    def size(self, num_inputs: int) -> int:
        """Inputs of a group in a row of so many."""
        return num_inputs if self.group_size == -1 else self.group_size

    @property
    def top(self) -> int:
        """The largest code."""
        return int(2**self.bits - 1)
