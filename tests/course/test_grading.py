"""`minipaged grade`: exit status, the five forms against their schemas, what is on disk, the autograder zip."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import strategies as st

import minipaged
from minipaged.cli import main
from minipaged.course.assignments.block_allocator import checks as block_allocator
from minipaged.course.assignments.block_allocator.mutants import SEEDED
from minipaged.course.grader import formats, search
from minipaged.course.grader.assignment import (
    Bench,
    CannotBeGraded,
    Grade,
    GradeStatus,
    Performance,
    Submission,
    find_assignment,
)
from minipaged.course.grader.autograder import write_autograder
from minipaged.course.grader.grading import grade
from minipaged.errors import Invariant
from tests.course.submissions import REFERENCE, RIGHT, hostile, right
from tests.effort import thorough

SCHEMAS = Path(minipaged.__file__).parent / "course" / "grader" / "schemas"
ASSIGNMENT = block_allocator.ASSIGNMENT
WRONG = SEEDED.mutants["double-free-accepted"].source


@pytest.fixture(autouse=True)
def fewer_examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(block_allocator, "TIMED_WORKLOADS", 5)
    monkeypatch.setattr(search, "EXAMPLES", 20)
    monkeypatch.setattr(block_allocator, "LARGE_POOLS", (8, 33))
    monkeypatch.setattr(block_allocator, "ENGINE_WORKLOADS", 2)
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


# --- Exit status ----------------------------------------------------------------------------------


def test_full_marks_are_exit_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(REFERENCE)
    assert run("grade", "block-allocator", "mine.py", "--no-model") == 0
    printed = capsys.readouterr().out
    assert "score: 90 of 90" in printed
    assert "not graded: SmolLM2 (10 points)" in printed
    assert "times the reference's" in printed
    assert not Path("counterexamples").exists()


def test_less_is_exit_status_1_and_the_counterexamples_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(WRONG)
    assert run("grade", "block-allocator", "mine.py:BlockAllocator", "--no-model") == 1
    printed = capsys.readouterr().out
    assert "has to raise BlockNotAllocated" in printed
    script = Path("counterexamples/mine/calls-that-make-no-sense-are-refused.py")
    assert script.read_text() in printed.replace("\n              ", "\n")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert "has to raise BlockNotAllocated" in ran.stderr
    events = [json.loads(line) for line in script.with_suffix(".jsonl").read_text().splitlines()]
    assert (events[0]["event"], events[-1]["event"]) == ("engine_started", "step_failed")
    Path("mine.py").write_text(REFERENCE)
    Path("other.py").write_text(REFERENCE)
    assert run("grade", "block-allocator", "other.py", "--no-model") == 0
    assert script.exists(), "of another submission"
    assert run("grade", "block-allocator", "mine.py", "--no-model") == 0
    assert not script.exists(), "of the run before"


NO_CLASS = "def allocate(): pass\n"
TWO = right("linked list") + RIGHT["bitmap"].replace("Mine", "Other")
PART = "class BlockAllocator:\n    def allocate(self): pass\n    def free(self, block): pass\n"
ABSTRACT = (
    "from minipaged.contracts import BlockAllocator as Contract\n"
    "class BlockAllocator(Contract):\n    def allocate(self): return 0\n"
)


@pytest.mark.parametrize(
    ("source", "spec", "message"),
    [
        (None, "nowhere.py", "there is no file nowhere.py"),
        ("", "mine.txt", "is not a Python file"),
        (NO_CLASS, "mine.py", "mine.py has no class BlockAllocator; the starter file shows what is needed"),
        (REFERENCE, "mine.py:Other", "rename yours, or say which it is, as in mine.py:BlockAllocator"),
        (REFERENCE, "mine.py:not a name", "is not a valid class name"),
        (
            TWO,
            "mine.py",
            "several classes that could be the part: Common, Mine, Other; say which, as in mine.py:Common",
        ),
        (PART, "mine.py", "BlockAllocator in mine.py lacks share, ref_count, copy_on_write"),
        (ABSTRACT, "mine.py", "BlockAllocator in mine.py lacks __init__, copy_on_write, free, num_blocks, num_free"),
        ("def broken(:", "mine.py", "mine.py does not load: SyntaxError"),
        (hostile(at_import="import os; os._exit(0)"), "mine.py", "does not load: ended"),
    ],
)
@pytest.mark.parametrize("form", ["terminal", "json"])
def test_what_cannot_be_graded_is_exit_status_2_and_told_why(
    source: str | None, spec: str, message: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if source is not None:
        Path(spec.partition(":")[0]).write_text(source)
    assert run("grade", "block-allocator", spec, "--no-model", "--format", form) == 2
    out, err = capsys.readouterr()
    assert message in err
    if form == "json":
        document = json.loads(out)
        check("grade", document)
        assert message in document["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("grade", "block-alocator", "mine.py"),
            "there is no assignment 'block-alocator'; choose one of block-allocator",
        ),
        (("grade", "block-allocator", "mine.py", "--format", "yaml"), "choose one of terminal, json, gradescope"),
        (("grade", "block-allocator", "mine.py", "--with", "mine.py"), "write it as ASSIGNMENT=FILE.py"),
        (("grade", "block-allocator", "mine.py", "--with", "beam-search=mine.py"), "does not build on 'beam-search'"),
        (("grade", "block-allocator", "mine.py", "-o", "nowhere/result.json"), "cannot write nowhere"),
        (("grade-tests", "beam", "mine.py"), "there is no assignment 'beam'"),
        (("grade", "mine.py", "block-allocator"), "the assignment's name comes first, then your file"),
        (("course", "autograder", "beam"), "there is no assignment 'beam'"),
    ],
)
def test_wrong_usage_is_exit_status_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text(REFERENCE)
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_without_hypothesis_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "minipaged.course.assignments.block_allocator.checks")
    with pytest.raises(CannotBeGraded, match=r"needs hypothesis.*extra 'course'"):
        find_assignment("block-allocator")


def test_the_module_can_be_run_as_well() -> None:
    Path("mine.py").write_text(PART)
    command = [sys.executable, "-m", "minipaged.course", "grade", "block-allocator", "mine.py"]
    environment = os.environ | {"PYTHONPATH": str(Path(minipaged.__file__).parent.parent)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "lacks share" in ran.stderr


# --- The forms ------------------------------------------------------------------------------------


def check_junit(written: str) -> None:
    import xmlschema  # half a second, for few

    xmlschema.XMLSchema(SCHEMAS / "junit.xsd").validate(written)


def check(schema: str, document: object) -> None:
    import jsonschema

    jsonschema.validate(document, json.loads((SCHEMAS / f"{schema}.schema.json").read_text()))


@pytest.fixture(scope="module")
def grades(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Grade]:
    """One of each kind: full marks, a wrong part, a hostile one, a hidden test, one that is not finished."""
    folder = tmp_path_factory.mktemp("submissions")

    def graded(name: str, source: str) -> Grade:
        path = folder / f"{name}.py"
        path.write_text(source)
        return grade(ASSIGNMENT, Submission(path), model=None)

    patch = pytest.MonkeyPatch()
    patch.setattr(search, "EXAMPLES", 20)
    patch.setattr(block_allocator, "LARGE_POOLS", (8, 33))
    patch.setattr(block_allocator, "ENGINE_WORKLOADS", 2)
    patch.setattr(block_allocator, "TIMED_WORKLOADS", 5)
    try:
        all_of_them = {
            "right": graded("right", REFERENCE),
            "wrong": graded("wrong", WRONG),
            "hostile": graded("hostile", hostile("print('\\x07<&>', flush=True); import os; os._exit(0)")),
        }
    finally:
        patch.undo()
    hidden = graded_with_hidden_tests(all_of_them["wrong"])
    wrong = all_of_them["wrong"]
    unfinished = Grade(wrong.assignment, wrong.submission, 0, wrong.results[:3])
    return {**all_of_them, "hidden": hidden, "unfinished": unfinished}


def graded_with_hidden_tests(shown: Grade) -> Grade:
    results = [
        dataclasses.replace(result, test=dataclasses.replace(result.test, hidden=True)) for result in shown.results
    ]
    return dataclasses.replace(shown, results=results)


KINDS = ["right", "wrong", "hostile", "hidden", "unfinished"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["grade", "gradescope", "prairielearn"])
def test_json_forms_are_as_their_schemas_say(form: str, kind: str, grades: dict[str, Grade]) -> None:
    written = formats.FORMATS["json" if form == "grade" else form](grades[kind])
    check(form, json.loads(written))


@pytest.mark.parametrize("kind", KINDS)
def test_junit_is_as_its_schema_says(kind: str, grades: dict[str, Grade]) -> None:
    check_junit(formats.junit(grades[kind]))


@pytest.mark.parametrize("form", formats.FORMATS)
def test_a_submission_that_cannot_be_graded_has_a_result_in_every_form(form: str) -> None:
    written = formats.FORMATS[form](Grade.refused("block-allocator", None, "no such file \x07"))
    if form == "junit":
        check_junit(written)
    elif form != "terminal":
        check("grade" if form == "json" else form, json.loads(written))
    assert "no such file" in written


def test_the_forms_agree_on_the_score(grades: dict[str, Grade]) -> None:
    wrong = grades["wrong"]
    assert 0 < wrong.score < wrong.max_score == 90
    assert json.loads(formats.as_json(wrong))["score"] == wrong.score
    assert json.loads(formats.gradescope(wrong))["score"] == wrong.score
    assert json.loads(formats.prairielearn(wrong))["score"] == pytest.approx(wrong.score / 90)
    assert f"score: {wrong.score} of 90" in formats.text(wrong)


def test_gradescope_has_a_leaderboard_of_speed(grades: dict[str, Grade]) -> None:
    timed = dataclasses.replace(grades["right"], performance=Performance(3e6, 2e6))
    [entry] = json.loads(formats.gradescope(timed))["leaderboard"]
    assert entry["value"] == 1.5


@pytest.mark.parametrize(("rate", "said"), [(3e6, "1.5"), (4e5, "0.2"), (7.2e3, "0.0036")])
def test_a_slow_part_is_not_said_to_be_no_times_as_fast(grades: dict[str, Grade], rate: float, said: str) -> None:
    timed = dataclasses.replace(grades["right"], performance=Performance(rate, 2e6))
    assert json.loads(formats.gradescope(timed))["leaderboard"][0]["value"] == float(said)
    assert f" operations a second, {said} times the reference's" in formats.text(timed)


def test_hidden_tests_show_students_points_only(grades: dict[str, Grade]) -> None:
    for form in ("terminal", "gradescope", "prairielearn", "junit"):
        shown = formats.FORMATS[form](grades["wrong"])
        hidden = formats.FORMATS[form](grades["hidden"])
        assert "has to raise BlockNotAllocated" in shown.replace("&quot;", '"')
        assert "has to raise" not in hidden
    assert "hidden" in formats.gradescope(grades["hidden"])


def test_a_failure_is_explained(grades: dict[str, Grade]) -> None:
    """What, the invariant by name, a sentence, a hint, a drawing, a script."""
    shown = formats.text(grades["wrong"])
    failed = next(result for result in grades["wrong"].results if result.status is GradeStatus.FAILED)
    assert failed.failure is not None
    for part in (failed.message, str(Invariant.CONSERVATION), "hint: ", "held by", "counterexample.py:", "try:"):
        assert part in shown
    verdict = formats.text(grades["hostile"])
    assert "ended: " in verdict
    assert "it printed:" in verdict


@thorough
def test_the_docs_show_what_the_grader_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "EXAMPLES", 100)
    mutant = SEEDED.mutants["copy-gives-up-first"]
    Path("block_allocator.py").write_text(mutant.source)
    run("grade", "block-allocator", "block_allocator.py", "--no-model")
    page = (Path(minipaged.__file__).parent.parent / "docs" / "course.md").read_text()
    command = "$ minipaged grade block-allocator block_allocator.py --no-model\n"
    shown = page.partition(command)[2].partition("```")[0]
    printed = capsys.readouterr().out.replace(str(Path.cwd()), "/home/you/course")
    assert [line.partition("(seed")[0] for line in printed.splitlines()] == [
        line.partition("(seed")[0] for line in shown.splitlines()
    ]


# --- On disk --------------------------------------------------------------------------------------


def test_partial_results_are_on_disk_after_every_test(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.py").write_text(REFERENCE)
    seen = []

    def stop_at_the_third(bench: object) -> None:
        seen.append(json.loads(Path("result.json").read_text()))
        raise KeyboardInterrupt

    tests = list(ASSIGNMENT.tests)
    tests[2] = dataclasses.replace(tests[2], check=stop_at_the_third)
    monkeypatch.setattr(block_allocator, "ASSIGNMENT", dataclasses.replace(ASSIGNMENT, tests=tuple(tests)))
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        main(["grade", "block-allocator", "mine.py", "--no-model", "--format", "json", "-o", "result.json"])
    [partial] = seen
    check("grade", partial)
    assert not partial["finished"]
    assert [test["status"] for test in partial["tests"]] == ["passed", "passed"]
    assert sorted(path.name for path in Path().iterdir()) == ["mine.py", "result.json"]


# --- The autograder -------------------------------------------------------------------------------


def test_the_autograder_zip_grades_a_submission(tmp_path: Path) -> None:
    write_autograder("block-allocator", tmp_path / "autograder.zip", seed=4, with_model=False)
    base = tmp_path / "autograder"
    with zipfile.ZipFile(tmp_path / "autograder.zip") as archive:
        archive.extractall(base / "source")
        assert {"setup.sh", "run_autograder", "requirements.txt", "minipaged/course/sandbox/worker.py"} <= set(
            archive.namelist()
        )
        assert archive.getinfo("run_autograder").external_attr >> 16 == 0o755
    (base / "submission").mkdir()
    (base / "submission" / "whatever_the_name.py").write_text(PART.replace("pass", "raise NotImplementedError"))
    environment = {"PATH": os.environ["PATH"], "AUTOGRADER": str(base), "PYTHON": sys.executable}
    ran = subprocess.run(["bash", base / "source" / "run_autograder"], env=environment, check=True, capture_output=True)
    document = json.loads((base / "results" / "results.json").read_text())
    check("gradescope", document)
    assert "lacks share" in document["output"], ran.stderr
    for script in ("setup.sh", "run_autograder"):
        subprocess.run(["bash", "-n", base / "source" / script], check=True)


def test_the_autograder_zip_names_what_it_needs() -> None:
    from minipaged.course.grader.autograder import requirements

    needed = {requirement.partition(">")[0] for requirement in requirements()}
    assert {"numpy", "typer", "hypothesis", "pytest"} <= needed
    assert not {"torch", "ruff"} & needed


def test_of_a_checkout_nobody_knows_what_the_zip_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written then."""

    def not_installed(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", not_installed)
    with pytest.raises(CannotBeGraded, match=r"this is a checkout; `pip install .*` installs it"):
        write_autograder("block-allocator", tmp_path / "autograder.zip", with_model=False)
    assert not list(tmp_path.iterdir())


OWN = """
from dataclasses import replace
from minipaged.course.grader.assignment import Test, Failed, Failure
from minipaged.course.assignments.block_allocator.checks import ASSIGNMENT as ORIGINAL

def check(bench):
    allocator = bench.make(3)
    if allocator.call("allocate") != 2:
        raise Failed(Failure("our students begin with the highest block"))

first, *_ = ORIGINAL.tests
secret = Test("the highest block first", 15, None, "", "", check, hidden=True)
ASSIGNMENT = replace(ORIGINAL, tests=(replace(first, points=85), secret), measure=None)
"""


def test_an_instructor_can_change_points_and_add_hidden_tests(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.py").write_text(OWN)
    Path("mine.py").write_text(REFERENCE)
    assert run("grade", "own.py", "mine.py") == 1
    printed = capsys.readouterr().out
    assert "score: 70 of 100 (with a failed test, 70 at most)" in printed
    assert "the highest block first" in printed
    assert "our students" not in printed
    assert run("course", "autograder", "own.py", "-o", "own.zip") == 0
    with zipfile.ZipFile("own.zip") as archive:
        assert archive.read("assignment.py").decode() == OWN
        assert "minipaged grade assignment.py" in archive.read("run_autograder").decode()


@thorough
def test_what_is_tried_does_not_depend_on_the_modules_that_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hypothesis tries the constants of modules that are no packages: of a clone, say, and not of a wheel."""

    def tried() -> list[int]:
        inputs: list[int] = []
        with Bench(ASSIGNMENT, Submission(tmp_path / "mine.py"), 0) as bench:
            search.search(bench, st.integers(), inputs.append, examples=200)
        return inputs

    (tmp_path / "mine.py").write_text(REFERENCE)
    before = tried()
    (tmp_path / "full_of_constants.py").write_text(f"NUMBERS = {[10_000_019 + 977 * n for n in range(1000)]}\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("full_of_constants")
    assert tried() == before
    monkeypatch.setitem(sys.modules, "hypothesis.internal.constants_ast", None)  # as in another one, perhaps
    assert len(tried()) == 200
