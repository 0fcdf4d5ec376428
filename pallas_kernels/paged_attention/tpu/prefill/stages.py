"""Three stages of the TPU prefill kernel, which run as a pipeline over the parts of all items,

    keys      part p + 1    logits = q k^T, masked; tops              MXU
    softmax   part p        weights, running maximum and sum          VALU, EUP
    values    part p - 1    sums = sums * kept + weights v            MXU

and each stage's inputs are ready before its turn: within a stretch, the units wait for each other only at its begin and
end. Logits are in units of log2.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.tpu.prefill import math as prefill_math
from pallas_kernels.paged_attention.tpu.prefill.schedule import Tile
from pallas_kernels.paged_attention.tpu.prefill.stretch import Span, Stretch, any_key, every_key
from pallas_kernels.paged_attention.tpu.prefill.walk import Item, Walk


class ItemPart(NamedTuple):
    """Part `index` of an item, and which of the item's keys its queries see."""

    item: Item
    index: int
    span: Span


def begin(w: Walk, t, tile: Tile, first: Item) -> None:
    """Fills the pipeline of a query tile: keys of the first part, and zero weights for the values before it."""
    _keys(w, t, tile, ItemPart(first, 0, any_key(w.config)))
    pair = w.pair(w.config.parts - 1)
    w.buffers["weights"][pair] = jnp.zeros_like(w.buffers["weights"][pair])
    w.buffers["kept"][pair] = jnp.ones_like(w.buffers["kept"][pair])


def end(w: Walk, last: Item) -> None:
    """Values of the last part."""
    _values(w, ItemPart(last, w.config.parts - 1, every_key(w.config)))


def run_stretch(w: Walk, t, tile: Tile, stretch: Stretch, items: list[Item]) -> None:
    """Softmax of all items but the first and last, keys of the part that follows and values of the part before each.

    The order of the stages matters, because parts share buffers: each is read before it is filled again.
    """
    count = w.config.parts
    parts = [ItemPart(items[1 + i // count], i % count, span) for i, span in enumerate(stretch.spans)]
    parts = [ItemPart(items[0], count - 1, every_key(w.config)), *parts, ItemPart(items[-1], 0, stretch.ahead)]
    for before, part, ahead in zip(parts, parts[1:], parts[2:], strict=False):
        _values(w, before)
        _softmax(w, part)
        _keys(w, t, tile, ahead)


def _keys(w: Walk, t, tile: Tile, part: ItemPart) -> None:
    (j, step, head, chunk), index, (first, end) = part
    buffers, rows, keys, G = w.buffers, w.rows(index), pl.ds(0, end), w.shape.group
    q = buffers["q"][t & 1, pl.ds(head * G, G), w.tokens(chunk, index), :]
    logits = prefill_math.dot_keys(q.reshape(-1, w.shape.key_lanes), buffers["keys"][j & 1, step, head, keys, :])
    if w.scales is not None:
        logits = logits * buffers["scales"][j & 1, step, head, pl.ds(0, 1), keys]
    if w.cap is not None:
        logits = w.cap * jnp.tanh(logits)
    if first < end:
        seen = prefill_math.visible(
            (w.config.part_q, end - first),
            first_query=tile.position + chunk * w.config.chunk_q + index * w.config.part_q,
            first_key=w.start_of(part.item) + first,
            end_position=tile.end_position,
            window=w.window,
            chunked=w.chunked,
            causal=w.causal,
            ends=None if w.ends is None else buffers["ends"][t & 1, w.tokens(chunk, index), :],
        )
        unsure = logits[:, first:]
        unsure = jnp.where(seen[None], unsure.reshape(G, *seen.shape), prefill_math.HIDDEN).reshape(unsure.shape)
        logits = jnp.concatenate([logits[:, :first], unsure], axis=1) if first else unsure
    buffers["logits"][rows, keys] = logits
    buffers["tops"][w.pair(index)] = prefill_math.fold_lanes(logits, jnp.maximum)


def _softmax(w: Walk, part: ItemPart) -> None:
    (j, step, head, _), index, (_, end) = part
    buffers, rows, keys, at = w.buffers, w.rows(index), pl.ds(0, end), w.slot_of(part.item)
    weights, highest, kept = prefill_math.softmax_step(
        buffers["logits"][rows, keys], buffers["tops"][w.pair(index)], buffers["highest"][at, rows]
    )
    buffers["highest"][at, rows] = highest
    buffers["kept"][w.pair(index)] = kept
    if not w.config.sums_by_product:
        buffers["total"][at, rows] = buffers["total"][at, rows] * kept + prefill_math.fold_lanes(weights, jnp.add)
    if w.scales is not None:
        weights = weights * buffers["scales"][j & 1, step, head, pl.ds(1, 1), keys]
    buffers["weights"][w.pair(index), keys] = weights.astype(w.shape.dtype)


def _values(w: Walk, part: ItemPart) -> None:
    (j, step, head, _), index, (_, end) = part
    buffers, rows, keys, at = w.buffers, w.rows(index), pl.ds(0, end), w.slot_of(part.item)
    v, kept, lanes = buffers["values"][j & 3, step, head, keys, :], buffers["kept"][w.pair(index)], w.shape.value_lanes
    if w.config.sums_by_product:
        v = jnp.concatenate([v, jnp.ones((end, prefill_math.LANES), v.dtype)], axis=1)
    added = prefill_math.dot_values(buffers["weights"][w.pair(index), keys], v)
    buffers["sums"][at, rows] = buffers["sums"][at, rows] * prefill_math.repeat_lanes(kept, lanes) + added[:, :lanes]
    if w.config.sums_by_product:
        buffers["total"][at, rows] = buffers["total"][at, rows] * kept + added[:, lanes:]
