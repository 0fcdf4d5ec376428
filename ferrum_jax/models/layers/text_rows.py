"""Whole texts that stand end to end in one run of tokens, and attention among the tokens of each.

    tokens [T]   a a a b b c c c c . .      lengths [R] = 3 2 4 0, padding behind
    rows [R, S]  a a a _ / b b _ _ / ...    as attention sees them, S at least the longest

What is computed token by token has no padding but at the end. A row of attention is the same wherever its text stands.
"""

import jax
import jax.numpy as jnp

QUERY_TILE = 512  # queries whose scores exist at once, so that memory grows with the length and not with its square
_MASKED = -1e30  # finite: an empty row has no real key at all, and its softmax must not be NaN


class TextRows:
    """Where each of T tokens stands; made inside a traced function.

    lengths: [R] int32, their sum at most T. length: S, static. seconds: [R] int32, where the second text of a pair
    begins in its row; as long as the row where there is none.
    """

    def __init__(self, lengths: jax.Array, *, length: int, num_tokens: int, seconds: jax.Array | None = None) -> None:
        ends = jnp.cumsum(lengths)  # [R]
        starts, tokens = ends - lengths, jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.minimum(jnp.sum(tokens[:, None] >= ends[None, :], axis=1, dtype=jnp.int32), len(lengths) - 1)
        self.lengths = lengths
        self.positions = jnp.minimum(tokens - starts[row], length - 1)  # [T]; of padding they mean nothing
        self.is_second = jnp.zeros_like(tokens) if seconds is None else (self.positions >= seconds[row]).astype(int)
        self._is_real = jnp.arange(length)[None, :] < lengths[:, None]  # [R, S]
        self._sources = jnp.minimum(starts[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :], num_tokens - 1)
        self._places = row * length + self.positions  # [T]

    def spread(self, x: jax.Array) -> jax.Array:  # [T, ...] -> [R, S, ...]
        """Each text in a row of its own, zeros behind it: another text's NaN times a weight of 0 would be NaN."""
        rows = x[self._sources]
        return jnp.where(self._is_real.reshape(*self._is_real.shape, *[1] * (x.ndim - 1)), rows, 0)

    def join(self, rows: jax.Array) -> jax.Array:  # [R, S, ...] -> [T, ...]
        """The texts end to end again."""
        return rows.reshape(-1, *rows.shape[2:])[self._places]

    def attend(
        self,
        q: jax.Array,  # [T, N, H]
        k: jax.Array,  # [T, K, H]
        v: jax.Array,  # [T, K, H]
        *,
        scale: float,
        reach: int | None = None,
    ) -> jax.Array:  # [T, N, H]
        """Attention of each token to the tokens of its own text, at most `reach` before and behind it."""
        q, k, v = (self.spread(jnp.repeat(x, q.shape[1] // x.shape[1], axis=1)) for x in (q, k, v))
        return self.join(attend(q, k, v, self.lengths, scale=scale, reach=reach))


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, *, scale: float, reach: int | None = None
) -> jax.Array:
    """softmax(scale q kᵀ) v over the real keys of each row, at most `reach` positions away; softmax in float32.

    q, k, v: [R, S, N, H]; S is at most QUERY_TILE or a multiple of it. Returns [R, S, N, H] in q's dtype.
    """
    S = q.shape[1]
    keys = jnp.arange(S)[None, None, None, :]
    real = keys < lengths[:, None, None, None]  # [R, 1, 1, S]

    def one_tile(q: jax.Array, start: jax.Array | int) -> jax.Array:  # [R, tile, N, H]
        seen = real
        if reach is not None:
            places = start + jnp.arange(q.shape[1])[None, None, :, None]
            seen = real & (jnp.abs(places - keys) <= reach)
        scores = jnp.einsum("RTNH,RSNH->RNTS", q, k, preferred_element_type=jnp.float32) * scale
        weights = jax.nn.softmax(jnp.where(seen, scores, _MASKED), axis=-1).astype(v.dtype)
        return jnp.einsum("RNTS,RSNH->RTNH", weights, v)

    if S <= QUERY_TILE:
        return one_tile(q, 0)
    R, _, N, H = q.shape
    tiles = jnp.moveaxis(q.reshape(R, S // QUERY_TILE, QUERY_TILE, N, H), 1, 0)
    starts = jnp.arange(S // QUERY_TILE) * QUERY_TILE
    return jnp.moveaxis(jax.lax.map(lambda tile: one_tile(*tile), (tiles, starts)), 0, 1).reshape(q.shape)
