"""Products with weights in a form, as launches whose ceilings are counted.

Dense ones have the shape of Llama-3-8B's gate, experts' those of Qwen3-30B-A3B's gates with as many pairs each. Float8
by float8 with one scale is XLA's own product and not here.
"""

from __future__ import annotations

import functools
from typing import Any

from scripts import gpu_static  # isort: skip  # before jax: it sets what the compilers read

import jax
import jax.numpy as jnp

from checkpoints.stored_weight import WeightForm
from pallas_kernels.grouped_matmul.mosaic_gpu import choose_rows, grouped_product
from pallas_kernels.grouped_matmul.tiles_of_experts import tiles_of_experts
from pallas_kernels.quantized_matmul import QuantizedWeight, quantized_matmul
from pallas_kernels.quantized_matmul.gpu.config import ProductTiles
from pallas_kernels.quantized_matmul.mosaic_gpu import form_of
from scripts.gpu_launch import Launch, Part
from scripts.gpu_static import Compiled

FORMS = {
    "int4": WeightForm(kind="int4", group=128, scale_dtype="bfloat16"),
    "awq": WeightForm(kind="int4", group=128, scale_dtype="float16", has_zeros=True),
    "mxfp4": WeightForm(kind="mxfp4", group=32, scale_dtype="uint8"),
    "int8": WeightForm(kind="int8"),
    "fp8": WeightForm(kind="fp8_e4m3"),
    "fp8_blocks": WeightForm(kind="fp8_e4m3", group=128),
}
_SHAPE = (14336, 4096)
_EXPERTS, _EXPERTS_PER_TOKEN, _EXPERT_SHAPE = 128, 8, (768, 2048)


def product_launches() -> list[Launch]:
    """A decode step's and a prefill's of each form, and of experts in 4 bits."""
    dense = [_dense(name, num_tokens) for name in FORMS for num_tokens in (16, 512)]
    return [*dense, *(_grouped(name, num_tokens) for name in ("int4", "mxfp4") for num_tokens in (64, 2048))]


def _dense(name: str, num_tokens: int) -> Launch:
    weight = _weight(name, _SHAPE)
    tiles = ProductTiles.choose(num_tokens, _SHAPE[0], form_of(weight), gpu_static.TARGET)
    x = jax.ShapeDtypeStruct((num_tokens, _SHAPE[1]), jnp.bfloat16)
    return Launch(
        name=f"product_{name}_{num_tokens}",
        compile=functools.partial(gpu_static.compile_for_h200, quantized_matmul, x, weight),
        parts=(_part(weight, tiles, num_tokens=num_tokens, row_tiles=-(-num_tokens // tiles.tile_rows)),),
    )


def _grouped(name: str, num_tokens: int) -> Launch:
    """One of an expert MLP's three products."""
    stack, pairs = _weight(name, (_EXPERTS, *_EXPERT_SHAPE)), num_tokens * _EXPERTS_PER_TOKEN
    rows = choose_rows(pairs, _EXPERTS)
    tiles = ProductTiles.choose(
        pairs, _EXPERT_SHAPE[0], form_of(stack), gpu_static.TARGET, is_divided=False, tile_rows=rows
    )
    row_tiles = _EXPERTS * -(-pairs // _EXPERTS // rows)  # if all experts have as many pairs

    def run(x: jax.Array, expert_ids: jax.Array, stack: QuantizedWeight) -> jax.Array:
        places = tiles_of_experts(expert_ids, num_here=_EXPERTS, rows=rows)
        return grouped_product(x[places.tokens], stack, places)

    def compiled() -> Compiled:
        x = jax.ShapeDtypeStruct((num_tokens, _EXPERT_SHAPE[1]), jnp.bfloat16)
        ids = jax.ShapeDtypeStruct((num_tokens, _EXPERTS_PER_TOKEN), jnp.int32)
        return gpu_static.compile_for_h200(run, x, ids, stack)

    return Launch(
        name=f"product_of_experts_{name}_{num_tokens}",
        compile=compiled,
        parts=(_part(stack, tiles, num_tokens=pairs, row_tiles=row_tiles),),
    )


def _part(weight: QuantizedWeight, tiles: ProductTiles, *, num_tokens: int, row_tiles: int) -> Part:
    """Every tile fetches its codes and its tokens; HBM gives codes, scales, zero points and tokens once.

    row_tiles: of all experts. Places of a tile that no token has are multiplied too. Experts' sums stay float32.
    """
    outputs, inputs = weight.shape[-2:]
    row_bytes = weight.codes.shape[-1] * weight.codes.dtype.itemsize
    out_bytes = 4 if weight.ndim > 2 or tiles.is_divided else 2
    leaves = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight))
    return Part(
        name="product",
        consumers=tiles.consumers,
        operations=2 * row_tiles * tiles.tile_rows * outputs * inputs,
        fetched_bytes=row_tiles * (outputs * row_bytes + outputs // tiles.tile_out * tiles.tile_rows * inputs * 2),
        hbm_bytes=leaves + num_tokens * (inputs * 2 + outputs * out_bytes),
    )


def _weight(name: str, shape: tuple[int, ...]) -> QuantizedWeight:
    """The shapes of a weight [.., O, I]."""
    form = FORMS[name]
    leaves: dict[str, Any] = {
        leaf: jax.ShapeDtypeStruct(size, jnp.dtype(dtype)) for leaf, (size, dtype) in form.leaves(shape).items()
    }
    return QuantizedWeight(kind=form.kind, kernels=gpu_static.TARGET, **leaves)
