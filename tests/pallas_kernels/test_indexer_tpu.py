"""The TPU's indexer and the kernel for latents that reads what it chose, interpreted over memory of NaN."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.indexer.tpu import kernel
from pallas_kernels.indexer.tpu.index_movement import BATCH, score_rows
from pallas_kernels.kv_pool import KVPool, from_bits
from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention import LatentConfig, TileLimits, make_schedule, paged_attention
from pallas_kernels.paged_attention.tpu.latent.kernel import latent_attention
from pallas_kernels.target import Target
from pallas_kernels.tolerance import TOLERANCE
from tests.pallas_kernels import test_indexer
from tests.pallas_kernels.test_indexer import Case, Made, expected_choice, made
from tests.pallas_kernels.tpu_interpreter import INTERPRET, without_races

_FORM = (("num_kv_heads", 1), ("head_dim", 128), ("v_head_dim", 16), ("is_latent", True))
_ROWS = ((5, 1), (1100, 1), (15, 1), (16, 1), (130, 1))
DECODE = Case(
    rows=_ROWS, top_k=16, num_tokens=6, table=72, block_size=16, width=128, num_heads=3, form=_FORM, decode_only=True
)


def _schedule(case: Case, arrays: Made, items: int = 1, **how: Any) -> Any:
    config = LatentConfig.choose(
        num_rows=len(case.rows) + 1,
        max_blocks=case.table,
        num_heads=case.num_heads,
        dtype=jnp.dtype(case.kv_dtype),
        pool=arrays.pool,
        target=Target.named("tpu:v6e"),
    )
    config = dataclasses.replace(
        config, decode=dataclasses.replace(config.decode, tile_kv=128, items=items, chunk=128, **how)
    )
    sizes = {"num_tokens": case.num_tokens, "block_size": case.block_size}
    return lambda batch: make_schedule(batch, **sizes, config=config, implementation="mosaic_tpu")


def _written(case: Case, arrays: Made) -> KVPool:
    """The pool with the step's index keys."""
    return test_indexer.choose(arrays.indexer, arrays.pool, arrays.batch, case=case)[1]


def _choose(case: Case, arrays: Made, pool: KVPool, items: int, **how: Any) -> TileLimits:
    schedule = _schedule(case, arrays, items, **how)

    def step(q: Any, weights: Any, pool: Any, batch: Any) -> TileLimits:
        return kernel.choose(q, weights, pool, schedule(batch), case.top_k, batch=2, interpret=INTERPRET)

    q, weights, _ = arrays.indexer
    return without_races(step, q, weights, pool, arrays.batch)


def _chosen_positions(case: Case, chosen: TileLimits) -> list[list[int]]:
    """By row, what its items show."""
    limits, found, item = np.asarray(chosen.limits), [], 0
    for start, _ in case.rows:
        tiles = start // 128 + 1
        shown = limits[item : item + tiles].reshape(-1)
        assert set(np.unique(shown)) <= {np.float32(-1e30), np.float32(np.inf)}
        found.append(np.flatnonzero(shown > 0).tolist())
        item += tiles
    return found


@pytest.mark.parametrize(
    ("items", "dtype"),
    [
        (1, "float32"),
        pytest.param(1, "bfloat16", marks=pytest.mark.slow),
        pytest.param(2, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_best_scores_of_each_row_are_shown_and_no_others(items: int, dtype: str) -> None:
    case = dataclasses.replace(DECODE, kv_dtype=dtype)
    arrays = made(case)
    pool = _written(case, arrays)
    found = _chosen_positions(case, _choose(case, arrays, pool, items))
    for (start, _), shown, ((expected, gap),) in zip(
        case.rows, found, expected_choice(case, arrays, pool), strict=True
    ):
        assert shown == expected or gap < 1e-4, f"position {start}"


@pytest.mark.slow
def test_of_equal_scores_the_earlier_are_shown() -> None:
    case = dataclasses.replace(DECODE, heads=2, top_k=40)
    arrays = made(case, whole_numbers=True)
    pool = _written(case, arrays)
    found = _chosen_positions(case, _choose(case, arrays, pool, 1))
    expected = expected_choice(case, arrays, pool)
    assert any(gap == 0 for ((_, gap),) in expected)
    assert found == [positions for ((positions, _),) in expected]


@pytest.mark.slow
@pytest.mark.parametrize("items", [1, 2])
def test_attention_reads_the_keys_that_are_shown_and_nothing_else(items: int) -> None:
    case = DECODE
    arrays = made(case)
    pool = _written(case, arrays)
    chosen, schedule = _choose(case, arrays, pool, items), _schedule(case, arrays, items)

    def step(q: Any, k: Any, v: Any, pool: Any, batch: Any, chosen: Any) -> tuple[jax.Array, KVPool]:
        logits = Logits(scale=0.3, soft_cap=None, sinks=None)
        return latent_attention(q, k, v, pool, schedule(batch), logits, chosen, interpret=INTERPRET)

    out, written = without_races(step, *arrays.attention, pool, arrays.batch, chosen)
    kept = np.asarray(from_bits(written.values, written)).astype(np.float64)
    shown = _chosen_positions(case, chosen)
    assert [len(positions) for positions in shown] == [min(start + 1, case.top_k) for start, _ in case.rows]
    for row, (positions, table) in enumerate(zip(shown, np.asarray(arrays.batch.block_tables), strict=False)):
        at = np.array(positions)
        latents = kept[table[at // case.block_size], at % case.block_size]
        expected = test_indexer._attend(arrays.attention[0][row], latents, latents[..., : pool.head_dim])
        np.testing.assert_allclose(np.asarray(out)[row], expected, **TOLERANCE["float32"])
    assert not np.isnan(np.asarray(out)[len(case.rows) :]).any()


_MANY = dataclasses.replace(DECODE, rows=tuple((7 * i % 40, 1) for i in range(9)), num_tokens=10, table=3, top_k=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "how"), [(_MANY, {}), (DECODE, {"is_resident": False})], ids=["more than together", "tables in HBM"]
)
def test_rows_have_their_own_keys_where_not_all_is_in_scalar_memory(case: Case, how: dict[str, Any]) -> None:
    """Rows that are more than are searched together, and tables that stay in HBM."""
    arrays = made(case)
    pool = _written(case, arrays)
    found = _chosen_positions(case, _choose(case, arrays, pool, 2, **how))
    assert found == [positions for ((positions, _),) in expected_choice(case, arrays, pool)]


def test_a_choice_in_another_form_is_refused() -> None:
    case = DECODE
    arrays = made(case)
    schedule = test_indexer.schedules_of(arrays.batch, case)[0]
    chosen = TileLimits(limits=jnp.zeros((8, 1, 128)))
    with pytest.raises(ValueError, match="chosen keys are TileLimits, and implementation is 'xla'"):
        paged_attention(*arrays.attention, arrays.pool, schedule, scale=0.3, chosen=chosen)


def test_tiles_of_every_generation_leave_scores_their_memory() -> None:
    for generation in ("v5e", "v5p", "v6e", "v7x"):
        target = Target.named(f"tpu:{generation}")
        for max_context in (4096, 131_072, 1_048_576):
            row_bytes = 4 * max_context
            ring = score_rows(-(-max_context // 1024), 1024, items=2, batch=BATCH)
            assert target.vmem_bytes is not None and ring * row_bytes <= target.vmem_bytes // 4
