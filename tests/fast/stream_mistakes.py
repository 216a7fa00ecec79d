"""Mistakes for the rehearsal on a pretended GPU to find: each wait of the fast tier forgotten, and a few others."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import minipaged.fast

FOLDER = Path(minipaged.fast.__file__).parent


class Mistake(NamedTuple):
    """A function of minipaged/fast with something changed in it."""

    name: str
    module: str
    function: str
    right: str
    wrong: str
    field: str
    """Of the report, where it shows,"""
    shows: str
    """and what that says, among other things."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Whoever has the function runs this one in its place."""
        source = source_of(self.module)
        assert source.count(self.right) == 1, f"{self.right!r} is no longer in {self.module}"
        module = importlib.import_module(f"minipaged.fast.{self.module}")
        found: Any = functools.reduce(getattr, self.function.split("."), module)
        function = inspect.unwrap(found)
        changed = compile(source.replace(self.right, self.wrong), inspect.getfile(module), "exec")
        right, function.__code__ = function.__code__, code_of(self.function, changed)
        try:
            yield
        finally:
            function.__code__ = right


def source_of(module: str) -> str:
    return (FOLDER / f"{module}.py").read_text()


def code_of(function: str, code: CodeType) -> CodeType:
    """Of a function by its qualified name, within a module's code."""
    for name in function.split("."):
        code = next(one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name)
    return code


ORDERING = {"record", "record_stream", "synchronize", "wait_event", "wait_stream"}
"""Methods that put work in order, of which each call has to be missed. (preemption.py waits to measure.)"""


def forgotten_waits() -> Iterator[Mistake]:
    """Each call of those in the fast tier, left out."""
    for module in sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "preemption"):
        source = source_of(module)
        for function, statement in statements(ast.parse(source)):
            call = statement.value
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ORDERING:
                right = ast.get_source_segment(source, statement)
                assert right
                yield Mistake(f"{function} without {right}", module, function, right, "pass", "races", function)


def statements(node: ast.AST, within: str = "") -> Iterator[tuple[str, ast.Expr]]:
    """The statements that are but an expression, each with the function that it is in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from statements(child, f"{within}.{child.name}".lstrip("."))
        elif isinstance(child, ast.Expr):
            yield within, child
        else:
            yield from statements(child, within)


MISTAKES = [
    *forgotten_waits(),
    Mistake(
        "padding that is the graph's own numbers, where the device is the host",
        "llama",
        "DecodeGraph.__init__",
        "self.numbers = torch.tensor(self._padding, device=device)",
        "self.numbers = torch.from_numpy(self._padding).to(device)",
        "others",
        "",
    ),
    Mistake(
        "one piece of pinned memory for all steps, which a copy may still have to read",
        "llama",
        "DecodeGraph.run",
        "self.numbers.copy_(torch.from_numpy(numbers).pin_memory(), non_blocking=True)",
        "pinned = vars(batch.tables).setdefault('pinned', torch.empty(3, 99, dtype=torch.int32, pin_memory=True));"
        "pinned.numpy()[:, : len(numbers[0])] = numbers;"
        "self.numbers.copy_(pinned[:, : len(numbers[0])], non_blocking=True)",
        "races",
        "the host has overwritten what DecodeGraph.run has allocated",
    ),
    Mistake(
        "a capture that begins in inference mode, and with it what torch keeps for all captures",
        "llama",
        "DecodeGraph.__init__",
        "with capture, torch.inference_mode():",
        "with torch.inference_mode(), capture:",
        "error",
        "Inplace update to inference tensor outside InferenceMode",
    ),
    Mistake(
        "a look at a number in the middle of a step, for which the host waits",
        "llama",
        "Llama.run",
        "choices = self.sample(logits, self.mirror.sampling_inputs())",
        "bool((logits > 0).any()); choices = self.sample(logits, self.mirror.sampling_inputs())",
        "waits",
        "Llama.run",
    ),
]
