"""StepPlan: the host's order for one step, integers only; the one bridge from host to device.

A plan holds one `ShardPlan` for each data shard, along "dp" of the mesh. Ids are local to
their shard and id 0 of every pool is null. Rows have the order of their tokens in the step: row r
computes `counts[r]` tokens at positions `starts[r] ...`; decodes come first. A *place* is where a token is sampled: one
of each row, whether it samples or not, and one more behind each drafted token. A step with a *horizon* has several
forwards, of rows that decode alone: each draws the token that the next one computes, and a row has a place for each.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

MAX_HORIZON = 8  # forwards of one launch
HORIZONS = (1, 4, MAX_HORIZON)  # forwards among which a scheduler chooses


class Draw(enum.IntEnum):
    """The demands of a row on its draws: each kind serves those before it as well, with equal bits."""

    GREEDY = 0  # the largest logit alone
    PLAIN = 1  # temperature, seed, and the log-probability of the drawn token
    FULL = 2  # anything


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """An order to copy the content of one id to another, on the device or between it and the host.

    pool: the index of the blocks' cache group; one past the last for recurrent states; two past it for the hidden
    states of cached prompts, which steps copy themselves.
    """

    pool: int
    source: int
    target: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EncodeOrder:
    """An order to encode an image of a request before the step. runs: of the pool of embeddings, that it fills."""

    request: int
    image: int
    runs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageTokensPlan:
    """Embeddings and positions of a step's tokens; empty in a step without images."""

    slots: np.ndarray  # [tokens] int32, of the pool of embeddings, 0 for tokens of text
    positions: np.ndarray  # [3, tokens] int32, rotary: time, row and column
    ends: np.ndarray  # [tokens] int32, position behind the last token of an image that is seen whole, 0 for others


NO_IMAGE_TOKENS = ImageTokensPlan(
    slots=np.zeros(0, np.int32), positions=np.zeros((3, 0), np.int32), ends=np.zeros(0, np.int32)
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardPlan:
    """The rows of one data shard in one step."""

    slots: np.ndarray  # [rows] int32, the row slot: its sampling parameters and token ids on the device
    starts: np.ndarray  # [rows] int32, position of the first token the row computes
    counts: np.ndarray  # [rows] int32, tokens the row computes
    samples: np.ndarray  # [rows] int32, of how many of its last tokens the logits are sampled: 0, 1, or drafts + 1
    block_tables: tuple[np.ndarray, ...]  # per cache group: [rows, width] int32, padded with 0
    state_slots: np.ndarray  # [rows] int32, recurrent state, 0 where the model has none
    source_slots: np.ndarray  # [rows] int32, prompt slot to sample from instead of computing, 0 for none
    target_slots: np.ndarray  # [rows] int32, prompt slot that keeps the last token's hidden state, 0 for none
    adapter_ids: np.ndarray  # [rows] int32, slot of the adapter that the row names, 0 for none
    rope_shifts: np.ndarray  # [rows] int32, rotary position less position, where no token of the row is of an image
    clip_slots: np.ndarray  # [rows] int32, keys and values of the clip that the row's layers attend to, 0 for none
    masked: np.ndarray  # [rows] bool, where a mask says which tokens the row may draw
    draw: Draw = Draw.FULL  # the least that serves all rows; FULL with drafts, and where prompt slots are read or kept
    drafts: tuple[int, ...] = ()  # of each row the tokens at its last samples - 1 positions
    horizon: int = 1  # places of a row; MAX_HORIZON where it computes one token in each of `counts` forwards
    images: ImageTokensPlan = NO_IMAGE_TOKENS
    spills: tuple[Copy, ...] = ()  # from device blocks to host blocks, before all else
    loads: tuple[Copy, ...] = ()  # from host blocks to device blocks, after the spills
    copies_before: tuple[Copy, ...] = ()
    copies_after: tuple[Copy, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def num_drafts(self) -> np.ndarray:
        """[rows] int32: drafted tokens, or those of a horizon behind the first, among those that the row computes."""
        return np.maximum(self.samples - 1, 0)

    @property
    def num_places(self) -> int:
        return self.num_rows * self.horizon + len(self.drafts)

    @property
    def first_places(self) -> np.ndarray:
        """[rows] int32: the place of each row, the first where it has several."""
        if not self.drafts:
            return np.arange(0, self.num_rows * self.horizon, self.horizon, dtype=np.int32)
        drafts = self.num_drafts
        return np.arange(self.num_rows, dtype=np.int32) + (np.cumsum(drafts, dtype=np.int32) - drafts)

    def drafts_of(self, row: int) -> tuple[int, ...]:
        """The drafted tokens of a row."""
        end = int(self.num_drafts[: row + 1].sum())
        return self.drafts[end - int(self.num_drafts[row]) : end]

    @property
    def mask_ids(self) -> np.ndarray:
        """[places] int32: the id of each place's mask, 0 where everything is allowed."""
        masked = np.repeat(self.masked, 1 + self.num_drafts) if self.drafts else self.masked
        return masked * np.arange(1, 1 + self.num_places, dtype=np.int32)

    def one_token_rows(self) -> ShardPlan:
        """This plan with each token as a row of its own, which draws."""
        rows = np.repeat(np.arange(self.num_rows), self.counts)
        behind = np.cumsum(self.counts)[rows] - 1 - np.arange(len(rows))
        fields = ("slots", "state_slots", "source_slots", "target_slots", "adapter_ids", "rope_shifts")
        fields = (*fields, "clip_slots", "masked")
        return dataclasses.replace(
            self,
            **{field: getattr(self, field)[rows] for field in fields},
            starts=(self.starts + self.counts)[rows] - 1 - behind,
            counts=np.ones(len(rows), np.int32),
            samples=np.ones(len(rows), np.int32),
            block_tables=tuple(table[rows] for table in self.block_tables),
            drafts=(),
        )

    @property
    def is_adapted(self) -> bool:
        return bool(np.any(self.adapter_ids))

    @property
    def has_images(self) -> bool:
        return len(self.images.slots) > 0

    @property
    def draws_under_masks(self) -> bool:
        return bool(np.any(self.masked[self.samples > 0]))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepPlan:
    """One step: its number, what to write into row slots before it, and the rows of each shard."""

    step: int
    shards: tuple[ShardPlan, ...]
    admitted: tuple[tuple[int, int, int], ...] = ()  # (shard, slot, request id): slot records to write before the step
    encodes: tuple[EncodeOrder, ...] = ()

    @property
    def is_adapted(self) -> bool:
        """Whether a row names an adapter."""
        return any(shard.is_adapted for shard in self.shards)

    @property
    def has_images(self) -> bool:
        """Whether a token is of an image."""
        return any(shard.has_images for shard in self.shards)

    @property
    def draw(self) -> Draw:
        """The least that serves the rows of all shards."""
        return max(shard.draw for shard in self.shards)

    @property
    def has_drafts(self) -> bool:
        """Whether a row computes a drafted token."""
        return any(len(shard.drafts) for shard in self.shards)

    def in_rows_of_one(self) -> StepPlan | None:
        """This plan with each token as a row; None where a row has more tokens than places, or no place."""
        if any((shard.counts != shard.num_drafts + 1).any() for shard in self.shards):
            return None
        return dataclasses.replace(self, shards=tuple(shard.one_token_rows() for shard in self.shards))

    @property
    def num_tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard.num_tokens for shard in self.shards)
