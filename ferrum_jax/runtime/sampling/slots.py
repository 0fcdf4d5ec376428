"""The pool of row records on the device, `slots: [S, RECORD_WORDS + L] int32`.

All functions are pure and run under jit; those that return slots are meant to be compiled with slots
donated, and then write in place.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ferrum_jax.runtime.sampling.record_words import ADAPTER, NUM_PARAMETERS, RECORD_WORDS


def write_slot(slots: jax.Array, slot: jax.Array, record: jax.Array) -> jax.Array:
    """The pool with `record` [W + L] at `slot` (int32 scalar); as it is where that is beyond the pool."""
    return slots.at[slot].set(record, mode="drop")


def append_tokens(
    slots: jax.Array,  # [S, W + L] int32
    row_slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32, the absolute position each token takes
    token_ids: jax.Array,  # [R] int32
    active: jax.Array,  # [R] bool
) -> jax.Array:
    """The pool with each active row's token at its position; nothing is written for the others."""
    rows = jnp.where(active, row_slots, slots.shape[0])
    return slots.at[rows, RECORD_WORDS + positions].set(token_ids, mode="drop")


def read_tokens(slots: jax.Array, token_slots: jax.Array, positions: jax.Array) -> jax.Array:
    """The token id of each (slot, position): [T] int32. A position beyond the pool reads the last one."""
    return slots.at[token_slots, RECORD_WORDS + positions].get(mode="clip")


def read_parameters(slots: jax.Array, row_slots: jax.Array) -> jax.Array:
    """The parameter words of each row: [R, NUM_PARAMETERS] int32."""
    return read_words(slots, row_slots, 0, NUM_PARAMETERS)


def read_words(slots: jax.Array, row_slots: jax.Array, start: int, count: int) -> jax.Array:
    """Words [start, start + count) of each row's record: [R, count] int32.

    The words first, then the rows: of the whole pool XLA takes parts of rows one by one, in a loop on TPUs.
    """
    return slots[:, start : start + count].at[row_slots].get(mode="clip")


def read_adapters(slots: jax.Array, row_slots: jax.Array) -> jax.Array:
    """The adapter's slot of each row: [R] int32, 0 for none."""
    return read_words(slots, row_slots, ADAPTER, 1)[:, 0]


def as_float(words: jax.Array) -> jax.Array:
    """The float32 whose bits the int32 words are."""
    return lax.bitcast_convert_type(words, jnp.float32)
