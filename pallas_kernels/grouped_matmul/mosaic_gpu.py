"""expert_mlp on Hopper, of experts that are kept as codes: the dense weights' kernel, with an expert for each tile."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.stack import ExpertStack
from pallas_kernels.grouped_matmul.tiles_of_experts import TilesOfExperts, mlp_over_tiles, stacks_of, tiles_of_experts
from pallas_kernels.quantized_matmul import QuantizedWeight
from pallas_kernels.quantized_matmul.activations import given_to_codes
from pallas_kernels.quantized_matmul.gpu import kernel
from pallas_kernels.quantized_matmul.gpu.config import COLUMNS, ProductTiles
from pallas_kernels.quantized_matmul.gpu.product_ops import in_order
from pallas_kernels.quantized_matmul.mosaic_gpu import form_of, packed_stack

_MAX_ROWS = 128


def expert_mlp(
    x: jax.Array,  # [T, D]
    expert_ids: jax.Array,  # [T, X], E for no expert
    expert_weights: jax.Array,  # [T, X]
    experts: ExpertStack,
    *,
    num_experts: int,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    sharers: int | None = None,
    interpret: Any = False,
) -> jax.Array:  # [T, D]
    """See the package's expert_mlp. num_experts: of all devices, which says how many pairs one gets.

    sharers: as in ProductTiles, which chooses them for None.
    """
    rows = choose_rows(expert_ids.size, num_experts)
    tiles = tiles_of_experts(expert_ids, num_here=stacks_of(experts)[0].shape[0], rows=rows)

    def product(given: jax.Array, stack: QuantizedWeight, _: Any) -> jax.Array:
        return grouped_product(given, stack, tiles, sharers=sharers, interpret=interpret)

    return mlp_over_tiles(x, expert_weights, experts, tiles, activation=activation, product=product)


def choose_rows(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile: about the pairs of an expert."""
    return next((rows for rows in COLUMNS if rows * num_experts >= num_pairs), _MAX_ROWS)


def grouped_product(
    x: jax.Array,  # [tiles rows, I]
    stack: QuantizedWeight,  # [E, O, I]
    tiles: TilesOfExperts,
    *,
    sharers: int | None = None,
    interpret: Any = False,
) -> jax.Array:  # [tiles, rows, O] float32
    """Each row, rounded as the form says, times its tile's expert; tiles that are not run hold anything."""
    assert stack.kernels is not None, "what names no GPU is multiplied in XLA"
    form, named = form_of(stack), {"tile_rows": tiles.rows} | ({} if sharers is None else {"sharers": sharers})
    given, token_scales = given_to_codes(x, stack, None)
    (out,) = kernel.multiply(
        in_order(given, form),
        packed_stack(stack),
        form=form,
        tiles=ProductTiles.choose(len(given), stack.shape[-2], form, stack.kernels, is_divided=False, **named),
        out_dtype=jnp.float32,
        experts=(tiles.expert_ids, tiles.num_tiles[None]),
        interpret=interpret,
    )
    out = out if token_scales is None else out * token_scales
    return out.reshape(-1, tiles.rows, out.shape[-1])
