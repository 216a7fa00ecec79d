"""The tutorials run to their end, every cell of them, and soon enough to be waited for: as the site was built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs import build
from tests.test_tutorials import MOST_SECONDS, TUTORIALS


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda script: script.stem)
def test_a_tutorial_ran_without_an_error_and_is_not_waited_for_long(script: Path, site: Path) -> None:
    assert (site / "tutorials" / f"{script.stem}.html").is_file()  # an error in a cell would have ended the building
    assert 0 < json.loads(build.COMPUTED.read_text())[script.stem] < MOST_SECONDS
