"""WaitingQueue: requests in the order in which they are admitted, by priority and then by arrival."""

import heapq

from ferrum_jax.core.kv_cache.junctions import Junctions
from ferrum_jax.core.request import FLEX, Request


class WaitingQueue:
    """A heap by (priority, id); what was removed is skipped when it comes up.

    awaited: ids of those whose next token is still on the device: they were preempted while it was in flight. num_flex:
    how many are FLEX.
    """

    def __init__(self, junctions: Junctions | None = None) -> None:
        """junctions: of a recurrent model; counts what waits here."""
        self.awaited: set[int] = set()
        self.num_flex = 0
        self._junctions = junctions
        self._requests: dict[int, Request] = {}
        self._aside: dict[int, Request] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def push(self, request: Request, *, is_awaited: bool = False) -> None:
        self._enter(request)
        if is_awaited:
            self.awaited.add(request.id)
        if self._junctions is not None:
            self._junctions.add(request)

    def _enter(self, request: Request) -> None:
        self._requests[request.id] = request
        self.num_flex += request.priority >= FLEX
        heapq.heappush(self._heap, (request.priority, request.id))

    @property
    def num_live(self) -> int:
        """Requests that are not FLEX."""
        return len(self._requests) - self.num_flex

    def first(self) -> Request:
        """The request to admit next; the queue must hold one."""
        while self._heap[0][1] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0][1]]

    def remove(self, request_id: int) -> Request | None:
        """Take the request out; None if it is not here."""
        self.awaited.discard(request_id)
        request = self._requests.pop(request_id, None)
        self.num_flex -= request is not None and request.priority >= FLEX
        if request is not None and self._junctions is not None:
            self._junctions.remove(request)
        return request

    def renew(self) -> None:
        """The keys of what waits are not what they were."""
        if self._junctions is not None:
            self._junctions.renew(self._requests.values())

    def set_aside(self, request_id: int) -> None:
        """Let those behind a request pass it until `put_back`."""
        request = self._aside[request_id] = self._requests.pop(request_id)
        self.num_flex -= request.priority >= FLEX

    def put_back(self) -> None:
        """Puts the requests that were set aside back into their places."""
        for request in self._aside.values():
            self._enter(request)
        self._aside.clear()

    def cut(self, request: Request, count: int) -> int:
        """The first tokens of a row's chunk, up to where a waiting request parts from it."""
        return count if self._junctions is None else self._junctions.cut(request, count)

    def check_invariants(self) -> None:
        """Prove that every awaited request is here, and that none is aside between steps."""
        assert self.awaited <= self._requests.keys(), "a request that does not wait is awaited"
        assert not self._aside, "a request was set aside and not put back"
        flex = sum(request.priority >= FLEX for request in self._requests.values())
        assert flex == self.num_flex, f"{flex} FLEX requests wait, and {self.num_flex} are counted"
        if self._junctions is not None:
            self._junctions.check_invariants(self._requests)
