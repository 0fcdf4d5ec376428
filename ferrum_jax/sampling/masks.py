"""Masks: which tokens a row may draw, as bits, in a pool on the device; id 0 allows everything.

A mask is ceil(V / 32) words; bit i of word w stands for token 32 w + i. Rows without one run the same executable, in
which what masks do stands behind `lax.cond`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

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
