"""`minipaged quantize` and `minipaged perplexity`: quantizes a model, and measures how good a model is on a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from minipaged.cli.apps import app, check_tokenizer, refuse_given
from minipaged.cli.options import Command, given_for, takes
from minipaged.setup.settings import Settings


@app.command(cls=Command)
def quantize(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A known name, a folder, or a hub id.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.", show_default=False)],
    method: Annotated[str, typer.Option(help="rtn (round to nearest), gptq or awq.")] = "gptq",
    bits: Annotated[int, typer.Option(help="Bits per weight: 2, 3, 4 or 8.")] = 4,
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale; -1 is a whole row.")] = 64,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="Make the middle code mean 0, which some kernels require.")
    ] = False,
    act_order: Annotated[
        str,
        typer.Option(
            help="GPTQ with important inputs first: none, static (groups of neighbours) or group (in that order)."
        ),
    ] = "static",
    form: Annotated[
        str, typer.Option("--format", help="File format: compressed-tensors or gptq.")
    ] = "compressed-tensors",
    calibration: Annotated[
        Path | None, typer.Option(help="A text file to calibrate with; by default Python's documentation.")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(help="The number of tokens of that text to use.")] = 16384,
) -> None:
    """Quantize a model's weights to a few bits, in files that transformers and vLLM load too."""
    from minipaged.models.quantized.recipe import Recipe
    from minipaged.quantizing.checkpoint import quantize as make

    if method != "gptq":
        refuse_given(context, ("act_order",), "has a meaning only with --method gptq")
    if method == "rtn":
        refuse_given(context, ("calibration", "calibration_tokens"), "has no meaning with --method rtn")
    made = make(
        model,
        output,
        Recipe(method, bits, group_size, symmetric, act_order),  # type: ignore[arg-type]  # Recipe checks it
        layout=form,  # type: ignore[arg-type]  # `make` checks it
        calibration=calibration,
        calibration_tokens=calibration_tokens,
        show_progress=sys.stderr.isatty(),
    )
    megabytes = f"{made.num_bytes / 1e6:,.1f} MB of weights, {made.num_bytes_before / 1e6:,.1f} before"
    calibrated = f", calibrated on {made.calibration_tokens:,} tokens" if made.calibration_tokens else ""
    print(f"{output}: {made.matrices} matrices quantized{calibrated}; {megabytes}")
    if made.calibration_tokens < calibration_tokens // 2 and calibrated:
        few = f"the text has {made.calibration_tokens:,} tokens of the {calibration_tokens:,} to calibrate on"
        print(f"warning: {few}; a longer one makes a better model", file=sys.stderr)


@app.command(cls=Command)
@takes(Settings, only=("tier", "device", "dtype", "kv_cache_dtype"))
def perplexity(
    model: Annotated[
        str, typer.Argument(help="A known name, a folder, a .gguf file, or a hub id.", show_default=False)
    ],
    text: Annotated[Path | None, typer.Argument(help="A text file; by default Python's documentation.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="The number of tokens to use, from the text's beginning.")] = 16384,
    window: Annotated[
        int | None,
        typer.Option(
            help="Tokens per piece that the text is cut into; by default 2048, or the model's context if shorter."
        ),
    ] = None,
    **given: Any,
) -> None:
    """Measure a model's perplexity on a text (smaller is better). Use it to judge a quantized model."""
    from minipaged.llm import LLM
    from minipaged.quantizing.perplexity import perplexity as measure
    from minipaged.quantizing.texts import text_of, tokens_of

    words = text_of(text, for_calibration=False)
    check_tokenizer(model)
    llm = LLM(model, num_swap_blocks=0, **given_for(Settings, given))
    found = measure(llm, tokens_of(words, llm.folder)[:tokens], window)
    print(f"{found.value:.3f}  ({found.num_tokens:,} tokens)")
    print(f"[{llm.description}]", file=sys.stderr)
