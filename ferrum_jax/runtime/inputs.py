"""The packed inputs of a step's halves: int32 arrays, written by the host and cut up on the device.

One literal table says what stands in each, and both sides read that table. Rows beyond the plan are zero:
slot 0, count 0, null blocks. The parts of several data shards stand one after the other, and each device gets its own.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.core.plan import Copy, ShardPlan
from ferrum_jax.runtime.buckets import Bucket
from ferrum_jax.runtime.pools.copies import COPY_BLOB_SIZE, MAX_COPIES
from ferrum_jax.sampling_params import MAX_NAMED_IDS

_FORWARD_FIELDS = ("slots", "starts", "counts", "samples", "state_slots", "adapter_ids", "rope_shifts", "clip_slots")
# For each token in an imaged bucket: its embedding slot, where the image ends that it sees, three rotary positions.
_IMAGE_FIELDS = 5
_SAMPLE_FIELDS = ("slots", "positions", "places", "samples", "source_slots", "target_slots", "mask_ids")
_SCORE_FIELDS = ("places", "following", "slots", "positions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardInputs:
    """A forward's view of a plan, as traced arrays."""

    slots: jax.Array  # [R] int32
    starts: jax.Array  # [R] int32
    counts: jax.Array  # [R] int32, 0 for padding rows
    samples: jax.Array  # [R] int32
    state_slots: jax.Array  # [R] int32
    adapter_ids: jax.Array  # [R] int32, 0 for none
    rope_shifts: jax.Array  # [R] int32
    clip_slots: jax.Array  # [R] int32, 0 for none
    block_tables: tuple[jax.Array, ...]  # per cache group [R, M] int32
    image_slots: jax.Array | None = None  # [T] int32, in an imaged bucket
    seen_ends: jax.Array | None = None  # [T] int32, likewise; 0 where a token sees what is before it alone
    rope_positions: jax.Array | None = None  # [3, T] int32, likewise


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleInputs:
    """Sampling's view of a plan, as traced arrays: R places, several for a row with drafts."""

    slots: jax.Array  # [R] int32
    positions: jax.Array  # [R] int32, that the drawn token takes
    places: jax.Array  # [R] int32, the token before it among those of the forward
    samples: jax.Array  # [R] int32
    source_slots: jax.Array  # [R] int32
    target_slots: jax.Array  # [R] int32
    mask_ids: jax.Array  # [R] int32, 0 allows everything
    num_rows: jax.Array  # [] int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreInputs:
    """The tokens of a tile of prompt log-probabilities, as traced arrays."""

    places: jax.Array  # [n] int32, the token among those of the forward
    following: jax.Array  # [n] int32, the prompt's next token
    slots: jax.Array  # [n] int32, its row
    positions: jax.Array  # [n] int32, that the next token takes
    tops: jax.Array  # [] int32, 1 where the most likely tokens are asked for too
    names: jax.Array  # [] int32, 1 where tokens are named
    named: jax.Array  # [n, MAX_NAMED_IDS] int32


def forward_words(bucket: Bucket, num_groups: int) -> int:
    """Words of the packed input of a bucket's forward."""
    of_tokens = _IMAGE_FIELDS * bucket.num_tokens if bucket.imaged else 0
    return bucket.num_rows * (len(_FORWARD_FIELDS) + num_groups * bucket.table_width) + of_tokens


def sample_words(num_rows: int) -> int:
    """Words of the packed input of what samples so many rows."""
    return 1 + num_rows * len(_SAMPLE_FIELDS)


def score_words(num_tokens: int) -> int:
    """Words of the packed input of a tile of so many tokens."""
    return 2 + num_tokens * (len(_SCORE_FIELDS) + MAX_NAMED_IDS)


def place_words(num_places: int) -> int:
    """Words of the packed input of what predicts one token more at this many places."""
    return 1 + num_places


def pack_forward(plans: Sequence[ShardPlan], bucket: Bucket) -> np.ndarray:
    """[shards * forward_words] int32, a fresh array: jax reads a numpy argument after the call has returned."""
    blob = np.zeros((len(plans), forward_words(bucket, len(plans[0].block_tables))), np.int32)
    R, M = bucket.num_rows, bucket.table_width
    for plan, part in zip(plans, blob, strict=True):
        rows = plan.num_rows
        at = 0
        for field in _FORWARD_FIELDS:
            part[at : at + rows] = getattr(plan, field)
            at += R
        for table in plan.block_tables:
            part[at : at + R * M].reshape(R, M)[:rows, : table.shape[1]] = table
            at += R * M
        if bucket.imaged:
            part[at:].reshape(_IMAGE_FIELDS, -1)[:, : plan.num_tokens] = _of_tokens(plan)
    return blob.reshape(-1)


def _of_tokens(plan: ShardPlan) -> np.ndarray:
    """[_IMAGE_FIELDS, tokens] int32 of a plan, which may have no image."""
    if plan.has_images:
        return np.concatenate([plan.images.slots[None], plan.images.ends[None], plan.images.positions])
    firsts = np.cumsum(plan.counts) - plan.counts
    positions = np.repeat(plan.starts + plan.rope_shifts - firsts, plan.counts) + np.arange(plan.num_tokens)
    none = np.zeros_like(positions)
    return np.stack([none, none, positions, positions, positions])


def pack_sample(plans: Sequence[ShardPlan], num_rows: int) -> np.ndarray:
    """[shards * sample_words] int32, a fresh array as in `pack_forward`."""
    blob = np.zeros((len(plans), sample_words(num_rows)), np.int32)
    for plan, part in zip(plans, blob, strict=True):
        part[0] = plan.num_places
        fields = part[1:].reshape(len(_SAMPLE_FIELDS), num_rows)[:, : plan.num_places]
        for field, value in zip(fields, (*_of_places(plan), plan.mask_ids), strict=True):
            field[:] = value
    return blob.reshape(-1)


def pack_places(plans: Sequence[ShardPlan], num_places: int) -> np.ndarray:
    """[shards * place_words] int32: how many places there are, and the token before each among those of the forward."""
    blob = np.zeros((len(plans), place_words(num_places)), np.int32)
    for plan, part in zip(plans, blob, strict=True):
        part[0] = plan.num_places
        part[1 : 1 + plan.num_places] = _of_places(plan)[_SAMPLE_FIELDS.index("places")]
    return blob.reshape(-1)


def _of_places(plan: ShardPlan) -> Sequence[np.ndarray]:
    """Sampling's inputs of each place, in the order of its fields, but for masks."""
    last = np.maximum(np.cumsum(plan.counts) - 1, 0)  # a row that computes nothing samples from a prompt slot
    of_prompts = plan.source_slots, plan.target_slots
    values = plan.slots, plan.starts + plan.counts, last, plan.samples > 0, *of_prompts
    return _by_place(plan, values) if len(plan.drafts) else values


def _by_place(plan: ShardPlan, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """`_of_places` from values of rows [rows]: each place draws one token before the place after it.

    The entry of a prompt is its last token's, which is the row's first place.
    """
    drafts, first = plan.num_drafts, plan.first_places
    rows = np.repeat(np.arange(plan.num_rows), 1 + drafts)
    behind = drafts[rows] - (np.arange(plan.num_places) - first[rows])
    slots, positions, last, samples, sources, targets = (value[rows] for value in values)
    targets = np.where(behind == drafts[rows], targets, 0)
    return slots, positions - behind, last - behind, samples, sources, targets


def pack_drafts(plans: Sequence[ShardPlan], size: int, beyond: int) -> np.ndarray:
    """[shards * 3 * size] int32: slot, position and token of each drafted token; the rest in a slot beyond the pool."""
    blob = np.zeros((len(plans), 3, size), np.int32)
    blob[:, 0] = beyond
    for plan, part in zip(plans, blob, strict=True):
        drafts = plan.num_drafts
        rows = np.repeat(np.arange(plan.num_rows), drafts)
        behind = (np.cumsum(drafts)[rows] if len(rows) else rows) - np.arange(len(rows))
        part[:, : len(rows)] = plan.slots[rows], (plan.starts + plan.counts)[rows] - behind, plan.drafts
    return blob.reshape(-1)


def pack_score(
    parts: Sequence[np.ndarray], num_tokens: int, *, tops: bool, named: Sequence[np.ndarray] | None = None
) -> np.ndarray:
    """[shards * score_words] int32 of each shard's tokens [fields, n], at most `num_tokens` of them.

    named: of each shard, [n, MAX_NAMED_IDS].
    """
    blob = np.zeros((len(parts), score_words(num_tokens)), np.int32)
    at = 2 + len(_SCORE_FIELDS) * num_tokens
    for index, (values, part) in enumerate(zip(parts, blob, strict=True)):
        part[:2] = tops, named is not None
        part[2:at].reshape(-1, num_tokens)[:, : values.shape[1]] = values
        if named is not None:
            part[at:].reshape(num_tokens, -1)[: values.shape[1]] = named[index]
    return blob.reshape(-1)


def pack_copies(copies: Sequence[Sequence[Copy]]) -> list[np.ndarray]:
    """[shards * COPY_BLOB_SIZE] int32 for each call that the copies of each shard take: see `cache.copies`."""
    blobs = []
    for start in range(0, max(map(len, copies)), MAX_COPIES):
        blob = np.zeros((len(copies), COPY_BLOB_SIZE), np.int32)
        for shard, all_of_shard in enumerate(copies):
            part = all_of_shard[start : start + MAX_COPIES]
            blob[shard, 0] = len(part)
            blob[shard, 1 : 1 + 3 * len(part)] = [c for copy in part for c in (copy.pool, copy.source, copy.target)]
        blobs.append(blob.reshape(-1))
    return blobs


def unpack_forward(blob: jax.Array, bucket: Bucket, num_groups: int) -> ForwardInputs:
    """The fields of a forward's packed input (on the device)."""
    R, M = bucket.num_rows, bucket.table_width
    at = len(_FORWARD_FIELDS) * R
    fields = dict(zip(_FORWARD_FIELDS, blob[:at].reshape(-1, R), strict=True))
    tables = tuple(blob[at + g * R * M : at + (g + 1) * R * M].reshape(R, M) for g in range(num_groups))
    if not bucket.imaged:
        return ForwardInputs(block_tables=tables, **fields)
    slots, ends, *positions = blob[at + num_groups * R * M :].reshape(_IMAGE_FIELDS, -1)
    of_images = {"image_slots": slots, "seen_ends": ends, "rope_positions": jnp.stack(positions)}
    return ForwardInputs(block_tables=tables, **of_images, **fields)


def unpack_sample(blob: jax.Array, num_rows: int) -> SampleInputs:
    """The fields of the packed input of what samples (on the device)."""
    fields = dict(zip(_SAMPLE_FIELDS, blob[1:].reshape(-1, num_rows), strict=True))
    return SampleInputs(num_rows=blob[0], **fields)


def unpack_score(blob: jax.Array, num_tokens: int) -> ScoreInputs:
    """The fields of the packed input of a tile of prompt log-probabilities (on the device)."""
    at = 2 + len(_SCORE_FIELDS) * num_tokens
    fields = dict(zip(_SCORE_FIELDS, blob[2:at].reshape(-1, num_tokens), strict=True))
    return ScoreInputs(tops=blob[0], names=blob[1], named=blob[at:].reshape(num_tokens, -1), **fields)
