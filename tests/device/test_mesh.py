"""The TPU's kernels on four simulated devices, interpreted: heads over "tp", rows and blocks over "dp", two of each."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # where the interpreter keeps the races it saw
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention import RaggedBatch, TpuConfig, TpuSchedule, make_schedule, oracle
from pallas_kernels.paged_attention.cases import TINY_CASES, Case, make_arguments
from pallas_kernels.paged_attention.run_case import choose_config
from pallas_kernels.paged_attention.tpu import mosaic_tpu as tpu
from pallas_kernels.target import Target
from pallas_kernels.tolerance import TOLERANCE
from tests.forked import call

CASES = ("decode_gqa", "decode_h96_window_sinks", "mixed_mha_h64", "mixed_gqa")
SHARDS, SPLITS = 2, 2  # of "dp" and of "tp"
_COMPILE_FAST = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
    "xla_llvm_disable_expensive_passes": True,
}  # the interpreter's programs are long and run once


def results() -> dict[str, dict[str, Any]]:
    return {case.name: _result(case) for case in TINY_CASES if case.name in CASES}


def _result(case: Case) -> dict[str, Any]:
    """Whether each shard's result is the oracle's, and the places of its pool that have changed."""
    parts = [make_arguments(case, seed, "mosaic_tpu") for seed in range(SHARDS)]
    joined = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *((a.q, a.k, a.v, a.pool, a.batch) for a in parts))
    mesh = Mesh(np.array(jax.devices()).reshape(SHARDS, SPLITS), ("dp", "tp"))
    heads, rows = P("dp", "tp", None), P("dp")
    scales = None if parts[0].pool.scales is None else P("dp", "tp", None)
    pool = dataclasses.replace(parts[0].pool, values=P("dp", None, "tp", None), scales=scales)
    batch = RaggedBatch(block_tables=P("dp", None), starts=rows, counts=rows, query_offsets=rows)
    specs = (heads, heads, heads, pool, batch)
    sinks, by_head = parts[0].sinks, P("tp")
    step = jax.shard_map(
        functools.partial(_step, case),
        mesh=mesh,
        in_specs=(*specs, by_head),
        out_specs=(heads, pool),
        check_vma=False,
    )
    out, after = jax.jit(step, compiler_options=_COMPILE_FAST)(*joined, sinks)
    outs, pools = np.split(np.asarray(out).astype(np.float64), SHARDS), np.split(np.asarray(after.values), SHARDS)
    assert interpret_pallas_call.races is not None  # the interpreter makes it when it runs, so not before the results
    return {
        "races": interpret_pallas_call.races.races_found,
        "errors": [_excess(case, seed, sinks, o) for seed, o in enumerate(outs)],
        "changed": [_changed(np.asarray(part.pool.values), p) for part, p in zip(parts, pools, strict=True)],
        "written": [_written(case, part.batch) for part in parts],
    }


def _step(case: Case, q: Any, k: Any, v: Any, pool: KVPool, batch: RaggedBatch, sinks: Any) -> Any:
    """One device's part: its heads of its shard's rows and blocks."""
    case_here = dataclasses.replace(case, num_heads=q.shape[1])
    config = choose_config(case_here, "mosaic_tpu", Target.named("tpu:v5e"), pool)
    assert isinstance(config, TpuConfig)
    tile = max(256 // config.shape.words, case.block_size)  # small: each operation costs the interpreter milliseconds
    config = dataclasses.replace(config, decode=dataclasses.replace(config.decode, tile_kv=tile, items=1, chunk=128))
    schedule = make_schedule(batch, **case.step, config=config, implementation="mosaic_tpu")
    assert isinstance(schedule, TpuSchedule)
    logits = Logits(**case.attention, sinks=sinks)
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    return tpu.paged_attention(q, k, v, pool, schedule, logits, interpret=interpret)


def _excess(case: Case, seed: int, sinks: Any, out: np.ndarray) -> float:
    """The largest error, in units of what the tolerance allows; infinite where something is not finite."""
    expected = oracle.of_case(case, dataclasses.replace(make_arguments(case, seed), sinks=sinks))
    allowed = TOLERANCE[case.dtype]["atol"] + TOLERANCE[case.dtype]["rtol"] * np.abs(expected)
    return float(np.nan_to_num(np.abs(out - expected) / allowed, nan=np.inf).max())


def _changed(before: np.ndarray, after: np.ndarray) -> list[list[int]]:
    """[block, offset] of each token of a pool that has other bits."""
    tokens = before.shape[:2]
    before, after = (np.ascontiguousarray(x).view(np.uint8).reshape(*tokens, -1) for x in (before, after))
    return np.argwhere((before != after).any(axis=2)).tolist()


def _written(case: Case, batch: RaggedBatch) -> list[list[int]]:
    """[block, offset] of each token of the step, in order."""
    tables, C = np.asarray(batch.block_tables), case.block_size
    places = [
        [int(tables[r, position // C]), position % C]
        for r, (start, count) in enumerate(case.rows)
        for position in range(start, start + count)
    ]
    return sorted(places)


@pytest.mark.slow
def test_every_shards_rows_attend_and_write_as_if_alone():
    """XLA:CPU has 16 threads: interpreted devices wait for one another, so that fewer never end."""
    found = call(results, devices=4, NPROC="16")
    assert set(found) == set(CASES)
    for name, result in found.items():
        assert not result["races"], name
        assert max(result["errors"]) <= 1, name
        assert result["changed"] == result["written"], name
