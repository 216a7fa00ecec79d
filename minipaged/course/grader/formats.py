"""The formats of a grade: text for a terminal, and files for Gradescope, PrairieLearn, JUnit readers and scripts.

`schemas/` has a schema for each file format (docs/instructors.md explains the fields). Only `--format json` has every
field. An unfinished grade can be written too; it has the tests so far.
"""

from __future__ import annotations

import json
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from minipaged.course.grader.assignment import Grade, GradeStatus, TestResult
from minipaged.course.grader.grading import VERDICT_HINTS
from minipaged.course.sandbox.contract import Verdict

WIDTH = 98
"""The most characters in a line of text."""

# --- Text -----------------------------------------------------------------------------------------


def heading(grade: Grade) -> list[str]:
    """Return the first lines: the assignment, the submission, the seed, and how student code is isolated."""
    apart = [f"{what}: {how}" for what, how in grade.isolation.items() if what != "performance"]
    return [f"{grade.assignment.name}: {grade.submission.path.name}  ({'; '.join([f'seed {grade.seed}', *apart])})", ""]


def result_lines(result: TestResult, earlier: Sequence[TestResult] = ()) -> list[str]:
    """Return the lines for one test: its points, and the explanation if it failed in a way no `earlier` test did."""
    test = result.test
    points = "not run" if result.status is GradeStatus.SKIPPED else f"{result.score:>2}/{test.points}"
    if result.status is GradeStatus.NOT_GRADED:
        points = "left out"
    elif not test.points:
        points = "passed" if result.status is GradeStatus.PASSED else "failed"
    lines = [f"{points:<9} {test.name:<38} {test.invariant or ''}".rstrip()]
    if result.status is GradeStatus.FAILED and test.hidden:
        return [*lines, *_indented(["a hidden test; what it found is not shown"]), ""]
    if result.status is GradeStatus.FAILED and result.failure:
        if same := fails_like(result, earlier):
            return [*lines, *_indented([f"fails like '{same.test.name}'"])]
        lines += ["", *_indented(explanation(result)), ""]
    elif result.message:
        lines += _indented(result.message.splitlines())
    return lines


def fails_like(result: TestResult, earlier: Sequence[TestResult]) -> TestResult | None:
    """Return the first earlier test that failed with the same message, or None."""
    return next((one for one in earlier if one.status is GradeStatus.FAILED and one.message == result.message), None)


def explanation(result: TestResult) -> list[str]:
    """Return the explanation of a failed test: its message, invariant, hint, drawing, script and printed output."""
    test, failure = result.test, result.failure
    lines = [result.message]
    if failure is None:
        return lines
    if failure.verdict:
        lines = [f"{failure.verdict}: {result.message}", "", f"hint: {VERDICT_HINTS[Verdict(failure.verdict)]}"]
    else:
        broken = failure.invariant
        if broken and broken is not test.invariant:
            lines[0] += f" (broken: {broken})"
        if test.meaning:
            lines += ["", f"{test.invariant}: {test.meaning}" if test.invariant else test.meaning]
        if test.hint and not failure.crashed:
            lines += [f"hint: {test.hint}"]
    if failure.drawing:
        lines += ["", *failure.drawing]
    if failure.script:
        lines += ["", "counterexample.py:", *(f"    {line}".rstrip() for line in failure.script.rstrip().splitlines())]
    if result.output:
        lines += ["", "it printed:", *(f"    {line}" for line in result.output.splitlines()[:10])]
    return lines


def closing(grade: Grade) -> list[str]:
    """Return the last lines: the score, and the speed if it was measured."""
    if grade.error:
        return [f"cannot be graded: {grade.error}"]
    lead = ["", *grade.lead] if grade.lead else []
    lines = [*lead, "", f"score: {grade.score} of {grade.max_score}"]
    if grade.capped:
        lines[-1] += f" (with a failed test, {grade.assignment.cap} at most)"
    if grade.also_checked:
        lines.append(f"{', '.join(grade.also_checked)}: also checked")
    left_out = [result.test for result in grade.results if result.status is GradeStatus.NOT_GRADED]
    if left_out:
        names = ", ".join(f"{test.name} ({test.points} points)" for test in left_out)
        lines.append(f"not graded: {names}")
    if grade.performance:
        performance = grade.performance
        rate = performance.operations_per_second
        amount = f"{rate / 1e6:.2f} million" if rate >= 1e4 else f"{rate:.0f}"
        lines.append(
            f"speed: {amount} {performance.operations} a second, {performance.index:.3g} times the reference's "
            "(for information; it does not count)"
        )
    elif "performance" in grade.isolation:
        lines.append(f"speed: {grade.isolation['performance']}")
    return lines


def text(grade: Grade) -> str:
    """Return the whole grade as the terminal shows it."""
    if grade.error:
        return "\n".join([*closing(grade), ""])
    lines = heading(grade)
    for number, result in enumerate(grade.results):
        lines += result_lines(result, grade.results[:number])
    return "\n".join([*lines, *(closing(grade) if grade.finished else ["", "(not finished)"]), ""])


def _indented(lines: list[str]) -> list[str]:
    """Indent lines to the column beside the points, and wrap long sentences.

    Drawings and scripts contain runs of spaces, and are not wrapped.
    """
    wrapped: list[str] = []
    for line in lines:
        wrapped += textwrap.wrap(line, WIDTH) if len(line) > WIDTH and "  " not in line.rstrip() else [line]
    return [f"          {line}".rstrip() for line in wrapped]


# --- JSON -----------------------------------------------------------------------------------------


def as_json(grade: Grade) -> str:
    """Return the grade as JSON with every field (schemas/grade.schema.json)."""
    performance = grade.performance
    return _dump(
        {
            "assignment": grade.assignment.name,
            "submission": grade.submission.path.name or None,
            "seed": grade.seed,
            "score": grade.score,
            "max_score": grade.max_score,
            "cap": grade.assignment.cap,
            "capped": grade.capped,
            "finished": grade.finished,
            "error": grade.error,
            "isolation": grade.isolation,
            "also_checked": list(grade.also_checked),
            "tests": [_test(result) for result in grade.results],
            "performance": performance and {**asdict(performance), "index": performance.index},
        }
    )


def _test(result: TestResult) -> dict[str, Any]:
    test, failure = result.test, result.failure
    return {
        "name": test.name,
        "stage": test.stage,
        "hidden": test.hidden,
        "invariant": test.invariant and str(test.invariant),
        "score": result.score,
        "max_score": test.points,
        "status": str(result.status),
        "message": result.message,
        "meaning": test.meaning,
        "hint": "" if failure and failure.crashed else test.hint,
        "output": result.output,
        "counterexample": failure
        and {
            "invariant": failure.invariant and str(failure.invariant),
            "verdict": failure.verdict,
            "script": failure.script,
            "drawing": list(failure.drawing),
            "events": [json.loads(event.to_json()) for event in failure.events],
        },
    }


# --- Gradescope, PrairieLearn, JUnit --------------------------------------------------------------


def gradescope(grade: Grade) -> str:
    """Return the grade as Gradescope's results.json. Students do not see hidden tests there."""
    tests = [
        {
            "name": result.test.name,
            "score": result.score,
            "max_score": result.test.points,
            "status": "passed" if result.status is GradeStatus.PASSED else "failed",
            "output": _said(result),
            "output_format": "text",
            "visibility": "hidden" if result.test.hidden else "visible",
        }
        for result in grade.results
        if result.status is not GradeStatus.NOT_GRADED
    ]
    leaderboard = []
    if grade.performance:
        name = "speed (1 is the reference's)"
        leaderboard.append({"name": name, "value": float(f"{grade.performance.index:.3g}"), "order": "desc"})
    return _dump(
        {
            "score": grade.score,
            "output": "\n".join(closing(grade)).strip(),
            "output_format": "text",
            "visibility": "visible",
            "stdout_visibility": "hidden",
            "tests": tests,
            "leaderboard": leaderboard,
        }
    )


def prairielearn(grade: Grade) -> str:
    """Return the grade as PrairieLearn's results.json. The score is a share, 0 to 1."""
    return _dump(
        {
            "gradable": grade.error is None,
            "score": grade.score / grade.max_score if grade.max_score else 0.0,
            "message": "\n".join(closing(grade)).strip(),
            "output": "" if any(result.test.hidden for result in grade.results) else text(grade),
            "tests": [
                {
                    "name": result.test.name,
                    "description": result.test.meaning,
                    "points": result.score,
                    "max_points": result.test.points,
                    "message": "" if result.test.hidden else result.message,
                    "output": _said(result),
                }
                for result in grade.results
                if result.status is not GradeStatus.NOT_GRADED
            ],
        }
    )


def junit(grade: Grade) -> str:
    """Return the grade as JUnit XML with one test suite."""
    statuses = [result.status for result in grade.results]
    suite = ET.Element(
        "testsuite",
        name=grade.assignment.name,
        tests=str(len(grade.results) + bool(grade.error)),
        failures=str(statuses.count(GradeStatus.FAILED)),
        errors=str(int(bool(grade.error))),
        skipped=str(statuses.count(GradeStatus.SKIPPED) + statuses.count(GradeStatus.NOT_GRADED)),
    )
    for result in grade.results:
        case = ET.SubElement(suite, "testcase", classname=grade.assignment.name, name=result.test.name)
        if result.status is GradeStatus.FAILED:
            message = "a hidden test" if result.test.hidden else _printable(result.message)
            ET.SubElement(case, "failure", message=message).text = _printable(_said(result))
        elif result.status is not GradeStatus.PASSED:
            ET.SubElement(case, "skipped", message=result.message)
    if grade.error:
        case = ET.SubElement(suite, "testcase", classname=grade.assignment.name, name="the submission can be graded")
        ET.SubElement(case, "error", message=_printable(grade.error))
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _said(result: TestResult) -> str:
    if result.status is GradeStatus.PASSED:
        return ""
    if result.test.hidden:
        return "a hidden test; what it found is not shown"
    return "\n".join(explanation(result) if result.status is GradeStatus.FAILED else [result.message])


def _printable(content: str) -> str:
    """Remove the control characters that XML does not allow."""
    return "".join(c for c in content if c in "\t\n" or (c >= " " and c not in "\ufffe\uffff"))


def _dump(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"


FORMATS: dict[str, Callable[[Grade], str]] = {
    "terminal": text,
    "json": as_json,
    "gradescope": gradescope,
    "prairielearn": prairielearn,
    "junit": junit,
}
