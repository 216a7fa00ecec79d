"""The rules of the house: who may import whom. Read from the source, so that no import hides in a function."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import minipaged

ROOT = Path(minipaged.__file__).parent
WINGS = ("reference", "fast")

MAY_IMPORT = {
    # Plain Python, which runs wherever Python runs.
    "contracts": {"minipaged.params", "minipaged.errors", "minipaged.steps"},
    "steps": {"minipaged.params"},
    "mirror": {"minipaged.contracts", "minipaged.steps"},
    "events": set[str](),
    "outputs": set[str](),
    "params": {"minipaged.errors"},
    "errors": set[str](),
    "scheduling": set[str](),
    "replay": {"minipaged.errors", "minipaged.events", "minipaged.replay"},
    "engine": {
        "minipaged.contracts",
        "minipaged.errors",
        "minipaged.events",
        "minipaged.outputs",
        "minipaged.params",
        "minipaged.scheduling",
        "minipaged.steps",
        "minipaged.engine",
    },
    "reference": {
        "numpy",
        "minipaged.contracts",
        "minipaged.errors",
        "minipaged.mirror",
        "minipaged.params",
        "minipaged.steps",
        "minipaged.models.config",
        "minipaged.reference",
    },
    "fast": {
        "numpy",
        "numba",
        "llvmlite",
        "torch",
        "triton",
        "minipaged.contracts",
        "minipaged.errors",
        "minipaged.mirror",
        "minipaged.params",
        "minipaged.steps",
        "minipaged.models.config",
        "minipaged.fast",
    },
}


def module_name(path: Path) -> str:
    parts = ("minipaged", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(path: Path, *, at_import_only: bool = False) -> Iterator[str]:
    """The modules that a file imports, as dotted names. `at_import_only`: leave out what functions import later, and
    what only type checkers see."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute in this house"
            assert node.module is not None
            for alias in node.names:  # `from minipaged import contracts` imports minipaged.contracts
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in SOURCES else node.module
        if at_import_only:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                pending.extend(node.orelse)
                continue
        pending.extend(ast.iter_child_nodes(node))


def is_under(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def is_allowed(module: str, allowed: set[str]) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names or any(is_under(module, name) for name in allowed)


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_only_what_lies_below_it(part: str):
    files = [path for name, path in SOURCES.items() if is_under(name, f"minipaged.{part}")]
    assert files
    wrong = {
        (path.relative_to(ROOT).as_posix(), module)
        for path in files
        for module in imports(path)
        if not is_allowed(module, MAY_IMPORT[part])
    }
    assert not wrong


ON_THE_FAST_TIER = ("minipaged.course.triton_decode", "minipaged.course.decode_worker")
"""The assignment that is about a kernel of the fast tier's: it puts the student's in its place."""


def test_only_tiers_knows_the_wings():
    """And each wing knows itself, never the other."""
    wrong = set()
    for name, path in SOURCES.items():
        for module in imports(path):
            for wing in WINGS:
                inside = is_under(name, f"minipaged.{wing}")
                if is_under(module, f"minipaged.{wing}") and not inside and name != "minipaged.tiers":
                    wrong.add((name, module))
    wrong -= {(name, module) for name, module in wrong if name in ON_THE_FAST_TIER and "minipaged.fast" in module}
    assert not wrong


TWINS = {
    "block_allocator": ("BlockAllocator",),
    "block_table": ("BlockTable",),
    "kv_cache": ("KVCache",),
    "attention": ("paged_attention",),
    "preemption": ("PreemptionCosts", "carry", "measure"),
    "beam_search": ("BeamSearch",),
    "sampling": ("sample",),
    "llama": ("Llama", "FlatBatch", "flatten", "rotary_tables", "inverse_frequencies"),
}


def test_the_wings_have_the_same_rooms():
    """Each file of one wing has its twin in the other. (The fast wing's kernels live in two rooms below; `kernels.py`
    says what they are.)"""
    for wing in WINGS:
        others = {"__init__", "kernels"} if wing == "fast" else {"__init__"}
        assert {path.stem for path in (ROOT / wing).glob("*.py")} == TWINS.keys() | others


@pytest.mark.parametrize(("room", "name"), [(room, name) for room, names in TWINS.items() for name in names])
def test_twins_have_the_same_public_members_called_in_the_same_way(room: str, name: str):
    """A fast member may take more than its twin, but only what can be left out."""
    reference, fast = (getattr(importlib.import_module(f"minipaged.{wing}.{room}"), name) for wing in WINGS)
    pairs = {name: (reference, fast)}
    if inspect.isclass(reference) and not dataclasses.is_dataclass(reference):
        members = {member for member in vars(reference) if not member.startswith("_")}
        pairs |= {member: (getattr(reference, member), getattr(fast, member)) for member in members - ONLY_REFERENCE}
    for member, (theirs, ours) in pairs.items():
        if not (callable(theirs) and callable(ours)) or name in ("FlatBatch", "rotary_tables", "flatten"):
            continue
        expected, found = (list(inspect.signature(call).parameters.values()) for call in (theirs, ours))
        assert [p.name for p in found[: len(expected)]] == [p.name for p in expected], member
        assert all(p.default is not p.empty for p in found[len(expected) :]), member


ONLY_REFERENCE = {"check_blocks"}
"""NumPy takes -1 for the last block, so that the reference checks tables in one more place."""


def test_triton_is_imported_only_by_its_kernels():
    """Everything else of the fast tier runs where there is no Triton."""
    users = {name for name, path in SOURCES.items() if any(is_under(m, "triton") for m in imports(path))}
    assert users
    assert users - {"minipaged.course.decode_worker"} == {
        name for name in users if is_under(name, "minipaged.fast.gpu")
    }


def test_numba_is_imported_only_by_its_kernels():
    users = {name for name, path in SOURCES.items() if any(is_under(m, "numba") for m in imports(path))}
    assert users
    assert users == {name for name in users if is_under(name, "minipaged.fast.cpu")}


def test_the_fast_tier_reaches_its_kernels_by_their_interface_only():
    """`kernels_for` chooses; no other file of the tier knows which set it has, or asks either for more."""
    sides = ("minipaged.fast.gpu", "minipaged.fast.cpu")
    users = {
        name
        for name, path in SOURCES.items()
        if is_under(name, "minipaged.fast") and not any(is_under(name, side) for side in sides)
        if any(is_under(module, side) for module in imports(path) for side in sides)
    }
    assert users == {"minipaged.fast.kernels"}


def test_block_allocators_import_no_numpy():
    allocators = [path for name, path in SOURCES.items() if name.endswith(".block_allocator")]
    assert allocators
    for path in allocators:
        assert "numpy" not in set(imports(path, at_import_only=True)), path


def test_no_module_imports_itself_by_way_of_others():
    """Arrows point down: what is imported when modules load has no cycle."""
    below = {name: {m for m in imports(path, at_import_only=True) if m in SOURCES} for name, path in SOURCES.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way, name))
        if name not in done:
            for module in sorted(below[name]):
                visit(module, (*way, name))
            done.add(name)

    for name in SOURCES:
        visit(name, ())
    assert below["minipaged.llm"] >= {"minipaged.tiers", "minipaged.engine.engine"}  # it does see imports


def test_every_file_opens_with_a_docstring():
    silent = [
        name
        for name, path in SOURCES.items()
        if path.read_text() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent
