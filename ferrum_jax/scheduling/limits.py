"""Limits: what could never run, or would keep others from it, is refused before anything has changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ferrum_jax.ints import ceil_div
from ferrum_jax.request import Request
from ferrum_jax.scheduling.cache_manager import CacheManager
from ferrum_jax.windows import most_held


def refuse_endless(request: Request, caches: Sequence[CacheManager], *, max_model_len: int, max_chunk: int) -> None:
    """Raises ValueError, naming both numbers, if the request could never run to its end on any shard.

    caches: of each shard. max_chunk: the most tokens that it computes in a step.
    """
    prompt, total = request.num_prompt_tokens, request.max_total_tokens
    if not 1 <= prompt < total:
        raise ValueError(
            f"a request has {prompt} prompt tokens and may have {total} in all; "
            "it needs at least one prompt token and room for one new token"
        )
    if total > max_model_len:
        raise ValueError(
            f"a request asks for {prompt} prompt + {total - prompt} new tokens, {total} in all, "
            f"more than max_model_len, {max_model_len}; shorten the prompt or lower max_tokens"
        )
    for cache in caches:
        if holds(request, cache, max_chunk):
            return
    lack = _shortage(request, caches[0], max_chunk)
    raise ValueError(
        f"a request of {prompt} prompt and {total - prompt} new tokens {lack}; "
        "shorten it, or raise num_blocks or kv_memory_bytes"
    )


def holds(request: Request, cache: CacheManager, max_chunk: int) -> bool:
    """Whether the request could run on a shard to its end, with nothing beside it but what is pinned."""
    return not _shortage(request, cache, max_chunk)


def _shortage(request: Request, cache: CacheManager, max_chunk: int) -> str:
    """What the first pool of a shard that is too small for the request lacks; empty where there is none."""
    for needed, available in zip(_num_needed(request, cache, max_chunk), _num_usable(request, cache), strict=True):
        if needed > available:
            return (
                f"needs {needed} blocks of {cache.block_size} tokens and the whole pool has "
                f"{available}{_but_pinned(cache)}"
            )
    return ""


def refuse_pins(keys: Sequence[bytes], unfinished: Iterable[Request], cache: CacheManager, *, max_chunk: int) -> None:
    """Raises ValueError if requests that were accepted could not run once the blocks of these keys are pinned."""
    needs = [_num_needed(request, cache, max_chunk) for request in unfinished]
    for group, pool in enumerate(cache.pools):
        needed = max((need[group] for need in needs), default=1)
        new = sum(pool.find(key) not in (0, *cache.pins.ids(group)) for key in keys)
        left = pool.num_ids - 1 - len(cache.pins.ids(group)) - new
        if new and left < needed:
            raise ValueError(
                f"{new} more blocks pinned leave {left} of {pool.num_ids - 1}, and {needed} are needed; "
                "pin less, or raise num_blocks or kv_memory_bytes"
            )


def _num_usable(request: Request, cache: CacheManager) -> list[int]:
    """Per group the blocks that the request can have when nothing else runs: not pinned, or pinned for it."""
    usable = [pool.num_ids - 1 for pool in cache.pools]
    if cache.pins.num_pinned:
        for group in range(len(usable)):
            own = cache.pins.num_among(group, cache.keys_of(request)) if request.takes_hits else 0
            usable[group] += own - len(cache.pins.ids(group))
    return usable


def _num_needed(request: Request, cache: CacheManager, max_chunk: int) -> list[int]:
    """Per group the most blocks that the request holds at once, if it computes up to `max_chunk` tokens a step."""
    total = ceil_div(request.max_total_tokens - 1, cache.block_size)  # the last token is never computed
    if not cache.blocks.has_windows:
        return [total] * len(cache.pools)
    return [
        total if window is None else min(total, most_held(window, max_chunk, cache.block_size))
        for window in cache.windows
    ]


def _but_pinned(cache: CacheManager) -> str:
    pinned = cache.pins.num_pinned
    return f" that are not pinned ({pinned} are)" if pinned else ""
