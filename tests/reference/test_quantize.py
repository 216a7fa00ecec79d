"""Quantizing, against loops that say the same thing number by number, in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.errors import InvalidRequest, ModelError
from minipaged.models.loading import load_config, load_weights
from minipaged.models.quantized.recipe import Recipe
from minipaged.models.quantized.stored import Array, Grouped, unpack
from minipaged.reference.flat_batch import FlatBatch
from minipaged.reference.kv_cache import KVCache
from minipaged.reference.llama import Llama
from minipaged.reference.quantize.awq import ALPHAS, SHRINKS, awq_clipped, awq_scales
from minipaged.reference.quantize.gptq import DAMP, gptq
from minipaged.reference.quantize.layers import FED, NOT_CLIPPED, in_one_batch, quantize_layers
from minipaged.reference.quantize.rtn import rtn
from tests.effort import quick_cases
from tests.end_to_end.small_llama import make_small_llama

BITS = st.sampled_from((2, 3, 4, 8))


@st.composite
def cases(draw: st.DrawFn, act_order: bool = False) -> tuple[Recipe, Array, Array]:
    """A recipe, a matrix [out, in] for it, and inputs [tokens, in] that go together more or less."""
    size, groups = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    whole = groups == 1 and draw(st.booleans())
    recipe = Recipe(
        bits=draw(BITS),
        group_size=-1 if whole else size,
        symmetric=draw(st.booleans()),
        act_order=draw(st.sampled_from(("none", "static", "group"))) if act_order else "none",
    )
    r = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_inputs = size * groups
    weight = r.standard_normal((draw(st.integers(1, 6)), num_inputs)) * 10.0 ** draw(st.integers(-3, 3))
    if draw(st.booleans()):
        weight[:, :size] = 0  # a group of zeros
    mixed = r.standard_normal((num_inputs, num_inputs)) + draw(st.sampled_from((0, 3))) * np.eye(num_inputs)
    inputs = r.standard_normal((draw(st.integers(1, 40)), num_inputs)) @ mixed
    if draw(st.booleans()):
        inputs[:, draw(st.integers(0, num_inputs - 1))] = 0  # an input that the text never uses
    return recipe, weight, inputs


# --- Round to nearest -----------------------------------------------------------------------------


def grid_of(weights: Sequence[float], recipe: Recipe, shrink: float = 1) -> tuple[float, int]:
    """Scale and zero of one group."""
    top = 2**recipe.bits - 1
    low, high = shrink * min(0, *weights), shrink * max(0, *weights)
    if recipe.symmetric:
        largest = max(-low, high)
        return max(float(np.float16(2 * largest / top)), 2.0**-24), 2 ** (recipe.bits - 1)
    scale = max(float(np.float16((high - low) / top)), 2.0**-24)
    return scale, min(max(round(-low / scale), 0), top)


def code_of(weight: float, grid: tuple[float, int], recipe: Recipe) -> int:
    """The code whose value comes closest: all are tried."""
    scale, zero = grid
    codes = range(2**recipe.bits)
    return min(codes, key=lambda q: abs((q - zero) * scale - weight))


@given(cases())
def test_rtn_takes_the_nearest_value_of_each_groups_grid(case: tuple[Recipe, Array, Array]) -> None:
    recipe, weight, _ = case
    matrix = rtn(weight, recipe)
    size = recipe.size(weight.shape[1])
    for row, scales, zeros, codes in zip(weight, *parts(matrix), strict=True):
        for g in range(len(row) // size):
            own = slice(g * size, (g + 1) * size)
            assert (scales[g], zeros[g]) == grid_of(row[own].tolist(), recipe)
            # A tie may go either way, and one step of a bad case's rounding with it.
            for weight_, code in zip(row[own].tolist(), codes[own].tolist(), strict=True):
                best = code_of(weight_, (scales[g], zeros[g]), recipe)
                errors = [abs((q - zeros[g]) * scales[g] - weight_) for q in (code, best)]
                assert code == best or math.isclose(*errors, rel_tol=1e-9)


def parts(matrix: Grouped) -> tuple[Array, Array, Array]:
    """Scales and zeros [out, groups] and codes [out, in], all as whole arrays."""
    zeros = np.broadcast_to(matrix.zeros, matrix.scales.shape)
    return matrix.scales.astype(np.float64), zeros.astype(int), unpack(matrix.codes, matrix.bits, matrix.shape[1])


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan, 1e9])
def test_weights_that_have_no_grid_are_refused(wrong: float) -> None:
    weight = np.ones((2, 8))
    weight[1, 3] = wrong
    with pytest.raises(ModelError, match="infinite, NaN, or too large"):
        rtn(weight, Recipe(group_size=4))


# --- GPTQ -----------------------------------------------------------------------------------------


def by_elimination(weight: Array, hessian: Array, recipe: Recipe) -> tuple[Array, Array, Array]:
    """The paper's section 3 as it stands: H⁻¹, one column at a time, which is then eliminated from it (Eq. 2 and 3).

    Codes [out, in]; scales and zeros [out, groups].
    """
    num_outputs, num_inputs = weight.shape
    size, order = recipe.size(num_inputs), list(range(num_inputs))
    if recipe.act_order != "none":
        order.sort(key=lambda i: -hessian[i, i])
    H = hessian.copy()
    used = [H[i, i] for i in range(num_inputs) if H[i, i]]
    mean = sum(used) / len(used) if used else 1
    for i in range(num_inputs):
        H[i, i] = (H[i, i] or mean) + DAMP * mean
    inverse, rest = np.linalg.inv(H), weight.copy()
    codes = np.zeros(weight.shape, int)
    scales, zeros = np.zeros((num_outputs, num_inputs // size)), np.zeros((num_outputs, num_inputs // size), int)
    for place, i in enumerate(order):
        g = (i if recipe.act_order == "static" else place) // size
        members = range(g * size, (g + 1) * size)
        for r in range(num_outputs):
            if recipe.act_order == "static":
                scales[r, g], zeros[r, g] = grid_of([weight[r, j] for j in members], recipe)
            elif place % size == 0:
                scales[r, g], zeros[r, g] = grid_of([rest[r, order[j]] for j in members], recipe)
            q = min(max(round(rest[r, i] / scales[r, g]) + zeros[r, g], 0), 2**recipe.bits - 1)
            codes[r, i] = q
            error = (rest[r, i] - (q - zeros[r, g]) * scales[r, g]) / inverse[i, i]
            for j in order[place + 1 :]:
                rest[r, j] -= error * inverse[i, j]
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return codes, scales, zeros


def check_gptq(weight: Array, inputs: Array, recipe: Recipe) -> None:
    hessian = inputs.T @ inputs
    matrix = gptq(weight, hessian, recipe)
    codes, scales, zeros = by_elimination(weight, hessian, recipe)
    found = parts(matrix)
    np.testing.assert_array_equal(found[0], scales)
    np.testing.assert_array_equal(found[1], zeros)
    np.testing.assert_array_equal(found[2], codes)
    if recipe.act_order == "group":
        assert matrix.group_index is not None
        order = np.argsort(-np.diag(hessian), kind="stable")
        assert (matrix.group_index[order] == np.arange(weight.shape[1]) // matrix.group_size).all()
    else:
        assert matrix.group_index is None


@pytest.mark.parametrize("unused", [4, 64])
def test_gptq_asks_not_how_large_the_hessian_is(unused: int) -> None:
    """Inputs that the text never used are some of it."""
    r = np.random.default_rng(0)
    weight, inputs = r.standard_normal((8, 64)), r.standard_normal((100, 64))
    inputs[:, :unused] = 0
    hessian = inputs.T @ inputs
    once, small = (gptq(weight, each, Recipe(group_size=16)) for each in (hessian, hessian / 2**30))
    np.testing.assert_array_equal(once.codes, small.codes)


@given(cases(act_order=True))
def test_gptq_is_elimination_column_by_column(case: tuple[Recipe, Array, Array]) -> None:
    recipe, weight, inputs = case
    check_gptq(weight, inputs, recipe)


@quick_cases(4)
@pytest.mark.parametrize("act_order", ["none", "static", "group"])
@pytest.mark.parametrize(("num_inputs", "group_size"), [(256, -1), (384, 192), (300, -1), (256, 64)])
def test_gptq_by_blocks_is_the_same(num_inputs: int, group_size: int, act_order: Any) -> None:
    """Groups that a block is a part of, and blocks that are groups."""
    r = np.random.default_rng(num_inputs)
    inputs = r.standard_normal((400, num_inputs)) @ r.standard_normal((num_inputs, num_inputs))
    check_gptq(r.standard_normal((2, num_inputs)), inputs, Recipe(group_size=group_size, act_order=act_order))


def output_error(weight: Array, matrix: Grouped, inputs: Array) -> float:
    scales, zeros, codes = parts(matrix)
    size = matrix.group_size
    rounded = (codes - zeros.repeat(size, axis=1)) * scales.repeat(size, axis=1)
    return float((((weight - rounded) @ inputs.T) ** 2).sum())


@given(BITS, st.booleans(), st.integers(0, 2**32))
def test_outputs_err_less_than_with_rtn(bits: int, symmetric: bool, seed: int) -> None:
    """On the same grids, of inputs of which a few directions are large, as a model's are."""
    r = np.random.default_rng(seed)
    directions = r.standard_normal((32, 32)) * np.geomspace(1, 0.01, 32)[:, None]
    inputs = r.standard_normal((200, 32)) @ directions
    weight = r.standard_normal((24, 32))
    recipe = Recipe(bits=bits, group_size=8, symmetric=symmetric, act_order="static")
    ours = output_error(weight, gptq(weight, inputs.T @ inputs, recipe), inputs)
    assert ours < output_error(weight, rtn(weight, recipe), inputs)


@given(cases(act_order=True))
def test_where_inputs_have_nothing_to_do_with_each_other_gptq_is_rtn(case: tuple[Recipe, Array, Array]) -> None:
    recipe, weight, inputs = case
    if recipe.act_order == "group":  # would put other inputs together
        recipe = dataclasses.replace(recipe, act_order="static")
    hessian = np.diag((inputs**2).sum(axis=0))
    for ours, theirs in zip(parts(gptq(weight, hessian, recipe)), parts(rtn(weight, recipe)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# --- AWQ ------------------------------------------------------------------------------------------


def rounded(weight: Array, recipe: Recipe) -> Array:
    """[out, in], each weight rounded to nearest, in float64."""
    scales, zeros, codes = parts(rtn(weight, recipe))
    size = recipe.size(weight.shape[1])
    return (codes - zeros.repeat(size, axis=1)) * scales.repeat(size, axis=1)


def fits(weight: Array, recipe: Recipe, shrink: float = 1) -> bool:
    """Whether there is a float16 for each group's step."""
    size = recipe.size(weight.shape[1])
    with np.errstate(over="ignore"):
        scales = [grid_of(group, recipe, shrink)[0] for group in weight.reshape(-1, size).tolist()]
    return bool(np.isfinite(scales).all())


@given(cases())
def test_awq_takes_the_scales_with_which_outputs_err_least(case: tuple[Recipe, Array, Array]) -> None:
    """Tried with the inputs themselves, on all matrices that share them. Some scales make weights of thousands so large
    that float16 has no steps for them."""
    recipe, weight, inputs = case
    mean_abs = np.abs(inputs).mean(axis=0)
    half = len(weight) // 2

    def error(scales: Array) -> float:
        return float(((inputs @ weight.T - inputs / scales @ rounded(weight * scales, recipe).T) ** 2).sum())

    found = awq_scales([weight[:half], weight[half:]], inputs.T @ inputs, mean_abs, recipe)
    tried = [np.array([max(m**alpha, 1e-4) for m in mean_abs]) for alpha in ALPHAS]
    tried = [scales / math.sqrt(max(scales) * min(scales)) for scales in tried]
    least = min(error(scales) for scales in tried if fits(weight * scales, recipe))
    assert error(found) <= least * (1 + 1e-6) + 1e-9 * float(((inputs @ weight.T) ** 2).sum())


@given(cases())
def test_awq_cuts_each_group_where_its_outputs_err_least(case: tuple[Recipe, Array, Array]) -> None:
    recipe, weight, inputs = case
    size = recipe.size(weight.shape[1])
    scales, zeros, codes = parts(awq_clipped(weight, inputs.T @ inputs, recipe))
    for r in range(len(weight)):
        for g in range(weight.shape[1] // size):
            own = slice(g * size, (g + 1) * size)
            w, x = weight[r, own], inputs[:, own]

            def error(grid: tuple[float, int], codes: Array, w: Array = w, x: Array = x) -> float:
                return float(((x @ (w - (codes - grid[1]) * grid[0])) ** 2).sum())

            grids = [grid_of(w.tolist(), recipe, shrink) for shrink in SHRINKS]
            tried = [error(grid, np.array([code_of(each, grid, recipe) for each in w.tolist()])) for grid in grids]
            ours = error((scales[r, g], zeros[r, g]), codes[r, own])
            assert ours <= min(tried) * (1 + 1e-6) + 1e-9 * float(((x @ w) ** 2).sum())


TOO_WIDE = np.array([[100_000.0, -100_000, 50_000, 30_000, 1, 2, 3, 4]])
"""One output, of which float16 has no steps for the first group, in 2 bits."""


@pytest.mark.parametrize(("least", "found"), [(100.0, False), (0.01, True)])
def test_awq_tries_only_scales_with_which_the_steps_fit_float16(least: float, found: bool) -> None:
    """Of which there are some where the inputs of the large weights are small."""
    recipe = Recipe("awq", bits=2, group_size=4)
    mean_abs = np.array([least] * 4 + [1.0] * 4)
    assert not fits(TOO_WIDE, recipe)
    if found:
        assert fits(TOO_WIDE * awq_scales([TOO_WIDE], np.eye(8), mean_abs, recipe), recipe)
        return
    with pytest.raises(ModelError, match="too large for float16 scales"):
        awq_scales([TOO_WIDE], np.eye(8), mean_abs, recipe)


def test_awq_cuts_off_what_does_not_fit_float16() -> None:
    recipe = Recipe("awq", bits=2, group_size=4)
    assert [fits(TOO_WIDE, recipe, shrink) for shrink in SHRINKS] == [False, *[True] * 9]
    scales, zeros, _ = parts(awq_clipped(TOO_WIDE, np.eye(8), recipe))
    assert (scales[0, 0], zeros[0, 0]) in [grid_of(TOO_WIDE[0, :4].tolist(), recipe, each) for each in SHRINKS[1:]]
    with pytest.raises(ModelError, match="too large for float16 scales"):
        awq_clipped(2 * TOO_WIDE, np.eye(8), recipe)


# --- The pass -------------------------------------------------------------------------------------

WINDOWS = [np.random.default_rng(i).integers(0, 128, length).tolist() for i, length in enumerate((70, 64, 33))]


@pytest.fixture(scope="module", params=[2, 4], ids=["GQA", "MHA"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where heads share keys and values, and where they do not."""
    folder = tmp_path_factory.mktemp("model")
    return make_small_llama(folder, num_key_value_heads=request.param)


class Told(Llama):
    """Tells what each matrix is given."""

    inputs: dict[str, Array]

    def _linear(self, name: str, x: Array) -> Array:
        self.inputs[name] = x
        return super()._linear(name, x)


def run(folder: Path, weights: dict[str, Any]) -> tuple[Array, dict[str, Array]]:
    """The last hidden states [tokens, hidden] of the windows, and every matrix's inputs: by the tier's plain Llama."""
    config = load_config(folder)
    tokens, num_blocks = in_one_batch(WINDOWS)
    cache = KVCache(config.num_hidden_layers, num_blocks, 64, config.num_key_value_heads, config.head_dim)
    llama = Told(config, weights, cache)
    llama.inputs = {}
    return states_of(llama, tokens), llama.inputs


def states_of(llama: Llama, tokens: FlatBatch) -> Array:
    x = llama._embed(tokens.ids)
    rotations = llama._rotations(tokens.positions)
    for i in range(llama.config.num_hidden_layers):
        x = x + llama._attention(i, llama._norm(f"model.layers.{i}.input_layernorm", x), tokens, rotations)
        x = x + llama._mlp(i, llama._norm(f"model.layers.{i}.post_attention_layernorm", x))
    return x


def made_of(folder: Path, recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's weights, and those that have changed."""
    config, weights = load_config(folder), load_weights(folder, load_config(folder))
    changed: dict[str, Any] = {}
    for layer in quantize_layers(config, weights, recipe, WINDOWS):
        changed |= layer
    return weights, changed


def test_gptq_is_given_the_inputs_of_the_quantized_model(model: Path) -> None:
    recipe = Recipe(bits=3, group_size=16)
    weights, changed = made_of(model, recipe)
    _, inputs = run(model, weights | changed)
    assert len(changed) == 14 == len(inputs)
    for name, x in inputs.items():
        again = gptq(weights[f"{name}.weight"], x.T @ x / np.float32(len(x)), recipe)
        np.testing.assert_array_equal(changed[f"{name}.weight"].codes, again.codes)


def test_a_text_in_windows_is_a_batch_of_prompts() -> None:
    tokens, num_blocks = in_one_batch(WINDOWS)
    assert tokens.ids.tolist() == [token for window in WINDOWS for token in window]
    assert num_blocks == 2 + 1 + 1
    assert len({*tokens.slots[0].tolist()}) == len(tokens.ids)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_with_eight_bits_the_model_says_what_it_said(model: Path, method: Any) -> None:
    """AWQ's scales are divided out again wherever they were multiplied in."""
    weights, changed = made_of(model, Recipe(method, bits=8, group_size=16))
    before, after = run(model, weights)[0], run(model, weights | changed)[0]
    assert np.abs(after - before).max() < 0.05 * np.abs(before).max()
    matrices = {f"model.layers.{i}.{name}.weight" for i in range(2) for fed in FED for name in fed.names}
    norms = {name for name in changed if "layernorm" in name}
    assert changed.keys() == matrices | norms
    assert len(norms) == (4 if method == "awq" else 0)
    assert all(isinstance(changed[name], Grouped) for name in matrices)


def test_awq_scales_what_comes_before_where_it_can(model: Path) -> None:
    """Values too, unless heads share them; keys and queries are not cut."""
    recipe = Recipe("awq", bits=2, group_size=16)
    weights, changed = made_of(model, recipe)
    shared = load_config(model).num_key_value_heads == 2
    for i in range(2):
        name = f"model.layers.{i}."
        for norm, fed in (("input_layernorm", FED[0]), ("post_attention_layernorm", FED[2])):
            scales = weights[f"{name}{norm}.weight"] / changed[f"{name}{norm}.weight"]  # [in]
            assert scales.max() > 1.01 * scales.min()  # there is something to see
            for part in set(fed.names) & set(NOT_CLIPPED):
                expected = rtn(weights[f"{name}{part}.weight"] * scales, recipe)
                np.testing.assert_allclose(changed[f"{name}{part}.weight"].scales, expected.scales, rtol=2e-3)
    # v_proj's scales are no longer those of its own weights, if o_proj's inputs were scaled.
    first = "model.layers.0."
    values, original = (each[f"{first}self_attn.v_proj.weight"] for each in (changed, weights))
    norm = weights[f"{first}input_layernorm.weight"] / changed[f"{first}input_layernorm.weight"]  # [in]
    whole = np.abs((original * norm).reshape(len(original), -1, 16)).max(axis=2) * 2  # no range is wider
    assert (values.scales * 3 > whole * 1.01).any() == (not shared)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "hqq"}, "method is 'hqq'; choose rtn, gptq, awq"),
        ({"bits": 5}, "bits is 5; choose 2, 3, 4, 8"),
        ({"act_order": "yes"}, "act_order is 'yes'; choose none, static, group"),
        ({"group_size": 0}, "group_size is 0; give 1 or more inputs, or -1"),
    ],
)
def test_a_recipe_that_there_is_not_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Recipe(**settings)
