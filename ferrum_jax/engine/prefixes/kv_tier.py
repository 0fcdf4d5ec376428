"""KVTier: cached prefixes in a folder or bucket, which outlive the engine and which any number of engines share.

    a prompt or a request ends ─► its pieces are gathered ─► written behind (`TierStore`)
    a request comes ─► what it lacks and the tier has is read ahead ─► cached between steps, as a saved prefix is
                   └─► and then the request is queued, and hits it

So the scheduler knows nothing of a tier. A request is held only where the rate measured of the store says that reading
beats computing, and no longer than computing would take. While a read is overdue nobody is held. Before a step was
measured, a held request waits 10 ms for each token and 2 s at most.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from checkpoints.kv_objects import encode
from ferrum_jax.config import EngineConfig
from ferrum_jax.core.request import Request
from ferrum_jax.engine.prefixes.saved_prefixes import PrefixCache
from ferrum_jax.engine.prefixes.tier_pieces import Piece, Pieces
from ferrum_jax.engine.prefixes.tier_store import Read, TierStore
from ferrum_jax.io import system
from ferrum_jax.io.files.store import open_store
from ferrum_jax.runtime.distributed.processes import refuse_several_processes

_UNMEASURED_S, _MAX_UNMEASURED_S = 0.01, 2.0  # of a token and of a request, before a step was measured
_SENT_A_STEP = 4  # pieces
_MAX_ARRIVING = 4  # pieces on their way from the devices, whose memory they take
_LOOK_S = 0.05  # how long a step waits for a read where nothing else is to do: meanwhile more may come, or end
_EASED = 1.1  # the store's rate after a refusal: one that became fast is tried again


def refuse_wrong_tier(config: EngineConfig) -> None:
    """Raises ValueError for a config whose tier could not work."""
    if config.kv_tier is None:
        return
    refuse_several_processes("kv_tier")
    if not config.enable_prefix_caching:
        raise ValueError("kv_tier keeps cached prefixes, and enable_prefix_caching is False; turn it on")
    if config.return_routed_experts:
        raise ValueError(
            "kv_tier does not keep the experts of its blocks' tokens, which return_routed_experts wants; leave one out"
        )
    open_store(config.kv_tier)


@dataclasses.dataclass(kw_only=True, eq=False)
class Fetch:
    """What is read for one request. num_tokens: that need not be computed then. deadline_s: when it is too late."""

    request: Request
    is_planned: bool = False
    reads: dict[Read, Piece] = dataclasses.field(default_factory=dict)  # that have not come
    num_bytes: int = 0
    num_tokens: int = 0
    num_read_bytes: int = 0
    began_s: float = 0.0
    deadline_s: float = 0.0
    is_late: bool = False


class _Sent:
    """Rows on their way from the devices, in batches."""

    def __init__(self, batches: Sequence[tuple[slice, Any]], fetch: Callable[[Any], np.ndarray]) -> None:
        self._batches, self._fetch, self._lock = batches, fetch, threading.Lock()
        self._found: list[np.ndarray] | None = None

    def arrays(self) -> list[np.ndarray]:
        """Each array of the rows, in host memory. Waits for the devices, which keep nothing of them then."""
        with self._lock:
            if self._found is None:
                parts = [
                    [self._fetch(leaf)[: part.stop - part.start] for leaf in jax.tree.leaves(found)]
                    for part, found in self._batches
                ]
                self._found, self._batches = [np.concatenate(each) for each in zip(*parts, strict=True)], ()
            return self._found


class KVTier:
    """The tier of one engine, used on its thread alone."""

    def __init__(self, path: str, max_bytes: int, prefixes: PrefixCache, compute_s: Callable[[int], float]) -> None:
        """compute_s: seconds that so many tokens of prompts take, 0 where no step was measured.

        Raises ValueError for a URL that cannot be opened.
        """
        self._prefixes, self._compute_s = prefixes, compute_s
        self._pieces = Pieces(prefixes)
        self._store = TierStore(path, self._pieces.identity, max_bytes)
        self._end = weakref.finalize(self, self._store.close)
        self._listing_until = system.monotonic() + _MAX_UNMEASURED_S
        self._open: list[Fetch] = []
        self._rate, self._ended_s = 0.0, 0.0  # bytes a second of the store, 0 before a read was measured
        self._orders: deque[Piece] = deque()
        self._arriving: deque[_Sent] = deque()
        self._rests = False

    def close(self) -> None:
        self._rests = True
        self._end()

    def rest(self) -> None:
        """The weights are others now: nothing is read or written any more."""
        self._rests = True
        self._orders.clear()

    def counts(self) -> dict[str, int]:
        return {f"kv_tier_{name}": value for name, value in dataclasses.asdict(self._store.counts).items()}

    # -- reading ahead ---------------------------------------------------------------------------------

    def want(self, request: Request) -> Fetch | None:
        """Begins to read what a new request lacks; None where there is nothing to wait for."""
        if self._rests or not request.takes_hits:
            return None
        self._store.look()
        fetch = Fetch(request=request)
        return None if self.is_over(fetch) else fetch

    def is_over(self, fetch: Fetch) -> bool:
        """Whether its request waits no longer: all has come, or it is not worth waiting."""
        if self._rests:
            return True
        if not fetch.is_planned:
            if not self._store.is_listed and system.monotonic() < self._listing_until:
                return False
            self._plan(fetch)
        return fetch.is_late or not fetch.reads

    def wait(self, fetch: Fetch) -> None:
        """Waits a moment for news, where nothing else is to do."""
        until_s = fetch.deadline_s if fetch.is_planned else self._listing_until
        self._store.news.wait(max(0.0, min(_LOOK_S, until_s - system.monotonic())))

    def _plan(self, fetch: Fetch) -> None:
        """Reads what pays. Whoever waits before would have to be computed too, so its tokens count with its bytes."""
        fetch.is_planned = True
        pieces, fetch.num_tokens = self._pieces.missing(fetch.request, self._store.has)
        if not fetch.num_tokens or any(each.is_late for each in self._open):
            return
        fetch.num_bytes = sum(map(self._pieces.num_bytes, pieces))
        every = [*self._open, fetch]
        num_tokens, num_bytes = (sum(getattr(each, name) for each in every) for name in ("num_tokens", "num_bytes"))
        most_s = self._compute_s(num_tokens) or min(_MAX_UNMEASURED_S, _UNMEASURED_S * num_tokens)
        if self._rate and num_bytes / self._rate > most_s:
            self._rate *= _EASED
            self._store.count(slower=1)
            return
        fetch.deadline_s = system.monotonic() + most_s
        for piece in pieces:
            read = Read(stem=piece.stem, header=self._pieces.header(piece), dtypes=self._pieces.dtypes(piece))
            fetch.reads[read] = piece
        self._open.append(fetch)
        for read in list(fetch.reads):
            self._store.read(read)

    def step(self) -> None:
        """Caches what has come and sends some of what is to be written; between steps."""
        self._store.news.clear()
        while not self._store.arrived.empty():
            self._take(self._store.arrived.get())
        now = system.monotonic()
        for fetch in self._open:
            if now >= fetch.deadline_s and not fetch.is_late:
                fetch.is_late = True
                self._store.count(late=1)
                for read in fetch.reads:
                    read.is_dropped = True
        self._send(_SENT_A_STEP)

    def _take(self, read: Read) -> None:
        fetch = next(each for each in self._open if read in each.reads)
        piece = fetch.reads.pop(read)
        fetch.began_s = min(fetch.began_s or read.began_s, read.began_s)
        if read.arrays is not None and not self._rests:
            self._prefixes.put_rows(piece.index, piece.keys, read.arrays)
            fetch.num_read_bytes += read.num_bytes
        if fetch.reads:
            return
        self._open.remove(fetch)
        if fetch.num_read_bytes:
            took_s = max(read.ended_s - max(fetch.began_s, self._ended_s), 1e-6)
            rate, self._ended_s = fetch.num_read_bytes / took_s, read.ended_s
            self._rate = (self._rate + rate) / 2 if self._rate else rate
            self._store.count(hits=1, hit_tokens=fetch.num_tokens)

    # -- writing behind --------------------------------------------------------------------------------

    def keep(self, request: Request) -> None:
        """Has what a request computed written, if its prompt has just ended or it has ended well itself."""
        is_first = len(request.token_ids) == request.num_prompt_tokens + 1
        if self._rests or request.has_old_kv or not (is_first or request.finish_reason in ("stop", "length")):
            return
        for piece in self._pieces.of_computed(request):
            if self._store.lacks(piece.stem):
                self._store.order(piece.stem)
                self._orders.append(piece)

    def send_all(self) -> None:
        """Sends all that is to be written: no step may come for long."""
        self._send(len(self._orders))

    def _send(self, most: int) -> None:
        """Starts copies to the host of what is still cached, and has them written."""
        for _ in range(min(most, len(self._orders))):
            piece = self._orders.popleft()
            num_bytes = self._pieces.num_bytes(piece)
            has_room = self._store.has_room(num_bytes)
            self._store.count(dropped=not has_room)
            batches = self._prefixes.send_rows(piece.index, piece.keys) if has_room else None
            if batches is None:  # evicted already, if there is room
                self._store.drop(piece.stem)
                continue
            sent = _Sent(batches, self._prefixes.copies.transfers.fetch)
            self._arriving.append(sent)
            if len(self._arriving) > _MAX_ARRIVING:
                self._arriving.popleft().arrays()
            self._store.write(piece.stem, num_bytes, functools.partial(_content, self._pieces.header(piece), sent))


def _content(header: dict[str, Any], sent: _Sent) -> bytes:
    return encode(header, dict(zip(header["arrays"], sent.arrays(), strict=True)))
