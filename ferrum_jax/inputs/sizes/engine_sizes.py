"""Sizes of an engine, with which the host counts (EngineSizes), and bounds of a set of requests (Reach)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ferrum_jax.inputs.sizes.speculative import SpeculativeConfig, speculative_of
from ferrum_jax.io.ints import pool_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reach:
    """Upper bounds for the steps of a known set of requests: no executable is made for larger steps.

    num_rows: choices of all requests. num_tokens: all their tokens, in and out. request_tokens: those of the longest
    request; None if that is not known, or if block tables shall be as wide as max_model_len.
    """

    num_rows: int
    num_tokens: int
    request_tokens: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """Room in each of an engine's `num_shards` data shards. Null ids are not counted.

    group_blocks, windows: for each cache group, its blocks, and how many positions a query sees, None for all.
    block_bytes, host_block_bytes: for each group, bytes of a block in all its layers, for the metrics; may be empty.
    num_host_blocks: blocks of each group in host memory; 0 without a host tier. max_snapshots: states kept beside the
    rows' own; None for a model without recurrent layers. state_bytes: bytes of one recurrent state.
    num_image_runs: runs of image embeddings, shared by all shards; 0 where the engine takes no images.
    max_image_patches: the most patches that a step encodes while rows run.
    speculative_config, num_places: how tokens are drafted, and how many tokens a step samples then.
    max_num_seqs, max_num_batched_tokens, max_model_len, max_cached_prompts, min_cached_prompt_tokens: see EngineConfig.

    Raises ValueError if a step cannot hold one token of every row.
    """

    block_size: int
    group_blocks: Sequence[int]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    windows: Sequence[int | None] = (None,)
    block_bytes: Sequence[int] = ()
    num_host_blocks: int = 0
    host_block_bytes: Sequence[int] = ()
    max_cached_prompts: int = 0
    min_cached_prompt_tokens: int = 8
    max_snapshots: int | None = None
    state_bytes: int = 0
    num_shards: int = 1
    num_image_runs: int = 0
    max_image_patches: int = 0
    speculative_config: SpeculativeConfig | None = None
    num_places: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculative_config", speculative_of(self.speculative_config))  # read of a log
        refuse_more_rows_than_tokens(self.max_num_seqs, self.max_num_batched_tokens)
        assert len(self.group_blocks) == len(self.windows), "a cache group has blocks and no window, or none and one"

    @property
    def num_blocks(self) -> int:
        """Blocks of the largest cache group."""
        return max(self.group_blocks)

    def with_pool(self, num_blocks: int) -> EngineSizes:
        """The sizes of this engine with `num_blocks` in its largest cache group, and caching on."""
        counts = [
            pool_blocks(
                window,
                num_blocks,
                block_size=self.block_size,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                keeps_cache=True,
            )
            for window in self.windows
        ]
        return dataclasses.replace(self, group_blocks=counts)


def refuse_more_rows_than_tokens(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Raises ValueError for steps that cannot hold a token of every row."""
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens is {max_num_batched_tokens}, less than max_num_seqs, {max_num_seqs}; a step must "
            "hold one token of every row"
        )
