"""gated_delta, state_space, causal_conv: their float64 oracles, and bits that do not depend on how rows are cut."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.causal_conv import cases as conv
from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.causal_conv.oracle import causal_conv as conv_oracle
from pallas_kernels.gated_delta import cases as delta
from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.gated_delta.oracle import gated_delta as delta_oracle
from pallas_kernels.row_cases import make_rows
from pallas_kernels.state_space import cases as space
from pallas_kernels.state_space import state_space
from pallas_kernels.state_space.oracle import state_space as space_oracle
from pallas_kernels.tolerance import TOLERANCE
from tests.fast_compile import FAST_COMPILE


def check(got, expected, rows, dtype: str) -> None:
    """Outputs of real tokens, and the states of all slots but the null one."""
    num_real = int(np.sum(rows.counts))
    for part, wanted in ((slice(0, num_real), 0), (slice(1, None), 1)):
        found = np.asarray(got[wanted], np.float64)[part]
        np.testing.assert_allclose(found, expected[wanted][part], **TOLERANCE[dtype])


def chosen(cases, fast: set[str]) -> list:
    """All cases; those that are not fast are slow, for each compiles loops of its own."""
    return [pytest.param(case, id=case.name, marks=() if case.name in fast else pytest.mark.slow) for case in cases]


OPS = {delta.Case: (gated_delta, delta, delta_oracle), space.Case: (state_space, space, space_oracle)}


@pytest.mark.parametrize(
    "case", [*chosen(delta.CASES, {"mixed", "decode_some", "channels_odd_tile"}), *chosen(space.CASES, {"mixed"})]
)
def test_every_case_of_a_recurrence_equals_the_float64_oracle(case: delta.Case | space.Case) -> None:
    op, cases, oracle = OPS[type(case)]
    arguments = cases.make_arguments(case)
    got = jax.jit(functools.partial(op, tile=case.tile), compiler_options=FAST_COMPILE)(*arguments)
    assert (got[0].dtype, got[1].dtype) == (arguments[2].dtype, jnp.float32)
    *arrays, rows = arguments
    check(got, oracle(*(np.asarray(a) for a in arrays), rows), rows, case.dtype)
    assert not np.any(np.asarray(got[0], np.float32)[int(np.sum(rows.counts)) :]), "outputs of padding are 0"


@pytest.mark.parametrize("case", chosen(conv.CASES, {"mixed"}))
def test_every_case_of_causal_conv_equals_the_float64_oracle(case: conv.Case) -> None:
    arguments = conv.make_arguments(case)
    got = jax.jit(causal_conv, compiler_options=FAST_COMPILE)(*arguments)
    *arrays, rows = arguments
    check(got, conv_oracle(*(np.asarray(a) for a in arrays), rows), rows, case.dtype)
    assert np.isfinite(np.asarray(got[0], np.float32)).all(), "outputs of padding are finite"


# A row of 90 tokens in one step, then in steps that end at these positions, in other buckets, beside another row.
WHOLE = delta.Case(name="", rows=((0, 90),), num_tokens=96, num_rows=3, tile=16)


@pytest.mark.slow
@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize(
    ("ends", "sequential"),
    [((32, 80, 90), False), ((7, 8, 31, 90), True)],
    ids=["multiples of the tile", "anywhere, sequential"],
)
def test_a_row_has_the_same_bits_however_it_is_cut(ends: tuple[int, ...], sequential: bool, by_channel: bool) -> None:
    case = dataclasses.replace(WHOLE, sequential=sequential, by_channel=by_channel)
    *tokens, pool, rows = delta.make_arguments(case)
    run = jax.jit(functools.partial(gated_delta, tile=16))
    whole, states = run(*tokens, pool, rows)
    parts, start = [], 0
    for end in ends:
        count, other = end - start, 2
        step = make_rows(((9, other), (start, count)), 4, np.array([3, int(rows.slots[0])]), sequential=sequential)
        cut = [jnp.pad(x[start:end], ((other, 128 - other - count), *((0, 0),) * (x.ndim - 1))) for x in tokens]
        out, pool = run(*cut, pool, step)
        parts.append(np.asarray(out[other : other + count]))
        start = end
    np.testing.assert_array_equal(np.concatenate(parts), whole[:90])
    np.testing.assert_array_equal(pool[rows.slots[0]], states[rows.slots[0]])


@pytest.mark.slow
def test_a_convolution_has_the_same_bits_however_a_row_is_cut() -> None:
    case = conv.Case(name="", rows=((0, 60),), num_tokens=64, num_rows=2)
    x, weight, pool, rows = conv.make_arguments(case)
    run = jax.jit(causal_conv)
    whole, states = run(x, weight, pool, rows)
    parts, start = [], 0
    for end in (1, 2, 10, 60):
        step = make_rows(((start, end - start),), 2, np.asarray(rows.slots))
        out, pool = run(jnp.pad(x[start:end], ((0, 64 - end + start), (0, 0))), weight, pool, step)
        parts.append(np.asarray(out[: end - start]))
        start = end
    np.testing.assert_array_equal(np.concatenate(parts), whole[:60])
    np.testing.assert_array_equal(pool[rows.slots[0]], states[rows.slots[0]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "single", "sequential", "channels"])
def test_states_are_written_in_place(name: str) -> None:
    case = next(case for case in delta.CASES if case.name == name)
    arguments = delta.make_arguments(case)
    run = jax.jit(functools.partial(gated_delta, tile=case.tile), donate_argnums=5)
    compiled = run.lower(*arguments).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= arguments[5].nbytes
    shape = f"f32[{','.join(map(str, arguments[5].shape))}]"
    lines = [line for line in compiled.as_text().splitlines() if shape in line]
    assert lines and not [line for line in lines if " copy(" in line]


def test_shapes_that_do_not_fit_and_an_unknown_implementation_are_errors() -> None:
    arguments = delta.make_arguments(delta.CASES[0])
    q, k, v, *rest = arguments
    with pytest.raises(ValueError, match="axis N"):
        gated_delta(q, k, v[:, :3], *rest)
    with pytest.raises(ValueError, match="v has 4 heads, no multiple of the 3 of k"):
        gated_delta(*(np.repeat(x, 2, axis=1)[:, :3] for x in (q, k)), v, *rest)
    with pytest.raises(ValueError, match="tile is 0; it must be a whole number, 1 or more"):
        gated_delta(*arguments, tile=0)
    with pytest.raises(ValueError, match="implementation is 'mosaic_gpu'"):
        gated_delta(*arguments, implementation="mosaic_gpu")
    c, b, *others = space.make_arguments(space.CASES[0])
    with pytest.raises(ValueError, match="v has 4 heads, no multiple of the 3 groups of b"):
        state_space(*(np.repeat(x, 2, axis=1)[:, :3] for x in (c, b)), *others)
    with pytest.raises(ValueError, match="implementation is 'mosaic_gpu'"):
        state_space(c, b, *others, implementation="mosaic_gpu")
    x, weight, pool, rows = conv.make_arguments(conv.CASES[0])
    with pytest.raises(ValueError, match="the pool keep W - 1"):
        causal_conv(x, weight[:, 1:], pool, rows)
