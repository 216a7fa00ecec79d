"""The rules of the house: who may import whom. Read from the source, so that no import hides in a function."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

import minipaged

ROOT = Path(minipaged.__file__).parent
WINGS = ("reference", "fast")


@dataclasses.dataclass(frozen=True)
class Room:
    """What a room (a package of ours, or a file beside them) imports besides the standard library. Words with blanks
    between them: rooms, single modules of one (`models.config`), or packages from outside."""

    ours: str = ""
    outside: str = ""
    late: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What only functions import: why not at once -> what. Modules of its own too, and of the standard library."""


HOUSE = {
    # The ground: plain Python, which runs wherever Python runs.
    "errors": Room(),
    "events": Room(),
    "outputs": Room(),
    "scheduling": Room(),
    "api": Room("errors"),
    "handover": Room("errors"),
    "params": Room("api errors"),
    "steps": Room("params"),
    "contracts": Room("errors params scheduling steps"),
    "mirror": Room("contracts steps", late={"only steps with grammars need it": "numpy"}),
    # The engine knows no tier, and no NumPy.
    "engine": Room("contracts errors events handover outputs params scheduling steps"),
    # A run followed from its events.
    "replay": Room("errors events"),
    # Where models come from.
    "models": Room(
        "errors params",
        "numpy",
        late={
            "slow to load, and only some models need them": "gguf huggingface_hub tokenizers transformers",
            "only requests with structured outputs need it": "llguidance",
            "slow to load, and needed once for each model": "filelock models.gguf platformdirs rich",
        },
    ),
    # The two wings know neither each other nor the engine.
    "reference": Room(
        "contracts errors mirror models.config models.quantized.recipe models.quantized.stored models.shards params "
        "scheduling steps",
        "numpy",
    ),
    "fast": Room(
        "contracts errors mirror models.config models.hub models.quantized.stored models.shards params scheduling "
        "steps",
        "filelock llvmlite numba numpy torch triton",
        late={
            "only where there is something to compile": "rich",
            "the device decides which kernels are needed": "fast.cpu fast.device fast.gpu",
            "an allocator needs it only where many blocks are asked for": "numpy",
        },
    ),
    # The one room that knows the wings.
    "tiers": Room(
        "contracts errors mirror models.config models.shards params scheduling steps",
        late={"whoever chooses a tier loads what it needs, and only that": "fast models.loading numpy reference torch"},
    ),
    "simulation": Room("contracts engine errors events mirror params scheduling steps tiers"),
    # One model in several processes.
    "parallel": Room(
        "contracts errors mirror models.config models.loading models.shards params scheduling steps tiers",
        "msgspec numpy torch",
        late={"a worker can say that it starts before it has": "parallel.rank"},
    ),
    # The settings, the model that they ask for, and the sizes that they leave open.
    "setup": Room(
        "contracts engine errors handover models params scheduling tiers",
        late={
            "slow to load, and only sizes that are left open need it": "psutil",
            "only those who ask for several processes need them": "parallel.tier",
        },
    ),
    # What users call, and what stands on it.
    "llm": Room(
        "api contracts engine errors events models outputs params scheduling setup tiers",
        late={"slow to load, and only some calls need it": "rich"},
    ),
    "quantizing": Room(
        "api errors llm models params tiers", "numpy", late={"slow to load, and only a terminal shows it": "rich"}
    ),
    "async_llm": Room("api engine errors events llm outputs params setup"),
    "minipaged": Room(
        "api errors outputs params", late={"the parts without NumPy are to be had without it": "async_llm llm"}
    ),
    "recordings": Room(
        "contracts errors llm mirror models.config params scheduling setup steps tiers", "msgspec numpy"
    ),
    "stepper": Room(
        "contracts engine errors events minipaged mirror params replay scheduling steps tiers",
        late={"runs in a page, where it is loaded when somebody begins": "numpy"},
    ),
    "demo": Room(
        "contracts engine errors events handover models.shards outputs params replay setup simulation",
        "rich",
        late={"a run is shown again, or simulated, without a model": "llm setup"},
    ),
    # The content oracle, and work for it.
    "testing": Room(
        "contracts engine errors events mirror outputs params scheduling steps tiers",
        "numpy",
        late={"where there is no NumPy, another model is given": "testing.numpy_model"},
    ),
    "course": Room(
        "contracts engine errors events llm minipaged models.config models.quantized.stored params quantizing "
        "scheduling setup simulation stepper steps testing tiers",
        "hypothesis numpy pytest torch triton",
        late={
            "where student code runs, there is no more than it needs": "fast numpy",
            "not everything that student code runs in is a process": "course.sandbox.process",
            "where there is no NumPy, no model is loaded": "llm setup",
            "one assignment needs torch": "course.assignments.triton_decode.worker torch",
            "one command needs pytest": "course.grader.student_tests",
            "what is private to it may be elsewhere": "hypothesis",
        },
    ),
    "serve": Room(
        "api async_llm engine errors events models outputs params replay setup tiers",
        "fastapi msgspec prometheus_client pydantic starlette uvicorn",
    ),
    # Several engines behind one endpoint; `replicas.routing` needs no more than the ground, and no Ray.
    "replicas": Room(
        "async_llm errors events handover models outputs params serve setup tiers",
        "prometheus_client psutil ray starlette",
    ),
    # The paper's figures, made again: the engine on simulated machines, and several of them behind a router.
    "paper": Room(
        "contracts engine errors events mirror params reference replay replicas.routing scheduling simulation "
        "stepper steps tiers",
        "matplotlib numpy rich",
        late={
            "beams are listened to once, by whoever writes the file": "llm setup",
            "Fig. 18a measures the fast tier's kernel too, where that is installed": "fast torch",
            "only what draws needs matplotlib": "paper",
        },
    ),
    "cli": Room(
        "errors events llm outputs params replay replicas.settings serve.settings setup",
        "rich typer",
        late={
            "the command line answers at once, and a command loads what it needs": (
                "cli.conversation course demo llm models paper quantizing recordings replay replicas serve setup "
                "stepper tiers"
            ),
            "not on every system": "readline",
        },
    ),
    "__main__": Room("cli"),
}
"""From the ground up: each room imports only rooms that stand above it in this list, so that there is no circle."""


def module_name(path: Path) -> str:
    parts = ("minipaged", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}

When = Literal["at once", "late", "for type checkers"]


@cache
def parsed(path: Path) -> ast.Module:
    """Each file is read once, for all tests."""
    return ast.parse(path.read_text())


@cache
def imports_and_when(path: Path) -> list[tuple[str, When]]:
    """The modules that a file imports, as dotted names; `late` are those that its functions import."""
    return [*_imports_and_when(path)]


def _imports_and_when(path: Path) -> Iterator[tuple[str, When]]:
    pending: list[tuple[ast.AST, When]] = [(parsed(path), "at once")]
    while pending:
        node, when = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute in this house"
            assert node.module is not None
            for alias in node.names:  # `from minipaged import contracts` imports minipaged.contracts
                whole = f"{node.module}.{alias.name}"
                yield (whole if whole in SOURCES else node.module), when
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending.extend((child, "for type checkers") for child in node.body)
            pending.extend((child, when) for child in node.orelse)
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            when = "late"
        pending.extend((child, when) for child in ast.iter_child_nodes(node))


def imports(path: Path, *, at_import_only: bool = False) -> Iterator[str]:
    """The modules that a file imports. `at_import_only`: leave out what functions import later, and what only type
    checkers see."""
    return (module for module, when in imports_and_when(path) if when == "at once" or not at_import_only)


def is_under(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def room_of(module: str) -> str:
    """The room that a module of ours is in. Those that only start the command line are a room of their own."""
    parts = module.split(".")
    return "__main__" if parts[-1] == "__main__" else parts[1] if len(parts) > 1 else parts[0]


def word_for(module: str, words: set[str]) -> str:
    """What the table calls a module: the longest of `words` that it is under, else its room, or its package."""
    if module not in SOURCES:
        return module.partition(".")[0]
    name = module.removeprefix("minipaged.")
    return max((word for word in words if is_under(name, word)), key=len, default=room_of(module))


def rooms_below(name: str) -> set[str]:
    return set(list(HOUSE)[: list(HOUSE).index(name)])


def test_every_room_is_in_the_table() -> None:
    assert {room_of(module) for module in SOURCES} == HOUSE.keys()


def test_the_design_shows_every_room_in_its_place() -> None:
    page = (ROOT.parent / "docs" / "design.md").read_text()
    shown = re.findall(r"^  (\S+)", page.partition("```\nminipaged/\n")[2].partition("```")[0], flags=re.MULTILINE)
    assert all((ROOT / name).is_dir() == name.endswith("/") for name in shown)
    names = [name.removesuffix("/").removesuffix(".py") for name in shown]
    assert ["minipaged" if name == "__init__" else name for name in names] == list(HOUSE)


@pytest.mark.parametrize("name", HOUSE)
def test_a_room_imports_what_the_table_says(name: str) -> None:
    """No more; and no less, so that the table stays true. Within its functions it imports only what `late` explains."""
    room = HOUSE[name]
    late = set(" ".join(room.late.values()).split())
    allowed: dict[When, set[str]] = {"at once": {*room.ours.split(), *room.outside.split()}, "late": late}
    found: dict[When, set[str]] = {"at once": set(), "late": set(), "for type checkers": set()}
    for module, when in (pair for m, path in SOURCES.items() if room_of(m) == name for pair in imports_and_when(path)):
        is_own = module in SOURCES and room_of(module) == name
        is_standard = module.partition(".")[0] in sys.stdlib_module_names
        if when == "late" or not (is_own or is_standard):
            found[when].add(word_for(module, late if when == "late" else allowed["at once"] | late))
    assert found["at once"] == allowed["at once"]
    assert found["late"] == allowed["late"]
    assert found["for type checkers"] <= allowed["at once"] | late | rooms_below(name)


@pytest.mark.parametrize("name", HOUSE)
def test_arrows_point_down(name: str) -> None:
    """What the table allows a room, early or late, stands before it."""
    words = " ".join((HOUSE[name].ours, *HOUSE[name].late.values())).split()
    assert {word.partition(".")[0] for word in words} & HOUSE.keys() <= rooms_below(name) | {name}
    assert set(HOUSE[name].ours.split()) & HOUSE.keys() <= rooms_below(name)


ON_THE_FAST_TIER = (
    "minipaged.course.assignments.triton_decode.checks",
    "minipaged.course.assignments.triton_decode.worker",
)
"""The assignment that is about a kernel of the fast tier's: it puts the student's in its place."""
IN_THE_PAPER = ("minipaged.paper.chunk", "minipaged.paper.kernel")
"""A table whose blocks are one piece is the reference's, with another rule for who gives them. And Fig. 18a measures
the kernels of both wings."""


def test_only_tiers_knows_the_wings():
    """And each wing knows itself, never the other."""
    wrong = set()
    for name, path in SOURCES.items():
        for module in imports(path):
            for wing in WINGS:
                inside = is_under(name, f"minipaged.{wing}")
                if is_under(module, f"minipaged.{wing}") and not inside and not is_under(name, "minipaged.tiers"):
                    wrong.add((name, module))
    wrong -= {(name, module) for name, module in wrong if name in ON_THE_FAST_TIER and "minipaged.fast" in module}
    wrong -= {(name, module) for name, module in wrong if name in IN_THE_PAPER}
    assert not wrong


TWINS = {
    "block_allocator": ("BlockAllocator",),
    "block_table": ("BlockTable",),
    "kv_cache": ("KVCache",),
    "handover": ("read_blocks", "read_host_blocks", "write_blocks"),
    "attention": ("paged_attention",),
    "cascade": ("shared_prefixes",),
    "preemption": ("carry", "measure"),
    "beam_search": ("BeamSearch",),
    "sampling": ("sample",),
    "speculation": ("verify",),
    "linear": (),  # one function there, one class for each way of multiplying here
    "llama": ("Llama", "FlatBatch", "flatten"),
    "rope": ("rotary_tables", "inverse_frequencies"),
    "sharded": (),  # here a model of all ranks, there what one of them exchanges with the others
}


def test_the_wings_have_the_same_rooms():
    """Each file of one wing has its twin in the other. (The fast wing computes on devices, see `device.py` and
    `cores.py`, and its kernels live in two rooms below, where they store 8 bits too; `kernels.py` says what they are.)
    """
    for wing in WINGS:
        others = {"cores", "device", "kernels"} if wing == "fast" else {"eight_bits", "flat_batch"}
        others |= {"__init__"}
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
    assert users - {"minipaged.course.assignments.triton_decode.worker"} == {
        name for name in users if is_under(name, "minipaged.fast.gpu")
    }


def test_numba_is_imported_only_by_its_kernels():
    users = {name for name, path in SOURCES.items() if any(is_under(m, "numba") for m in imports(path))}
    assert users
    assert users == {name for name in users if is_under(name, "minipaged.fast.cpu")}


def test_numbas_kernels_are_marked_as_kernel_inner_or_loop():
    """A function of plain `njit` would be made a part of the first kernel that calls it, and crash if Python called it
    later (`whole_kernels.py`)."""
    users = [name for name, path in SOURCES.items() if "njit" in path.read_text()]
    assert users == ["minipaged.fast.cpu.kernel_cache"]


def test_the_fast_tier_reaches_its_kernels_by_their_interface_only():
    """`kernels_for` chooses; no other file of the tier knows which set it has, or asks either for more."""
    sides = ("minipaged.fast.gpu", "minipaged.fast.cpu")
    users = {
        name
        for name, path in SOURCES.items()
        if is_under(name, "minipaged.fast") and not any(is_under(name, side) for side in sides)
        if any(is_under(module, side) for module in imports(path) for side in sides)
    }
    assert users == {"minipaged.fast"}


def test_what_preemption_costs_is_reckoned_in_one_place():
    """By the policy. Others only say what the figures are: a simulated machine's are fields of its own, and those of a
    model with a draft model are the sums of both."""

    def reads(path: Path, figure: str) -> bool:
        nodes = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute))
        return any(node.attr == figure and isinstance(node.ctx, ast.Load) for node in nodes)

    def readers(figure: str) -> set[str]:
        return {name for name, path in SOURCES.items() if reads(path, figure)}

    assert readers("prefill_tokens_per_second") == {"minipaged.engine.policy", "minipaged.tiers.drafted"}
    assert readers("seconds_per_copy") == {"minipaged.engine.policy", "minipaged.simulation.simulated"}


def test_block_allocators_import_no_numpy():
    allocators = [path for name, path in SOURCES.items() if name.endswith(".block_allocator")]
    assert allocators
    for path in allocators:
        assert "numpy" not in set(imports(path, at_import_only=True)), path


def test_no_module_imports_itself_by_way_of_others():
    """Arrows point down within rooms too, and what is imported late, or only for type checkers, is no way round."""
    below = {name: {m for m in imports(path) if m in SOURCES} for name, path in SOURCES.items()}
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


TWICE = {
    # Both wings have it, and the contract says what is common to them.
    *("BeamSearch", "BlockAllocator", "BlockTable", "FlatBatch", "KVCache", "Llama"),
    # Both sets of kernels of the fast wing have it.
    *("DenseMatrix", "PackedMatrix"),
}


def test_a_class_name_means_one_thing() -> None:
    """In the whole package, but for twins."""
    classes = (node for path in SOURCES.values() for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef))
    times = Counter(node.name for node in classes)
    assert {name for name, count in times.items() if count > 1} == TWICE


def test_every_file_opens_with_a_docstring():
    silent = [name for name, path in SOURCES.items() if path.read_text() and not ast.get_docstring(parsed(path))]
    assert not silent


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of modules, classes and functions, and those below fields and constants."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value.strip()


WITHOUT_A_SUBJECT = ("Of ", "That ", "As ", "The same", "So ", "Those ")


def test_a_docstring_begins_with_its_subject() -> None:
    """With the noun or the verb, and not with the rest of a sentence whose beginning is the name."""
    found = {(name, text[:60]) for name, path in SOURCES.items() for text in docstrings(path)}
    assert len(found) > 3000
    assert not {(name, text) for name, text in found if text.startswith(WITHOUT_A_SUBJECT)}


FIRST_READING = (
    *sorted(
        f"reference/{path.name}"
        for path in (ROOT / "reference").glob("*.py")
        if path.stem
        not in ("cascade", "eight_bits", "flat_batch", "handover", "linear", "rope", "sharded", "speculation")
    ),
    *(f"engine/{name}.py" for name in ("engine", "scheduler", "policy", "block_manager", "prefix_cache")),
)


def test_the_first_reading_is_short() -> None:
    """What docs/reading.md says to read first: under 2,000 lines, blank ones not counted."""
    page = (ROOT.parent / "docs" / "reading.md").read_text()
    section = page.partition("## The first reading\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| (\d+) \|.*?\]\(\.\./minipaged/(\S+?)\)", section, flags=re.MULTILINE)
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    assert {name for _, name in listed} | {"reference/__init__.py"} == set(FIRST_READING)
    lines = [line for name in FIRST_READING for line in (ROOT / name).read_text().splitlines() if line.strip()]
    assert len(lines) < 2000


def test_one_step_fits_on_one_screen() -> None:
    """From the call to its launch and its commit, in engine.py."""
    source = (ROOT / "engine" / "engine.py").read_text().splitlines()
    first = next(i for i, line in enumerate(source) if "def _run_step" in line)
    last = next(i for i, line in enumerate(source) if "def _finish_step" in line)
    assert last - first < 60
