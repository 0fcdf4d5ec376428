"""expert_mlp against its float64 oracle; its cost, and that a token's bits are its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import ExpertAdapters, choose_tile, expert_mlp, oracle, swiglu
from pallas_kernels.grouped_matmul.cases import CASES, Case, make_arguments
from pallas_kernels.low_rank import ExpertSlots
from pallas_kernels.tolerance import TOLERANCE
from tests.fast_compile import FAST_COMPILE, UNOPTIMISED


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_equals_the_float64_oracle(case: Case) -> None:
    arguments = make_arguments(case)
    got = jax.jit(functools.partial(expert_mlp, tile=case.tile), compiler_options=FAST_COMPILE)(*arguments)
    assert got.dtype == arguments[0].dtype
    *tokens, experts = arguments
    expected = oracle.expert_mlp(*map(np.asarray, (*tokens, experts.gate, experts.up, experts.down)))
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, **TOLERANCE[case.dtype])


def _swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


def _clamped(gate, up):
    return (up + 1) * gate / (1 + (jnp if isinstance(gate, jax.Array) else np).exp(-1.702 * gate))


@pytest.mark.parametrize("activation, expected", [(swiglu, _swiglu), (_clamped, _clamped)], ids=["swiglu", "gpt_oss"])
def test_biases_in_bfloat16_are_added_before_the_one_rounding(activation, expected) -> None:
    case = Case(name="", num_tokens=64, num_experts=8, num_experts_per_token=2, dtype="bfloat16")
    run = jax.jit(functools.partial(expert_mlp, tile=8, activation=activation), compiler_options=FAST_COMPILE)
    for seed in range(40):
        rng = np.random.default_rng(100 + seed)
        shapes = ((8, case.hidden), (8, case.hidden), (8, case.width))
        biases = tuple((rng.standard_normal(shape) / 2).astype(jnp.bfloat16) for shape in shapes)
        *tokens, experts = make_arguments(case, seed)
        got = np.asarray(run(*tokens, dataclasses.replace(experts, biases=biases)), np.float64)
        right = oracle.expert_mlp(
            *map(np.asarray, (*tokens, experts.gate, experts.up, experts.down)),
            biases,
            expected,
        )
        np.testing.assert_allclose(got, right, **TOLERANCE["bfloat16"], err_msg=f"seed {seed}")


def test_a_tokens_bits_depend_on_no_companion_order_or_bucket() -> None:
    fixed = jax.jit(functools.partial(expert_mlp, tile=16))
    case = Case(name="", num_tokens=256, num_experts=8, num_experts_per_token=2, width=96, hidden=80)
    x, ids, weights, experts = jax.tree.map(np.asarray, make_arguments(case))
    whole = np.asarray(fixed(x, ids, weights, experts))
    for size, seed in ((64, 0), (64, 1), (256, 2)):
        some = np.random.default_rng(seed).permutation(256)[:size]
        np.testing.assert_array_equal(np.asarray(fixed(x[some], ids[some], weights[some], experts)), whole[some])


def test_only_experts_that_are_routed_to_are_read() -> None:
    case = Case(name="", num_tokens=32, num_experts=16, num_experts_per_token=2, favourites=3)
    x, ids, weights, experts = jax.tree.map(np.asarray, make_arguments(case))
    unused = np.isin(np.arange(16), ids, invert=True)[:, None, None]
    poisoned = jax.tree.map(lambda leaf: np.where(unused, np.float32(np.nan), leaf), experts)
    run = jax.jit(expert_mlp)
    np.testing.assert_array_equal(run(x, ids, weights, poisoned), run(x, ids, weights, experts))


def test_scratch_does_not_grow_with_the_number_of_experts() -> None:
    def scratch(num_experts: int) -> int:
        case = Case(name="", num_tokens=64, num_experts=num_experts, num_experts_per_token=2)
        compiled = jax.jit(functools.partial(expert_mlp, tile=8)).lower(*make_arguments(case)).compile(UNOPTIMISED)
        return compiled.memory_analysis().temp_size_in_bytes

    one_expert_bytes = 4 * 24 * 40
    assert scratch(256) - scratch(16) < 64 * one_expert_bytes


def test_a_tile_holds_about_the_tokens_of_one_expert() -> None:
    def tile(T: int, X: int, E: int) -> int:
        return choose_tile(num_tokens=T, num_experts_per_token=X, num_experts=E)

    assert [tile(1, 8, 128), tile(16, 8, 128), tile(16, 2, 8), tile(4, 2, 3)] == [1, 1, 8, 8]
    assert [tile(128, 2, 8), tile(2048, 8, 128), tile(3, 1, 1)] == [32, 64, 3]


def test_shapes_that_do_not_fit_and_an_unknown_implementation_are_errors() -> None:
    x, ids, weights, experts = make_arguments(CASES[0])
    with pytest.raises(ValueError, match="axis D"):
        expert_mlp(x, ids, weights, dataclasses.replace(experts, down=experts.down.transpose(0, 2, 1)))
    with pytest.raises(ValueError, match="tile is 16"):
        expert_mlp(x, ids, weights, experts, tile=16)
    for tile in (0, -4):
        with pytest.raises(ValueError, match=f"tile is {tile}; it must be a whole number, 1 or more"):
            expert_mlp(x, ids, weights, experts, tile=tile)
    with pytest.raises(ValueError, match="num_experts is 7, and there are weights of 8"):
        expert_mlp(x, ids, weights, dataclasses.replace(experts, num_experts=7))
    with pytest.raises(ValueError, match="implementation is 'mosaic_tpu'"):
        expert_mlp(x, ids, weights, experts, implementation="mosaic_tpu")


@pytest.mark.parametrize("tile", [1, 8])
def test_experts_add_what_the_adapter_of_a_token_says_of_each_of_them(tile) -> None:
    case = Case(name="", num_tokens=40, num_experts=6, num_experts_per_token=2)
    x, ids, weights, experts = make_arguments(case)
    rng, S, R = np.random.default_rng(5), 3, 2
    slots = rng.integers(0, S + 1, 40).astype(np.int32)
    parts, scales = {}, rng.uniform(0.5, 2, S).astype(np.float32)
    for name in ("gate", "up", "down"):
        E, O, I = getattr(experts, name).shape
        a, b = rng.standard_normal((S, E, R, I)) * I**-0.5, rng.standard_normal((S, E, R, O)) * R**-0.5
        parts[name] = ExpertSlots(a=a.astype(np.float32), b=b.astype(np.float32), scales=scales)
    adapters = ExpertAdapters(**parts, slots=slots)
    run = jax.jit(functools.partial(expert_mlp, tile=tile), compiler_options=FAST_COMPILE)
    got = np.asarray(run(x, ids, weights, dataclasses.replace(experts, adapters=adapters)))
    for slot in range(S + 1):
        merged = []
        for name in ("gate", "up", "down"):
            low, base = parts[name], np.asarray(getattr(experts, name))
            delta = np.einsum("eri,ero->eoi", low.a[slot - 1], low.b[slot - 1]) * scales[slot - 1]
            merged.append(base + delta if slot else base)
        own = slots == slot
        expected = oracle.expert_mlp(*(np.asarray(array)[own] for array in (x, ids, weights)), *merged)
        np.testing.assert_allclose(got[own], expected, **TOLERANCE["float32"])
