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
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ferrum_jax.core.request import Request
from ferrum_jax.engine.prefixes.saved_prefixes import PrefixCache
from ferrum_jax.engine.prefixes.tier_pieces import Pieces, TierPiece
from ferrum_jax.engine.prefixes.tier_store import COUNTED, Read, TierStore
from ferrum_jax.io import system

_UNMEASURED_S, _MAX_UNMEASURED_S = 0.01, 2.0  # of a token and of a request, before a step was measured
_MAX_ARRIVING = 4  # pieces on their way from the devices, whose memory they take; so many are sent a step
_EASED = 1.1  # the store's rate after a refusal: one that became fast is tried again


@dataclasses.dataclass(kw_only=True, eq=False)
class Fetch:
    """Reads for one request. num_tokens: that need not be computed then. deadline_s: when they are too late."""

    tier: KVTier
    request: Request
    is_planned: bool = False
    reads: set[Read] = dataclasses.field(default_factory=set)  # that have not come
    num_bytes: int = 0
    num_tokens: int = 0
    num_read_bytes: int = 0
    began_s: float = 0.0
    deadline_s: float = 0.0
    is_late: bool = False

    @property
    def is_over(self) -> bool:
        """Whether its request waits no longer: all has come, or it is not worth waiting."""
        if not self.is_planned:
            if not self.tier.store.is_listed and system.monotonic() < self.tier.listing_until:
                return False  # what there is; of a store that hangs nobody waits for that
            self.tier.plan(self)
        return self.is_late or not self.reads or self.tier.rests


class _Copied:
    """Rows on their way from the devices, in batches."""

    def __init__(self, batches: Sequence[tuple[slice, Any]], fetch: Callable[[Any], np.ndarray]) -> None:
        self._batches, self._fetch, self._lock = batches, fetch, system.Lock()
        self._found: list[np.ndarray] = []

    def arrays(self) -> list[np.ndarray]:
        """Each array of the rows, in host memory. Waits for the devices, which keep nothing of them then."""
        with self._lock:
            if self._batches:
                parts = [
                    [self._fetch(leaf)[: part.stop - part.start] for leaf in jax.tree.leaves(found)]
                    for part, found in self._batches
                ]
                self._found, self._batches = [np.concatenate(each) for each in zip(*parts, strict=True)], ()
            return self._found


class KVTier:
    """The tier of one engine, used on its thread alone. rests: nothing is read or written."""

    def __init__(self, path: str, max_bytes: int, prefixes: PrefixCache, compute_s: Callable[[int], float]) -> None:
        """compute_s: seconds that so many tokens of prompts take, 0 where no step was measured."""
        self._prefixes, self._compute_s, self._pieces = prefixes, compute_s, Pieces(prefixes)
        self.store = TierStore(path, self._pieces, max_bytes)
        self._end = weakref.finalize(self, self.store.close)
        self.rests = False
        self.listing_until = system.monotonic() + _MAX_UNMEASURED_S
        self._open: list[Fetch] = []
        self._rate, self._ended_s = 0.0, 0.0  # bytes a second of the store, 0 before a read was measured
        self._orders: deque[TierPiece] = deque()
        self._arriving: deque[_Copied] = deque()

    def rest(self) -> None:
        """The weights are others now, or the engine ends."""
        self.rests = True
        self._orders.clear()
        self._end()

    def counts(self) -> dict[str, int]:
        return {name: self.store.counts[name.removeprefix("kv_tier_")] for name in COUNTED}

    def want(self, choices: Sequence[Request]) -> Fetch | None:
        """Begins to read what the choices of a new submission hit; None where there is nothing to wait for."""
        request = next((request for request in choices if request.takes_hits), None)
        if self.rests or request is None:
            return None
        self.store.look()
        fetch = Fetch(tier=self, request=request)
        return None if fetch.is_over else fetch

    def plan(self, fetch: Fetch) -> None:
        """Reads what pays. Whoever waits before would have to be computed too, so its tokens count with its bytes."""
        fetch.is_planned = True
        pieces, fetch.num_tokens = self._pieces.missing(fetch.request, self.store.has)
        if not fetch.num_tokens or any(each.is_late for each in self._open):
            return
        fetch.num_bytes = sum(map(self._pieces.num_bytes, pieces))
        every = [*self._open, fetch]
        num_tokens, num_bytes = sum(each.num_tokens for each in every), sum(each.num_bytes for each in every)
        most_s = self._compute_s(num_tokens) or min(_MAX_UNMEASURED_S, _UNMEASURED_S * num_tokens)
        if self._rate and num_bytes / self._rate > most_s:
            self._rate *= _EASED
            self.store.count(slower=1)
            return
        fetch.began_s = system.monotonic()
        fetch.deadline_s = fetch.began_s + most_s
        self._open.append(fetch)
        reads = [Read(piece=piece) for piece in pieces]
        fetch.reads.update(reads)
        for read in reads:
            self.store.read(read)

    def step(self) -> None:
        """Caches what has come and sends some of what is to be written; between steps."""
        self.store.news.clear()
        while not self.store.arrived.empty():
            self._take(self.store.arrived.get())
        for fetch in self._open:
            if system.monotonic() >= fetch.deadline_s and not fetch.is_late:
                fetch.is_late = True
                self.store.count(late=1)
                for read in fetch.reads:
                    read.is_dropped = True
        self.send(_MAX_ARRIVING)

    def _take(self, read: Read) -> None:
        fetch = next(each for each in self._open if read in each.reads)
        fetch.reads.remove(read)
        if read.arrays is not None and not self.rests:
            self._prefixes.put_rows(read.piece.index, read.piece.keys, read.arrays)
            fetch.num_read_bytes += self._pieces.num_bytes(read.piece)
        if fetch.reads:
            return
        self._open.remove(fetch)
        if fetch.num_read_bytes:
            took_s = max(read.ended_s - max(fetch.began_s, self._ended_s), 1e-6)
            rate, self._ended_s = fetch.num_read_bytes / took_s, read.ended_s
            self._rate = (self._rate + rate) / 2 if self._rate else rate
            self.store.count(hits=1, hit_tokens=fetch.num_tokens)

    def keep(self, request: Request) -> None:
        """Has what a request computed written, if its prompt has just ended or it has ended well itself."""
        is_first = len(request.token_ids) == request.num_prompt_tokens + 1
        if self.rests or request.has_old_kv or not (is_first or request.finish_reason in ("stop", "length")):
            return
        self._orders += [piece for piece in self._pieces.computed(request) if self.store.orders(piece.stem)]

    def send(self, most: int | None = None) -> None:
        """Starts copies to the host of what is still cached, and has them written. most: pieces; None is all."""
        for _ in range(len(self._orders))[:most]:
            piece = self._orders.popleft()
            batches = self._prefixes.send_rows(piece.index, piece.keys) if self.store.has_room(piece) else None
            if batches is None:  # evicted already, if there is room
                self.store.drop(piece.stem)
                continue
            sent = _Copied(batches, self._prefixes.copies.transfers.fetch)
            self._arriving.append(sent)
            if len(self._arriving) > _MAX_ARRIVING:
                self._arriving.popleft().arrays()
            self.store.write(piece, sent.arrays)
