"""Subscriber: who hears a cache's events and knows nothing else."""

from array import array
from hashlib import blake2b
from typing import Any

from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.core.kv_cache.keys import root_key

ROOT = root_key(b"", "float32", 4)


class Subscriber:
    """The keys of each cache group that are stored, as told; every event must fit what was told before."""

    def __init__(self, num_groups: int) -> None:
        self.stored: list[set[bytes]] = [set() for _ in range(num_groups)]
        self.num_events = 0

    def hear(self, manager: CacheManager) -> None:
        assert manager.events is not None
        for event in manager.events.take():
            self.num_events += 1
            self.take(event)

    def take(self, event: dict[str, Any]) -> None:
        stored, keys = self.stored[event["group_idx"]], event["block_hashes"]
        assert keys and len(set(keys)) == len(keys) and event["medium"] == "GPU"
        if event["type"] == "BlockRemoved":
            assert stored.issuperset(keys), "a block that was never told of is gone"
            stored.difference_update(keys)
            return
        assert event["type"] == "BlockStored" and stored.isdisjoint(keys), "a block is told of twice"
        size, tokens, parent = event["block_size"], event["token_ids"], event["parent_block_hash"] or ROOT
        assert len(tokens) == size * len(keys) == size * len(event["extra_keys"])
        for index, key in enumerate(keys):
            block = array("i", tokens[index * size : (index + 1) * size]).tobytes()
            assert key == blake2b(block, digest_size=16, salt=parent).digest(), "the tokens are another block's"
            parent = key
        stored.update(keys)
