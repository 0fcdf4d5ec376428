"""The TPU's kernel for latents, interpreted with race detection over memory of NaN, against the oracle."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.kv_pool import KVPool, from_bits
from pallas_kernels.kv_write import oracle as kv_oracle
from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention import LatentConfig, make_schedule, oracle
from pallas_kernels.paged_attention.cases import LATENT_CASES, REAL_CASES, Arguments, Case, make_arguments, make_shapes
from pallas_kernels.paged_attention.run_case import choose_config, smallest_tiles
from pallas_kernels.paged_attention.support import refusals, serving
from pallas_kernels.paged_attention.tpu.latent.kernel import latent_attention
from pallas_kernels.target import Target
from pallas_kernels.tolerance import TOLERANCE
from tests.pallas_kernels.tpu_interpreter import INTERPRET, without_races

DECODES = [case for case in LATENT_CASES if case.decode_only]
SEVERAL = {case.name: case for case in LATENT_CASES if not case.decode_only}
FEW = dataclasses.replace(DECODES[0], name="two_rows", rows=((5, 1), (130, 1)), num_tokens=2, num_rows=2)
TPU = Target.named("tpu:v6e")


def _config(case: Case, arguments: Arguments, items: int) -> LatentConfig:
    config = choose_config(case, "mosaic_tpu", TPU, arguments.pool)
    assert isinstance(config, LatentConfig)
    config = smallest_tiles(config, case.block_size)
    return dataclasses.replace(config, decode=dataclasses.replace(config.decode, items=items))


def _attend(case: Case, a: Arguments, items: int = 1) -> tuple[np.ndarray, KVPool]:
    config = _config(case, a, items)

    def step(q: Any, k: Any, v: Any, pool: Any, batch: Any) -> tuple[jax.Array, KVPool]:
        schedule: Any = make_schedule(batch, **case.step, config=config, implementation="mosaic_tpu")
        return latent_attention(q, k, v, pool, schedule, Logits(**case.attention, sinks=None), interpret=INTERPRET)

    out, pool = without_races(step, a.q, a.k, a.v, a.pool, a.batch)
    return np.asarray(out).astype(np.float64), pool


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "items"),
    [
        *((FEW, 1), (DECODES[0], 1), (DECODES[0], 2), (DECODES[1], 2), (DECODES[2], 1)),
        *((SEVERAL[name], 1) for name in ("mixed_latent", "verify_latent_f32_soft_cap")),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_case_equals_the_oracle_and_writes_its_tokens_where_they_belong(case: Case, items: int) -> None:
    arguments = make_arguments(case, implementation="mosaic_tpu")
    found, pool = _attend(case, arguments, items)
    np.testing.assert_allclose(found, oracle.of_case(case, arguments), **TOLERANCE[case.dtype])
    tables, starts = (np.asarray(x) for x in (arguments.batch.block_tables, arguments.batch.starts))
    before, after = (np.asarray(from_bits(p.values, p)).astype(np.float64) for p in (arguments.pool, pool))
    new = np.concatenate([np.asarray(arguments.k), np.asarray(arguments.v)], axis=-1)
    new = kv_oracle.encode(new, arguments.pool.dtype)[0].astype(np.float64)
    owned = np.zeros(before.shape[:2], bool)
    ends = np.cumsum([count for _, count in case.rows])
    for row, (start, count) in enumerate(case.rows):
        places = np.arange(start)
        blocks, offsets = tables[row, places // case.block_size], places % case.block_size
        np.testing.assert_array_equal(after[blocks, offsets], before[blocks, offsets])
        places = start + np.arange(count)
        written = after[tables[row, places // case.block_size], places % case.block_size]
        np.testing.assert_array_equal(written, new[ends[row] - count : ends[row]])
        owned[tables[row, : -(-(start + count) // case.block_size)]] = True
    owned[0] = not case.decode_only  # the null block, where padding is written
    assert starts[: len(case.rows)].tolist() == [start for start, _ in case.rows]
    assert np.isnan(after[~owned]).all(), "blocks that no row owns are as they were"


@pytest.mark.slow
def test_what_a_row_computes_depends_on_its_own_context_alone() -> None:
    case = FEW
    arguments = make_arguments(case, implementation="mosaic_tpu")
    found, _ = _attend(case, arguments)
    poisoned = dataclasses.replace(
        arguments, q=np.concatenate([np.full_like(arguments.q[:1], np.nan), arguments.q[1:]])
    )
    others, _ = _attend(case, poisoned)
    assert np.isnan(others[0]).all()
    np.testing.assert_array_equal(others[1:], found[1:])


def test_tiles_of_published_sizes_are_whole_blocks_and_fit_every_generation() -> None:
    cases = [case for case in REAL_CASES if case.rope_dim is not None]
    assert len(cases) == 6
    for case in cases:
        for generation in ("v5e", "v5p", "v6e", "v7x"):
            target = Target.named(f"tpu:{generation}")
            config = choose_config(case, "mosaic_tpu", target, make_shapes(case).pool)
            assert isinstance(config, LatentConfig) and config.decode.tile_kv % case.block_size == 0
            assert config.vmem_bytes(256) <= config.decode.vmem_limit_bytes
            assert (config.several is None) == case.decode_only
            if config.several is not None:
                assert config.several.queries == 512
                assert config.several.vmem_bytes(0) <= config.several.decode.vmem_limit_bytes


def test_what_the_kernel_has_not_is_said_with_what_to_take() -> None:
    latent = {"target": TPU, "v_head_dim": 64, "is_latent": True}
    assert refusals("mosaic_tpu", **latent, head_dim=512, block_size=None, kv_dtype="bfloat16") == []
    reasons = refusals("mosaic_tpu", **latent, head_dim=100, block_size=16, kv_dtype="int8")
    for reason, told in zip(reasons, ("kv_lora_rank is 100", "'int8'", "block_size is 16"), strict=True):
        assert told in reason
    assert serving("mosaic_tpu", is_latent=True, decode_only=False) == "mosaic_tpu"
    assert serving("mosaic_tpu", is_latent=True, decode_only=False, itemsize=1) == "xla"
    assert serving("mosaic_tpu", is_latent=True, decode_only=False, chooses=True, index_dim=128) == "xla"
    assert serving("mosaic_tpu", is_latent=True, decode_only=True) == "mosaic_tpu"
    assert serving("mosaic_tpu", is_latent=True, decode_only=True, sinks=True) == "xla"
    choosing = {"decode_only": True, "chooses": True}
    assert serving("mosaic_tpu", is_latent=True, **choosing, index_dim=128) == "mosaic_tpu"
    assert serving("mosaic_tpu", is_latent=True, **choosing, index_dim=96) == "xla"
    assert serving("mosaic_tpu", is_latent=False, **choosing, index_dim=128) == "xla"


def test_a_window_and_sinks_are_refused() -> None:
    case = FEW
    arguments = make_arguments(case, implementation="mosaic_tpu")
    config = _config(case, arguments, 1)
    with pytest.raises(ValueError, match="window is 5"):
        make_schedule(arguments.batch, **(case.step | {"window": 5}), config=config, implementation="mosaic_tpu")
    make = functools.partial(make_schedule, **case.step, config=config, implementation="mosaic_tpu")
    schedule: Any = jax.eval_shape(make, arguments.batch)
    logits = Logits(**case.attention, sinks=np.zeros(case.num_heads, np.float32))
    a = arguments
    with pytest.raises(ValueError, match="has sinks"):
        latent_attention(a.q, a.k, a.v, a.pool, schedule, logits)
