"""Masks: which tokens a row may draw, as bits, in a pool on the device; id 0 allows everything.

A mask is ceil(V / 32) words; bit i of word w stands for token 32 w + i. Rows without one run the same executable, in
which what masks do stands behind `lax.cond`. What a row could draw in the end has the
same form.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ferrum_jax.io.ints import ceil_div

ALL = -1  # a word that allows each of its tokens


def write_masks(masks: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """The pool [S, words] with `rows` [n, words] at `ids` [n]; an id beyond the pool writes nothing. Donate `masks`."""
    return masks.at[ids].set(rows, mode="drop")


def allow(logits: jax.Array, masks: jax.Array, mask_ids: jax.Array) -> jax.Array:
    """Logits [R, V] with minus infinity where a row's mask, `masks[mask_ids]`, has a zero; bit for bit elsewhere."""
    words = masks[mask_ids]
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :] & 1
    allowed = bits.reshape(len(words), -1)[:, : logits.shape[1]] == 1
    return jnp.where(allowed, logits, -jnp.inf)


def packed(allowed: jax.Array) -> jax.Array:
    """Masks [R, ceil(V / 32)] int32 of bools [R, V]; bits beyond the vocabulary are 0."""
    bits = jnp.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32))).reshape(len(allowed), -1, 32)
    words = jnp.sum(
        bits.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)[None, None, :], axis=2, dtype=jnp.uint32
    )
    return lax.bitcast_convert_type(words, jnp.int32)


def only(token_ids: jax.Array, vocabulary: int) -> jax.Array:
    """Masks [R, ceil(V / 32)] int32 that allow the one token of each row [R]; none where it is below 0."""
    words = jnp.arange(ceil_div(vocabulary, 32), dtype=jnp.int32)
    bit = jnp.int32(1) << (token_ids & 31)
    return jnp.where((token_ids >> 5)[:, None] == words[None, :], bit[:, None], 0)
