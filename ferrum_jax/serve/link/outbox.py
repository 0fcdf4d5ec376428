"""Outbox: messages on their way from the engine to HTTP. Who puts one in never waits, and what waits is bounded.

What is new of a choice joins what waits of it already, so a slow link carries fewer and larger deltas. A request with
more than MOST_UNSENT_TOKENS waiting is cut: its deltas are dropped, and its reader is told so. Only the latest beat,
statistics and changed facts wait, the last of these before all answers; of everything else there is one message a
request.
"""

import threading
from collections.abc import Callable, Iterable, Sequence

from ferrum_jax.core.delta import Delta, joined
from ferrum_jax.serve.link.wire import Message

MOST_UNSENT_TOKENS = 8192
_LATEST = ("changed", "beat", "stats")


class Outbox:
    """From any thread to one that takes."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """wake: called when something waits after nothing did."""
        self._wake = wake
        self._filled = threading.Condition()
        self._deltas: dict[tuple[int, int], Delta] = {}  # by request and choice; who was added to last is last
        self._num_unsent: dict[int, int] = {}  # tokens, by request
        self._messages: list[Message] = []
        self._latest: dict[str, Message] = {}

    def put(self, messages: Iterable[Message]) -> None:
        """Messages other than deltas."""
        with self._filled:
            was_empty = self._is_empty
            for message in messages:
                if message[0] in _LATEST:
                    self._latest[message[0]] = message
                else:
                    self._messages.append(message)
            self._tell(was_empty)

    def add(self, deltas: Sequence[Delta]) -> list[int]:
        """Adds deltas. Returns the ids of requests that this cuts off, because nobody reads their tokens."""
        cut = []
        with self._filled:
            was_empty = self._is_empty
            for delta in deltas:
                if delta.id in cut:
                    continue
                place = delta.id, delta.choice
                waiting = self._deltas.pop(place, None)
                self._deltas[place] = delta if waiting is None else joined(waiting, delta)
                unsent = self._num_unsent[delta.id] = self._num_unsent.get(delta.id, 0) + len(delta.token_ids)
                if unsent > MOST_UNSENT_TOKENS and not delta.is_last:
                    self._cut(delta.id)
                    cut.append(delta.id)
            self._tell(was_empty)
        return cut

    def _cut(self, request_id: int) -> None:
        for place in [place for place in self._deltas if place[0] == request_id]:
            del self._deltas[place]
        unsent = self._num_unsent.pop(request_id)
        self._messages.append(["refused", request_id, "slow", f"{unsent} tokens were not sent"])

    @property
    def _is_empty(self) -> bool:
        return not (self._deltas or self._messages or self._latest)

    def _tell(self, was_empty: bool) -> None:
        if was_empty and not self._is_empty:
            self._filled.notify()
            self._wake()

    def take(self, timeout_s: float | None = 0.0) -> list[Message]:
        """All that waits. timeout_s: how long to wait for something; None for ever."""
        with self._filled:
            self._filled.wait_for(lambda: not self._is_empty, timeout_s)
            deltas, self._deltas = self._deltas, {}
            messages, self._messages = self._messages, []
            latest, self._latest = self._latest, {}
            self._num_unsent = {}
        found: list[Message] = [latest.pop("changed")] if "changed" in latest else []
        if deltas:
            found.append(["deltas", list(deltas.values())])
        return [*found, *messages, *latest.values()]
