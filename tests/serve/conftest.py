"""The models that are served, and a server of the small one that several tests ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minipaged.llm import LoadedModel
from tests.serve.harness import Served, no_certificates, served
from tests.tiny_model import make_tiny_model

__all__ = ["no_certificates"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LoadedModel:
    return LoadedModel.load(tiny_folder, tier="reference")


@pytest.fixture(scope="module")
def server(tiny: LoadedModel) -> Iterator[Served]:
    """Nothing may be left in it after the tests of a module."""
    with served(tiny) as running:
        yield running
        running.check_nothing_is_left()
