"""IdPool: the host's book about the ids of one device pool (KV blocks, row slots, state slots).

An id is in exactly one of three states:

    clean    free, without a key
    cached   free, with a key; ordered from the least recently used; revived by `retain`, evicted by `acquire`
    live     held once or more, with or without a key

Id 0 is null: padding writes there, unused table entries point there; it is never handed out. The cached
ids form a ring through id 0, kept in two lists, so that each operation costs the same at any pool size.
The pool does not know what its ids stand for; whoever acquires or retains an id releases it once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence


class IdPool:
    """Ids 1 .. num_ids - 1; `acquire` hands out clean ones first, then the least recently used."""

    def __init__(self, num_ids: int) -> None:
        """num_ids: how many ids, the null one included; with that one alone there is none to hand out."""
        if num_ids < 1:
            raise ValueError(f"num_ids is {num_ids}; a pool needs at least 1, because id 0 is the null one")
        self.num_ids = num_ids
        self.num_live = 0
        self.num_cached = 0
        self.peak_live = 0
        self.evictions = 0
        self.on_evict: Callable[[int, bytes], None] | None = None  # called with id and key before the id is handed out
        self.on_unkeyed: Callable[[bytes], None] | None = None  # called with each key that no id carries any more
        self.revivals = 0
        self._forget()

    def _forget(self) -> None:
        self._refs = [0] * self.num_ids
        self._key_of: list[bytes | None] = [None] * self.num_ids
        self._id_of: dict[bytes, int] = {}
        self._next = [0] * self.num_ids  # ring of cached ids: _next[0] is the least recently used,
        self._prev = [0] * self.num_ids  # _prev[0] the most recently used
        self._returned: list[int] = []  # clean ids that were used before; the last one goes first
        self._fresh = 1  # ids from here on were never handed out

    @property
    def num_clean(self) -> int:
        return len(self._returned) + self.num_ids - self._fresh

    @property
    def num_free(self) -> int:
        """Ids that `acquire` can hand out now: clean and cached."""
        return self.num_ids - 1 - self.num_live

    @property
    def usage(self) -> float:
        """Live ids as a share of all, 0 to 1."""
        return self.num_live / max(self.num_ids - 1, 1)

    @property
    def num_keyed(self) -> int:
        """Ids that a key finds, live or cached."""
        return len(self._id_of)

    def key_of(self, id: int) -> bytes | None:
        return self._key_of[id]

    def num_holders(self, id: int) -> int:
        return self._refs[id]

    def acquire(self, n: int) -> list[int] | None:
        """n ids with one holder each; None, with nothing changed, when fewer are free."""
        if n > self.num_free:
            return None
        returned = self._returned
        if n <= len(returned):
            split = len(returned) - n
            ids = returned[split:]
            ids.reverse()
            del returned[split:]
        else:
            ids = self._acquire_beyond_returned(n)
        refs = self._refs
        for id in ids:
            refs[id] = 1
        self.num_live += n
        if self.num_live > self.peak_live:
            self.peak_live = self.num_live
        return ids

    def take(self, n: int) -> list[int]:
        """n ids, which the caller knows to be free."""
        ids = self.acquire(n)
        assert ids is not None, f"{n} ids are taken and {self.num_free} are free"
        return ids

    def _acquire_beyond_returned(self, n: int) -> list[int]:
        ids = self._returned[::-1]
        self._returned.clear()
        end = min(self._fresh + n - len(ids), self.num_ids)
        ids.extend(range(self._fresh, end))
        self._fresh = end
        if len(ids) < n:
            self._evict(n - len(ids), ids)
        return ids

    def _evict(self, n: int, ids: list[int]) -> None:
        """Append the n least recently used cached ids, without their keys; the ring is cut once."""
        following, key_of, id_of = self._next, self._key_of, self._id_of
        id = following[0]
        for _ in range(n):
            key = key_of[id]
            assert key is not None, f"cached id {id} has no key"
            del id_of[key]
            key_of[id] = None
            if self.on_evict is not None:
                self.on_evict(id, key)
            if self.on_unkeyed is not None:
                self.on_unkeyed(key)
            ids.append(id)
            id = following[id]
        following[0] = id
        self._prev[id] = 0
        self.num_cached -= n
        self.evictions += n

    def _unlink(self, id: int) -> None:
        before, after = self._prev[id], self._next[id]
        self._next[before] = after
        self._prev[after] = before
        self.num_cached -= 1

    def retain(self, id: int) -> None:
        """One more holder; a cached id is revived by it."""
        count = self._refs[id]
        if count == 0:
            assert self._key_of[id] is not None, f"retain of id {id}, which is clean or null"
            self._unlink(id)
            self.revivals += 1
            self.num_live += 1
            if self.num_live > self.peak_live:
                self.peak_live = self.num_live
        self._refs[id] = count + 1

    def release(self, ids: Iterable[int]) -> None:
        """One holder less for each id, in this order; the last id counts as the most recently used."""
        refs, keys, returned = self._refs, self._key_of, self._returned
        following, previous = self._next, self._prev
        freed = 0
        for id in ids:
            count = refs[id]
            assert count > 0, f"release of id {id}, which nobody holds"
            refs[id] = count - 1
            if count > 1:
                continue
            freed += 1
            if keys[id] is None:
                returned.append(id)
            else:
                last = previous[0]
                following[last] = previous[0] = id
                previous[id] = last
                following[id] = 0
                self.num_cached += 1
        self.num_live -= freed

    def publish(self, id: int, key: bytes) -> int:
        """The id that carries `key` from now on: this one, or the first that was published under it."""
        (canonical,) = self.publish_all((id,), (key,))
        return canonical

    def publish_all(self, ids: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """The ids that carry the keys from now on, each as `publish` says."""
        refs, key_of, carrier = self._refs, self._key_of, self._id_of.setdefault
        found = []
        for id, key in zip(ids, keys, strict=True):
            assert refs[id] > 0, f"publish of id {id}, which nobody holds"
            canonical = carrier(key, id)
            if canonical == id:
                assert key_of[id] in (None, key), f"id {id} is published already, under another key"
                key_of[id] = key
            found.append(canonical)
        return found

    def withdraw(self, id: int) -> None:
        """Take the key of a live id away; it is clean once it is released."""
        key = self._key_of[id]
        assert self._refs[id] > 0 and key is not None, f"withdraw of id {id}, which is not live or has no key"
        del self._id_of[key]
        self._key_of[id] = None
        if self.on_evict is not None:
            self.on_evict(id, key)
        if self.on_unkeyed is not None:
            self.on_unkeyed(key)

    def unkey(self, key: bytes) -> bool:
        """No id carries `key` from now on; whether one did. A cached id is clean, a live one once it is released.

        Unlike an eviction it is told to nobody: what the key stands for is not worth keeping.
        """
        id = self._id_of.pop(key, 0)
        if not id:
            return False
        if self.on_unkeyed is not None:
            self.on_unkeyed(key)
        self._key_of[id] = None
        if not self._refs[id]:
            self._unlink(id)
            self._returned.append(id)
        return True

    def unkey_all(self) -> None:
        """No id carries a key from now on; ids that are held stay so."""
        for key in list(self._id_of):
            self.unkey(key)

    def find(self, key: bytes) -> int:
        """The id that carries `key`, or 0. Changes nothing."""
        return self._id_of.get(key, 0)

    def find_run(self, keys: Sequence[bytes]) -> list[int]:
        """The ids of the leading keys, up to the first that misses. Changes nothing."""
        ids = []
        find = self._id_of.get
        for key in keys:
            id = find(key)
            if id is None:
                break
            ids.append(id)
        return ids

    def missing(self, keys: Iterable[bytes]) -> set[bytes]:
        """The keys that no id carries."""
        return set(keys).difference(self._id_of)

    def keyed(self) -> list[tuple[int, bytes]]:
        """(id, key) of every keyed id: cached ones from the least recently used on, then live ones."""
        ids, id = [], self._next[0]
        while id:
            ids.append(id)
            id = self._next[id]
        ids += [id for id in sorted(self._id_of.values(), reverse=True) if self._refs[id]]
        return [(id, key) for id in ids if (key := self._key_of[id]) is not None]

    def num_cached_among(self, ids: Iterable[int]) -> int:
        """How many of these published ids nobody holds."""
        refs = self._refs
        return sum(1 for id in ids if refs[id] == 0)

    def reset(self) -> None:
        """Forget every key. Raises ValueError while an id is live; peak and counters stay."""
        if self.num_live:
            raise ValueError(f"reset of a pool with {self.num_live} live ids; release them first")
        self.unkey_all()
        self._forget()

    def check_invariants(self, holders: Mapping[int, int] | None = None) -> None:
        """Prove the books. holders: for each held id, the number of its holders as they count themselves."""
        ring, id = [], self._next[0]
        while id:
            assert self._prev[id] == (ring[-1] if ring else 0), f"the ring is broken at id {id}"
            assert self._refs[id] == 0 and self._key_of[id] is not None, f"id {id} is in the ring but not cached"
            ring.append(id)
            id = self._next[id]
        assert self._prev[0] == (ring[-1] if ring else 0), "the end of the ring is broken"
        clean = [*self._returned, *range(self._fresh, self.num_ids)]
        live = {id: count for id, count in enumerate(self._refs) if count}
        assert len(ring) == self.num_cached and len(live) == self.num_live, "a gauge is wrong"
        assert sorted([*ring, *clean, *live]) == list(range(1, self.num_ids)), "an id has no state, or two"
        assert all(self._key_of[id] is None for id in clean), "a clean id has a key"
        keyed = {key: id for id, key in enumerate(self._key_of) if key is not None}
        assert keyed == self._id_of, "a key points to an id that does not carry it"
        assert self.num_live <= self.peak_live, "the peak fell"
        if holders is not None:
            assert live == {id: count for id, count in holders.items() if count}, "holders and references differ"
