"""The course: students swap in their own parts, and learn from what fails. `minipaged grade ASSIGNMENT FILE.py`.

assignment.py       what an assignment is: tests, points, invariants; what a grade is
grading.py          one submission through the tests of one assignment, in order
isolation.py        the grader's end of the process in which student code runs
worker.py, wire.py  the other end, and what travels between them
counterexample.py   the scripts and the words in which failures are told
search.py           looking for a counterexample, with Hypothesis
block_allocator.py  assignment 1; each assignment is a file like it
block_table.py      assignment 2, with table_session.py (what its properties are made of) and table_worker.py
paged_attention.py  assignment 3, with attention_cases.py (inputs, what is right) and attention_worker.py
scheduler.py        assignment 4, with scheduler_scenes.py (what is asked about), scheduler_session.py (what is right);
                    engine/policy.py is what a student would hand in
beam_search.py      assignment 5
triton_decode.py    assignment 6, with decode_cases.py (inputs, what is right) and decode_worker.py (tensors, a clock)
student_tests.py    the students' own tests, graded by the seeded bugs (mutants) that they find
formats.py          results for terminals, Gradescope, PrairieLearn and JUnit
autograder.py       the zip that Gradescope wants
content_runner.py   a model without weights that checks every read
workloads.py        random workloads on it, and what they must produce
museum.py           the same with a part exchanged for one of the bug museum
"""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minipaged.course.assignment import Assignment

ASSIGNMENTS = ("block-allocator", "block-table", "paged-attention", "scheduler", "beam-search", "triton-decode")
"""In the order of the course. The file of each has its name, with underscores."""

ORDER = "the assignment's name comes first, then your file: minipaged grade block-allocator block_allocator.py"


def find_assignment(name: str) -> Assignment:
    """The assignment called `name`, or the `ASSIGNMENT` of an instructor's own file. Raises CannotBeGraded."""
    from minipaged.course.assignment import Assignment, CannotBeGraded, needs_hypothesis

    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise CannotBeGraded(f"there is no file {name} with an assignment; {ORDER}")
        with needs_hypothesis():
            assignment = runpy.run_path(name).get("ASSIGNMENT")
        if not isinstance(assignment, Assignment):
            raise CannotBeGraded(f"{name} has no ASSIGNMENT (docs/instructors.md); {ORDER}")
        return assignment
    name = name.replace("_", "-")
    if name not in ASSIGNMENTS:
        raise CannotBeGraded(f"there is no assignment {name!r}; choose one of {', '.join(ASSIGNMENTS)}")
    with needs_hypothesis():
        found: Assignment = importlib.import_module(f"minipaged.course.{name.replace('-', '_')}").ASSIGNMENT
    return found
