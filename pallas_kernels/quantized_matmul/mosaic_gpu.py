"""quantized_matmul on Hopper: x is put in order and rounded in XLA, codes are decoded in registers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_matmul.activations import given_to_codes
from pallas_kernels.quantized_matmul.gpu import kernel
from pallas_kernels.quantized_matmul.gpu.config import CodesForm, ProductTiles
from pallas_kernels.quantized_matmul.gpu.product_ops import in_order
from pallas_kernels.quantized_matmul.weight import QuantizedWeight


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    out_dtype: jnp.dtype,
    activation_scales: jax.Array | None,
    *,
    tiles: ProductTiles | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See the package's quantized_matmul; `product_support.refusals` names other weights. tiles: chosen for None."""
    assert weight.kernels is not None, "what names no GPU is multiplied in XLA"
    if weight.order is not None:
        x = jnp.take(x, weight.order, axis=1)
    given, token_scales = given_to_codes(x, weight, activation_scales)
    form, (T, O) = form_of(weight), (x.shape[0], weight.shape[0])
    tiles = tiles or ProductTiles.choose(T, O, form, weight.kernels)
    given = jnp.pad(in_order(given, form), ((0, -T % tiles.tile_rows), (0, 0)))
    is_whole = token_scales is None and not tiles.is_divided
    pieces = kernel.multiply(
        given,
        packed_stack(jax.tree.map(lambda leaf: leaf[None], weight)),
        form=form,
        tiles=tiles,
        out_dtype=out_dtype if is_whole else jnp.float32,
        interpret=interpret,
    )
    y = _added(pieces, form, tiles)[:T] if tiles.is_divided else pieces[0, :T]
    return (y if token_scales is None else y * token_scales).astype(out_dtype)


def form_of(weight: QuantizedWeight) -> CodesForm:
    """The kernel's specialisation; weight may be shapes."""
    return CodesForm(
        kind=weight.kind,
        num_inputs=weight.shape[-1],
        num_groups=weight.scales.shape[-1],
        has_zeros=weight.zeros is not None,
    )


def packed_stack(stack: QuantizedWeight) -> kernel.PackedStack:
    """Weights [E, O, I] as the kernel takes them, with codes as bytes."""
    codes = stack.codes
    if codes.dtype != jnp.uint8:
        codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    return kernel.PackedStack(codes, stack.scales, stack.zeros)


def _added(pieces: jax.Array, form: CodesForm, tiles: ProductTiles) -> jax.Array:  # [pieces, T, O] -> [T, O]
    """The sum of each tile's pieces in their order, whatever stands where a tile has fewer."""
    _, T, O = pieces.shape
    row_tiles, out_tiles = T // tiles.tile_rows, O // tiles.tile_out
    counts = kernel.num_pieces(form.num_inputs // tiles.tile_in, row_tiles * out_tiles, tiles.programs)
    counts = counts.reshape(out_tiles, row_tiles).T  # a run goes over the rows of a tile of outputs first
    counts = np.repeat(np.repeat(counts, tiles.tile_rows, axis=0), tiles.tile_out, axis=1)
    total = pieces[0]
    for i in range(1, len(pieces)):
        total += jnp.where(jnp.asarray(counts > i), pieces[i], 0.0)
    return total
