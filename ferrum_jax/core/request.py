"""Request: the engine's book about one choice of one prompt."""

from __future__ import annotations

import dataclasses
from array import array

from ferrum_jax.core.plan import Draw
from ferrum_jax.inputs.prompt import MediaSpan, PlacedImage

FLEX = 1 << 30  # priority from which on a request takes only what the others leave: rows of steps, slots and blocks


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """The engine's book about one choice of one prompt; mutable, owned by the scheduler once added.

    `token_ids` is prompt then generated tokens, as far as the host has seen them. `num_computed` counts
    tokens whose KV has been dispatched (it runs ahead of the host by the step in flight).
    """

    id: int  # unique in an engine, by arrival
    token_ids: array[int]  # int32, its own
    num_prompt_tokens: int
    max_total_tokens: int  # prompt + most generated tokens, within max_model_len
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()  # tokens that end it: end tokens and stop_token_ids
    end_ids: frozenset[int] = frozenset()  # of these, the model's end tokens, which give no stop_reason
    priority: int = 0  # lower runs first
    choice: int = 0
    num_choices: int = 1  # of its prompt, which arrive together
    takes_hits: bool = True  # False where all of its tokens must be computed, as for prompt_logprobs
    most_hit_tokens: int | None = None  # of one whose tokens behind these are scored; None for as many as there are
    takes_drafts: bool = True  # tokens that are expected of it may be computed along
    is_constrained: bool = False  # its next token is drawn under a mask, which the tokens before it decide
    draw: Draw = Draw.FULL  # the least that serves it
    needs_host: bool = False  # each of its tokens is looked at before the next is drawn, as for stop strings
    adapter_id: int = 0  # slot of its adapter, held from before it is queued to its end
    adapter: str = ""  # the digest of its adapter; requests share blocks only where adapter and cache_salt are equal
    cache_salt: bytes = b""
    media: tuple[MediaSpan, ...] = ()  # what tokens stand for beyond their ids
    images: tuple[PlacedImage, ...] = ()  # in order; the model is given their embeddings
    # progress, written by the scheduler only
    has_old_kv: bool = False  # of weights before an update, over which it goes on: nothing of it is shared
    num_computed: int = 0
    num_cached_tokens: int = 0  # of the first admission
    junction: int = 0  # of a recurrent model: where the cached blocks of its prefix ended when it was admitted
    num_preemptions: int = 0
    keys: list[bytes] = dataclasses.field(default_factory=list)  # of its full blocks, as far as they were asked for
    image_runs: dict[int, list[int]] = dataclasses.field(default_factory=dict)  # by image: where its embeddings are
    shard: int = 0  # data shard whose row it is, or was last
    slot: int = 0  # row slot while running, 0 when not
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def hit_limit(self) -> int:
        """The most tokens whose KV may come from blocks of the cache: the last token is always computed."""
        limit = len(self.token_ids) - 1
        return limit if self.most_hit_tokens is None else min(limit, self.most_hit_tokens)
