"""The command `minipaged quantize`: it writes a model with its matrices in a few bits, in a format that others read.

The computation is in the reference tier, `reference/quantize/`, where it can be read. This module does all else: it
checks what can be quantized, takes the text, shows progress, and writes the folder, completely or not at all.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minipaged import tiers
from minipaged.errors import InvalidRequest, ModelError
from minipaged.models import hub
from minipaged.models.loading import checkpoint_tensors, load_config, load_formats, load_weights
from minipaged.models.quantized.recipe import Recipe
from minipaged.models.quantized.stored import Array, Grouped
from minipaged.models.quantized.writing import Layout, check_shapes, matrices, write_quantized
from minipaged.quantizing.texts import text_of, tokens_of, windows_of

Progress = Callable[[int, int], None]
"""A function that is called with the number of layers done, and the number of all layers."""

WINDOW = 512
"""Tokens per window of the calibration text."""


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """The result of quantizing a checkpoint."""

    matrices: int
    """The number of quantized matrices."""
    num_bytes: int
    """Size of all weights of the model now."""
    num_bytes_before: int
    calibration_tokens: int
    """Tokens that were used for calibration; 0 with round-to-nearest."""


def quantize(
    model: str | Path,
    folder: Path,
    recipe: Recipe,
    *,
    layout: Layout = "compressed-tensors",
    calibration: Path | None = None,
    calibration_tokens: int = 16384,
    show_progress: bool = False,
) -> QuantizedCheckpoint:
    """Write `model` into `folder`, which must not exist yet, with all matrices of its layers quantized.

    Embedding, head and norms stay as they are (AWQ divides norms). `calibration`: a text file, or None for the default
    of `texts.py`. About `calibration_tokens` of it are used, all together; each takes about 10 KB of memory per 1,000
    columns of the model's MLP. All weights are held in float32 meanwhile.

    Raises InvalidRequest for a recipe that does not fit the model, a text that cannot be read or a folder that exists
    or cannot be written, and ModelError for a model that cannot be found, read, or quantized.
    """
    if folder.exists():
        raise InvalidRequest(f"{folder} exists already; name a folder that does not")
    if calibration_tokens < 2:
        raise InvalidRequest(f"calibration_tokens is {calibration_tokens}; give 2 or more")
    source = hub.resolve(model)
    config = load_config(source)
    if load_formats(source) is not None:
        raise ModelError(f"{model} is quantized already; quantize the original, with weights in fp32, fp16 or bf16")
    if config.gemma:
        raise ModelError(f"{model} is a Gemma; only Llama, Mistral and Qwen can be quantized here")
    check_shapes(config, recipe, layout)
    windows: list[list[int]] = []
    if recipe.method != "rtn":
        ids = tokens_of(text_of(calibration, for_calibration=True), source)
        windows = windows_of(ids, min(WINDOW, config.max_position_embeddings, calibration_tokens), calibration_tokens)
    changed: dict[str, Grouped | Array] = {}
    with _complete_or_not_at_all(folder) as partial:
        weights = load_weights(source, config, np.float32)
        for name in matrices(config):
            if not np.isfinite(weights[name]).all():
                raise ModelError(f"{model}: tensor '{name}' holds infinity or NaN")
        with _progress_bar(show_progress) as progress:
            for done, made in enumerate(tiers.reference_quantizer()(config, weights, recipe, windows)):
                changed |= made
                progress(done + 1, config.num_hidden_layers)
        write_quantized(source, partial, changed, recipe, layout)
    num_matrices = sum(isinstance(each, Grouped) for each in changed.values())
    return QuantizedCheckpoint(num_matrices, _weight_bytes(folder), _weight_bytes(source), sum(map(len, windows)))


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in {each.file for each in checkpoint_tensors(folder).values()})


@contextmanager
def _complete_or_not_at_all(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`, and rename it to that at the end. After an error, only the folders
    above it stay."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as beside:
            partial = Path(beside, folder.name)  # it gets the permissions of a usual new folder, unlike `beside`
            partial.mkdir()
            yield partial
            os.rename(partial, folder)
    except OSError as error:
        raise InvalidRequest(f"{folder} could not be written: {error}; name another folder, or make room") from error


@contextmanager
def _progress_bar(show: bool) -> Iterator[Progress]:
    """Show on stderr how many layers are done."""
    if not show:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        task = bars.add_task("layers", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
