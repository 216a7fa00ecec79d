"""Assignment 7, `quantize`: pack, unpack, round to nearest, and one column of GPTQ, in NumPy.

The properties are single calls with a few weights, made up by Hypothesis: packed bits are compared with one of Python's
whole numbers, codes with all the values that their grid has, and what the other columns become with the solution of the
least-squares problem that GPTQ's formula is for. Then whole matrices are made of the student's calls, packed bytes
included, put into the reference's Llama, and judged by what is left of the model: its perplexity, first of a small one
with random weights on a text that it wrote itself, then SmolLM2's with its last layer in 2 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from minipaged.course.assignments.paged_attention.checks import SMALL, random_weights
from minipaged.course.assignments.quantize import worker as quantize_worker
from minipaged.course.assignments.quantize.cases import (
    Column,
    Packing,
    QuantizeCase,
    Rounding,
    Unpacking,
    Yardstick,
    upper_root_of_inverse,
    wrong_array,
)
from minipaged.course.grader.assignment import Bench, Check, Failed, Failure
from minipaged.course.grader.points import described
from minipaged.course.grader.search import search
from minipaged.course.sandbox.contract import Handle, Limits
from minipaged.errors import ModelError
from minipaged.llm import LLM
from minipaged.models.quantized.stored import Activations, Array, Grouped, StoredMatrix
from minipaged.params import SamplingParams
from minipaged.quantizing.perplexity import perplexity
from minipaged.quantizing.texts import default_text
from minipaged.setup.loaded_model import LoadedModel
from minipaged.tiers import choose_tier

EXAMPLES = 60
"""Cases tried for each property."""
DAMP = 0.01
"""Of the mean of H's diagonal, added to it."""
SLACK = 1.05
"""How much larger than with our codes a perplexity, or the outputs' error, may be: sums in another order flip a few."""


# --- Properties -----------------------------------------------------------------------------------


@st.composite
def packings(draw: st.DrawFn, kind: type[Packing] = Packing) -> Packing:
    """A few rows of codes of any width."""
    bits = draw(st.integers(2, 8))
    count = draw(st.integers(1, 17))
    row = st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count).map(tuple)
    return kind(bits, False, codes=tuple(draw(st.lists(row, min_size=1, max_size=3))))


NORMAL, ONE_SIDED, SMALL_OR_NONE = "normal", "one-sided", "small or none"


@st.composite
def roundings(draw: st.DrawFn, symmetric: bool | None, kind: str = NORMAL) -> Rounding:
    """A few groups of weights of one kind; `symmetric` None: on either grid."""
    rows, groups, size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 8))
    weights = np.random.default_rng(draw(st.integers(0, 1000))).standard_normal((rows, groups, size))
    if kind == ONE_SIDED:
        weights = draw(st.sampled_from([1, -1])) * (5 + weights)
    elif kind == SMALL_OR_NONE:
        sizes = draw(st.lists(st.sampled_from([0, 1e-9, 5e-7, 1e-6, 2e-6]), min_size=groups, max_size=groups))
        weights *= np.array(sizes)[:, None]
    else:
        weights *= draw(st.sampled_from([0.02, 1, 60]))
    is_symmetric = draw(st.booleans()) if symmetric is None else symmetric
    return Rounding(draw(st.sampled_from([2, 3, 4, 8])), is_symmetric, groups=_short(weights))


@st.composite
def columns(draw: st.DrawFn) -> Column:
    """A few columns of weights, with inputs that have much to do with each other."""
    rows, count = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    x = related_inputs(rng, 4 * count, count)
    hessian = np.round(x.T @ x / len(x) + 0.1 * np.eye(count), 2)
    bits, symmetric = draw(st.sampled_from([2, 3, 4, 8])), draw(st.booleans())
    return Column(bits, symmetric, weights=_short(rng.standard_normal((rows, count))), hessian=_tuples(hessian))


def related_inputs(rng: np.random.Generator, tokens: int, inputs: int) -> Array:
    """[tokens, in]: what they have in common is as much as what is each one's own; some are larger than others."""
    own, common = rng.standard_normal((tokens, inputs)), rng.standard_normal((tokens, 1))
    related: Array = (own + common) * np.exp(rng.standard_normal(inputs) / 2)
    return related


def _short(numbers: Array) -> Any:
    """The same with three digits, to be written into a script."""
    return _tuples(np.vectorize(lambda number: float(f"{number:.2e}"), otypes=[float])(numbers))


def _tuples(numbers: Array) -> Any:
    return tuple(map(_tuples, numbers)) if numbers.ndim else float(numbers)


CUT_OFF = Rounding(4, False, groups=(((-1.32e-06, -1e-06),),))
"""A scale that is 8.8e-08 and becomes 6e-08 in float16: so the lowest weight is 22 steps below 0, and 0 has code 15."""


def property_of(inputs: st.SearchStrategy[QuantizeCase], *always: QuantizeCase) -> Callable[[Bench], None]:
    """A check of such cases. `always`: those that few searches would come upon."""

    def check(bench: Bench) -> None:
        search(bench, inputs, lambda case: case.check(bench), EXAMPLES)
        for case in always:
            case.check(bench)

    return check


def check_matrix(bench: Bench) -> None:
    """All columns of a matrix, group after group, with one quantizer."""
    bits, size = 3, 8
    for seed in range(3):
        rng = np.random.default_rng([bench.seed, seed])
        weights, x = rng.standard_normal((16, 24)).astype(np.float32), related_inputs(rng, 96, 24)
        hessian = x.T @ x / len(x)
        bench.process.forget()
        made = quantized(RemoteQuantizer(bench, bits, symmetric=seed == 0), weights, hessian, size)
        right = quantized(Here(bits, symmetric=seed == 0), weights, hessian, size)
        error, least = (lost(weights, each, hessian) for each in (made, right))
        if not error <= SLACK * least:
            raise Failed(
                Failure(
                    f"a matrix [16, 24] of {bits} bits in groups of {size}, column after column: its outputs err by "
                    f"{error:.4g}, {error / least:.2f} times as much as with ours ({least:.4g})"
                )
            )


def lost(weights: Array, made: Grouped, hessian: Array) -> float:
    """The error of the outputs: the sum over them of d H d.T."""
    d = np.float64(weights) - made.rows()  # [out, in]
    return float(np.vdot(d @ hessian, d))


# --- Matrices made by a quantizer -----------------------------------------------------------------


class Here:
    """The yardstick, asked for whole matrices."""

    def __init__(self, bits: int, *, symmetric: bool) -> None:
        self.bits, self.symmetric = bits, symmetric
        self._quantizer = Yardstick(bits, symmetric)

    def make(self, loop: str, *arguments: Any) -> Any:
        return getattr(quantize_worker, loop)(self._quantizer, *arguments)


class RemoteQuantizer:
    """The student's, asked for the same in the worker."""

    def __init__(self, bench: Bench, bits: int, *, symmetric: bool) -> None:
        self.bits, self.symmetric = bits, symmetric
        self._bench, self._quantizer = bench, bench.make(bits, symmetric)
        assert isinstance(self._quantizer, Handle)

    def make(self, loop: str, *arguments: Any) -> Any:
        return self._bench.process.modules[0].call(loop, self._quantizer, *arguments)


def quantized(quantizer: Here | RemoteQuantizer, weights: Array, hessian: Array | None, size: int) -> Grouped:
    """weights [out, in] as a stored matrix: by GPTQ; without a hessian [in, in] rounded to nearest. Raises Failed."""
    if hessian is None:
        made = quantizer.make("rounded", weights, size)
    else:
        damped = hessian + DAMP * np.diag(hessian).mean() * np.eye(len(hessian))
        made = quantizer.make("compensated", weights, upper_root_of_inverse(damped).astype(np.float32), size)
    num_outputs, num_inputs = weights.shape
    codes, scales, zeros = made
    num_bytes, grids = -(-num_inputs * quantizer.bits // 8), (num_outputs, num_inputs // size)
    wrong = (
        wrong_array("for a whole matrix pack returned", codes, (num_outputs, num_bytes), np.uint8)
        or wrong_array("for a whole matrix round_to_nearest returned scales", scales, grids, np.float16)
        or wrong_array("for a whole matrix round_to_nearest returned zeros", zeros, grids, np.uint8)
    )
    if wrong:
        raise Failed(Failure(wrong))
    return Grouped(
        shape=(num_outputs, num_inputs),
        rounding="float16",
        bits=quantizer.bits,
        codes=codes,
        scales=scales,
        zeros=zeros,
        group_size=size,
    )


# --- Perplexity -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Noting(Activations):
    """Leaves inputs as they are, and keeps what GPTQ asks of them."""

    kind: Any = None
    hessian: list[Array] = field(default_factory=list)
    """X.T X [in, in] of each call."""

    def applied(self, x: Array) -> Array:
        self.hessian.append(x.T @ x)
        return x


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WatchedMatrix(StoredMatrix):
    """A matrix of floats whose inputs are noted."""

    weight: Array
    """[out, in]."""

    def rows(self, which: slice | Array = slice(None)) -> Array:
        rows: Array = self.weight[which]
        return rows


def llm_with(loaded: LoadedModel, changed: Mapping[str, Any], max_model_len: int) -> LLM:
    """The model with these weights instead of its own."""
    weights = {**loaded.weights, **changed}
    blocks = -(-max_model_len // 16)
    return LLM(
        replace(loaded, weights=weights),
        num_blocks=blocks,
        block_size=16,
        max_model_len=max_model_len,
        enable_prefix_caching=False,
    )


def perplexity_with(loaded: LoadedModel, changed: Mapping[str, Any], ids: Sequence[int]) -> float:
    """Of a text in one window."""
    return perplexity(llm_with(loaded, changed, len(ids) + 1), list(ids)).value


def hessians(loaded: LoadedModel, names: Sequence[str], ids: Sequence[int]) -> dict[str, Array]:
    """X.T X of these matrices' inputs [tokens, in], for this text."""
    noted, watched = {name: Noting() for name in names}, {}
    for name, inputs in noted.items():
        weight = loaded.weights[name]
        watched[name] = WatchedMatrix(shape=weight.shape, rounding="float32", activations=inputs, weight=weight)
    perplexity_with(loaded, watched, ids)
    return {name: np.sum(inputs.hessian, axis=0) for name, inputs in noted.items()}


def compare(
    bench: Bench, where: str, loaded: LoadedModel, names: Sequence[str], size: int, bits: tuple[int, int], *texts: Any
) -> None:
    """Quantize these matrices with the student's part and with ours, rounded to nearest in `bits[0]` and by GPTQ in
    `bits[1]` bits. `texts`: to calibrate with, and to measure on. Raises Failed for a perplexity that is higher."""
    calibration, measured = texts
    found = hessians(loaded, names, calibration)
    of_original = perplexity_with(loaded, {}, measured)
    for method, own_bits, inputs in (("round_to_nearest", bits[0], {}), ("round_column", bits[1], found)):
        values = []
        for quantizer in (Here(own_bits, symmetric=False), RemoteQuantizer(bench, own_bits, symmetric=False)):
            made = {name: quantized(quantizer, loaded.weights[name], inputs.get(name), size) for name in names}
            try:
                values.append(perplexity_with(loaded, made, measured))
            except ModelError as error:  # of weights beyond all bounds
                raise Failed(Failure(f"{where}, {own_bits} bits by {method}: {error}")) from None
        right, value = values
        if not value <= SLACK * right:
            raise Failed(
                Failure(
                    f"{where}, {own_bits} bits by {method}: its perplexity is {value:.4g}; it should be {right:.4g} at "
                    f"most, or {SLACK:g} times that (with weights as they were it is {of_original:.4g})"
                )
            )


def check_small(bench: Bench) -> None:
    """A text is what the model itself writes: nobody can know it better."""
    rng = np.random.default_rng(bench.seed)
    loaded = LoadedModel(Path(), SMALL, None, choose_tier("reference"), random_weights(rng))
    params = SamplingParams(temperature=1, seed=bench.seed, max_tokens=180, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": [token]} for token in (1, 2)]
    outputs = llm_with(loaded, {}, 200).generate(prompts, params, use_tqdm=False)
    names = [name for name in loaded.weights if "_proj" in name]
    compare(bench, "a small Llama", loaded, names, 16, (3, 3), *(output.outputs[0].token_ids for output in outputs))


def check_model(bench: Bench) -> None:
    """The last layer: what it loses no other makes up for."""
    loaded = LoadedModel.load(bench.model, "reference", dtype="float32")
    assert loaded.tokenizer
    ids = [loaded.tokenizer.encode(default_text(for_calibration=own)[:3000])[:257] for own in (True, False)]
    names = [
        name for name in loaded.weights if f".layers.{loaded.config.num_hidden_layers - 1}." in name and "_proj" in name
    ]
    size = 64 if loaded.config.hidden_size % 64 == 0 else 8
    compare(bench, "SmolLM2 with its last layer", loaded, names, size, (3, 2), *ids)


# --- The assignment -------------------------------------------------------------------------------

CHECKS: dict[str, Check] = {
    "pack": property_of(packings()),
    "unpack": property_of(packings(Unpacking)),
    "round to nearest, symmetric": property_of(roundings(symmetric=True)),
    "round to nearest, asymmetric": property_of(roundings(symmetric=False)),
    "0 has a code": property_of(roundings(symmetric=False, kind=ONE_SIDED)),
    "groups of zeros": property_of(roundings(symmetric=None, kind=SMALL_OR_NONE), CUT_OFF),
    "one column of GPTQ": property_of(columns()),
    "a whole matrix": check_matrix,
    "a small Llama": check_small,
    "SmolLM2": check_model,
}

ASSIGNMENT = described(
    "quantize",
    CHECKS,
    part="Quantizer",
    members=("pack", "unpack", "round_to_nearest", "round_column"),
    limits=Limits(call_seconds=60),
    modules=("minipaged.course.assignments.quantize.worker",),
)
