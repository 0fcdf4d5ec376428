"""Counters of reuse and of drafts: exact since the engine's start, with gauges of this moment."""

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


MEDIA = {  # counters of `LLM.stats` about what models see and hear, and what each counts
    "images_encoded": "images that the tower was asked for",
    "image_hits": "images whose embeddings were found",
    "video_groups_encoded": "groups of a video's frames that the tower was asked for",
    "video_group_hits": "groups of frames whose embeddings were found",
    "sounds_encoded": "sounds, or windows of one, that the encoder was asked for",
    "sound_hits": "sounds, or windows of one, whose states were found",
    "sound_s": "seconds of sound, of those encoded and those found",
}


@dataclasses.dataclass(kw_only=True, slots=True)
class SpeculationCounts:
    """Counts of drafted and accepted tokens.

    steps_with_drafts: steps in which a row had a draft, counted for each row, so that accepted tokens over them are the
    mean accepted length. drafted_by_position, accepted_by_position: the same tokens by their place in a draft.
    """

    steps_with_drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_position: list[int] = dataclasses.field(default_factory=list)
    accepted_by_position: list[int] = dataclasses.field(default_factory=list)

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Counts a row's step. num_accepted: how many of its draft's tokens stand, the first ones."""
        assert 0 <= num_accepted <= num_drafted, f"{num_accepted} of {num_drafted} drafted tokens were accepted"
        if not num_drafted:
            return
        self.steps_with_drafts += 1
        self.drafted_tokens += num_drafted
        self.accepted_tokens += num_accepted
        _raise_first(self.drafted_by_position, num_drafted)
        _raise_first(self.accepted_by_position, num_accepted)

    def snapshot(self) -> dict[str, Any]:
        """All of it under the keys of `LLM.stats`; both lists are as long as the longest draft."""
        missing = len(self.drafted_by_position) - len(self.accepted_by_position)
        return {
            "speculation_steps": self.steps_with_drafts,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "drafted_by_position": list(self.drafted_by_position),
            "accepted_by_position": self.accepted_by_position + [0] * missing,
        }


def _raise_first(counts: list[int], num_positions: int) -> None:
    """Raises the counts of the first positions by one."""
    counts += [0] * (num_positions - len(counts))
    for position in range(num_positions):
        counts[position] += 1
