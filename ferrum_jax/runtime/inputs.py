"""The packed input of a step: one int32 array, written by the host and cut up on the device.

One literal table says what stands in it, and both sides read that table. Rows beyond the plan are zero:
slot 0, count 0, null blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from ferrum_jax.plan import Copy, ShardPlan
from ferrum_jax.runtime.buckets import Bucket

_ROW_FIELDS = ("slots", "starts", "counts", "samples", "state_slots", "source_slots")
_COPY_FIELDS = ("copies_before", "copies_after")  # at most one of each for a row: (pool, source, target)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What the device sees of a plan, as traced arrays."""

    slots: jax.Array  # [R] int32
    starts: jax.Array  # [R] int32
    counts: jax.Array  # [R] int32, 0 for padding rows
    samples: jax.Array  # [R] int32
    state_slots: jax.Array  # [R] int32
    source_slots: jax.Array  # [R] int32
    copies_before: jax.Array  # [R, 3] int32, zero rows copy null to null
    copies_after: jax.Array  # [R, 3] int32
    block_tables: tuple[jax.Array, ...]  # per cache group [R, M] int32
    num_rows: jax.Array  # [] int32


def blob_size(bucket: Bucket, num_groups: int) -> int:
    """Words of the packed input of a bucket."""
    return 1 + bucket.num_rows * (len(_ROW_FIELDS) + 3 * len(_COPY_FIELDS) + num_groups * bucket.table_width)


def pack(plan: ShardPlan, bucket: Bucket) -> np.ndarray:
    """[blob_size] int32, a fresh array: jax reads a numpy argument after the call has returned."""
    R, M = bucket.num_rows, bucket.table_width
    blob = np.zeros(blob_size(bucket, len(plan.block_tables)), np.int32)
    rows = plan.num_rows
    blob[0] = rows
    at = 1
    for field in _ROW_FIELDS:
        blob[at : at + rows] = getattr(plan, field)
        at += R
    for field in _COPY_FIELDS:
        copies: Sequence[Copy] = getattr(plan, field)
        assert len(copies) <= R, f"{len(copies)} {field} in a bucket of {R} rows"
        for i, copy in enumerate(copies):
            blob[at + 3 * i : at + 3 * i + 3] = (copy.pool, copy.source, copy.target)
        at += 3 * R
    for table in plan.block_tables:
        blob[at : at + R * M].reshape(R, M)[:rows, : table.shape[1]] = table
        at += R * M
    return blob


def unpack(blob: jax.Array, bucket: Bucket, num_groups: int) -> StepInputs:
    """The fields of a packed input (on the device, inside the step)."""
    R, M = bucket.num_rows, bucket.table_width
    at = 1
    fields: dict[str, jax.Array] = {}
    for field in _ROW_FIELDS:
        fields[field] = blob[at : at + R]
        at += R
    for field in _COPY_FIELDS:
        fields[field] = blob[at : at + 3 * R].reshape(R, 3)
        at += 3 * R
    tables = tuple(blob[at + g * R * M : at + (g + 1) * R * M].reshape(R, M) for g in range(num_groups))
    return StepInputs(block_tables=tables, num_rows=blob[0], **fields)
