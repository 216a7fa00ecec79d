"""The files that students start from: each assignment's handout, starter, and first test.

They are in the repository's `assignments/`; setup.py copies them into an installed minipaged.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from minipaged.course.grader.assignment import CannotBeGraded, name_of

COURSE = Path(__file__).parents[1]
FOLDERS = COURSE / "handed_out", COURSE.parents[1] / "assignments"
"""The folders that may have the files: in an installed minipaged, and in a clone."""


def folder_of(assignment: str) -> Path:
    """Return the folder of an assignment's files. Raises CannotBeGraded for an unknown assignment."""
    part = name_of(assignment).replace("-", "_")
    folder = next((one for root in FOLDERS for one in root.glob(f"[0-9]*_{part}")), None)
    if folder is None:
        raise CannotBeGraded(f"the files of {assignment} are not installed; reinstall minipaged, or use a clone")
    return folder


OF_THE_SITE = re.compile(r"\n<!-- (?:tests|grade \S+) -->\n")
"""A marker in a handout that the site replaces by content of its own."""


def files_of(assignment: str) -> dict[str, str]:
    """Return an assignment's files: name in the student's folder -> contents. Raises CannotBeGraded."""
    part, folder = name_of(assignment).replace("-", "_"), folder_of(assignment)
    names = {"handout.md": "handout.md", "starter.py": f"{part}.py", "first_test.py": f"test_{part}.py"}
    contents = {name: (folder / file).read_text() for file, name in names.items()}
    starter = contents[f"{part}.py"].replace("starter.py", f"{part}.py")
    # The handout's links point into the repository, which the student's folder is not part of.
    handout = re.sub(r"\[([^\]]+)\]\(\.\./\.\./([^)]+)\)", r"\1 (`\2` of the repository)", contents["handout.md"])
    return {**contents, f"{part}.py": starter, "handout.md": OF_THE_SITE.sub("", handout)}


def title_of(assignment: str) -> str:
    """Return the title of an assignment's handout, such as "the block allocator"."""
    return files_of(assignment)["handout.md"].partition("\n")[0].partition(": ")[2]


def start(assignment: str, folder: Path) -> list[Path]:
    """Write an assignment's files into a folder, which may exist, and return their paths.

    Raises CannotBeGraded, and writes nothing, if one of the files exists.
    """
    files = {folder / name: text for name, text in files_of(assignment).items()}
    if there := [path for path in files if path.exists()]:
        raise CannotBeGraded(f"{there[0]} exists already and is not overwritten; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text)
    except OSError as error:
        raise CannotBeGraded(f"cannot write to {folder}: {error.strerror}; name another folder") from None
    return list(files)


def to_do(path: Path) -> list[str]:
    """Return a line for each function of a student's file that is not written yet: its line number and signature."""
    functions = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.FunctionDef)]
    unwritten = [one for one in functions if ast.unparse(one.body[-1]).startswith("raise NotImplementedError")]
    for one in unwritten:
        one.args.args = [argument for argument in one.args.args if argument.arg != "self"]
    return [
        f"line {one.body[-1].lineno:<4} {one.name}({ast.unparse(one.args)})"
        for one in sorted(unwritten, key=lambda one: one.lineno)
    ]
