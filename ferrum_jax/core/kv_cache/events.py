"""KVEvents: what a cache tells others who send it requests: blocks that are stored, and that are no more.

A block is told with its tokens once a request had it, so one that was loaded from a file is told at its first hit.
"""

from collections.abc import Sequence
from typing import Any

from ferrum_jax.core.request import Request


class KVEvents:
    """The events of one cache in the form of vLLM 0.33, in their order; a cache group is vLLM's too.

    Stored: type, block_hashes (chain keys), parent_block_hash, token_ids (of these blocks), block_size, lora_id,
    medium, lora_name (an adapter's digest), extra_keys (per block), group_idx, kv_cache_spec_kind and
    kv_cache_spec_sliding_window. Removed: type, block_hashes, medium, group_idx. The medium "GPU" stands for the memory
    of any accelerator.
    """

    def __init__(self, windows: Sequence[int | None], block_size: int) -> None:
        """windows: of each cache group, as `EngineSizes` has them."""
        self._windows, self._block_size = tuple(windows), block_size
        self._told: list[set[bytes]] = [set() for _ in windows]
        self._events: list[dict[str, Any]] = []

    def stored(self, group: int, request: Request, start: int, ids: Sequence[int]) -> None:
        """The request's blocks from index `start` on have these ids; 0 where a window has left one behind."""
        told, keys, first = self._told[group], request.keys, start
        end = start + len(ids)
        for index in range(start, end + 1):
            if index < end and ids[index - start] and keys[index] not in told:
                continue
            if first < index:
                told.update(keys[first:index])
                self._events.append(self._stored(group, request, first, index))
            first = index + 1

    def _stored(self, group: int, request: Request, first: int, end: int) -> dict[str, Any]:
        size, window = self._block_size, self._windows[group]
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": request.keys[first:end],
            "parent_block_hash": request.keys[first - 1] if first else None,
            "token_ids": request.token_ids[first * size : end * size].tolist(),
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": request.adapter or None,
            "extra_keys": [self._extra_keys(request, index) for index in range(first, end)],
            "group_idx": group,
            "kv_cache_spec_kind": "full_attention" if window is None else "sliding_window",
        }
        return event if window is None else event | {"kv_cache_spec_sliding_window": window}

    def _extra_keys(self, request: Request, index: int) -> list[Any] | None:
        """The parts of a block's key beside its tokens: the adapter, media that touch it, the salt of a first one."""
        start, end = index * self._block_size, (index + 1) * self._block_size
        media = [[m.digest.hex(), m.start - start] for m in request.media if m.start < end and m.end > start]
        salt = [request.cache_salt.decode()] if request.cache_salt and not index else []
        return [*([request.adapter] if request.adapter else []), *media, *salt] or None

    def removed(self, group: int, key: bytes) -> None:
        """No block of the group has the key any more."""
        if key not in self._told[group]:
            return
        self._told[group].discard(key)
        last = self._events[-1] if self._events else {}
        if last.get("type") == "BlockRemoved" and last["group_idx"] == group:
            last["block_hashes"].append(key)
        else:
            self._events.append({"type": "BlockRemoved", "block_hashes": [key], "medium": "GPU", "group_idx": group})

    def take(self) -> list[dict[str, Any]]:
        """The events since the last call."""
        taken, self._events = self._events, []
        return taken
