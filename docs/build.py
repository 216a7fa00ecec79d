"""Gather the pages of the site in build/docs, from where `mkdocs.yml` takes them: python -m docs.build

- The pages of docs/, and the handouts of assignments/. They are read on the repository too, so their links go to files.
  What such a link leads to is looked up here: a tutorial is its page, a module of minipaged its place in the API, and
  what is no page is copied along.
- The tutorials of tutorials/. Each is run, cell by cell, and becomes a page with what its cells put out, and a notebook
  to download. An error in a cell, a failed assert among them, ends the build; so does a question to the reader whose
  answer is not what the run says (`predict.py`).
- A still of the recorded demo, for who has asked for reduced motion: a picture in a page is not told of that.
- The stepper and the walk of attention, and in place of a line `<!-- run FILE.py -->` in a page the recording that this
  file, run now, calls `run`.
- In place of a line `<!-- code FILE.py NAME ... -->` the source of these functions, methods or classes, as it is now. A
  name that the file does not have ends the build.
- In place of the line `<!-- tests -->` of a handout the table of its tests, from `tests.toml` beside it.
- The figures of the paper, from the results in docs/runs/paper/: a picture and a page each, and in place of a line
  `<!-- verdicts -->` all verdicts in one table. A figure without a result gets no page, and the table says so.
- The picture that the home page opens with, in place of the line `<!-- opening -->`, and its tutorials as cards.
- Python for the pages, by which a reader changes and runs the cells of tutorials that have the tag `editable` (after
  those with the tag `needed`), moves the sliders that their comments ask for, and, in place of a line
  `<!-- grade ASSIGNMENT -->`, writes an assignment and has it graded. It is fetched from the npm registry and the
  package index, once. Where that cannot be, the site is built without; MINIPAGED_NEEDS_BROWSER=1 makes that an error.
"""

from __future__ import annotations

import ast
import html
import json
import os
import re
import runpy
import shutil
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify, unique

from docs import cards, npm, opening, predict, python_in_page
from minipaged.course.grader.assignment import find_assignment
from minipaged.course.grader.handouts import files_of
from minipaged.paper.figures import FIGURES
from minipaged.paper.pages import body, counts, knees, label, section, summary
from minipaged.paper.running import file_name, kept_figures
from minipaged.stepper import attention
from minipaged.stepper.page import STEPPER, element, in_script
from minipaged.stepper.recording import ANCHORS, WATCHED
from minipaged.stepper.recording import KIND as RECORDING

ROOT = Path(__file__).parent.parent
STAGE = ROOT / "build" / "docs"
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>(?!https?:)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
STEPPED = {RECORDING, attention.KIND}
"""What a page can step through."""
RUN = re.compile(r"^<!-- run (?P<file>\S+\.py) -->$", re.MULTILINE)
REDUCED = re.compile(r"@media\(prefers-reduced-motion:reduce\)\{(?P<rules>[^{}]*\{[^{}]*\})\}")
VERDICTS = "<!-- verdicts -->"
OPENING = "<!-- opening -->"
TESTS = re.compile(r"^<!-- tests -->$", re.MULTILINE)
TOGETHER = 4
"""Tutorials that run at the same time: each has a process of its own, of up to 2 GB."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""For each: with as many threads as cores in each, they wait for each other: on 2 cores 87 s, in place of 43."""
WIDE = "---\nhide: [toc]\n---"
"""At the head of a page: steppers want the room."""
HEADING = re.compile(r"^## (?P<text>.+)$", re.MULTILINE)
LINES = (
    "Solid lines are ours, dashed ones the paper's; hollow circles are the points by which the machine was calibrated."
)
BLOCKS = "The picture is drawn from the events of a run, which is below to be stepped through."
RESULTS = ROOT / "docs" / "runs" / "paper"
"""Of the paper's figures: copied from where `minipaged paper run` has left them."""
GRADE = re.compile(r"^<!-- grade (?P<assignment>\S+) -->$", re.MULTILINE)
MEANS = re.compile(r"\bThere (`\w+` is [^.]+)\.")
"""In a handout: what the calls of an assignment are in the run that the stepper shows."""
CODE = re.compile(r"^<!-- code (?P<file>\S+\.py) (?P<names>\S.*?) -->$", re.MULTILINE)


def main() -> None:
    check_anchors()
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", STAGE, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    can_edit = brings("no code can be edited", python_in_page.write, STAGE / "assets")
    can_grade = can_edit and brings("nothing is graded", python_in_page.write_grading, STAGE / "assets")
    for source in [*(ROOT / "docs").rglob("*.md"), *(ROOT / "assignments").rglob("*.md")]:
        place = place_of(source.relative_to(ROOT))
        text = with_links_into_the_site(source.read_text(), source, place)
        text = RUN.sub(lambda run, folder=source.parent: recorded((folder / run["file"]).resolve()), text)
        text = CODE.sub(lambda code, place=place: as_in_the_source(code["file"], code["names"].split(), place), text)
        text = GRADE.sub(lambda found: in_the_page(found["assignment"]) if can_grade else "", text)
        text = TESTS.sub(lambda _, folder=source.parent: table_of_tests(folder / "tests.toml"), text)
        if place.name == "handout.md" or place == Path("museum/index.md"):
            text = wide(text)
        (STAGE / place).parent.mkdir(parents=True, exist_ok=True)
        (STAGE / place).write_text(text)
    demo = (STAGE / "assets" / "demo.svg").read_text()
    (STAGE / "assets" / "demo-still.svg").write_text(REDUCED.sub(r"\g<rules>", demo))
    for script in (STEPPER, attention.SCRIPT):
        shutil.copy(script, STAGE / "assets")
    (STAGE / "tutorials").mkdir()
    from minipaged.paper import drawing  # noqa: F401  before the threads: matplotlib looks for an IPython that is whole

    with ThreadPoolExecutor(min(TOGETHER, os.cpu_count() or 1)) as pool:
        scripts = sorted((ROOT / "tutorials").glob("[0-9]*.py"), reverse=True)  # the latest ones take longest
        written = [pool.submit(write_tutorial, script, can_edit) for script in scripts]
        try:
            paper_figures()
            seconds = {script.stem: tutorial.result() for script, tutorial in zip(scripts, written, strict=True)}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    COMPUTED.write_text(json.dumps(seconds))
    home = STAGE / "index.md"
    text = home.read_text().replace(OPENING, opening.opening())
    home.write_text(cards.with_cards(text, STAGE / "tutorials"))


def table_of_tests(file: Path) -> str:
    """What an assignment's tests are worth, and what they are about."""
    tests = tomllib.loads(file.read_text())["test"]
    meanings = ["" if one.get("hidden") else " ".join(one["meaning"].split()) for one in tests]
    rows = [f"| {one['name']} | {one['points']} | {said} |" for one, said in zip(tests, meanings, strict=True)]
    return "\n".join(["| test | points | |", "|---|---|---|", *rows])


def write_tutorial(script: Path, can_edit: bool) -> float:
    """Returns how many seconds it computed."""
    print(f"running tutorials/{script.name}", flush=True)
    notebook, cells, seconds = executed(script)
    (STAGE / "tutorials" / f"{script.stem}.ipynb").write_text(notebook)
    (STAGE / "tutorials" / f"{script.stem}.md").write_text(as_markdown(cells, script, can_edit))
    return seconds


def brings(without: str, write: Callable[[Path], None], folder: Path) -> bool:
    """Whether something for the pages could be had. Raises NotFetched where it must be."""
    try:
        write(folder)
    except npm.NotFetched as error:
        if os.environ.get("MINIPAGED_NEEDS_BROWSER") == "1":
            raise
        print(f"{without} on the pages of this site: {error}", file=sys.stderr)
        return False
    return True


def recorded(script: Path) -> str:
    """The stepper of the recording that the script makes as `run`, or what else is stepped through. A stepper begins at
    the event `start`, if the script names one."""
    print(f"running {script.relative_to(ROOT)}", flush=True)
    made = runpy.run_path(str(script))
    data = made["run"]._repr_mimebundle_()
    if "start" in made:
        events = data[RECORDING]["events"]
        start = next(i for i, event in enumerate(events, 1) if event["event"] == made["start"])
        return element(data[RECORDING], id=script.stem, start=start)
    shown = stepped(data, script.stem)
    assert shown is not None
    return shown


def stepped(data: dict[str, Any], name: str) -> str | None:
    """What a notebook was given, as an element of that name; None for what nobody steps through."""
    if RECORDING in data:
        return element(data[RECORDING], id=name, start=first_held(data[RECORDING]["events"]))
    return attention.as_element(data[attention.KIND], id=name) if attention.KIND in data else None


def first_held(events: list[dict[str, Any]]) -> int:
    """The step at which the first block is taken: before it a pool has nothing to look at."""
    return next((i for i, event in enumerate(events, 1) if event.get("new_blocks") or event.get("blocks")), 1)


def in_the_page(name: str) -> str:
    """A section in which an assignment is written and graded."""
    assignment, file, given = find_assignment(name), f"{name.replace('-', '_')}.py", files_of(name)
    means = MEANS.search(given["handout.md"])
    data = in_script(
        {
            "assignment": name,
            "file": file,
            "code": given[file],
            "tests": [{"name": test.name, "points": test.points, "stage": test.stage} for test in assignment.tests],
            "speed": assignment.measure is not None,
            "command": f"minipaged grade {name} {file}",
            "means": " ".join(means[1].split()) if means else None,
        }
    )
    return f"""## Write it here

Nothing has to be installed for that: Python and the grader run in this page, and look for the same mistakes in the same
order as on a command line.

<div><paged-grader name="{name}">{data}</paged-grader></div>"""


def check_anchors() -> None:
    """The lines that steppers light are where they are said to be, or ValueError."""
    files = {name: file for file, names in WATCHED.items() for name in names}
    for event, anchors in ANCHORS.items():
        for name, start in anchors:
            source = source_of(f"minipaged/{files[name]}", name)
            if not any(line.lstrip().startswith(start) for line in source.splitlines()):
                raise ValueError(f"the stepper tells {event} by a line of {name} that begins with {start}; it has none")


# --- The paper's figures --------------------------------------------------------------------------


def paper_figures() -> None:
    """A page and a picture for each result that is kept, and the table of all verdicts."""
    from minipaged.paper import drawing

    results, folder = kept_figures(RESULTS, FIGURES), STAGE / "paper"
    for name, data in results.items():
        drawing.save(data, folder / f"{file_name(name)}.svg")
        (folder / f"{file_name(name)}.md").write_text(figure_page(data, list(results)))
    index = folder / "index.md"
    index.write_text(index.read_text().replace(VERDICTS, verdicts(results)))


def figure_page(data: dict[str, Any], names: list[str]) -> str:
    """The page of one figure. `names`: of all that have one, in order."""
    from minipaged.paper.drawing import in_words

    figure, name = FIGURES[data["figure"]], file_name(data["figure"])
    stepper, place = data.get("recording"), names.index(data["figure"])
    around = [f"[← {label(names[place - 1])}]({file_name(names[place - 1])}.md)"] if place else []
    around.append("[all verdicts](index.md)")
    if place + 1 < len(names):
        around.append(f"[{label(names[place + 1])} →]({file_name(names[place + 1])}.md)")
    return "\n\n".join(
        [
            *([WIDE] if stepper else []),
            f"# {data['title']}",
            " · ".join(around),
            f"{section(figure)} {counts([data])}. {LINES if not stepper else BLOCKS}",
            f"![{in_words(data)}]({name}.svg){{ .drawn }}",
            "## What to look at",
            figure.look,
            *(["## Step through it", stepped({RECORDING: stepper}, f"figure-{name}") or ""] if stepper else []),
            f'<div class="paper">\n{body(figure, data, level=2)}\n</div>',
            f"[The numbers of this page](../runs/paper/{name}.json) · [what this is, and what it is not](what.md)",
        ]
    )


def verdicts(results: dict[str, dict[str, Any]]) -> str:
    """All of them, and which figures have none."""
    parts = [line] if (line := knees(results)) else []
    links = {name: f"{file_name(name)}.html" for name in results}
    parts.append(f'<div class="paper">\n{summary(results, links)}\n</div>')
    if missing := [label(name) for name in FIGURES if name not in results]:
        parts.append(f"Without a result that is kept here, and so without a page: {', '.join(missing)}.")
    return "\n\n".join(parts)


# --- Code -----------------------------------------------------------------------------------------


def as_in_the_source(file: str, names: list[str], page: Path) -> str:
    """What the page, a path in the site, shows of a file of the repository: its name as a link, and the code."""
    code = "\n\n".join(source_of(file, name) for name in names)
    link = with_links_into_the_site(f"[{file}]({file})", ROOT / "README.md", page)
    return f'<div class="code" markdown="1" data-search-exclude>\n\n{link}\n\n```python\n{code}\n```\n\n</div>'


def source_of(file: str, name: str) -> str:
    """The lines of a function, a class, or a method (`BlockTable.append`), decorators included, moved to the margin.

    Raises ValueError where the file has none of that name.
    """
    text = (ROOT / file).read_text()
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        inside = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part]
        if not inside:
            raise ValueError(f"a page shows {name} of {file}, which does not define it: name it as it is called now")
        node = inside[-1]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    first = min(part.lineno for part in (node, *node.decorator_list))
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


# --- Links ----------------------------------------------------------------------------------------


def with_links_into_the_site(text: str, source: Path, page: Path) -> str:
    """The text, its links to files changed to where the same thing is on the site.

    `source` is the file that the text is from; `page` is its page, as a path in the site.
    """
    return LINK.sub(lambda link: _moved(link, source, page), text)


def place_of(path: Path) -> Path:
    """Where a file of the repository is on the site: a page, or a file copied along."""
    if path.parts[0] == "docs":
        return path.relative_to("docs")
    if path.parts[0] == "assignments" and path.suffix == ".md":
        return path
    return path.with_suffix(".md") if path.parts[0] == "tutorials" else "files" / path


def _moved(link: re.Match[str], source: Path, page: Path) -> str:
    target = (source.parent / link["target"]).resolve()
    path = target.relative_to(ROOT)
    if path.parts[0] == "minipaged" and path.suffix == ".py":
        module, name = ".".join(path.with_suffix("").parts), link["text"].strip("`")
        is_within = link["text"].startswith("`") and name != module and not name.endswith(".py")
        within = f".{name}" if is_within else ""
        return f"[{link['text']}][{module}{within}]"
    place = place_of(path)
    if place.parts[0] == "files":
        (STAGE / place.parent).mkdir(parents=True, exist_ok=True)
        shutil.copy(target, STAGE / place)
    return f"[{link['text']}]({Path(os.path.relpath(place, page.parent)).as_posix()}{link['anchor'] or ''})"


# --- Tutorials ------------------------------------------------------------------------------------


def run_tutorial(script: Path, *, can_edit: bool = True) -> tuple[str, str]:
    """Run one tutorial: its notebook, without outputs, and its page. Raises nbclient's CellExecutionError, and
    ValueError for a question without an answer."""
    notebook, cells, _ = executed(script)
    return notebook, as_markdown(cells, script, can_edit)


def executed(script: Path) -> tuple[str, list[Any], float]:
    """Run one tutorial: its notebook, without outputs; its cells with theirs; and the seconds that it computed, on all
    cores together."""
    import jupytext
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell
    from traitlets.config import Config

    notebook = jupytext.read(script)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for cell in notebook.cells:
        if "solution" in cell.metadata.get("tags", ()):
            cell.metadata["jupyter"] = {"source_hidden": True}
    download: str = jupytext.writes(notebook, fmt="ipynb")
    notebook.cells = [*with_checks(notebook.cells), new_code_cell(HAS_COMPUTED, metadata={CHECK: True})]
    # In the root of the tree, whose minipaged is then the one that is imported.
    place = {"metadata": {"path": str(ROOT)}}
    with tempfile.TemporaryDirectory() as sockets:
        # No port is opened. Without a name of its own a kernel's sockets would be those of any other that starts here.
        config = Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"})
        # What a cell prints comes in pieces, cut wherever the clock has it; the page shows it as one.
        NotebookClient(notebook, config=config, timeout=CELL_S, resources=place, coalesce_streams=True).execute(
            env=os.environ | ONE_THREAD
        )
    cells = [cell for cell in notebook.cells if CHECK not in cell.metadata]
    return download, cells, float(notebook.cells[-1].outputs[0].text)


CELL_S = 900
"""A cell that takes longer, in seconds, ends the build. A cell that compiles on a busy machine is given its time."""
CHECK = "check"
"""In the metadata of a cell that asks the run whether an answer is right, or what it took."""
HAS_COMPUTED = """import resource
used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(sum(each.ru_utime + each.ru_stime for each in used))"""
COMPUTED = ROOT / "build" / "tutorials.json"
"""The seconds that each tutorial computed when the site was built last."""


def with_checks(cells: list[Any]) -> list[Any]:
    """The cells of a tutorial; before each text, what its run has to say to the questions that were asked above it."""
    from nbformat.v4 import new_code_cell

    checked: list[Any] = []
    asked: list[str] = []
    for cell in [*cells, None]:
        if cell is None or cell.cell_type == "markdown":
            checked += [new_code_cell(code, metadata={CHECK: True}) for code in asked]
            asked = [] if cell is None else [code for each in predict.questions(cell.source) if (code := each.check())]
        checked += [cell] if cell is not None else []
    return checked


def as_markdown(cells: list[Any], script: Path, can_edit: bool) -> str:
    title, *rest = cells
    parts = [
        WIDE,
        title.source,
        f"[This page as a notebook]({script.stem}.ipynb){{ download }} · the page is what the notebook put out, and "
        "every `assert` in it held when the page was made.",
        contents([cell.source for cell in rest if cell.cell_type == "markdown"]),
    ]
    steppers, folded = 0, ""  # what ends the fold of a question, into which code still comes
    for cell in rest:
        source = cell.source
        if folded and (cell.cell_type == "markdown" or shows_a_run(cell)):
            if cell.cell_type == "markdown":
                says, source = what_it_says(source)
                parts.append(with_links_into_the_site(says, script, Path("tutorials") / script.name))
            parts.append(folded)
            folded = ""
        if cell.cell_type == "markdown":
            text, folded = predict.on_the_page(source)
            parts.append(with_links_into_the_site(text, script, Path("tutorials") / script.name))
            continue
        shown = [f"```python\n{cell.source}\n```"]
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                print(output.text, file=sys.stderr)  # a library's warning: for who builds, not for who reads
                continue
            steppers += is_stepped(output)
            shown.append(_as_html(output, f"stepper-{steppers}"))
        if "editable" in cell.metadata.get("tags", ()):
            shown.insert(1, editor(cell.source, name_of(cell, script), needed(cells)) if can_edit else NO_EDITOR)
            inside = "\n\n".join(shown)
            shown = [f'<div class="editable" markdown="1">\n\n{inside}\n\n</div>']
        if "solution" in cell.metadata.get("tags", ()):
            inside = "\n\n".join(shown)
            shown = [f'<details class="solution" markdown="1"><summary>A solution</summary>\n\n{inside}\n\n</details>']
        parts += shown
    return "\n\n".join([*parts, folded]) + "\n"


def what_it_says(text: str) -> tuple[str, str]:
    """The text behind a question and its code: what it says of the answer first, which is seen with it, and the rest.

    That is its first paragraph, unless it leads to something else: a heading, a question, what follows a colon.
    """
    first, _, rest = text.partition("\n\n")
    leads_on = first.startswith(("#", "-", "|", "<", "!", "$", "    ", "**Predict.**")) or first.rstrip().endswith(":")
    return ("", text) if leads_on else (first, rest)


def shows_a_run(cell: Any) -> bool:
    return any(map(is_stepped, cell.outputs))


def is_stepped(output: Any) -> bool:
    """Whether a page shows it by a component."""
    return not STEPPED.isdisjoint(output.get("data", {}))


def wide(page: str) -> str:
    """A page with the room of the column beside it, whose headings are folded instead."""
    title, _, rest = page.partition("\n")
    return "\n\n".join([WIDE, title, contents([rest]), rest.lstrip("\n")])


def contents(texts: list[str]) -> str:
    """The headings of a page, folded, in the place of a column beside it."""
    headings = [heading["text"] for text in texts for heading in HEADING.finditer(text)]
    if not headings:
        return ""
    anchors: set[str] = set()
    lines = [f"- [{text}](#{unique(slugify(text.replace('`', ''), '-'), anchors)})" for text in headings]
    listed = "\n".join(lines)
    return f'<details class="contents" markdown="1"><summary>On this page</summary>\n\n{listed}\n\n</details>'


NO_EDITOR = (
    "*On the site as it is published this code can be edited and run, and has its sliders. This copy was built without "
    "npm or a network.*"
)


SLIDER = re.compile(
    r"^(?P<name>\w+) = (?P<value>\d+)  # slide (?P<low>\d+) to (?P<high>\d+)"
    r"(?: by (?P<by>\d+)|(?P<doubling> doubling))?: (?P<what>.+)$",
    re.MULTILINE,
)


def sliders(code: str) -> list[dict[str, Any]]:
    """Of each line such as `pool = 16  # slide 4 to 64 doubling: blocks`: name, what it is, all values, the one now."""
    found = []
    for line in SLIDER.finditer(code):
        low, high, value = (int(line[part]) for part in ("low", "high", "value"))
        values = list(range(low, high + 1, int(line["by"] or 1)))
        if line["doubling"]:
            values = [low << n for n in range((high // low).bit_length())]
        if value not in values:
            raise ValueError(f"a slider cannot stand where it begins: {line[0]!r} has the values {values}")
        found.append({"name": line["name"], "what": line["what"], "values": values, "value": value})
    if len(found) != code.count("# slide "):
        raise ValueError(
            f"a slider is written as `pool = 16  # slide 4 to 64 doubling: blocks`; here it is not: {code}"
        )
    return found


def needed(cells: list[Any]) -> str:
    """The code that the editable cells of a tutorial build on."""
    return "\n\n".join(cell.source for cell in cells if "needed" in cell.metadata.get("tags", ()))


def name_of(cell: Any, script: Path) -> str:
    """What an editable cell is called, also where cells come and go. Raises ValueError if it shows more than one thing,
    or something that cannot be shown again."""
    data = [output.get("data", {}) for output in cell.outputs if output.get("name") != "stderr"]
    if len(data) == 1 and RECORDING in data[0]:
        return f"{script.stem}: {data[0][RECORDING]['title']}"
    if len(data) == 1 and "text/html" in data[0]:
        return f"{script.stem}: {', '.join(slider['name'] for slider in sliders(cell.source))}"
    raise ValueError(f"an editable cell of {script.name} shows something else than a recording or a picture, alone")


def editor(code: str, name: str, needed: str = "") -> str:
    """What lets a reader change the code and run it, after what it needs. `name`: under which a browser keeps the
    reader's version."""
    data = in_script({"code": code, "needed": needed, "sliders": sliders(code)})
    return f'<div><paged-editor name="{html.escape(name)}">{data}</paged-editor></div>'


def _as_html(output: Any, name: str) -> str:
    """One output of a cell, as a page shows it."""
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()}\n```"
    data = output.data
    if shown := stepped(data, name):
        return shown
    if "text/html" in data:
        return f'<div class="picture">{data["text/html"]}</div>'
    return f"```text\n{data['text/plain']}\n```"


if __name__ == "__main__":
    sys.exit(main())
