"""What an engine counts about reuse: exact counters since its start, and gauges of this moment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(kw_only=True, slots=True)
class ReuseMetrics:
    """Counters are raised where the thing happens; gauges are written by `CacheManager.metrics`.

    A lookup is a request's first admission, if it asked for hits; it hits when at least one block was found. hit +
    missed tokens are all tokens of such admissions. A preempted row that is admitted again finds what it computed
    itself, so its tokens are counted apart: resumed where they were found, recomputed where they were not. A refusal is
    an admission put off because blocks were missing. A prompt hit computed no token. Units: tokens, blocks of
    `block_size` tokens, bytes.
    """

    enabled: bool
    block_size: int
    kv_dtype: str
    # counters
    lookups: int = 0
    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    missed_tokens: int = 0
    saved_prefill_tokens: int = 0  # the hit tokens: prompt tokens that were never computed for their request
    resumed_tokens: int = 0
    recomputed_tokens: int = 0
    prompt_hits: int = 0  # hits of a whole prompt with its last hidden state
    hit_blocks: int = 0
    published_blocks: int = 0
    twins_merged: int = 0
    left_behind_blocks: int = 0  # blocks that running rows gave back behind a sliding window
    copied_blocks: int = 0  # on the device: partial tails, kept for a repeat or taken by one, and recurrent states
    evictions: int = 0
    prompt_evictions: int = 0  # of last hidden states
    snapshot_evictions: int = 0
    host_hits: int = 0  # admissions that took a block from host memory
    spilled_blocks: int = 0  # copied to host memory
    loaded_blocks: int = 0  # copied back
    host_evictions: int = 0  # blocks that host memory gave up
    revivals: int = 0
    refusals: int = 0
    preemptions: int = 0
    # gauges
    live: int = 0
    cached: int = 0
    clean: int = 0
    peak_live: int = 0
    entries: int = 0  # keyed blocks, live or cached
    cached_prompts: int = 0  # last hidden states that are kept
    bytes: int = 0  # of the keyed blocks
    snapshots: int = 0  # of recurrent states
    snapshot_bytes: int = 0
    host_entries: int = 0  # blocks that host memory keeps
    host_bytes: int = 0  # of those
    pinned: int = 0

    def snapshot(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        return dataclasses.asdict(self)


def total(parts: Sequence[ReuseMetrics]) -> ReuseMetrics:
    """The sum over data shards, of gauges and peaks too."""
    counts = [field.name for field in dataclasses.fields(ReuseMetrics) if field.default == 0]
    return dataclasses.replace(parts[0], **{name: sum(getattr(part, name) for part in parts) for name in counts})
