"""expert_mlp on TPUs, of experts that are kept as codes: pairs are put into tiles of one expert each in XLA.

A (token, choice) pair has a place in the tiles; an expert's pairs begin a tile of their own. The number of tiles that
are run is data, their room is for the worst case: every expert's last tile is nearly empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.stack import ExpertStack
from pallas_kernels.grouped_matmul.tpu_kernel import grouped_rows
from pallas_kernels.quantized_matmul import QuantizedWeight
from pallas_kernels.quantized_matmul.mosaic_tpu import form_of, given_to_codes
from pallas_kernels.quantized_matmul.tpu.config import LANES, FewRows, are_few
from pallas_kernels.quantized_matmul.tpu.operands import group_sums, in_chunks

_FEWEST_ROWS = 16  # of a bfloat16 tile
_UNIT = 2 * LANES  # inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class TilesOfExperts:
    """Where pairs stand. rows: of a tile."""

    num_tiles: jax.Array  # [] int32
    expert_ids: jax.Array  # [tiles] int32
    tokens: jax.Array  # [tiles rows] int32: the token at a place, 0 where none is
    places: jax.Array  # [T, X] int32: of each pair, beyond the last where its expert is elsewhere
    rows: int


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
    stacks = [stack for stack in (experts.gate, experts.up, experts.down) if isinstance(stack, QuantizedWeight)]
    assert len(stacks) == 3, "experts that are not codes are multiplied in XLA"
    tiles = tiles_of_experts(
        expert_ids, num_here=stacks[0].shape[0], rows=choose_rows(expert_ids.size, num_experts, stacks)
    )

    def product(given: jax.Array, stack: QuantizedWeight, bias: jax.Array | None) -> jax.Array:
        out = grouped_product(given, stack, tiles, interpret=interpret)  # [tiles, rows, O] float32
        return out if bias is None else out + bias[tiles.expert_ids][:, None, :].astype(jnp.float32)

    biases = (None, None, None) if experts.biases is None else experts.biases
    rows = x[tiles.tokens]  # [tiles rows, D]
    gate, up = (product(rows, stack, bias) for stack, bias in zip(stacks[:2], biases[:2], strict=True))
    hidden = activation(gate, up).astype(x.dtype)
    down = product(hidden.reshape(-1, hidden.shape[-1]), stacks[2], biases[2]).astype(x.dtype)
    outputs, is_here = down.reshape(-1, x.shape[1]), tiles.places < tiles.tokens.shape[0]
    total = jnp.zeros(x.shape, jnp.float32)
    for choice in range(expert_ids.shape[1]):
        given = jnp.where(is_here[:, choice, None], outputs[tiles.places[:, choice]].astype(jnp.float32), 0.0)
        total += expert_weights[:, choice, None] * given
    return total.astype(x.dtype)


def choose_rows(num_pairs: int, num_experts: int, stacks: Sequence[QuantizedWeight]) -> int:
    """Rows of a tile: about the pairs of an expert, as far as every stack multiplies codes with so few of them."""
    rows = _FEWEST_ROWS
    while rows * num_experts < num_pairs and all(
        are_few(2 * rows, form_of(stack), stack.kernels) for stack in stacks if stack.kernels is not None
    ):
        rows *= 2
    return rows


def tiles_of_experts(expert_ids: jax.Array, *, num_here: int, rows: int) -> TilesOfExperts:
    """The tiles of pairs whose expert is here, those with an id below num_here."""
    T, X = expert_ids.shape
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.bincount(flat, length=num_here).astype(jnp.int32)
    num_tiles = -(-counts // rows)
    ends = jnp.cumsum(num_tiles)
    most = min(T * X, T * X // rows + num_here)
    owners = jnp.searchsorted(ends, jnp.arange(most, dtype=jnp.int32), side="right", method="compare_all")
    sorted_ids = flat[order]
    of = jnp.minimum(sorted_ids, num_here - 1)
    rank = jnp.arange(T * X, dtype=jnp.int32) - (jnp.cumsum(counts) - counts)[of]
    in_order = jnp.where(sorted_ids < num_here, (ends - num_tiles)[of] * rows + rank, most * rows).astype(jnp.int32)
    return TilesOfExperts(
        num_tiles=ends[-1].astype(jnp.int32),
        expert_ids=jnp.minimum(owners, num_here - 1).astype(jnp.int32),
        tokens=jnp.zeros((most * rows,), jnp.int32).at[in_order].set(order // X, mode="drop"),
        places=jnp.zeros((T * X,), jnp.int32).at[order].set(in_order).reshape(T, X),
        rows=rows,
    )


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
