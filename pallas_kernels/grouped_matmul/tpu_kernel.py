"""Products of tiles of rows, each tile of one expert: codes cross HBM packed and are decoded in VMEM, or bfloat16.

The grid goes over tiles of outputs, and within one over tiles of rows. What a tile of rows reads follows from its
expert's id, which is known before the step begins; neighbours of one expert share its codes, and experts without
tokens are never read.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.dense_support import tile_of
from pallas_kernels.quantized_matmul.tpu.config import LANES, FewRows, ProductForm
from pallas_kernels.quantized_matmul.tpu.few_rows import tile_of_outputs
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


def grouped_rows(
    expert_ids: jax.Array,  # [tiles] int32, below E
    num_tiles: jax.Array,  # [] int32: those that are run
    x: jax.Array,  # [tiles, chunks, n rows, inputs] bf16 or int8, as `in_chunks` gives each tile
    sums: jax.Array | None,  # [tiles, rows, 1] float32, or [tiles, 2 rows, G] bf16
    codes: jax.Array,  # [E, O, I] or [E, O, I / 2]
    scales: jax.Array,  # [E, G, O]
    zeros: jax.Array | None,  # [E, G, O] float32
    *,
    form: ProductForm,
    config: FewRows,
    interpret: Any = False,
) -> jax.Array:  # [tiles, rows, O] float32; tiles that are not run hold anything
    """Each tile's rows times what the codes of its expert stand for."""
    (_, O, width), tile, G = codes.shape, config.tile_out, form.num_groups
    width = -(-width // LANES) * LANES  # what is beyond the last code is multiplied with zeros
    along = pl.BlockSpec((None, G, tile), lambda o, t, ids: (ids[t], 0, o))

    def of_tile(array: jax.Array) -> pl.BlockSpec:
        rest = array.shape[1:]
        return pl.BlockSpec((None, *rest), lambda o, t, ids: (t, *(0,) * len(rest)))

    operands = {
        "x": (x, of_tile(x)),
        "codes": (codes, pl.BlockSpec((None, tile, width), lambda o, t, ids: (ids[t], o, 0))),
        "scales": (scales, along),
    }
    if sums is not None:
        operands["sums"] = (sums, of_tile(sums))
    if zeros is not None:
        operands["zeros"] = (zeros, along)

    def body(ids: Any, *refs: Any) -> None:
        tile_of_outputs(dict(zip([*operands, "out", "scale"], refs, strict=True)), form, config)

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(-(-O // tile), num_tiles),
            in_specs=[spec for _, spec in operands.values()],
            out_specs=pl.BlockSpec((None, config.num_rows, tile), lambda o, t, ids: (t, 0, o)),
            scratch_shapes=[pltpu.VMEM((G, tile), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], config.num_rows, O), jnp.float32),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=config.vmem_limit_bytes),
        interpret=interpret,
        name="grouped_matmul",
    )(expert_ids, *(array for array, _ in operands.values()))
