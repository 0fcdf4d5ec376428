"""Cases of paged attention compiled for a TPU that is not here: what each program contains."""

from scripts import tpu_static  # isort: skip  # before jax: it sets what libtpu reads

import math
import re
import time
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import LatentConfig, RaggedBatch, TpuConfig, make_schedule, paged_attention
from pallas_kernels.paged_attention.cases import CASES, LONG_CASES, WIDE_CASES, Case, make_shapes
from pallas_kernels.paged_attention.tpu.prefill.config import PrefillShape
from pallas_kernels.target import Target
from scripts.tpu_attention import choose_config
from tests.aot.described import or_error

_LARGE_OPS = re.compile(
    r"^\s*(?:ROOT )?(%\S+) = \w+\[([\d,]*)\]\S* (copy|transpose|convert|reshape|pad)\(", re.MULTILINE
)


def estimates(case: Case, config: TpuConfig | LatentConfig) -> dict[str, int]:
    """Bytes of vector memory that the config says a kernel takes."""
    if isinstance(config, LatentConfig):
        if config.several is None:
            return {"latent_attention_decode": config.vmem_bytes(case.num_tokens)}
        several = config.several.vmem_bytes(0)
        return {"latent_attention_decode": config.vmem_bytes(case.num_rows), "latent_attention_several": several}
    pool = make_shapes(case).pool
    found = {"paged_attention_decode": config.decode.vmem_bytes(config.shape, case.num_rows)}
    if config.prefill is not None:
        shape = PrefillShape.of(num_heads=case.num_heads, dtype=jnp.dtype(case.dtype), pool=pool)
        found["prefill_attention"] = config.prefill.vmem_bytes(shape, has_ends=bool(case.spans))
    return found


def describe(case: Case, generation: str) -> dict[str, Any]:
    """A layer's attention, its schedule made in the same program; the pool is donated."""
    shapes, target = make_shapes(case), Target.named(f"tpu:{generation}")
    config = choose_config(case, target)

    def layer(q: Any, k: Any, v: Any, pool: Any, batch: RaggedBatch, sinks: Any) -> Any:
        schedule = make_schedule(batch, **case.step, config=config, implementation="mosaic_tpu")
        options: dict[str, Any] = case.attention | {"sinks": sinks}
        return paged_attention(q, k, v, pool, schedule, **options, implementation="mosaic_tpu")

    started = time.process_time()
    arguments = [shapes.q, shapes.k, shapes.v, shapes.pool, shapes.batch, shapes.sinks]
    result = tpu_static.measure(layer, arguments, generation=generation, donate=(3,), counts=False)
    memory = result.compiled.memory_analysis()
    leaves = jax.tree.leaves(shapes.pool)
    return {
        "compile_s": round(time.process_time() - started, 1),
        "aliased_bytes": memory.alias_size_in_bytes,
        "pool_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
        "temp_bytes": memory.temp_size_in_bytes,
        "pool_copies": large_copies(result.hlo, shapes.pool),
        "vmem_bytes": {kernel.schedule.name: kernel.vmem_bytes for kernel in result.kernels},
        "estimates": estimates(case, config),
        "smem_bytes": {kernel.schedule.name: kernel.smem_bytes for kernel in result.kernels},
        "scalar_bytes": config.scalar_bytes(case.num_tokens, case.num_rows, case.max_blocks),
        "spills": {kernel.schedule.name: kernel.vector_spills for kernel in result.kernels},
    }


def large_copies(hlo: str, pool: Any) -> list[str]:
    """Operations that make something as large as the smallest array of the pool."""
    least = min(leaf.size for leaf in jax.tree.leaves(pool))
    return [f"{op} {name} [{dims}]" for name, dims, op in _LARGE_OPS.findall(hlo) if _size(dims) >= least]


def _size(dims: str) -> int:
    return math.prod(int(d) for d in dims.split(",") if d)


def main(generation: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """By name."""
    by_name = {case.name: case for case in (*CASES, *WIDE_CASES, *LONG_CASES)}
    return {name: or_error(describe, by_name[name], generation) for name in names}
