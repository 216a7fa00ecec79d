"""What students begin with: of each assignment a handout, a starter, and a first test of their own.

They are files of the repository's `assignments/`, of which an installed minipaged has a copy (setup.py makes it).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from minipaged.course.grader.assignment import CannotBeGraded, name_of

COURSE = Path(__file__).parents[1]
FOLDERS = COURSE / "handed_out", COURSE.parents[1] / "assignments"
"""Where they may lie: installed, and in a clone."""


def folder_of(assignment: str) -> Path:
    """Where they are. Raises CannotBeGraded for what is no assignment."""
    part = name_of(assignment).replace("-", "_")
    folder = next((one for root in FOLDERS for one in root.glob(f"[0-9]_{part}")), None)
    if folder is None:
        raise CannotBeGraded(f"the files of {assignment} are not installed; install minipaged again, or take a clone")
    return folder


OF_THE_SITE = re.compile(r"\n<!-- (?:tests|grade \S+) -->\n")
"""Where the site puts something into a handout."""


def files_of(assignment: str) -> dict[str, str]:
    """Name in the student's folder -> contents. Raises CannotBeGraded for what is no assignment."""
    part, folder = name_of(assignment).replace("-", "_"), folder_of(assignment)
    names = {"handout.md": "handout.md", "starter.py": f"{part}.py", "first_test.py": f"test_{part}.py"}
    contents = {name: (folder / file).read_text() for file, name in names.items()}
    starter = contents[f"{part}.py"].replace("starter.py", f"{part}.py")
    # What the handout links to lies in the repository, not beside it.
    handout = re.sub(r"\[([^\]]+)\]\(\.\./\.\./([^)]+)\)", r"\1 (`\2` of the repository)", contents["handout.md"])
    return {**contents, f"{part}.py": starter, "handout.md": OF_THE_SITE.sub("", handout)}


def title_of(assignment: str) -> str:
    """As its handout is called: "the block allocator"."""
    return files_of(assignment)["handout.md"].partition("\n")[0].partition(": ")[2]


def start(assignment: str, folder: Path) -> list[Path]:
    """Write its files into a folder, which may be there already. Returns their paths. Raises CannotBeGraded where one
    of them is there: nothing is written then."""
    files = {folder / name: text for name, text in files_of(assignment).items()}
    if there := [path for path in files if path.exists()]:
        raise CannotBeGraded(f"{there[0]} is there already, and is left alone; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text)
    except OSError as error:
        raise CannotBeGraded(f"cannot write to {folder}: {error.strerror}; name another folder") from None
    return list(files)


def to_do(path: Path) -> list[str]:
    """What of a student's file is not written yet, as lines: where, and what. Empty, if everything is."""
    functions = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.FunctionDef)]
    unwritten = [one for one in functions if ast.unparse(one.body[-1]).startswith("raise NotImplementedError")]
    for one in unwritten:
        one.args.args = [argument for argument in one.args.args if argument.arg != "self"]
    return [
        f"line {one.body[-1].lineno:<4} {one.name}({ast.unparse(one.args)})"
        for one in sorted(unwritten, key=lambda one: one.lineno)
    ]
