"""Writes a Gradescope autograder: `minipaged course autograder block-allocator -o autograder.zip`.

The zip contains:

setup.sh        runs once, when the image is built: installs minipaged's requirements, fetches the model
run_autograder  runs for each submission: grades it and writes results/results.json
requirements.txt, minipaged/    a copy of this minipaged, so that every submission is graded by the same version
"""

from __future__ import annotations

import importlib.metadata
import zipfile
from collections.abc import Sequence
from pathlib import Path

import minipaged
from minipaged.course.grader.assignment import ASSIGNMENTS, CannotBeGraded, find_assignment
from minipaged.course.grader.handouts import folder_of

SETUP = """\
#!/usr/bin/env bash
# Run once, when the image is built.
set -euo pipefail
apt-get update && apt-get install -y python3 python3-venv
python3 -m venv /autograder/venv
/autograder/venv/bin/pip install --no-cache-dir -r /autograder/source/requirements.txt
{fetch}"""

FETCH = """\
cd /autograder/source
MINIPAGED_CACHE=/autograder/cache /autograder/venv/bin/python -m minipaged model fetch
"""

RUN = """\
#!/usr/bin/env bash
# Run for each submission. Gradescope reads results/results.json; it is there from the first test on.
base="${{AUTOGRADER:-/autograder}}"
python="${{PYTHON:-$base/venv/bin/python}}"
export MINIPAGED_CACHE="${{MINIPAGED_CACHE:-$base/cache}}"
mkdir -p "$base/results"
shopt -s nullglob
files=("$base"/submission/*.py)
if [ ${{#files[@]}} -eq 1 ]; then file="${{files[0]}}"; else file="$base/submission/{file}"; fi
cd "$base/source"
"$python" -m minipaged grade {assignment} "$file" --seed {seed} {options}--format gradescope \\
    --counterexamples "$base/counterexamples" --output "$base/results/results.json"
exit 0  # a submission with less than full marks is no failure of the autograder
"""


def write_autograder(name: str, path: Path, *, seed: int = 0, with_model: bool = True) -> None:
    """Write the zip. `name` may be an instructor's own file, which is added to the zip.

    The autograder grades the only .py file of a submission, or the one named like the assignment.
    """
    assignment = find_assignment(name)
    own = name.endswith(".py")
    file = f"{assignment.name.replace('-', '_')}.py"
    options = "" if with_model else "--no-model "
    scripts = {
        "setup.sh": SETUP.format(fetch=FETCH if with_model else ""),
        "run_autograder": RUN.format(
            assignment="assignment.py" if own else assignment.name, file=file, seed=seed, options=options
        ),
    }
    extras = ("course", "fast") if assignment.needs else ("course",)
    needed = requirements(extras)
    package = Path(minipaged.__file__).parent
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for script, content in scripts.items():
                entry = zipfile.ZipInfo(script, date_time=(1980, 1, 1, 0, 0, 0))
                entry.external_attr = 0o755 << 16
                archive.writestr(entry, content)
            archive.writestr("requirements.txt", "\n".join([*needed, ""]))
            if own:
                archive.write(name, "assignment.py")
            for source in sorted(package.rglob("*")):
                if source.is_file() and "__pycache__" not in source.parts:
                    archive.write(source, Path("minipaged") / source.relative_to(package))
            for folder in map(folder_of, ASSIGNMENTS):
                if package not in folder.parents:  # they lie outside the package in a clone
                    for source in sorted(folder.glob("*.*")):
                        archive.write(source, Path("minipaged/course/handed_out", folder.name, source.name))
    except OSError as error:
        raise CannotBeGraded(f"cannot write {path}: {error.strerror}") from None


def requirements(extras: Sequence[str] = ("course",)) -> list[str]:
    """Return the requirements of the installed minipaged with these extras. Raises CannotBeGraded in a checkout."""
    try:
        required = importlib.metadata.requires("minipaged") or ()
    except importlib.metadata.PackageNotFoundError:
        raise CannotBeGraded(
            "an autograder lists the requirements of an installed minipaged, and this is a checkout; "
            "`pip install -e '.[course]'` installs it"
        ) from None
    needed = []
    for requirement in required:
        what, _, condition = requirement.partition(";")
        if not condition or any(f'extra == "{extra}"' in condition for extra in extras):
            needed.append(what.strip())
    return sorted(needed)
