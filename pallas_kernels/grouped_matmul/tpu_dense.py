"""Products of tiles of rows, each tile of one expert, whose weights are bfloat16.

The grid goes over tiles of outputs, and within one over tiles of rows, as that of experts which are codes does: while
one expert's weights are multiplied, the next one's cross HBM. Where XLA loops over experts, each waits for its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.dense_support import tile_of
from pallas_kernels.target import Target

_VMEM_SHARE = 0.8


def dense_rows(
    expert_ids: jax.Array,  # [tiles] int32, below E
    num_tiles: jax.Array,  # [] int32: those that are run
    x: jax.Array,  # [tiles, rows, I] bf16
    weights: jax.Array,  # [E, O, I] bf16
    *,
    out_dtype: Any,
    target: Target,
    interpret: Any = False,
) -> jax.Array:  # [tiles, rows, O]; tiles that are not run hold anything
    """Each tile's rows times the weights of its expert, summed in float32."""
    (_, O, I), (tiles, rows, _) = weights.shape, x.shape
    tile = tile_of(O, I)
    assert tile is not None and target.vmem_bytes is not None, "dense_refusals says so before"

    def body(ids: Any, x_ref: Any, weights_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jax.lax.dot_general(
            x_ref[...],  # [rows, I]
            weights_ref[...],  # [tile, I]
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        ).astype(out_dtype)

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(O // tile, num_tiles),
            in_specs=[
                pl.BlockSpec((None, rows, I), lambda o, t, ids: (t, 0, 0)),
                pl.BlockSpec((None, tile, I), lambda o, t, ids: (ids[t], o, 0)),
            ],
            out_specs=pl.BlockSpec((None, rows, tile), lambda o, t, ids: (t, 0, o)),
        ),
        out_shape=jax.ShapeDtypeStruct((tiles, rows, O), out_dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=int(target.vmem_bytes * _VMEM_SHARE)),
        interpret=interpret,
        name="grouped_dense",
    )(expert_ids, x, weights)
