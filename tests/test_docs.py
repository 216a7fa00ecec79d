"""The docs say what is true: the events' schema field by field, links that lead somewhere, options that exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from minipaged.events import EVENT_TYPES

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "assignments").glob("*/*.md")]
)


def test_the_schema_of_events_names_every_event_with_every_field_in_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", (ROOT / "docs" / "events.md").read_text(), flags=re.MULTILINE)
    documented = {name: re.findall(r"`(\w+)`", columns) for name, columns in rows}
    assert documented == {name: [field.name for field in fields(event)] for name, event in EVENT_TYPES.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_command_lines_of_the_readme_are_understood() -> None:
    from typer.testing import CliRunner

    from minipaged.cli import app

    lines = re.findall(r"^\$ minipaged (.*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        words = re.findall(r'"[^"]*"|\S+', line)
        shown = CliRunner().invoke(app, [word.strip('"') for word in words] + ["--help"])
        assert shown.exit_code == 0, line
        for option in (word for word in words if word.startswith("--")):
            assert option in shown.output, f"{option} in: {line}"
