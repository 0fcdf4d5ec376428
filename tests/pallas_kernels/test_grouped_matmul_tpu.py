"""expert_mlp for Mosaic TPU over codes, interpreted, against its float64 oracle; where pairs stand; what is refused."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import ExpertStack, cases, expert_mlp, mosaic_tpu, oracle, swiglu, xla
from pallas_kernels.grouped_matmul.dense_support import dense_refusals, tile_of
from pallas_kernels.quantized_matmul import cases as product_cases
from pallas_kernels.quantized_matmul import oracle as product_oracle
from pallas_kernels.quantized_matmul import refusals
from pallas_kernels.target import Target
from pallas_kernels.tolerance import TOLERANCE
from tests.fast_compile import FAST_COMPILE
from tests.pallas_kernels.tpu_interpreter import INTERPRET

V5E, V7X = Target.named("tpu:v5e"), Target.named("tpu:v7x")  # matrix units of 128 and 256, without and with E4M3


def matrices_of(experts: ExpertStack) -> list[Any]:
    return [experts.gate, experts.up, experts.down]


def kernel(num_experts: int) -> Any:
    """The interpreted kernel of an MLP of experts."""
    run = functools.partial(mosaic_tpu.expert_mlp, num_experts=num_experts, activation=swiglu, interpret=INTERPRET)
    return jax.jit(run, compiler_options=FAST_COMPILE)


def for_kernels(experts: ExpertStack, target: Target) -> ExpertStack:
    parts: dict[str, Any] = {name: getattr(experts, name) for name in ("gate", "up", "down")}
    return dataclasses.replace(
        experts, **{name: dataclasses.replace(part, kernels=target) for name, part in parts.items()}
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", [V5E, pytest.param(V7X, marks=pytest.mark.long)], ids=lambda t: t.generation)
@pytest.mark.parametrize(
    ("case", "form"),
    [
        pytest.param(case, form, id=case.name, marks=() if case.name == "w4a16" else pytest.mark.long)
        for case, form in cases.TPU_CASES
    ],
)
def test_every_case_equals_the_product_of_decoded_experts(
    case: cases.Case, form: product_cases.Case, target: Target
) -> None:
    if form.name == "w8a8" and target is V7X:
        pytest.skip("it has no int8 product")
    x, ids, weights, experts = cases.make_packed_arguments(case, form)
    got = kernel(case.num_experts)(x, ids, weights, for_kernels(experts, target))
    assert got.dtype == x.dtype
    expected = oracle.packed_expert_mlp(*map(np.asarray, (x, ids, weights)), *matrices_of(experts))
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, **TOLERANCE["bfloat16"])


@pytest.mark.slow
def test_experts_elsewhere_add_nothing_and_biases_are_each_tiles_experts() -> None:
    case, form = cases.TPU_CASES[0]
    x, ids, weights, experts = cases.make_packed_arguments(case, form)
    rng, (E, F, D) = np.random.default_rng(1), experts.gate.shape
    biases = tuple(jnp.asarray(rng.standard_normal(shape), "bfloat16") for shape in ((E, F), (E, F), (E, D)))
    own = xla.ids_here(ids, 1, E - 1)  # a device that lacks the first expert
    kept = jax.tree.map(lambda leaf: leaf[1:], dataclasses.replace(experts, biases=biases, first_expert=()))
    got = kernel(case.num_experts)(x, own, weights, for_kernels(kept, V5E))
    matrices = map(product_oracle.decode, matrices_of(experts))
    absent = np.where(np.asarray(ids) == 0, 0.0, np.asarray(weights))
    expected = oracle.expert_mlp(np.asarray(x), np.asarray(ids), absent, *matrices, tuple(map(np.asarray, biases)))
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, **TOLERANCE["bfloat16"])


def stand(ids: jax.Array, num_here: int, rows: int) -> tuple[jax.Array, ...]:
    tiles = mosaic_tpu.tiles_of_experts(ids, num_here=num_here, rows=rows)
    return tiles.places, tiles.expert_ids, tiles.tokens, tiles.num_tiles


def test_every_pair_has_a_place_of_its_own_in_a_tile_of_its_expert() -> None:
    """For experts that all want, that nobody wants and that are elsewhere."""
    rng, stood = np.random.default_rng(0), jax.jit(stand, static_argnames=("num_here", "rows"))
    for T, X, E, rows, chosen in ((40, 2, 5, 16, 3), (33, 3, 8, 32, 9)):
        ids = np.stack([rng.permutation(max(chosen, X))[:X] for _ in range(T)]).clip(max=E).astype(np.int32)
        places, owners, tokens, num_tiles = map(np.asarray, stood(ids, num_here=E, rows=rows))
        here = ids < E
        assert (places[~here] == len(tokens)).all()
        assert len(set(places[here])) == here.sum()
        assert int(num_tiles) == sum(-(-int((ids == e).sum()) // rows) for e in range(E))
        assert places[here].max(initial=0) < int(num_tiles) * rows <= len(tokens)
        np.testing.assert_array_equal(owners[places[here] // rows], ids[here])
        np.testing.assert_array_equal(tokens[places[here]], np.nonzero(here)[0])


def test_a_tile_has_about_the_pairs_of_an_expert_as_far_as_codes_are_multiplied() -> None:
    def rows(which: int, num_pairs: int) -> int:
        _, _, _, experts = cases.make_packed_arguments(*cases.TPU_CASES[which])
        return mosaic_tpu.choose_rows(num_pairs, 4, matrices_of(for_kernels(experts, V7X)))

    assert [rows(0, pairs) for pairs in (1, 64, 65, 200, 10_000)] == [16, 16, 32, 64, 128]
    assert rows(4, 10_000) == 32, "rows of groups of 32 are given eight times"


def test_what_the_kernels_do_not_take_is_refused_or_multiplied_in_xla() -> None:
    case, form = next(pair for pair in cases.TPU_CASES if pair[0].name == "mxfp4_part_of_a_chunk")
    x, ids, weights, experts = cases.make_packed_arguments(case, form)
    gate = matrices_of(experts)[0]
    assert refusals(gate, x.dtype, V5E) == []
    ordered = dataclasses.replace(gate, order=np.zeros((4, 320), np.int32), input_scale=np.ones((4, 1)))
    assert refusals(ordered, x.dtype, V5E) == [
        "experts have an order of inputs each",
        "experts have a scale of activations each",
    ]
    whole = dataclasses.replace(gate, kind="int8")
    assert "320 inputs of a device are no multiple of 256" not in refusals(whole, x.dtype, V5E), "640 codes of a byte"
    with pytest.raises(ValueError, match="takes gate, up and down as codes that name their Target"):
        expert_mlp(x, ids, weights, experts, implementation="mosaic_tpu")
    with pytest.raises(ValueError, match="expert_mlp has 'xla', 'mosaic_tpu', 'mosaic_gpu'"):
        expert_mlp(x, ids, weights, experts, implementation="mosaic")


def dense_arguments(case: cases.Case) -> tuple[Any, ...]:
    *tokens, experts = cases.make_arguments(case)
    return (*tokens, dataclasses.replace(experts, kernels=V7X))


@pytest.mark.slow
def test_bfloat16_experts_equal_the_product_of_each() -> None:
    x, ids, weights, experts = dense_arguments(cases.DENSE_TPU_CASES[0])
    got = kernel(4)(x, ids, weights, experts)
    expected = oracle.expert_mlp(*map(np.asarray, (x, ids, weights, *matrices_of(experts))))
    assert got.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, **TOLERANCE["bfloat16"])


@pytest.mark.slow
def test_the_room_for_tiles_changes_no_bit() -> None:
    """Few pairs stand in a small room; where all of them come to one device, in that for the worst case."""
    case = dataclasses.replace(cases.DENSE_TPU_CASES[0], num_tokens=40, num_experts=2)
    x, ids, weights, experts = dense_arguments(case)
    assert mosaic_tpu.usual_room(ids.size, 64, num_here=2, rows=16) == 3, "of seven, and all pairs need six"
    compute = kernel(64)
    everywhere, few = compute(x, ids, weights, experts), jnp.where(jnp.arange(40)[:, None] < 3, ids, 2)
    elsewhere = compute(x, few, weights, experts)
    np.testing.assert_array_equal(np.asarray(everywhere)[:3], np.asarray(elsewhere)[:3])
    assert not np.asarray(elsewhere)[3:].any()


def test_bfloat16_experts_are_refused_by_what_does_not_fit() -> None:
    def refused(*shape: int, dtype: str = "bfloat16", target: Target = V7X) -> list[str]:
        return dense_refusals(jax.ShapeDtypeStruct(shape, dtype), jnp.dtype("bfloat16"), target)

    assert refused(128, 768, 2048) == refused(128, 2048, 768) == []
    assert tile_of(14336, 4096) == 512 and tile_of(768, 2048) == 768, "four megabytes are one transfer"
    assert refused(4, 96, 2048) == ["96 outputs by 2048 inputs of a device have no tile of a multiple of 128"]
    assert refused(4, 128, 100) == ["100 inputs of a device are no multiple of 128"]
    assert refused(4, 128, 128, dtype="float32") == ["weights of float32 and inputs of bfloat16, not bfloat16"]
    assert refused(4, 128, 128, target=Target.named("tpu:v4")) == ["'v4' runs no kernel of experts that are not codes"]
