"""KVPublisher: the events of an engine's caches over ZeroMQ, as vLLM 0.33 sends them, for routers that know prefixes.

A message is (topic, number as 8 bytes, MessagePack of [seconds, events, data shard]). A publisher begins by saying that
nothing is stored. Who missed some asks the second socket, with the first number that is wanted.
"""

import itertools
import queue
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.inputs.sizes.kv_events import endpoints_of
from ferrum_jax.io.paths import install_command
from ferrum_jax.io.watched_threads import start_thread

_KEPT = 10_000  # messages that can be asked for again, and that wait for a subscriber
_END = (-1).to_bytes(8, "big", signed=True)


class KVPublisher:
    """Sends from a thread of its own; a step waits for nothing."""

    def __init__(self, text: str, caches: Iterable[CacheManager]) -> None:
        """text: see `endpoints_of`. Raises ImportError without the extra, and ValueError where it cannot listen."""
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ImportError(f"kv_events needs an extra ({error}): {install_command('kv-events')}") from error
        endpoint, self._topic, replay = endpoints_of(text)
        self._caches = tuple(caches)
        self._encode = msgspec.msgpack.encode
        self._sockets = [zmq.Context.instance().socket(kind) for kind in (zmq.PUB, zmq.ROUTER)]
        for socket, where in zip(self._sockets, (endpoint, replay), strict=True):
            socket.set_hwm(2 * _KEPT + 1)  # all that are kept, for one who asks again, and the end
            try:
                binds = socket is self._sockets[1] or "*" in where or "::" in where or not where.startswith("tcp")
                if where:
                    (socket.bind if binds else socket.connect)(where)
            except zmq.ZMQError as error:
                self._close()
                raise ValueError(f"kv_events cannot use {where} ({error}); name another endpoint") from error
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=_KEPT)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for shard in range(len(self._caches)):
            self._queue.put([time.time(), [{"type": "AllBlocksCleared"}], shard])
        self._thread = start_thread(self._send, lambda why: None, name="kv-events")

    def tell(self) -> None:
        """Sends what has changed since the last call."""
        for shard, cache in enumerate(self._caches):
            events = cache.events.take() if cache.events is not None else ()
            if events and self._thread.is_alive():
                self._queue.put([time.time(), events, shard])

    def close(self) -> None:
        """Sends what is left and ends."""
        self._queue.put(None)
        self._thread.join()

    def _send(self) -> None:
        publisher, replay = self._sockets
        numbers = itertools.count()
        try:
            while True:
                if replay.poll(0):
                    self._send_again(replay)
                try:
                    batch = self._queue.get(timeout=0.1)
                except queue.Empty:
                    continue
                if batch is None:
                    return
                message = next(numbers).to_bytes(8, "big"), self._encode(batch)
                publisher.send_multipart((self._topic.encode(), *message))
                self._sent.append(message)
        finally:
            self._close()

    def _send_again(self, replay: Any) -> None:
        asker, *_, first = replay.recv_multipart()
        for number, events in self._sent:
            if number >= first:
                replay.send_multipart((asker, b"", number, events))
        replay.send_multipart((asker, b"", _END, b""))

    def _close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=1000)
