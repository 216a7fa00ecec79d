"""Where a test process has a real model on the fast tier in float32: its matrices once in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def kept_once() -> Iterator[None]:
    """A model that is loaded meanwhile has its matrices as rows alone, as with a torch that has no oneDNN.

    On a CPU the fast tier keeps each matrix twice, as rows for one token and laid out by oneDNN for many. In float32
    that are 1.1 GB of SmolLM2. That both give the same is said of matrices as large as SmolLM2's in `test_smollm2.py`.
    """
    with patch.object(torch.backends.mkldnn, "is_available", lambda: False):
        yield
