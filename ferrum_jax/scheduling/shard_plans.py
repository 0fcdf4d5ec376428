"""Shard plans: the rows that were chosen for a step, as the arrays of its order."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ferrum_jax.plan import ShardPlan
from ferrum_jax.request import Request
from ferrum_jax.scheduling.cache_manager import CacheManager


def build_shard(
    cache: CacheManager, slots: np.ndarray, starts: np.ndarray, chunks: list[tuple[Request, int]]
) -> ShardPlan:
    """The plan of decodes, at slots and positions [rows], and then of chunks, each of so many tokens.

    What the cache keeps of the chunks and moves for them is ordered with it.
    """
    counts = np.ones(len(slots), np.int32)
    samples = counts
    if chunks:
        lengths = [count for _, count in chunks]
        ends = [request.num_computed + count == len(request.token_ids) for request, count in chunks]
        slots = np.concatenate([slots, np.array([request.slot for request, _ in chunks], np.int32)])
        starts = np.concatenate([starts, np.array([request.num_computed for request, _ in chunks], np.int32)])
        counts, samples = (np.concatenate([counts, np.array(tail, np.int32)]) for tail in (lengths, ends))
    none = np.zeros(len(slots), np.int32)
    for request, count in chunks:
        cache.keep(request, request.num_computed + count)
    transfers = cache.take_transfers()
    return ShardPlan(
        slots=slots,
        starts=starts,
        counts=counts,
        samples=samples,
        block_tables=cache.blocks.gather(slots),
        state_slots=cache.state_slots(slots),
        source_slots=_by_row(transfers.sources, slots) if transfers.sources else none,
        target_slots=_by_row(transfers.targets, slots) if transfers.targets else none,
        spills=transfers.spills,
        loads=transfers.loads,
        copies_before=tuple(transfers.copies_before),
        copies_after=tuple(transfers.copies_after),
    )


def _by_row(prompt_slots: Mapping[int, int], slots: np.ndarray) -> np.ndarray:
    """[rows] int32: the prompt slot of each row, 0 where it has none."""
    return np.array([prompt_slots.get(slot, 0) for slot in slots.tolist()], np.int32)
