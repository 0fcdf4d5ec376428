"""FairQueue: requests that wait for the engine, bounded, and fair between keys. Knows no asyncio and no clock.

Deficit round robin (Shreedhar and Varghese 1995): keys take turns, each turn gives a key QUANTUM tokens of credit, and
a key's next request leaves once its credit covers the request's cost. So a key that asks for much does not keep others
waiting, and one that asks for little waits at most a turn of each other key. Within a key: by priority, then arrival.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

QUANTUM = 2048  # tokens


class QueueEntry:
    """A waiting request. cost: in tokens, of the prompt and what may be generated. rows: choices that will run.

    is_queued: it waits for its turn now.
    """

    def __init__(self, *, key: str, cost: int, rows: int = 1, priority: int = 0) -> None:
        self.key, self.cost, self.rows, self.priority = key, cost, rows, priority
        self.order = 0
        self.is_queued = False

    def __lt__(self, other: QueueEntry) -> bool:
        return (self.priority, self.order) < (other.priority, other.order)


Entry = TypeVar("Entry", bound=QueueEntry)


class FairQueue(Generic[Entry]):
    """num_requests, num_tokens: what waits now, of all keys."""

    def __init__(self, *, max_requests: int, max_tokens: int, quantum: int = QUANTUM) -> None:
        self.num_requests = self.num_tokens = 0
        self._max_requests, self._max_tokens, self._quantum = max_requests, max_tokens, quantum
        self._waiting: OrderedDict[str, list[Entry]] = OrderedDict()  # heaps; keys in order of their turns
        self._credit: dict[str, int] = {}
        self._arrivals = itertools.count()

    def push(self, entries: Sequence[Entry]) -> bool:
        """Queues all of them, of one key, or none where the bounds do not allow it. One alone always has room."""
        tokens = sum(entry.cost for entry in entries)
        is_full = self.num_requests + len(entries) > self._max_requests or self.num_tokens + tokens > self._max_tokens
        if is_full and (self.num_requests or len(entries) > self._max_requests):
            return False
        for entry in entries:
            entry.order = next(self._arrivals)
            heapq.heappush(self._waiting.setdefault(entry.key, []), entry)
            self._count(entry, 1)
        return True

    def remove(self, entry: Entry) -> None:
        """Takes out one that waits: who asked has left."""
        heap = self._waiting[entry.key]
        heap.remove(entry)
        heapq.heapify(heap)
        self._count(entry, -1)
        self._forget_if_empty(entry.key)

    def pop(self) -> Entry | None:
        """The one whose turn it is; None where nobody waits."""
        while self._waiting:
            key, heap = next(iter(self._waiting.items()))
            credit = self._credit.get(key, self._quantum)
            if heap[0].cost > credit:
                self._credit[key] = credit + self._quantum
                if len(self._waiting) > 1:
                    self._waiting.move_to_end(key)
                else:
                    self._credit[key] = heap[0].cost
                continue
            entry = heapq.heappop(heap)
            self._credit[key] = credit - entry.cost
            self._count(entry, -1)
            self._forget_if_empty(key)
            return entry
        return None

    def _count(self, entry: QueueEntry, sign: int) -> None:
        entry.is_queued = sign > 0
        self.num_requests += sign
        self.num_tokens += sign * entry.cost

    def _forget_if_empty(self, key: str) -> None:
        """A key that waits for nothing keeps no credit."""
        if not self._waiting[key]:
            del self._waiting[key]
            self._credit.pop(key, None)
