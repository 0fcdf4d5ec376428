"""Recurrences on a TPU: rows of one token, and tiles of longer rows, whose states stay in vector memory meanwhile.

Rows of one token: while one row's states change, those of its neighbours cross HBM. A turn of the grid has some heads
of one row; there is no turn for rows without a token or with several. States are written where they were read, and a
row's bits follow from its own states and token alone.

Tiles: the grid goes over parts of the heads, and within one over the tiles of all rows. Tiles begin and end anywhere in
the flat tokens: a block of L tokens comes in from where a tile begins, or from the last place where as many are, and
only the tile's own tokens go out, in runs whose lengths are powers of two.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.row_recurrence.heads_tile import HeadsTile, close_dot, exact_dot
from pallas_kernels.row_recurrence.tpu_support import TILE_BYTES, turns_of_row
from pallas_kernels.state_rows import RowTiles, SingleRows, StateRows

_FIELDS = 5  # of RowTiles, as scalars
_COMPILER = pltpu.CompilerParams(
    dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=2**25, disable_bounds_checks=True
)

# (load, keep, *tokens) -> out [H, B]: load(n) is the state of the n-th of H heads, keep(n, state) what it is afterwards
HeadsRule = Callable[..., jax.Array]


def several_tokens(
    rule: Callable[[HeadsTile], None],
    tokens: tuple[jax.Array, ...],  # [T, K, A] of groups, v [T, N, B], then [T, N] of heads
    out: jax.Array,  # [T, N, B]
    pool: jax.Array,  # [slots, N, ...] float32
    tiles: RowTiles,
    *,
    num_shared: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """(out, pool) after the tiles; all else in them is as it was. num_shared: of groups."""
    (T, N, B), K, L = out.shape, tokens[0].shape[1], tiles.tile
    turns = turns_of_row(pool.shape[1:], K, most_bytes=TILE_BYTES)
    groups, H = min(turns, K), N // turns

    def of_tiles(x: jax.Array) -> pl.BlockSpec:  # [T, parts, H, ...]
        parts = x.shape[1]

        def place(h: Any, i: Any, slots: Any, firsts: Any, *_: Any) -> tuple[Any, ...]:
            return jnp.minimum(firsts[i], T - L), h * parts // turns, 0, 0

        return pl.BlockSpec(tuple(map(pl.Element, (L, 1, *x.shape[2:]))), place)

    given = [_cut(x, groups if i < num_shared else turns) for i, x in enumerate(tokens)]
    begun = _cut(out, turns)
    states = pl.BlockSpec((None, H, *pool.shape[2:]), lambda h, i, slots, *_: (slots[i], h, 0, 0))
    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
    wide = [pltpu.VMEM((2 * L, *x.shape[2:]), jnp.float32) for x in given]
    after, pool = pl.pallas_call(
        functools.partial(_tiles_kernel, rule=rule, num_tokens=len(given), num_shared=num_shared, T=T, L=L),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=_FIELDS,
            grid=(turns, tiles.count),
            in_specs=[*map(of_tiles, given), anywhere, states],
            out_specs=[anywhere, states],
            scratch_shapes=[
                *wide,
                *(pltpu.VMEM((L, H, B), dtype) for dtype in (jnp.float32, out.dtype)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (begun, pool)],
        input_output_aliases={_FIELDS + len(given): 0, _FIELDS + 1 + len(given): 1},
        compiler_params=_COMPILER,
        interpret=interpret,
        name="row_recurrence_tiles",
    )(tiles.slots, tiles.firsts, tiles.counts, tiles.leads, tiles.begins, *given, begun, pool)
    return after.reshape(out.shape), pool


def _tiles_kernel(*refs, rule, num_tokens: int, num_shared: int, T: int, L: int):
    """refs: of RowTiles, tokens of a tile, what out was, states before; out, states after; tokens in float32, out's
    tile in float32 and as it goes out, its DMA's semaphore."""
    (_, firsts, counts, leads, begins), refs = refs[:_FIELDS], refs[_FIELDS:]
    tokens, (_, before, out, after, *scratch) = refs[:num_tokens], refs[num_tokens:]
    *wide, found, said, left = scratch
    h, i = pl.program_id(0), pl.program_id(1)
    num_tiles = pl.num_programs(1)
    first, count = firsts[i], counts[i]
    at = first - jnp.minimum(first, T - L)
    own = jax.lax.broadcasted_iota(jnp.int32, (L, 1), 0) < count
    for there, here in zip(tokens, wide, strict=True):
        here[pl.ds(0, L)] = there[:, 0].astype(jnp.float32)

    @pl.when(leads[i] == 1)
    def _() -> None:
        after[...] = jnp.where(begins[i] == 1, 0.0, before[...])

    def read(x: Any, n: int, is_masked: bool = True) -> jax.Array:
        given = x[pl.ds(at, L), n, :]
        return jnp.where(own, given, 0.0) if is_masked else given

    def copies(turn: Any, tile: Any, act: Callable[[Any], None]) -> None:
        def run(here: Any, there: Any) -> None:
            act(pltpu.make_async_copy(said.at[here], out.at[there, turn], left))

        _each_run(firsts[tile], counts[tile], L, run)

    @pl.when((h > 0) | (i > 0))
    def _() -> None:
        wrap = i == 0
        copies(jnp.where(wrap, h - 1, h), jnp.where(wrap, num_tiles - 1, i - 1), lambda copy: copy.wait())

    def say(n: int, x: jax.Array) -> None:
        found[:, n, :] = x  # of 16 bits each store of a token would read its neighbour

    def keep(n: int, x: jax.Array) -> None:
        after[n] = x

    rule(
        HeadsTile(
            shared=tuple(functools.partial(read, x, is_masked=place > 0) for place, x in enumerate(wide[:num_shared])),
            value=functools.partial(read, wide[num_shared]),
            of_heads=tuple(read(x, 0) for x in wide[num_shared + 1 :]),
            load=lambda n: after[n],
            keep=keep,
            say=say,
            dot=exact_dot if said.dtype == jnp.float32 else close_dot,
            num_groups=wide[0].shape[1],
            num_heads=wide[num_shared].shape[1],
            num_tokens=L,
        )
    )
    said[...] = found[...].astype(said.dtype)
    copies(h, i, lambda copy: copy.start())

    @pl.when((h == pl.num_programs(0) - 1) & (i == num_tiles - 1))
    def _() -> None:
        copies(h, i, lambda copy: copy.wait())


def _each_run(first: Any, count: Any, most: int, act: Callable[[Any, Any], None]) -> None:
    """Calls act with the places of runs of powers of two, in a tile and behind `first`, that are `count` tokens."""
    for size in (1 << bit for bit in reversed(range(most.bit_length()))):

        @pl.when((count & size) != 0)
        def _(size: int = size) -> None:
            skip = count & ~(2 * size - 1)
            act(pl.ds(skip, size), pl.ds(first + skip, size))


def one_token(
    rule: HeadsRule,
    tokens: tuple[jax.Array, ...],  # [T, K, A] of groups, then [T, N] or [T, N, ...] of heads
    out: jax.Array,  # [T, N, B]
    pool: jax.Array,  # [slots, N, ...] float32
    rows: StateRows,
    *,
    num_shared: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """(out, pool) after the tokens of rows that have one; all else in them is as it was. num_shared: of groups.

    rule is given the tokens of a turn in float32, [1, H] what was [T, N].
    """
    N, K = pool.shape[1], tokens[0].shape[1]
    turns = turns_of_row(pool.shape[1:], K)
    groups = min(turns, K)
    singles = rows.singles or SingleRows.of(rows.counts)
    cut = [_cut(x, groups if i < num_shared else turns) for i, x in enumerate(tokens)]

    def of_token(x: jax.Array) -> pl.BlockSpec:  # [T, turns or groups, H, ...]
        part = x.shape[1]
        return pl.BlockSpec(
            (None, None, *x.shape[2:]),
            lambda r, h, order, slots, offsets, starts: (offsets[order[r]], h * part // turns, 0, 0),
        )

    states = pl.BlockSpec(
        (None, N // turns, *pool.shape[2:]), lambda r, h, order, slots, *_: (slots[order[r]], h, 0, 0)
    )
    begun = _cut(out, turns)
    after, pool = pl.pallas_call(
        functools.partial(_kernel, rule=rule, num_tokens=len(cut)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(singles.count, turns),
            in_specs=[*map(of_token, cut), pl.BlockSpec(memory_space=pltpu.HBM), states],
            out_specs=[of_token(begun), states],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (begun, pool)],
        input_output_aliases={4 + len(cut): 0, 5 + len(cut): 1},
        compiler_params=_COMPILER,
        interpret=interpret,
        name="row_recurrence",
    )(singles.order, rows.slots, rows.offsets, rows.starts, *cut, begun, pool)
    return after.reshape(out.shape), pool


def _cut(x: jax.Array, parts: int) -> jax.Array:
    """[T, N, ...] as [T, parts, N / parts, ...], and [T, N] as [T, parts, 1, N / parts], for blocks have whole last
    axes."""
    return x.reshape(len(x), parts, *((1, -1) if x.ndim == 2 else (-1, x.shape[2])))


def _kernel(order, slots, offsets, starts, *refs, rule: HeadsRule, num_tokens: int):
    """refs: tokens of a turn, what out was, states before; out, states after."""
    tokens, (_, before, out, after) = refs[:num_tokens], refs[num_tokens:]
    begins = starts[order[pl.program_id(0)]] == 0

    def load(n: int) -> jax.Array:
        return jnp.where(begins, 0.0, before[n])

    def keep(n: int, state: jax.Array) -> None:
        after[n] = state

    out[...] = rule(load, keep, *(x[...].astype(jnp.float32) for x in tokens)).astype(out.dtype)
