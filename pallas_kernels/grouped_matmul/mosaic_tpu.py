"""expert_mlp on TPUs, of codes or bfloat16: pairs are put into tiles of one expert each in XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.stack import ExpertStack
from pallas_kernels.grouped_matmul.tiles_of_experts import TilesOfExperts, mlp_over_tiles, stacks_of, tiles_of_experts
from pallas_kernels.grouped_matmul.tpu_kernel import dense_rows, grouped_rows
from pallas_kernels.quantized_matmul import QuantizedWeight
from pallas_kernels.quantized_matmul.activations import given_to_codes
from pallas_kernels.quantized_matmul.mosaic_tpu import form_of
from pallas_kernels.quantized_matmul.tpu.config import LANES, FewRows, are_few
from pallas_kernels.quantized_matmul.tpu.operands import group_sums, in_chunks

_FEWEST_ROWS, _MOST_DENSE_ROWS = 16, 128  # of a bfloat16 tile; of one beside dense weights
_UNIT = 2 * LANES  # inputs
_ROOMS = 2  # times the even share of pairs


def expert_mlp(
    x: jax.Array,  # [T, D]
    expert_ids: jax.Array,  # [T, X], E for no expert
    expert_weights: jax.Array,  # [T, X]
    experts: ExpertStack,
    *,
    num_experts: int,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    interpret: Any = False,
) -> jax.Array:  # [T, D]
    """See the package's expert_mlp. num_experts: of all devices, which says how many pairs one gets."""
    stacks = stacks_of(experts)
    num_here = stacks[0].shape[0]
    tiles = tiles_of_experts(expert_ids, num_here=num_here, rows=choose_rows(expert_ids.size, num_experts, stacks))

    def product(tiles: TilesOfExperts, given: jax.Array, stack: jax.Array | QuantizedWeight, dtype: Any) -> jax.Array:
        if isinstance(stack, QuantizedWeight):
            return grouped_product(given, stack, tiles, interpret=interpret)
        assert experts.kernels is not None, "kernels_of asks for it"
        tokens = given.reshape(-1, tiles.rows, given.shape[1])
        return dense_rows(
            *(tiles.expert_ids, tiles.num_tiles, tokens, stack),
            out_dtype=dtype,
            target=experts.kernels,
            interpret=interpret,
        )

    def within(tiles: TilesOfExperts) -> jax.Array:
        given = functools.partial(product, tiles)
        return mlp_over_tiles(x, expert_weights, experts, tiles, activation=activation, product=given)

    room = usual_room(expert_ids.size, num_experts, num_here=num_here, rows=tiles.rows)
    if _ROOMS * room > len(tiles.expert_ids):
        return within(tiles)
    return jax.lax.cond(tiles.num_tiles <= room, lambda: within(tiles.in_room(room)), lambda: within(tiles))


def usual_room(num_pairs: int, num_experts: int, *, num_here: int, rows: int) -> int:
    """Tiles that are enough where experts here get no more than some times the pairs of as many others.

    The worst case, in which every token comes here, may be 16 times as many; all that XLA does around the kernels, such
    as rounding what they are given, is in proportion to them.
    """
    return -(-_ROOMS * num_pairs * num_here // (num_experts * rows)) + num_here


def choose_rows(num_pairs: int, num_experts: int, stacks: Sequence[jax.Array | QuantizedWeight]) -> int:
    """Rows of a tile: about the pairs of an expert, as far as every stack multiplies so few of them at once."""
    rows = _FEWEST_ROWS
    while rows * num_experts < num_pairs and all(_takes(2 * rows, stack) for stack in stacks):
        rows *= 2
    return rows


def _takes(rows: int, stack: jax.Array | QuantizedWeight) -> bool:
    if not isinstance(stack, QuantizedWeight):
        return rows <= _MOST_DENSE_ROWS
    return stack.kernels is None or are_few(rows, form_of(stack), stack.kernels)


def grouped_product(
    x: jax.Array,  # [tiles rows, I]
    stack: QuantizedWeight,  # [E, O, I]
    tiles: TilesOfExperts,
    *,
    interpret: Any = False,
) -> jax.Array:  # [tiles, rows, O] float32
    """Each row times the weight of its tile's expert, rounded as the form says."""
    form, target, rows = form_of(stack), stack.kernels, tiles.rows
    assert target is not None
    config = FewRows.choose(rows, stack.shape[-2], form, target)
    given, token_scales = given_to_codes(x, stack, None)
    given = given.reshape(-1, rows, x.shape[1])
    has_points = form.middle or form.has_zeros
    sums = jax.vmap(lambda tile: group_sums(tile, form.num_groups))(given) if has_points else None
    filled = jnp.pad(given, ((0, 0), (0, 0), (0, -x.shape[1] % _UNIT)))
    chunks = jax.vmap(lambda tile: in_chunks(tile, config.inputs, form))(filled)
    scales = stack.scales.astype(jnp.float32) if stack.scales.dtype == jnp.float16 else stack.scales
    out = grouped_rows(
        tiles.expert_ids,
        tiles.num_tiles,
        chunks,
        sums,
        stack.codes,
        scales.swapaxes(1, 2),
        None if stack.zeros is None else stack.zeros.astype(jnp.float32).swapaxes(1, 2),
        form=form,
        config=config,
        interpret=interpret,
    )
    return out if token_scales is None else out * token_scales.reshape(-1, rows, 1)
