"""expert_mlp on TPUs, of codes or bfloat16: pairs are put into tiles of one expert each in XLA."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.dense_support import tile_of
from pallas_kernels.grouped_matmul.stack import ExpertStack
from pallas_kernels.grouped_matmul.tiles_of_experts import TilesOfExperts, mlp_over_tiles, stacks_of, tiles_of_experts
from pallas_kernels.quantized_matmul import QuantizedWeight
from pallas_kernels.quantized_matmul.activations import given_to_codes
from pallas_kernels.quantized_matmul.mosaic_tpu import form_of
from pallas_kernels.quantized_matmul.tpu.config import LANES, FewRows, ProductForm, are_few
from pallas_kernels.quantized_matmul.tpu.few_rows import tile_of_outputs
from pallas_kernels.quantized_matmul.tpu.operands import group_sums, in_chunks
from pallas_kernels.target import Target

_MIN_ROWS, _MAX_DENSE_ROWS = 16, 128  # of a bfloat16 tile; of one beside dense weights
_UNIT = 2 * LANES  # inputs
_ROOMS = 2  # times the even share of pairs
_VMEM_SHARE = 0.8


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
    rows = _MIN_ROWS
    while rows * num_experts < num_pairs and all(_takes(2 * rows, stack) for stack in stacks):
        rows *= 2
    return rows


def _takes(rows: int, stack: jax.Array | QuantizedWeight) -> bool:
    if not isinstance(stack, QuantizedWeight):
        return rows <= _MAX_DENSE_ROWS
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
