"""What tests of every kind may ask for, and where the Triton kernels run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which nothing has done yet

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background; programs under test get Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def pytest_report_header() -> str:
    """Which of the two the suite runs."""
    if torch.cuda.is_available():
        return f"Triton kernels: compiled, on {torch.cuda.get_device_name()} (float32, float16, bfloat16)"
    return "Triton kernels: in the interpreter, there is no GPU (float32, float16); compiled for GPUs, but not run"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama with random weights that runs in milliseconds."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, or a skipped test."""
    from tests.browser import chromium  # Playwright is not everywhere where tests run

    with chromium() as found:
        yield found
