"""Recurrences by the TPU's kernel, compiled for a TPU that is not here: what each program contains.

By hand: python -m tests.aot.recurrence_program GENERATION SIZES...
"""

from __future__ import annotations

from scripts import tpu_static  # isort: skip  # before jax: it sets what libtpu reads

import dataclasses
import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.state_rows import StateRows
from pallas_kernels.state_space import state_space
from tests.aot.case_program import large_copies

_POOL_BYTES = 2**30  # XLA puts smaller ones in vector memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """K groups and N heads of a device, whose states are `state`. by_channel: of decays; None is Mamba2."""

    groups: int
    heads: int
    state: tuple[int, int] = (128, 128)
    by_channel: bool | None = False
    rows: int = 64
    tokens: int | None = None  # of a mixed step; None: one of each row
    dtype: str = "bfloat16"


SIZES = {
    "qwen3_next": Sizes(groups=16, heads=32),
    "qwen3_next_tp4": Sizes(groups=4, heads=8),
    "qwen3_next_tp16": Sizes(groups=1, heads=2),
    "qwen3_next_mixed": Sizes(groups=16, heads=32, tokens=512),
    "qwen3_next_float32": Sizes(groups=16, heads=32, rows=16, dtype="float32"),
    "qwen35_48_heads": Sizes(groups=16, heads=48, rows=8),
    "kimi": Sizes(groups=32, heads=32, by_channel=True),
    "kimi_tp8": Sizes(groups=4, heads=4, by_channel=True, rows=256),
    "granite_small": Sizes(groups=1, heads=128, state=(64, 128), by_channel=None),
    "granite_small_tp8": Sizes(groups=1, heads=16, state=(64, 128), by_channel=None),
    "qwen3_next_tp16_mixed": Sizes(groups=1, heads=2, tokens=256, dtype="float32"),
    "qwen35_48_heads_mixed": Sizes(groups=16, heads=48, rows=256, tokens=2048),
    "falcon_h1_34b_mixed": Sizes(groups=2, heads=32, state=(128, 256), by_channel=None, tokens=512),
    "nemotron_h_8b_mixed": Sizes(groups=8, heads=128, state=(64, 128), by_channel=None, tokens=512),
    "granite_tiny_mixed": Sizes(groups=1, heads=48, state=(64, 128), by_channel=None, tokens=128),
    "falcon_h1_34b": Sizes(groups=2, heads=32, state=(128, 256), by_channel=None),
    "falcon_h1_1b": Sizes(groups=1, heads=24, state=(64, 256), by_channel=None),
    "nemotron_h_8b": Sizes(groups=8, heads=128, state=(64, 128), by_channel=None),
    "nemotron_h_47b": Sizes(groups=8, heads=256, state=(64, 256), by_channel=None),
}


def describe(sizes: Sizes, generation: str) -> dict[str, Any]:
    """The pool is donated."""
    T, K, N, (size, lanes) = sizes.tokens or sizes.rows, sizes.groups, sizes.heads, sizes.state
    is_space = sizes.by_channel is None
    shape, dtype, wide = jax.ShapeDtypeStruct, jnp.dtype(sizes.dtype), jnp.float32
    keys, values = (lanes, size) if is_space else (size, lanes)
    decays = shape((T, N, keys) if sizes.by_channel else (T, N), wide)
    tokens = [shape((T, K, keys), dtype)] * 2 + [shape((T, N, values), dtype), decays]
    tokens += [] if is_space else [shape((T, N), wide)]
    pool = shape((_POOL_BYTES // (4 * N * size * lanes) + 1, N, size, lanes), wide)
    ints = shape((sizes.rows,), jnp.int32)
    rows = StateRows(slots=ints, starts=ints, counts=ints, offsets=ints, decode_only=sizes.tokens is None)
    fn = functools.partial(state_space if is_space else gated_delta, implementation="mosaic_tpu")
    arguments = [*tokens, pool, rows]
    result = tpu_static.measure(fn, arguments, generation=generation, donate=(len(tokens),), trip_counts={})
    return {
        "kernels": {kernel.schedule.name: kernel.vmem_bytes for kernel in result.kernels},
        "aliased_bytes": result.compiled.memory_analysis().alias_size_in_bytes,
        "pool_bytes": 4 * pool.size,
        "pool_copies": large_copies(result.hlo, pool),
    }


def main(generation: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """By name; sizes that do not compile have their error instead."""
    found = {}
    for name in names:
        try:
            found[name] = describe(SIZES[name], generation)
        except Exception as error:  # whatever the compiler raises is what the test reports
            found[name] = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
    return found


if __name__ == "__main__":
    for name, said in main(sys.argv[1], sys.argv[2:] or [*SIZES]).items():
        print(json.dumps({"name": name, **said}))
