"""Edits of logits before a token is drawn: logit_bias, min_tokens, penalties, times. All are [R, V] float32 in and out.

Each function leaves the rows that did not ask for it bit for bit as they were.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ferrum_jax.runtime.sampling.record_words import (
    ASKS_BIAS,
    ASKS_COUNTS,
    ASKS_MIN_TOKENS,
    ASKS_REPETITION,
    ASKS_STAMPS,
    BIAS_IDS,
    BIAS_VALUES,
    FREQUENCY,
    MIN_TOTAL_TOKENS,
    NUM_BIAS,
    NUM_PROMPT_TOKENS,
    NUM_STOP_IDS,
    PRESENCE,
    REPETITION,
    STAMPS_FROM,
    STOP_IDS,
    STOP_ROOM,
)
from ferrum_jax.runtime.sampling.slots import as_float, read_tokens, read_words
from ferrum_jax.sampling_params import MAX_LOGIT_BIAS

_TILE_TOKENS = 32  # history tokens of each row per turn of the loop; all pairs of them are compared
_IN_PROMPT = 1 << 30  # mark in the counts of a token that the prompt holds


def add_bias(
    logits: jax.Array, slots: jax.Array, row_slots: jax.Array, words: jax.Array, flags: jax.Array
) -> jax.Array:
    """Logits with each row's logit_bias added. words: [R, NUM_PARAMETERS]; flags: [R], 0 for inactive rows."""
    count = jnp.where(flags & ASKS_BIAS != 0, words[:, NUM_BIAS], 0)
    ids = _listed(read_words(slots, row_slots, BIAS_IDS, MAX_LOGIT_BIAS), count, logits.shape[1])
    values = as_float(read_words(slots, row_slots, BIAS_VALUES, MAX_LOGIT_BIAS))
    # unique_indices: otherwise a TPU's compiler takes 5 s to make a sort
    return logits.at[_rows(logits), ids].add(values, mode="drop", unique_indices=True)


def forbids_stops(words: jax.Array, flags: jax.Array, positions: jax.Array) -> jax.Array:
    """[R] bool: the row does not have min_tokens tokens yet, so its stop ids may not be drawn."""
    return (flags & ASKS_MIN_TOKENS != 0) & (positions < words[:, MIN_TOTAL_TOKENS])


def mask_stops(
    logits: jax.Array, slots: jax.Array, row_slots: jax.Array, words: jax.Array, mask: jax.Array
) -> jax.Array:
    """Logits with -inf at the stop ids of the rows in `mask` ([R] bool)."""
    count = jnp.where(mask, words[:, NUM_STOP_IDS], 0)
    ids = _listed(read_words(slots, row_slots, STOP_IDS, STOP_ROOM), count, logits.shape[1])
    return logits.at[_rows(logits), ids].set(-jnp.inf, mode="drop")


def are_stops(token_ids: jax.Array, slots: jax.Array, row_slots: jax.Array) -> jax.Array:
    """[R] bool: the token [R] is one of its row's stop ids."""
    is_id = jnp.arange(STOP_ROOM)[None] < read_words(slots, row_slots, NUM_STOP_IDS, 1)
    return jnp.any(is_id & (read_words(slots, row_slots, STOP_IDS, STOP_ROOM) == token_ids[:, None]), axis=1)


def penalise(
    logits: jax.Array,  # [R, V] f32
    slots: jax.Array,
    row_slots: jax.Array,  # [R]
    words: jax.Array,  # [R, NUM_PARAMETERS]
    flags: jax.Array,  # [R]
    positions: jax.Array,  # [R]
) -> jax.Array:
    """Logits after repetition, then frequency and presence penalty.

    Repetition (of prompt and output): l / r where l > 0, l * r elsewhere. Then l - f * count - p * (count > 0)
    with the counts of the output alone.

    Source: Keskar et al. 2019, section 4.1 (repetition); OpenAI API reference (presence, frequency).
    """
    counts = _counts(logits, slots, row_slots, words, flags, positions)
    repeats = (flags & ASKS_REPETITION != 0)[:, None] & (counts > 0)
    penalty = as_float(words[:, REPETITION])[:, None]
    repeated = jnp.where(logits > 0, logits / penalty, logits * penalty)
    edited = jnp.where(repeats, jnp.minimum(repeated, jnp.finfo(jnp.float32).max), logits)
    output = (counts & (_IN_PROMPT - 1)).astype(jnp.float32)
    cost = as_float(words[:, FREQUENCY])[:, None] * output
    cost = cost + jnp.where(output > 0, as_float(words[:, PRESENCE])[:, None], 0.0)
    return jnp.where((flags & ASKS_COUNTS != 0)[:, None], edited - cost, edited)


def prefer_stamps(logits: jax.Array, words: jax.Array, flags: jax.Array) -> jax.Array:
    """Logits with -inf at all words of a row, ids below its first time, where all times are more likely than each word.

    Source: Radford et al. 2022 (Whisper), as in Hugging Face's WhisperTimeStampLogitsProcessor.
    """
    is_stamp = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :] >= words[:, STAMPS_FROM][:, None]
    shifted = logits - jnp.max(logits, axis=1, keepdims=True)
    stamps = jnp.log(jnp.sum(jnp.where(is_stamp, jnp.exp(shifted), 0.0), axis=1))
    likely = stamps > jnp.max(jnp.where(is_stamp, -jnp.inf, shifted), axis=1)
    drops = ((flags & ASKS_STAMPS != 0) & likely)[:, None] & ~is_stamp
    return jnp.where(drops, -jnp.inf, logits)


def _counts(
    logits: jax.Array,
    slots: jax.Array,
    row_slots: jax.Array,
    words: jax.Array,
    flags: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """[R, V] int32: how often the output holds the token, plus _IN_PROMPT if the prompt does.

    The work is bounded by the longest history among the rows that ask, not by max_model_len. There is only one loop
    with one scatter of unique ids, because a TPU's compiler takes four seconds for each scatter in a loop.
    """
    num_prompt = jnp.minimum(words[:, NUM_PROMPT_TOKENS], positions)
    start = jnp.where(flags & ASKS_REPETITION != 0, 0, num_prompt)
    length = jnp.where(flags & (ASKS_REPETITION | ASKS_COUNTS) != 0, positions - start, 0)
    rows, vocabulary = _rows(logits), logits.shape[1]
    place = jnp.arange(_TILE_TOKENS, dtype=jnp.int32)

    def count(tile: jax.Array, counts: jax.Array) -> jax.Array:
        offset = tile * _TILE_TOKENS + place[None, :]
        position = start[:, None] + offset
        ids = read_tokens(slots, row_slots[:, None], position)
        ids = jnp.where(offset < length[:, None], ids, vocabulary)
        equal = ids[:, :, None] == ids[:, None, :]  # [R, tile, tile]
        in_output = (position >= num_prompt[:, None])[:, None, :]
        times = jnp.sum(equal & in_output, axis=2, dtype=jnp.int32)
        marks = jnp.where(jnp.any(equal & ~in_output, axis=2), _IN_PROMPT, 0)
        comes_before = jnp.any(equal & (place[None, :] < place[:, None])[None], axis=2)
        found = jnp.where((ids < vocabulary) & ~comes_before, ids, vocabulary + place[None, :])
        before = counts.at[rows, found].get(mode="fill", fill_value=0)
        return counts.at[rows, found].set((before + times) | marks, mode="drop", unique_indices=True)

    num_tiles = (jnp.max(length) + _TILE_TOKENS - 1) // _TILE_TOKENS
    return lax.fori_loop(0, num_tiles, count, jnp.zeros(logits.shape, jnp.int32))


def _rows(logits: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]


def _listed(ids: jax.Array, count: jax.Array, vocabulary: int) -> jax.Array:
    """The first `count` ids of each row; the rest are different ids beyond the vocabulary, which a scatter drops."""
    place = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where(place < count[:, None], ids, vocabulary + place)
