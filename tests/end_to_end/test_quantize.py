"""`minipaged quantize` and `minipaged perplexity`, from the command line to what comes of it."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from minipaged import LLM
from minipaged.cli import main
from minipaged.errors import InvalidRequest, ModelError
from minipaged.llm import LoadedModel
from minipaged.models.loading import load_config, load_weights
from minipaged.models.quantized.recipe import Method, Recipe
from minipaged.models.quantized.stored import Grouped
from minipaged.quantizing import checkpoint
from minipaged.quantizing.perplexity import perplexity
from minipaged.quantizing.texts import text_of, tokens_of, windows_of
from minipaged.reference.quantize.layers import quantize_layers
from minipaged.reference.quantize.rtn import rtn
from tests.effort import thorough

Cli = Callable[..., tuple[object, str, str]]
TEXT = "Once upon a time there were nine on the hill, and the one there than the other: the same as ever. " * 40


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command line: exit status, stdout, stderr."""

    def run(*arguments: str | Path) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


# --- quantize -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["--method=gptq", "--calibration-tokens=300"],
        ["--method=awq", "--calibration-tokens=300", "--symmetric"],
        ["--method=rtn", "--bits=8", "--group-size=-1", "--symmetric", "--format=gptq"],
        ["--method=gptq", "--act-order=group", "--format=gptq", "--calibration-tokens=300"],
    ],
)
def test_a_model_is_quantized_and_serves(
    cli: Cli, small_llama: Path, text: Path, tmp_path: Path, options: list[str]
) -> None:
    folder = tmp_path / "new" / "made"
    calibrated = [] if "--method=rtn" in options else ["--calibration", text]
    size = [] if "--group-size=-1" in options else ["--group-size=32"]
    status, out, err = cli("quantize", small_llama, "-o", folder, *options, *size, *calibrated)
    assert (status, err) == (0, "")
    on = ", calibrated on 256 tokens" if calibrated else ""  # 2 windows of the model's length
    assert out.startswith(f"{folder}: 14 matrices quantized{on}; 0.1 MB of weights, 0.3 before")
    weights = load_weights(folder, load_config(folder))
    assert sum(isinstance(each, Grouped) for each in weights.values()) == 14
    status, out, err = cli("generate", "--model", folder, "Once upon", "--max-tokens=4", "--tier=reference")
    assert status == 0, err
    assert [each.name for each in folder.parent.iterdir()] == ["made"]


def test_rtn_is_written_as_it_is_computed(cli: Cli, small_llama: Path, tmp_path: Path) -> None:
    assert cli("quantize", small_llama, "-o", tmp_path / "made", "--method=rtn", "--group-size=32")[0] == 0
    before = load_weights(small_llama, load_config(small_llama))
    for name, matrix in load_weights(tmp_path / "made", load_config(tmp_path / "made")).items():
        if isinstance(matrix, Grouped):
            expected = rtn(before[name], Recipe("rtn", group_size=32))
            np.testing.assert_array_equal(matrix.rows(), expected.rows())
        else:
            np.testing.assert_array_equal(matrix, before[name])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--bits=5"], "bits is 5; choose 2, 3, 4, 8"),
        (["--method=best"], "method is 'best'; choose rtn, gptq, awq"),
        (["--group-size=48"], "group_size is 48, which does not divide the 64 inputs of model.layers.0."),
        (["--format=awq"], "format is 'awq'; choose compressed-tensors or gptq"),
        (["--method=awq", "--act-order=none"], "--act-order has a meaning only with --method gptq"),
        (["--method=rtn", "--calibration=x"], "--calibration has no meaning with --method rtn"),
        (["--group-size=32", "--calibration=nowhere"], "the text nowhere cannot be read: No such file"),
        (["--group-size=32", "--calibration-tokens=1"], "calibration_tokens is 1; give 2 or more"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(
    cli: Cli, small_llama: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    status, out, err = cli("quantize", small_llama, "-o", tmp_path / "made", *options)
    assert (status, out) == (1, "")
    assert err.startswith(f"error: {said}")
    assert err.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_nothing_is_overwritten_and_nothing_quantized_twice(cli: Cli, small_llama: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    again = ["quantize", small_llama, "-o", made, "--method=rtn", "--group-size=32"]
    assert cli(*again)[0] == 0
    status, _, err = cli(*again)
    assert (status, err) == (1, f"error: {made} exists already; name a folder that does not\n")
    status, _, err = cli("quantize", made, "-o", tmp_path / "twice", "--method=rtn")
    assert status == 1
    assert "is quantized already; quantize the original" in err
    assert not (tmp_path / "twice").exists()


def test_a_text_that_is_none_is_refused(cli: Cli, small_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    command = ["quantize", small_llama, "-o", tmp_path / "made", "--group-size=32"]
    for name, said in (("empty", "the text has 0 tokens"), ("bytes", "cannot be read: it is not UTF-8")):
        status, _, err = cli(*command, "--calibration", tmp_path / name)
        assert status == 1
        assert said in err


def test_a_text_that_is_short_is_said_to_be(cli: Cli, small_llama: Path, text: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text(text.read_text()[:100])
    status, out, err = cli("quantize", small_llama, "-o", tmp_path / "made", "--group-size=32", "--calibration", short)
    number = len(tokens_of(short.read_text(), small_llama))
    assert status == 0
    assert f"calibrated on {number} tokens" in out
    assert (
        err
        == f"warning: the text has {number} tokens of the 16,384 to calibrate on; a longer one makes a better model\n"
    )


def test_weights_that_are_no_numbers_are_named(small_llama: Path, tmp_path: Path) -> None:
    """Of a matrix; and of an embedding, which the calibration shows."""
    for name, method, said in (
        (
            "model.layers.1.mlp.up_proj.weight",
            "rtn",
            "tensor 'model.layers.1.mlp.up_proj.weight' holds",
        ),
        ("model.embed_tokens.weight", "gptq", "layer 0: the inputs of self_attn.q_proj are infinite or NaN"),
    ):
        folder = tmp_path / method
        shutil.copytree(small_llama, folder)
        weights = load_file(folder / "model.safetensors")
        weights[name][1:] = np.nan
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=said):
            checkpoint.quantize(folder, tmp_path / "made", Recipe(method, group_size=32))  # type: ignore[arg-type]
    assert not (tmp_path / "made").exists()


def test_a_folder_is_complete_or_not_there(small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)  # the weights are written by then
    with pytest.raises(InvalidRequest, match="No space left on device"):
        checkpoint.quantize(small_llama, tmp_path / "made", Recipe("rtn", group_size=32))
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_computed(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "load_weights", None)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidRequest, match=r"could not be written: .*file"):
        checkpoint.quantize(small_llama, tmp_path / "file" / "made", Recipe("rtn", group_size=32))
    assert (tmp_path / "file").read_text() == "mine"


def test_what_stands_beside_the_folder_stays(small_llama: Path, tmp_path: Path) -> None:
    """Also what is there under such names as unfinished folders have; and the folder has the rights of a new one."""
    for name in ("made.partial", ".made.x"):
        (tmp_path / name).mkdir()
    checkpoint.quantize(small_llama, tmp_path / "made", Recipe("rtn", group_size=32))
    assert {each.name for each in tmp_path.iterdir()} == {"made", "made.partial", ".made.x"}
    assert (tmp_path / "made").stat().st_mode == (tmp_path / ".made.x").stat().st_mode


# --- perplexity -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["reference", "fast"])
def test_perplexity_is_by_transformers_loss(tier: str, cli: Cli, small_llama: Path, text: Path) -> None:
    ids = tokens_of(text.read_text(), small_llama)[:230]
    theirs = AutoModelForCausalLM.from_pretrained(small_llama, dtype=torch.float32)
    lost, told = 0.0, 0
    for window in (ids[:100], ids[100:200], ids[200:]):
        tokens = torch.tensor([window])
        with torch.no_grad():
            lost += float(theirs(tokens, labels=tokens).loss) * (len(window) - 1)
        told += len(window) - 1
    options = ["--tokens=230", "--window=100", f"--tier={tier}", "--device=auto", "--dtype=float32"]
    status, out, err = cli("perplexity", small_llama, text, *options)
    assert status == 0, err
    assert told == 227
    value, rest = out.split(maxsplit=1)
    assert float(value) == pytest.approx(np.exp(lost / told), rel=1e-3)
    assert rest == "(227 tokens)\n"


def test_a_window_has_to_fit(small_llama: Path) -> None:
    llm = LLM(small_llama, tier="reference", num_blocks=8)
    for window in (1, 128, 1000):
        with pytest.raises(InvalidRequest, match=f"window is {window}; give 2 to 127 tokens"):
            perplexity(llm, [1, 2, 3], window)
    with pytest.raises(InvalidRequest, match="a perplexity needs two tokens at least; there are 1"):
        perplexity(llm, [1])
    assert perplexity(llm, [5, 6, 7, 8, 9], 2).num_tokens == 2  # the last one stands alone
    assert perplexity(llm, [5] * 128).num_tokens == 126  # all there is room for, and one that stands alone


# --- texts ----------------------------------------------------------------------------------------


def test_no_model_is_measured_on_what_it_was_made_with() -> None:
    measured, calibrated = text_of(None, for_calibration=False), text_of(None, for_calibration=True)
    assert len(measured) > 150_000
    assert len(calibrated) > 60_000
    assert not set(measured.split("\n\n")) & set(calibrated.split("\n\n"))


@pytest.mark.parametrize(
    ("number", "length", "tokens", "firsts"),
    [
        (10, 4, 8, [0, 6]),
        (10, 4, 100, [0, 6]),
        (12, 4, 100, [0, 4, 8]),
        (10, 4, 4, [0]),
        (3, 4, 100, [0]),
        (4, 4, 8, [0]),
    ],
)
def test_windows_are_spread_over_the_text(number: int, length: int, tokens: int, firsts: list[int]) -> None:
    found = windows_of(list(range(number)), length, tokens)
    assert [window[0] for window in found] == firsts
    assert all(len(window) == min(length, number) for window in found)


# --- The real model -------------------------------------------------------------------------------


@thorough
@pytest.mark.model
def test_gptq_and_awq_harm_a_real_model_less_than_rtn() -> None:
    """Its first layers in 3 bits, the others as they are: quantizing all of them takes two minutes."""
    loaded = LoadedModel.load("smollm2-135m-instruct", "reference")
    ids = tokens_of(text_of(None, for_calibration=False), loaded.folder)[:512]
    windows = windows_of(tokens_of(text_of(None, for_calibration=True), loaded.folder), 512, 512)

    def lost(changed: dict[str, Any]) -> float:
        """The mean of -log p(token | the tokens before it)."""
        llm = LLM(replace(loaded, weights=loaded.weights | changed), num_blocks=40, num_swap_blocks=0)
        return math.log(perplexity(llm, ids, 512).value)

    def lost_by(method: Method) -> float:
        made = quantize_layers(loaded.config, loaded.weights, Recipe(method, bits=3), windows)
        return lost({name: weight for layer in islice(made, 3) for name, weight in layer.items()}) - exactly

    exactly = lost({})
    by_rtn = lost_by("rtn")
    assert by_rtn > 0.05
    assert lost_by("gptq") < 0.7 * by_rtn
    assert lost_by("awq") < 0.7 * by_rtn


@thorough
@pytest.mark.model
@pytest.mark.skipif(settings.get_current_profile_name() != "nightly", reason="it takes two minutes: make test-nightly")
def test_gptq_is_better_than_rtn_on_a_real_model(tmp_path: Path) -> None:
    """With 3 bits and little of both texts, as it takes minutes otherwise.

    The tests' processes give every array of a megabyte back to the system when it goes. Quantizing makes so many that a
    third of its time went into that, so it has processes of its own.
    """
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_MMAP_THRESHOLD_"}
    found = {}
    for method in ("rtn", "gptq", "awq"):
        folder = tmp_path / method
        command = [sys.executable, "-m", "minipaged", "quantize", "smollm2-135m-instruct", f"--output={folder}"]
        options = [f"--method={method}", "--bits=3", *(["--calibration-tokens=512"] if method != "rtn" else [])]
        done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        llm = LLM(folder, device="cpu", num_swap_blocks=0, max_num_seqs=4)
        ids = tokens_of(text_of(None, for_calibration=False), folder)[:1024]
        found[method] = perplexity(llm, ids, 512).value
    assert found["gptq"] < 0.8 * found["rtn"]
    assert found["awq"] < 0.9 * found["rtn"]
