"""Recurrences over flat ragged tokens: a loop over rows of one token, and one over tiles of longer rows.

Trip counts are data, so cost follows the tokens that there are, and states are read and written in their slots. What a
token or a tile does to a state is the caller's: `one_token` for a token of each of several rows, `one_tile` for
neighbouring tokens of one row. Heads stand as [K, G]: those of a group share what the group brings. On a TPU a kernel
may take the rows of one token (`mosaic_tpu`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.row_recurrence.tpu_support import takes_tiles
from pallas_kernels.state_rows import RowTiles, SingleRows, StateRows

GROUP = 16  # rows of one token that are computed at once
_MOST = 64

Rule = Callable[..., tuple[jax.Array, jax.Array]]  # (state, *tokens) -> (out, state), all float32


def choose_tile(*, num_tokens: int) -> int:
    """Tokens of a tile: as many as a step has, at most 64, where a tile costs as much as reading a state."""
    return min(_MOST, max(2, num_tokens))


def for_kernels(rows: StateRows, *, num_tokens: int) -> StateRows:
    """The rows with what kernels need to know of them, for all layers of a step of this many tokens."""
    tiles = None if rows.decode_only else RowTiles.of(rows, num_tokens, choose_tile(num_tokens=num_tokens))
    return dataclasses.replace(rows, singles=SingleRows.of(rows.counts), tiles=tiles)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowRecurrence:
    """one_token: states [R, K, G, ...], tokens [R, ...] each -> (out [R, K, G, B], the states after it).

    one_tile: a state [K, G, ...], tokens [L, ...] each, 0 for those that are not the row's -> (out [L, K, G, B], the
    state after them). heads, heads_tile: what `one_token` and `one_tile` do, as the TPU's kernels ask for it; None
    leaves it to XLA.
    """

    one_token: Rule
    one_tile: Rule
    heads: Callable[..., jax.Array] | None = None
    heads_tile: Callable[..., None] | None = None
    interpret: Any = False  # the kernels, for tests and checks

    def __call__(
        self,
        shared: tuple[jax.Array, ...],  # [T, K, A] each
        v: jax.Array,  # [T, K * G, B]
        of_heads: tuple[jax.Array, ...],  # [T, K * G, ...] each
        pool: jax.Array,  # [slots, K * G, ...] float32
        rows: StateRows,
        *,
        tile: int | None,
    ) -> tuple[jax.Array, jax.Array]:
        """(out as v is, the pool after the step). tile: None is choose_tile's."""
        flat, num_shared = (*shared, v, *of_heads), len(shared)
        tile = tile or choose_tile(num_tokens=len(v))
        if self.heads is not None and not rows.sequential:
            return self._by_kernels(flat, num_shared, pool, rows, tile)
        tokens = _grouped(flat, num_shared)
        out = jnp.zeros_like(tokens[num_shared])
        if rows.sequential:
            out, pool = self._sequential(tokens, out, pool, rows)
        else:
            out, pool = self._singles(tokens, out, pool, rows)
            if not rows.decode_only:
                out, pool = self._tiles(tokens, out, pool, rows, tile)
        return out.reshape(v.shape), pool

    def _by_kernels(
        self, tokens: tuple[jax.Array, ...], num_shared: int, pool: jax.Array, rows: StateRows, tile: int
    ) -> tuple[jax.Array, jax.Array]:
        """Rows of one token on a TPU, and tiles of longer ones where a kernel takes them."""
        from pallas_kernels.row_recurrence import mosaic_tpu  # Pallas takes half a second

        assert self.heads is not None, "asked before"
        v, how = tokens[num_shared], {"num_shared": num_shared, "interpret": self.interpret}
        out, pool = mosaic_tpu.one_token(self.heads, tokens, jnp.zeros_like(v), pool, rows, **how)
        if rows.decode_only:
            return out, pool
        if self.heads_tile is not None and takes_tiles(tile, len(v), [x.ndim for x in tokens[num_shared + 1 :]]):
            tiles = rows.tiles or RowTiles.of(rows, len(v), tile)
            return mosaic_tpu.several_tokens(self.heads_tile, tokens, out, pool, tiles, **how)
        grouped = _grouped((*tokens, out), num_shared)
        out, pool = self._tiles(grouped[:-1], grouped[-1], pool, rows, tile)
        return out.reshape(v.shape), pool

    def _singles(
        self, tokens: tuple[jax.Array, ...], out: jax.Array, pool: jax.Array, rows: StateRows
    ) -> tuple[jax.Array, jax.Array]:
        """Rows of one token, several at once."""
        T, R = out.shape[0], len(rows.slots)
        single = rows.counts == 1
        # XLA reads a single state twice and copies the pool for it
        group, count = min(GROUP, max(R, 2)), jnp.sum(single)
        order = jnp.pad(jnp.argsort(~single, stable=True).astype(jnp.int32), (0, -R % group))  # those rows first

        def several(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            out, pool = carry
            row = jax.lax.dynamic_slice_in_dim(order, i * group, group)
            real = i * group + jnp.arange(group, dtype=jnp.int32) < count
            slots = jnp.where(real, rows.slots[row], 0)
            places = jnp.where(real, rows.offsets[row], T)
            state = _begun(pool.at[slots].get(mode="promise_in_bounds"), rows.starts[row] == 0, out.shape[1:3])
            arguments = _wide(jax.tree.map(lambda x: x.at[places].get(mode="clip"), tokens))
            said, state = self.one_token(state, *arguments)
            out = out.at[places].set(said.astype(out.dtype), mode="drop")
            return out, pool.at[slots].set(state.reshape(group, *pool.shape[1:]), mode="promise_in_bounds")

        return jax.lax.fori_loop(0, -(-count // group), several, (out, pool))

    def _sequential(
        self, tokens: tuple[jax.Array, ...], out: jax.Array, pool: jax.Array, rows: StateRows
    ) -> tuple[jax.Array, jax.Array]:
        """One row after the other, one token of it after the other."""

        def one_row(row: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            out, pool = carry

            def one(t: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                out, state = carry
                arguments = _wide(jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, t, 1), tokens))
                said, state = self.one_token(state, *arguments)
                return jax.lax.dynamic_update_slice_in_dim(out, said.astype(out.dtype), t, 0), state

            first = rows.offsets[row]
            state = jax.lax.dynamic_slice_in_dim(pool, rows.slots[row], 1)
            state = _begun(state, rows.starts[row][None] == 0, out.shape[1:3])
            out, state = jax.lax.fori_loop(first, first + rows.counts[row], one, (out, state))
            state = state.reshape(1, *pool.shape[1:])
            return out, jax.lax.dynamic_update_slice_in_dim(pool, state, rows.targets[row], 0)

        there = jnp.where(rows.counts > 0, jnp.arange(1, 1 + len(rows.counts)), 0)
        return jax.lax.fori_loop(0, jnp.max(there), one_row, (out, pool))

    def _tiles(
        self, tokens: tuple[jax.Array, ...], out: jax.Array, pool: jax.Array, rows: StateRows, tile: int
    ) -> tuple[jax.Array, jax.Array]:
        """Rows of several tokens, tile by tile; lane i stands at a position i more than a multiple of `tile`."""
        T = out.shape[0]
        lead = rows.starts % tile
        num_tiles = jnp.where(rows.counts > 1, -(-(lead + rows.counts) // tile), 0)
        ends = jnp.cumsum(num_tiles)
        lane = jnp.arange(tile, dtype=jnp.int32)

        def padded(x: jax.Array) -> jax.Array:  # [T + 2 tile, ...]: a tile lies inside wherever it begins
            return jnp.pad(x, ((tile, tile), *((0, 0),) * (x.ndim - 1)))

        def one(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            out, pool = carry
            row = jnp.searchsorted(ends, i, side="right", method="compare_all")
            done = (i - (ends[row] - num_tiles[row])) * tile - lead[row]  # tokens of the row before lane 0
            own = (lane + done >= 0) & (lane + done < rows.counts[row])
            first = rows.offsets[row] + done + tile

            def load(x: jax.Array) -> jax.Array:
                part = jax.lax.dynamic_slice_in_dim(x, first, tile)
                return jnp.where(own.reshape(-1, *(1,) * (x.ndim - 1)), part, jnp.zeros_like(part))

            begins = (rows.starts[row] == 0) & (done <= 0)
            state = _begun(jax.lax.dynamic_slice_in_dim(pool, rows.slots[row], 1), begins[None], out.shape[1:3])
            said, state = self.one_tile(state[0], *_wide(jax.tree.map(load, wide)))
            before = jax.lax.dynamic_slice_in_dim(out, first, tile)
            said = jnp.where(own[:, None, None, None], said.astype(out.dtype), before)
            out = jax.lax.dynamic_update_slice_in_dim(out, said, first, 0)
            return out, jax.lax.dynamic_update_slice_in_dim(pool, state.reshape(1, *pool.shape[1:]), rows.slots[row], 0)

        wide = jax.tree.map(padded, tokens)
        out, pool = jax.lax.fori_loop(0, ends[-1], one, (padded(out), pool))
        return out[tile : tile + T], pool


def _grouped(tokens: tuple[jax.Array, ...], num_shared: int) -> tuple[jax.Array, ...]:
    """The tokens with heads as [K, G] in place of [K * G]; those of groups are left."""
    T, K, _ = tokens[0].shape
    of_heads = (x.reshape(T, K, x.shape[1] // K, *x.shape[2:]) for x in tokens[num_shared:])
    return *tokens[:num_shared], *of_heads


def _wide(tokens: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """All in float32."""
    return tuple(x.astype(jnp.float32) for x in tokens)


def _begun(states: jax.Array, begins: jax.Array, heads: tuple[int, ...]) -> jax.Array:
    """[n, K, G, ...]: the states [n, K * G, ...] of rows, zeros where one begins; heads: (K, G).

    The barrier has XLA read them once: else it reads a slot again after writing it, and copies the whole pool.
    """
    states = jnp.where(begins[:, None, None, None], jnp.zeros_like(states), states)
    return jax.lax.optimization_barrier(states).reshape(states.shape[0], *heads, *states.shape[2:])
