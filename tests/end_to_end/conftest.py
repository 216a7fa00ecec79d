"""The models that the end-to-end tests serve: small random ones, and the real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from minipaged.models import hub
from tests.end_to_end.small_llama import make_small_llama


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random Llama with a tokenizer."""
    return make_small_llama(tmp_path_factory.mktemp("small_llama"))


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The folder of the real model, fetched where it is not there yet."""
    return hub.resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session", params=["reference", "fast"])
def tier(request: pytest.FixtureRequest) -> str:
    """One test, every tier."""
    return str(request.param)
