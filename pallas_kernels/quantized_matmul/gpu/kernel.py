"""The GPU's product: one warpgroup fetches codes and tokens, the others decode codes in registers and multiply.

    fetch     c x  c x  c x ...      as far ahead as there are stages, also into the next tile
    consume        d m  d m  d m     a chunk is decoded while the one before is multiplied

Work is counted in steps of tile_in inputs, tile after tile; a program takes an unbroken run of them. Where tiles are
divided, a run may begin and end within one: each program's share of a tile is a piece of its own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantized_matmul.gpu.config import PART, QUARTER_BYTES, CodesForm, ProductTiles
from pallas_kernels.quantized_matmul.gpu.product_ops import ProductOps

_REGISTERS = {2: (40, 232), 3: (32, 160)}  # per thread of who fetches and who consumes, by the number of consumers
_ROW_BYTES = 4 * QUARTER_BYTES  # of codes in a chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductShape:
    """The static shape of a launch. row_tiles: of tokens, None where it is data."""

    form: CodesForm
    tiles: ProductTiles
    num_outputs: int
    row_tiles: int | None
    pieces: int
    ops: ProductOps

    @property
    def steps(self) -> int:
        """How many a tile has."""
        return self.form.num_inputs // self.tiles.tile_in

    @property
    def out_tiles(self) -> int:
        return self.num_outputs // self.tiles.tile_out


class ProductRefs(NamedTuple):
    """Arrays in global memory. zeros: empty without zero points. experts: of each tile. num_tiles: [1]."""

    x: Any
    codes: Any
    scales: Any
    zeros: tuple[Any, ...]
    experts: Any
    num_tiles: Any
    out: Any


class StepsOfTile(NamedTuple):
    """Steps first .. end - 1 of a tile, which a program multiplies without a break."""

    expert: Any
    rows: Any
    outputs: Any
    first: Any
    end: Any
    piece: Any


def num_pieces(steps: int, num_tiles: int, programs: int) -> np.ndarray:
    """[tiles]: by how many programs each tile is shared, if all steps are dealt out evenly."""
    ends = np.arange(1, programs + 1) * steps * num_tiles // programs
    tile = np.arange(num_tiles)
    first = np.searchsorted(ends, tile * steps, side="right")
    last = np.searchsorted(ends, (tile + 1) * steps - 1, side="right")
    return last - first + 1


class PackedStack(NamedTuple):
    """A stack of weights as it is kept."""

    codes: jax.Array  # [E, O, bytes] uint8
    scales: jax.Array  # [E, O, G]
    zeros: jax.Array | None  # [E, O, G]


def multiply(
    x: jax.Array,  # [row tiles * tile_rows, I] bfloat16, inputs in the order of `in_order`
    weights: PackedStack,
    *,
    form: CodesForm,
    tiles: ProductTiles,
    out_dtype: Any,
    experts: tuple[jax.Array, jax.Array] | None = None,  # of each row tile, [row tiles] int32; how many are run, [1]
    interpret: Any = False,
) -> jax.Array:  # [pieces, row tiles * tile_rows, O]; pieces that a tile does not have hold anything
    """x times what the codes stand for."""
    row_tiles, O = x.shape[0] // tiles.tile_rows, weights.codes.shape[1]
    steps = form.num_inputs // tiles.tile_in
    assert O % tiles.tile_out == 0 and form.num_inputs % tiles.tile_in == 0, (O, tiles, form)
    assert tiles.tile_in // form.chunk % tiles.sharers == 0, "sharers have as many chunks of a stage each"
    assert experts is None or not tiles.is_divided, "how many tiles there are is not known where they would be divided"
    num_tiles = row_tiles * O // tiles.tile_out
    assert not tiles.is_divided or num_tiles * steps >= tiles.programs, "a program without steps is no piece"
    shape = ProductShape(
        form=form,
        tiles=tiles,
        num_outputs=O,
        row_tiles=None if experts is not None else row_tiles,
        pieces=int(num_pieces(steps, num_tiles, tiles.programs).max()) if tiles.is_divided else 1,
        ops=ProductOps(form=form, is_interpreted=bool(interpret)),
    )
    data = [x, *(leaf for leaf in weights if leaf is not None), *(experts or ())]

    def body(*refs: Any) -> None:
        *inputs, out, scratch = refs
        x, codes, scales, *rest = inputs
        zeros = () if weights.zeros is None else (rest.pop(0),)
        ids, num_tiles = rest or (None, None)
        _body(shape, ProductRefs(x, codes, scales, zeros, ids, num_tiles, out), scratch)

    launch = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((shape.pieces, x.shape[0], O), out_dtype),
        scratch_types=[_scratch_of(shape)],
        grid=(tiles.programs,),
        grid_names=("program",),
        num_threads=tiles.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return launch(*data)


def _scratch_of(shape: ProductShape) -> dict[str, Any]:
    """Shared memory and barriers by name."""
    tiles, chunks = shape.tiles, shape.tiles.tile_in // shape.form.chunk
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # as wgmma reads tokens
    scratch = {
        "codes": plgpu.SMEM((tiles.stages, chunks, tiles.tile_out, _ROW_BYTES), jnp.uint8),
        "x": plgpu.SMEM((tiles.stages, chunks, tiles.tile_rows, shape.form.chunk), jnp.bfloat16, transforms=swizzled),
        "ready": plgpu.Barrier(num_arrivals=2 * chunks, num_barriers=tiles.stages),
        "free": plgpu.Barrier(num_arrivals=tiles.consumers, num_barriers=tiles.stages),
    }
    if (others := tiles.sharers - 1) > 0:
        columns = tiles.consumers // tiles.sharers
        scratch["sums"] = plgpu.SMEM((others, columns, tiles.parts * PART, tiles.tile_rows), jnp.float32)
        scratch["sums_ready"] = plgpu.Barrier(num_arrivals=others, num_barriers=columns)
        scratch["sums_free"] = plgpu.Barrier(num_barriers=columns)
    return scratch


def _body(shape: ProductShape, refs: ProductRefs, scratch: dict[str, Any]) -> None:
    tiles, warpgroup, program = shape.tiles, lax.axis_index("warpgroup"), lax.axis_index("program")
    first, end = _run_of(shape, refs, program)
    steps, count, registers = shape.steps, end - first, _REGISTERS.get(tiles.consumers)
    num_places = jnp.where(count > 0, lax.div(end - 1, steps) - lax.div(first, steps) + 1, 0)

    def place_of(i: Any) -> StepsOfTile:
        tile = lax.div(first, steps) + i
        begin, row_tiles = tile * steps, shape.row_tiles
        if row_tiles is None:
            row_tiles = refs.num_tiles[0]
        rows, outputs = lax.rem(tile, row_tiles), lax.div(tile, row_tiles)
        expert = jnp.int32(0) if refs.experts is None else refs.experts[rows]
        piece = program - _program_of(shape, begin) if tiles.is_divided else jnp.int32(0)
        own = lax.max(first - begin, 0), lax.min(end - begin, steps)
        return StepsOfTile(expert, rows * tiles.tile_rows, outputs * tiles.tile_out, *own, piece)

    @pl.when(warpgroup == tiles.consumers)
    def _() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[0], action="decrease")
        n = lax.fori_loop(0, num_places, lambda i, n: _fetch(shape, refs, scratch, place_of(i), n), jnp.int32(0))
        for stage in range(tiles.stages):
            pl.when(n > stage)(functools.partial(plgpu.barrier_wait, scratch["free"].at[stage]))

    @pl.when(warpgroup < tiles.consumers)
    def _() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[1], action="increase")
        columns = tiles.consumers // tiles.sharers
        own = Consumer(refs, scratch, lax.rem(warpgroup, columns), lax.div(warpgroup, columns))
        lax.fori_loop(0, num_places, lambda i, n: _consume(shape, own, place_of(i), i, n), jnp.int32(0))
        if tiles.sharers > 1:
            free = scratch["sums_free"].at[own.column]
            pl.when((own.share > 0) & (num_places > 0))(lambda: plgpu.barrier_wait(free))


def _run_of(shape: ProductShape, refs: ProductRefs, program: Any) -> tuple[Any, Any]:
    """The steps first .. end - 1 of a program."""
    row_tiles = refs.num_tiles[0] if shape.row_tiles is None else jnp.int32(shape.row_tiles)
    total, programs = row_tiles * shape.out_tiles, shape.tiles.programs
    if shape.tiles.is_divided:
        total *= shape.steps
        return lax.div(program * total, programs), lax.div((program + 1) * total, programs)
    first, end = (lax.div(p * total, programs) * shape.steps for p in (program, program + 1))
    return first, end


def _program_of(shape: ProductShape, step: Any) -> Any:
    """The program whose run has a step, of those that are dealt out evenly."""
    assert shape.row_tiles is not None
    total = shape.row_tiles * shape.out_tiles * shape.steps
    return lax.div((step + 1) * shape.tiles.programs - 1, total)


def _fetch(shape: ProductShape, refs: ProductRefs, scratch: dict[str, Any], place: StepsOfTile, n: Any) -> Any:
    """Starts a run's transfers. n: steps before it; returned with its own added."""
    form, tiles = shape.form, shape.tiles

    def one_step(step: Any, n: Any) -> Any:
        stage = lax.rem(n, tiles.stages)
        ready = scratch["ready"].at[stage]
        pl.when(n >= tiles.stages)(lambda: plgpu.barrier_wait(scratch["free"].at[stage]))
        chunks = tiles.tile_in // form.chunk
        for chunk in range(chunks):
            at = step * chunks + chunk
            plgpu.copy_gmem_to_smem(
                refs.codes.at[place.expert, pl.ds(place.outputs, tiles.tile_out), pl.ds(at * _ROW_BYTES, _ROW_BYTES)],
                scratch["codes"].at[stage, chunk],
                ready,
            )
        for chunk in range(chunks):
            at = step * chunks + chunk
            plgpu.copy_gmem_to_smem(
                refs.x.at[pl.ds(place.rows, tiles.tile_rows), pl.ds(at * form.chunk, form.chunk)],
                scratch["x"].at[stage, chunk],
                ready,
            )
        return n + 1

    return lax.fori_loop(place.first, place.end, one_step, n)


class Consumer(NamedTuple):
    """A warpgroup that multiplies. column: which of a tile's outputs are its own. share: and which of their inputs."""

    refs: ProductRefs
    scratch: dict[str, Any]
    column: Any
    share: Any


def _consume(shape: ProductShape, consumer: Consumer, place: StepsOfTile, i: Any, n: Any) -> Any:
    """Multiplies a run's steps and stores their sum. n: steps before it; returned with its own added."""
    (refs, scratch, column, share), (form, tiles, ops) = consumer, (shape.form, shape.tiles, shape.ops)
    chunks, first_output = tiles.tile_in // form.chunk, column * (tiles.parts * PART)
    its_chunks = [share * (chunks // tiles.sharers) + c for c in range(chunks // tiles.sharers)]
    pieces = [(chunk, part) for chunk in its_chunks for part in range(tiles.parts)]

    def outputs_of(part: int) -> Any:
        return pl.ds(place.outputs + first_output + part * PART, PART)

    def factors_of(step: Any) -> tuple[jax.Array, ...]:
        """Scales and zero points of a step's codes, loaded while the step before is multiplied."""
        if not form.has_scales and not form.has_zeros:
            return ()
        found = []
        for chunk, part in pieces:
            first = lax.div((step * chunks + chunk) * form.groups_of_chunk, max(1, form.group // form.chunk))
            at = (place.expert, outputs_of(part), pl.ds(first, form.groups_of_chunk))
            found.append(ops.load_factors([ref.at[at] for ref in (refs.scales, *refs.zeros)]))
        return tuple(found)

    def one_step(step: Any, carry: Any) -> Any:
        n, total, factors = carry
        stage = lax.rem(n, tiles.stages)
        following = factors_of(lax.min(step + 1, place.end - 1))
        plgpu.barrier_wait(scratch["ready"].at[stage])
        products = []
        for j, (chunk, part) in enumerate(pieces):
            codes = scratch["codes"].at[stage, chunk, pl.ds(first_output + part * PART, PART)]
            lhs = functools.partial(ops.decode, codes, factors[j] if factors else None, refs.scales.dtype)
            products.append((part, lhs, scratch["x"].at[stage, chunk]))
        total = ops.accumulate(total, products)
        ops.end_reading()
        plgpu.barrier_arrive(scratch["free"].at[stage])
        return n + 1, total, following

    empty = ops.full((tiles.parts * PART, tiles.tile_rows))
    n, total, _ = lax.fori_loop(place.first, place.end, one_step, (n, empty, factors_of(place.first)))

    def store(total: jax.Array) -> None:
        for part in range(tiles.parts):
            out = refs.out.at[place.piece, pl.ds(place.rows, tiles.tile_rows), outputs_of(part)]
            scales = () if form.has_scales else (refs.scales.at[place.expert, outputs_of(part)],)
            ops.store(out, total[part * PART : (part + 1) * PART] if tiles.parts > 1 else total, *scales)

    if tiles.sharers == 1:
        store(total)
    else:
        _add_shares(shape, consumer, total, i, store)
    return n


def _add_shares(
    shape: ProductShape, consumer: Consumer, total: jax.Array, i: Any, store: Callable[[jax.Array], None]
) -> None:
    """Stores the sum of all shares, in their order: the first sharer takes what the others leave."""
    scratch, column, share, ops = consumer.scratch, consumer.column, consumer.share, shape.ops
    ready, free = scratch["sums_ready"].at[column], scratch["sums_free"].at[column]

    @pl.when(share > 0)
    def _() -> None:
        pl.when(i > 0)(lambda: plgpu.barrier_wait(free))
        ops.put_aside(scratch["sums"].at[share - 1, column], total)
        plgpu.barrier_arrive(ready)

    @pl.when(share == 0)
    def _() -> None:
        plgpu.barrier_wait(ready)
        whole = total
        for other in range(shape.tiles.sharers - 1):
            whole += ops.take_back(scratch["sums"].at[other, column])
        plgpu.barrier_arrive(free)
        store(whole)
