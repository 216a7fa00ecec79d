"""`minipaged grade`, `grade-tests` and `course`: the assignments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from minipaged.cli.apps import app, course_app
from minipaged.cli.options import Command
from minipaged.errors import MinipagedError

FormatOption = Annotated[
    str, typer.Option("--format", help="terminal, json, gradescope, prairielearn, or junit.", show_default=True)
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the result here, and again after every test.")
]


@app.command("grade", cls=Command)
def grade_command(
    assignment: Annotated[str, typer.Argument(help="The assignment, e.g. block-allocator.", show_default=False)],
    submission: Annotated[str, typer.Argument(metavar="FILE.py[:Class]", show_default=False)],
    seed: Annotated[int, typer.Option(help="The same seed gives the same score and counterexamples.")] = 0,
    form: FormatOption = "terminal",
    output: OutputOption = None,
    counterexamples: Annotated[Path | None, typer.Option(help="The folder for scripts and traces of failures.")] = Path(
        "counterexamples"
    ),
    model: Annotated[str, typer.Option(help="The real model to grade on.")] = "smollm2-135m-instruct",
    no_model: Annotated[bool, typer.Option("--no-model", help="Leave out the tests on the real model.")] = False,
    carried: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="ASSIGNMENT=FILE.py", help="Use your own solution of an earlier assignment."),
    ] = None,
    call_seconds: Annotated[
        float | None, typer.Option(help="Time limit of one call, in seconds; by default the assignment's.")
    ] = None,
    test_seconds: Annotated[
        float | None, typer.Option(help="Time limit of one test, in seconds; by default the assignment's.")
    ] = None,
) -> None:
    """Grade your solution. Exit status: 0 for full marks, 1 for less, 2 if it cannot be graded."""
    from minipaged.course.grader.assignment import CannotBeGraded
    from minipaged.course.grader.commands import Report, run_grade

    try:
        report = Report(form, output, counterexamples)
    except CannotBeGraded as error:
        raise exit_2(error) from None
    raise typer.Exit(
        run_grade(
            assignment,
            submission,
            report,
            seed=seed,
            model=None if no_model else model,
            carried=carried or (),
            call_seconds=call_seconds,
            test_seconds=test_seconds,
        )
    )


@app.command("grade-tests", cls=Command)
def grade_tests_command(
    assignment: Annotated[str, typer.Argument(help="The assignment, e.g. block-allocator.", show_default=False)],
    tests: Annotated[str, typer.Argument(metavar="TEST_FILE.py", show_default=False)],
    form: FormatOption = "terminal",
    output: OutputOption = None,
) -> None:
    """Grade your tests: they must pass on a correct solution, and fail on each of many faulty ones."""
    from minipaged.course.grader.assignment import CannotBeGraded
    from minipaged.course.grader.commands import Report, run_grade_tests

    try:
        report = Report(form, output)
    except CannotBeGraded as error:
        raise exit_2(error) from None
    raise typer.Exit(run_grade_tests(assignment, tests, report))


@course_app.command("list", cls=Command)
def course_list() -> None:
    """List the assignments, in order."""
    from minipaged.course.grader.assignment import ASSIGNMENTS, CannotBeGraded
    from minipaged.course.grader.handouts import title_of

    try:
        titles = {assignment: title_of(assignment) for assignment in ASSIGNMENTS}
    except CannotBeGraded as error:
        raise exit_2(error) from None
    for assignment, title in titles.items():
        print(f"{assignment:<16} {title}")


@course_app.command("start", cls=Command)
def course_start(
    assignment: Annotated[str, typer.Argument(help="The assignment, e.g. block-allocator.", show_default=False)],
    folder: Annotated[
        Path | None, typer.Argument(help="The folder to write; by default one named after the assignment.")
    ] = None,
) -> None:
    """Write an assignment's handout, starter, and first test."""
    from minipaged.course.grader.assignment import CannotBeGraded
    from minipaged.course.grader.handouts import start

    try:
        written = start(assignment, folder or Path(assignment))
    except CannotBeGraded as error:
        raise exit_2(error) from None
    print("\n".join(map(str, written)))
    print(f"Read {written[0]}; then, in its folder: minipaged grade {assignment} {written[1].name} --no-model")


@course_app.command("autograder", cls=Command)
def course_autograder(
    assignment: Annotated[str, typer.Argument(help="The assignment, e.g. block-allocator.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The zip to write.")] = Path("autograder.zip"),
    seed: Annotated[int, typer.Option(help="The seed for grading all submissions.")] = 0,
    no_model: Annotated[bool, typer.Option("--no-model", help="Leave out the tests on the real model.")] = False,
) -> None:
    """Write an autograder for Gradescope, as a zip."""
    from minipaged.course.grader.assignment import CannotBeGraded
    from minipaged.course.grader.autograder import write_autograder

    try:
        write_autograder(assignment, output, seed=seed, with_model=not no_model)
    except CannotBeGraded as error:
        raise exit_2(error) from None
    print(output)


def exit_2(error: MinipagedError) -> typer.Exit:
    print(f"error: {error}", file=sys.stderr)
    return typer.Exit(2)
