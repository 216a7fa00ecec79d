"""What tests of every kind may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama with random weights that runs in milliseconds."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
