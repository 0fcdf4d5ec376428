"""The TPU's kernel of recurrences, interpreted with race detection over memory of NaN, against the float64 oracles."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_delta as delta
from pallas_kernels import state_space as space
from pallas_kernels.gated_delta import cases as delta_cases
from pallas_kernels.gated_delta.oracle import gated_delta as delta_oracle
from pallas_kernels.row_cases import RecurrentCase, make_rows
from pallas_kernels.row_recurrence import RowRecurrence, tpu_support
from pallas_kernels.state_rows import RowTiles
from pallas_kernels.state_space import cases as space_cases
from pallas_kernels.state_space.oracle import state_space as space_oracle
from pallas_kernels.tolerance import TOLERANCE
from tests.pallas_kernels.tpu_interpreter import INTERPRET, without_races

OPS: dict[type, tuple[Any, Any, Any]] = {
    delta_cases.Case: (delta.ON_TPU, delta_cases, delta_oracle),
    space_cases.Case: (space.ON_TPU, space_cases, space_oracle),
}
FAST = {"tpu_some", "tpu_halves"}


def run(kernel: RowRecurrence, arguments: tuple[Any, ...], tile: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(out, pool) by the interpreted kernel, which must see no race."""
    kernel = dataclasses.replace(kernel, interpret=INTERPRET)

    def call(first: Any, second: Any, v: Any, *rest: Any) -> tuple[jax.Array, jax.Array]:
        *of_heads, pool, rows = rest
        return kernel((first, second), v, tuple(of_heads), pool, rows, tile=tile)

    out, pool = without_races(call, *arguments)
    assert out.dtype == arguments[2].dtype and pool.dtype == jnp.float32
    return np.asarray(out).astype(np.float64), np.asarray(pool)


def on_xla(*_: Any) -> Any:
    raise AssertionError("kernels take all rows")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{name}-{case.name}", marks=() if case.name in FAST else pytest.mark.slow)
        for name, cases in (("delta", delta_cases.TPU_CASES), ("space", space_cases.TPU_CASES))
        for case in cases
    ],
)
def test_every_case_equals_the_oracle_and_leaves_all_else_as_it_was(case: RecurrentCase) -> None:
    kernel, cases, oracle = OPS[type(case)]
    if not getattr(case, "by_channel", False):
        kernel = dataclasses.replace(kernel, one_token=on_xla, one_tile=on_xla)
    arguments = cases.make_arguments(case)
    *arrays, rows = arguments
    out, pool = run(kernel, arguments, case.tile)
    expected, states = oracle(*(np.asarray(a) for a in arrays), rows)
    real = case.num_real
    np.testing.assert_allclose(out[:real], expected[:real], **TOLERANCE[case.dtype])
    np.testing.assert_allclose(pool[1:], states[1:], **TOLERANCE[case.dtype])
    assert not np.any(out[real:]), "outputs of padding are 0"
    before, counts = np.asarray(arrays[-1]), np.asarray(rows.counts)
    changed = np.asarray(rows.slots)[counts > 0]
    others = np.setdiff1d(np.arange(1, len(before)), changed)
    np.testing.assert_array_equal(pool[others], before[others])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(dataclasses.replace(delta_cases.TPU_CASES[0], by_channel=False), id="heads"),
        pytest.param(dataclasses.replace(delta_cases.TPU_CASES[0], by_channel=True), id="channels"),
        pytest.param(space_cases.TPU_CASES[0], id="space"),
    ],
)
@pytest.mark.slow
def test_a_row_has_the_same_bits_alone_and_beside_others(case: RecurrentCase) -> None:
    kernel, cases, _ = OPS[type(case)]
    *tokens, pool, rows = cases.make_arguments(case)
    together, states = run(kernel, (*tokens, pool, rows))
    for row in (0, 7):
        slot = int(rows.slots[row])
        alone = make_rows(((row, 1),), 2, np.array([slot]), decode_only=True)
        cut = [jnp.pad(x[row : row + 1], ((0, 1), *((0, 0),) * (x.ndim - 1))) for x in tokens]
        out, pools = run(kernel, (*cut, pool, alone))
        np.testing.assert_array_equal(out[0], together[row])
        np.testing.assert_array_equal(pools[slot], states[slot])


@pytest.mark.slow
@pytest.mark.parametrize("case", [delta_cases.TPU_CASES[0], space_cases.TPU_CASES[0]], ids=["delta", "space"])
def test_a_row_has_the_same_bits_cut_at_multiples_of_the_tile_beside_another(case: RecurrentCase) -> None:
    kernel, cases, _ = OPS[type(case)]
    case = dataclasses.replace(case, rows=((0, 50),), num_tokens=64, num_rows=3, decode_only=False)
    *tokens, pool, rows = cases.make_arguments(case)
    whole, states = run(kernel, (*tokens, pool, rows), 16)
    slot, parts, start = int(rows.slots[0]), [], 0
    another = 1 + slot % 3
    for end, other, size in ((16, 0, 16), (48, 3, 128), (50, 21, 32)):
        step = make_rows(((9, other), (start, end - start)), 4, np.array([another, slot]))
        behind = size - other - end + start
        cut = [jnp.pad(x[start:end], ((other, behind), *((0, 0),) * (x.ndim - 1))) for x in tokens]
        out, pool = run(kernel, (*cut, jnp.asarray(pool).at[another].set(0), step), 16)
        parts.append(out[other : other + end - start])
        start = end
    np.testing.assert_array_equal(np.concatenate(parts), whole[:50])
    np.testing.assert_array_equal(pool[slot], states[slot])


def test_tiles_are_cut_at_multiples_of_the_position_and_hold_each_token_once() -> None:
    rows = make_rows(((70, 100), (3, 1), (0, 21), (5, 2), (9, 0)), 6, np.arange(1, 6))
    tiles = RowTiles.of(rows, 128, 32)
    count = int(tiles.count)
    columns = (x[:count].tolist() for x in (tiles.slots, tiles.firsts, tiles.counts, tiles.leads, tiles.begins))
    found = list(zip(*columns, strict=True))
    of_first = [(1, 0, 26, 1, 0), (1, 26, 32, 0, 0), (1, 58, 32, 0, 0), (1, 90, 10, 0, 0)]
    assert found == [*of_first, (3, 101, 21, 1, 1), (4, 122, 2, 1, 0)]


@pytest.mark.slow
def test_turns_of_part_of_a_row_s_heads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(delta_cases.TPU_CASES[1], num_key_heads=2, num_value_heads=8)
    arguments = delta_cases.make_arguments(case)
    whole = run(delta.ON_TPU, arguments)
    for turns in (2, 4, 8):
        monkeypatch.setattr("pallas_kernels.row_recurrence.mosaic_tpu.turns_of_row", lambda *_, n=turns: n)
        for found, expected in zip(run(delta.ON_TPU, arguments), whole, strict=True):
            np.testing.assert_array_equal(found[:1], expected[:1])
            np.testing.assert_array_equal(found, expected)


def test_turns_are_the_fewest_that_fit_and_lie_within_groups() -> None:
    assert tpu_support.turns_of_row((32, 128, 128), 16) == 1
    assert tpu_support.turns_of_row((128, 64, 128), 1) == 2
    assert tpu_support.turns_of_row((96, 128, 128), 3) == 3
    assert tpu_support.turns_of_row((24, 256, 256), 2) == 4


def test_states_that_the_kernel_does_not_take_are_errors() -> None:
    with pytest.raises(ValueError, match="states of 8 by 12 are no multiples of 8 by 128: the kernel does not take"):
        delta.gated_delta(*delta_cases.make_arguments(delta_cases.CASES[0]), implementation="mosaic_tpu")
    with pytest.raises(ValueError, match="states of 12 by 8 are no multiples"):
        space.state_space(*space_cases.make_arguments(space_cases.CASES[0]), implementation="mosaic_tpu")
    assert tpu_support.refusals((4, 1024, 1024)) == ["a state of 1024 by 1024 has more than 2097152 bytes"]
