"""The TPU's indexer, and attention to what it chose, compiled for a TPU that is not here: what programs contain."""

from scripts import tpu_indexer  # isort: skip  # before jax: it sets what libtpu reads

from typing import Any

import jax

from tests.aot.case_program import large_copies

_CONTEXT, _ROWS = 8192, 4


def describe(generation: str, block_size: int, num_heads: int) -> dict[str, Any]:
    """By kernel."""
    step = tpu_indexer.Step(generation, _CONTEXT, rows=_ROWS, block_size=block_size, num_heads=num_heads)
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.pool))
    found = {}
    for result in (step.choosing(), step.attending(to_chosen=True)):
        (kernel,) = result.kernels
        found[kernel.schedule.name] = {
            "aliased_bytes": result.compiled.memory_analysis().alias_size_in_bytes,
            "pool_bytes": pool_bytes,
            "pool_copies": large_copies(result.hlo, step.pool),
            "vmem_bytes": kernel.vmem_bytes,
        }
    return found


def main(generation: str, block_sizes: list[int]) -> dict[str, dict[str, Any]]:
    """By block size and heads of attention: of many and of few."""
    return {f"C={C} N={N}": describe(generation, C, N) for C in block_sizes for N in (128, 16)}
