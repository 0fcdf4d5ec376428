"""Junctions: where the prompts of waiting requests part from one that is computed.

A recurrent state can be resumed only at a snapshot, so the row that computes a shared prefix must stop where the others
leave it. What waits is known: each key counts the waiting requests that would hit its block, and where the count
falls along a row's own keys, a request parts. Counts are of keys, so they cost two dictionary operations a block.
"""

from collections import Counter
from collections.abc import Iterable

from ferrum_jax.core.kv_cache.keys import RequestKeys
from ferrum_jax.core.request import Request


class Junctions:
    """Over the requests of one queue."""

    def __init__(self, keys: RequestKeys, block_size: int) -> None:
        self._keys = keys
        self._block_size = block_size
        self._waiting: Counter[bytes] = Counter()
        self._num_keys: dict[int, int] = {}  # by id of the waiting requests: how many of their keys are counted

    def add(self, request: Request) -> None:
        """Counts a request that starts to wait; without hits it has no junctions."""
        limit = request.hit_limit // self._block_size if request.takes_hits else 0
        self._num_keys[request.id] = limit
        self._waiting.update(self._keys.of_blocks(request, limit)[:limit])

    def renew(self, waiting: Iterable[Request]) -> None:
        """Recounts waiting requests after their keys changed."""
        self._waiting.clear()
        self._num_keys.clear()
        for request in waiting:
            self.add(request)

    def remove(self, request: Request) -> None:
        """Forgets a request that no longer waits."""
        for key in request.keys[: self._num_keys.pop(request.id)]:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]

    def cut(self, request: Request, count: int) -> int:
        """The first tokens of a chunk of `count`, up to the first junction in it."""
        size, start = self._block_size, request.num_computed
        first, end = start // size, (start + count) // size
        if not self._waiting or first >= end:
            return count
        keys = self._keys.of_blocks(request, end)
        before = self._waiting[keys[first]]
        for index in range(first + 1, end):
            if not before:  # who shares no block shares none after it
                break
            after = self._waiting[keys[index]]
            if after < before:
                return index * size - start
            before = after
        return count

    def check_invariants(self, waiting: dict[int, Request]) -> None:
        """Prove that every waiting request is counted, and nothing else."""
        assert self._num_keys.keys() == waiting.keys(), "a request waits and is not counted, or the reverse"
        expected = Counter(key for id, request in waiting.items() for key in request.keys[: self._num_keys[id]])
        assert self._waiting == expected and 0 not in self._waiting.values(), "keys of waiting requests are miscounted"
