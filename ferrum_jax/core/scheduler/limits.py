"""Limits: what could never run, or would keep others from it, is refused before anything has changed."""

from collections.abc import Iterable, Sequence

from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.core.kv_cache.pins import Pinnable
from ferrum_jax.core.request import Request
from ferrum_jax.io.ints import ceil_div, most_held


def refuse_endless(request: Request, caches: Sequence[CacheManager]) -> None:
    """Raises ValueError, naming both numbers, if the request could never run to its end on any shard.

    caches: of each shard.
    """
    prompt, total = request.num_prompt_tokens, request.max_total_tokens
    if not 1 <= prompt < total:
        raise ValueError(
            f"a request has {prompt} prompt tokens and may have {total} in all; "
            "it needs at least one prompt token and room for one new token"
        )
    max_model_len = caches[0].sizes.max_model_len
    if total - 1 > max_model_len:  # the last token is never computed; a text that is read may be as long as all others
        raise ValueError(
            f"a request asks for {prompt} prompt + {total - prompt} new tokens, {total} in all, "
            f"more than max_model_len, {max_model_len}; shorten the prompt or lower max_tokens"
        )
    for cache in caches:
        if holds(request, cache):
            return
    lack = _shortage(request, caches[0])
    raise ValueError(
        f"a request of {prompt} prompt and {total - prompt} new tokens {lack}; "
        "shorten it, or raise num_blocks or kv_memory_bytes"
    )


def holds(request: Request, cache: CacheManager) -> bool:
    """Whether the request could run on a shard to its end, with nothing beside it but what is pinned."""
    return not _shortage(request, cache)


def _shortage(request: Request, cache: CacheManager) -> str:
    """Says what the first pool of a shard too small for the request lacks; empty where all are large enough."""
    for needed, available in zip(_num_needed(request, cache), _num_usable(request, cache), strict=True):
        if needed > available:
            return (
                f"needs {needed} blocks of {cache.sizes.block_size} tokens and the whole pool has "
                f"{available}{_but_pinned(cache)}"
            )
    return ""


def refuse_pins(wanted: Pinnable, unfinished: Iterable[Request], cache: CacheManager) -> None:
    """Raises ValueError if requests that were accepted could not run once these ids are pinned, or a row had no state.

    Rows have state slots of their own, so only as many snapshots are pinned as there are beside those.
    """
    needs = [_num_needed(request, cache) for request in unfinished]
    for group, pool in enumerate(cache.pools):
        needed = max((need[group] for need in needs), default=1)
        new = len(cache.pins.new(pool, wanted.get(pool, ())))
        left = pool.num_ids - 1 - len(cache.pins.ids(pool)) - new
        if new and left < needed:
            raise ValueError(
                f"{new} more blocks pinned leave {left} of {pool.num_ids - 1}, and {needed} are needed; "
                "pin less, or raise num_blocks or kv_memory_bytes"
            )
    if cache.states is not None:
        new = len(cache.pins.new(cache.states.pool, wanted.get(cache.states.pool, ())))
        total = len(cache.pins.ids(cache.states.pool)) + new
        if new and total > cache.states.max_snapshots:
            raise ValueError(
                f"{new} more state snapshots pinned make {total}, more than max_state_snapshots, "
                f"{cache.states.max_snapshots}; pin less, or raise it"
            )


def refuse_without_cache(cache: CacheManager) -> None:
    """Raises ValueError, naming the setting, if no prefix that is computed could be hit."""
    if not cache.enabled:
        raise ValueError("enable_prefix_caching is False, so no prefix is kept; turn it on")
    if cache.states is not None and not cache.states.max_snapshots:
        raise ValueError(
            "max_state_snapshots is 0, so no prefix of this recurrent model is kept: a prefix resumes only from a "
            "snapshot of its state; raise it"
        )


def _num_usable(request: Request, cache: CacheManager) -> list[int]:
    """Per group the blocks that the request can have when nothing else runs: not pinned, or pinned for it."""
    usable = [pool.num_ids - 1 for pool in cache.pools]
    if cache.pins.num_pinned:
        for group, pool in enumerate(cache.pools):
            own = cache.pins.num_among(pool, cache.keys_of(request)) if request.takes_hits else 0
            usable[group] += own - len(cache.pins.ids(pool))
    return usable


def _num_needed(request: Request, cache: CacheManager) -> list[int]:
    """Per group the most blocks that the request holds at once, with the longest chunk that a step may have."""
    sizes = cache.sizes
    total = ceil_div(request.max_total_tokens - 1, sizes.block_size)  # the last token is never computed
    if not cache.blocks.has_windows:
        return [total] * len(cache.pools)
    return [
        total if window is None else min(total, most_held(window, sizes.max_num_batched_tokens, sizes.block_size))
        for window in sizes.windows
    ]


def _but_pinned(cache: CacheManager) -> str:
    pinned = cache.pins.num_pinned
    return f" that are not pinned ({pinned} are)" if pinned else ""
