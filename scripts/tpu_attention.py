"""Launches of attention on TPUs, ours and jax's own ragged paged attention, whose cycles other scripts count.

Needs libtpu (pip install -e '.[aot]') but no TPU (see `tpu_static`). jax's kernel does not write K and V.
"""

import functools
from collections.abc import Callable
from typing import Any

from scripts import tpu_static  # isort: skip  # before jax: it sets environment variables for libtpu

import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from pallas_kernels.paged_attention import LatentConfig, TpuConfig, make_schedule, paged_attention, run_case
from pallas_kernels.paged_attention.cases import Case, make_batch, make_shapes
from pallas_kernels.target import Target
from scripts.tpu_static import StaticResult

_BASELINE_TILE_KV = 2048  # tokens; 256 is slower
_BASELINE_TILE_Q = 32  # the same in all entries of its tuning table for these shapes


def launch(
    case: Case, target: Target, config: TpuConfig | LatentConfig | None = None
) -> tuple[Callable[..., Any], list[Any]]:
    """One layer's attention and its arguments: shapes, and the schedule that the step made of the case's rows."""
    shapes = make_shapes(case)
    tables = shapes.batch.block_tables.shape
    blocks = 1 + np.arange(np.prod(tables), dtype=np.int32).reshape(tables)  # none null: that is not written
    schedule = make_schedule(
        make_batch(case, blocks),
        **case.step,
        config=config or choose_config(case, target),
        implementation="mosaic_tpu",
    )
    fn = functools.partial(paged_attention, **case.attention, implementation="mosaic_tpu")
    args = [shapes.q, shapes.k, shapes.v, shapes.pool, schedule]
    if case.has_sinks:
        return lambda *a: fn(*a[:-1], sinks=a[-1]), [*args, shapes.sinks]
    return fn, args


def choose_config(case: Case, target: Target) -> TpuConfig | LatentConfig:
    """The tiles that an engine would choose for a step of these shapes."""
    config = run_case.choose_config(case, "mosaic_tpu", target, make_shapes(case).pool)
    assert isinstance(config, TpuConfig | LatentConfig)
    return config


def measure_ours(case: Case, generation: str, config: TpuConfig | LatentConfig | None = None) -> StaticResult:
    """The case through the public function, its pool donated. config: None is what an engine's step would have."""
    fn, args = launch(case, Target.named(f"tpu:{generation}"), config)
    return tpu_static.measure(fn, args, generation=generation, donate=(3,))


def baseline_launch(case: Case) -> tuple[Callable[..., Any], list[Any]]:
    """jax's kernel and its arguments, as `launch` has ours."""
    shapes = make_shapes(case)
    pages = min(max(1, _BASELINE_TILE_KV // case.block_size), case.max_blocks)
    tables = np.zeros((case.num_rows, case.max_blocks), np.int32)
    batch = make_batch(case, tables)
    ends = np.cumsum(batch.counts, dtype=np.int32)
    contexts = np.asarray(batch.starts + batch.counts, np.int32)
    args = [shapes.q, shapes.pool.values, contexts, tables, np.array([0, *ends], np.int32)]
    fn = functools.partial(
        ragged_paged_attention,
        sm_scale=case.softmax_scale,
        sliding_window=case.window,
        soft_cap=case.soft_cap,
        num_kv_pages_per_block=pages,
        num_queries_per_block=min(_BASELINE_TILE_Q, case.num_tokens),
    )
    return fn, [*args, np.array([len(case.rows)], np.int32)]
