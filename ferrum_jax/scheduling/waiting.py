"""WaitingQueue: requests in the order in which they are admitted, by priority and then by arrival."""

from __future__ import annotations

import heapq

from ferrum_jax.request import Request


class WaitingQueue:
    """A heap by (priority, id); what was removed is skipped when it comes up."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def push(self, request: Request) -> None:
        self._requests[request.id] = request
        heapq.heappush(self._heap, (request.priority, request.id))

    def first(self) -> Request:
        """The request to admit next; the queue must hold one."""
        while self._heap[0][1] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0][1]]

    def remove(self, request_id: int) -> Request | None:
        """Take the request out; None if it is not here."""
        return self._requests.pop(request_id, None)
