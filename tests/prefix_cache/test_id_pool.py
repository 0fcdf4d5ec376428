"""IdPool: its sentences, and random histories against a naive model."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ferrum_jax.core.kv_cache.id_pool import IdPool


def _key(n: int) -> bytes:
    return n.to_bytes(16, "little")


def test_n_ids_come_out_as_1_to_n_and_the_next_asks_in_vain() -> None:
    pool = IdPool(6)
    assert [pool.acquire(1), pool.acquire(4)] == [[1], [2, 3, 4, 5]]
    assert pool.acquire(1) is None
    assert pool.num_live == 5 and pool.num_free == 0
    pool.check_invariants(dict.fromkeys(range(1, 6), 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.take(3), "3 ids are taken and 2 are free"),
        (lambda pool: pool.release([2]), "release of id 2, which nobody holds"),
        (lambda pool: pool.release([0]), "release of id 0"),
        (lambda pool: pool.publish(0, _key(1)), "publish of id 0"),
        (lambda pool: pool.retain(0), "retain of id 0"),
        (lambda pool: pool.publish(1, _key(2)), "under another key"),
        (lambda pool: pool.withdraw(2), "withdraw of id 2, which is not live or has no key"),
    ],
)
def test_what_would_break_the_books_is_refused(call, message) -> None:
    pool = IdPool(4)
    pool.publish(*pool.take(1), _key(1))
    assert pool.publish(1, _key(1)) == 1, "the same key once more is no second one"
    with pytest.raises(AssertionError, match=message):
        call(pool)


def test_a_sequence_that_was_freed_deepest_first_comes_out_again_in_its_order() -> None:
    pool = IdPool(9)
    pool.release(reversed(pool.take(6)))
    assert pool.acquire(4) == [1, 2, 3, 4] and pool.acquire(4) == [5, 6, 7, 8]


def test_a_pool_of_the_null_id_alone_hands_out_and_finds_nothing() -> None:
    pool = IdPool(1)
    assert pool.acquire(1) is None and pool.acquire(0) == [] and pool.find(_key(1)) == 0
    assert (pool.num_free, pool.usage, pool.num_cached) == (0, 0.0, 0)
    pool.check_invariants({})
    with pytest.raises(ValueError, match="num_ids is 0; a pool needs at least 1"):
        IdPool(0)


def test_peak_use_never_falls_and_usage_runs_from_0_to_1() -> None:
    pool = IdPool(5)
    assert pool.usage == 0.0
    ids = pool.acquire(4)
    assert pool.usage == 1.0
    pool.release(ids)
    assert pool.usage == 0.0 and pool.peak_live == 4


def test_a_reset_is_refused_while_an_id_is_live_and_complete_when_none_is() -> None:
    pool = IdPool(4)
    ids = pool.acquire(2)
    pool.publish(ids[0], _key(1))
    with pytest.raises(ValueError, match="2 live ids; release them first"):
        pool.reset()
    pool.release(ids)
    pool.reset()
    assert pool.find(_key(1)) == 0 and pool.num_clean == 3 and pool.peak_live == 2
    assert pool.acquire(3) == [1, 2, 3]


class _NaivePool:
    """The same book as plain dicts and lists."""

    def __init__(self, num_ids: int) -> None:
        self.clean = set(range(1, num_ids))
        self.cached: list[int] = []  # least recently used first
        self.holders: dict[int, int] = {}
        self.keys: dict[int, bytes] = {}
        self.evictions = self.revivals = 0
        self.told: list[int] = []  # ids whose keys were evicted or withdrawn: what is unkeyed is kept nowhere else

    def id_of(self, key: bytes) -> int:
        return next((id for id, k in self.keys.items() if k == key), 0)

    def take(self, id: int) -> None:
        """The real pool handed out `id`: it must be a clean one, or the least recently used."""
        if self.clean:
            assert id in self.clean, "a cached id went before a clean one"
            self.clean.remove(id)
        else:
            assert id == self.cached.pop(0), "the evicted id was not the least recently used"
            del self.keys[id]
            self.evictions += 1
            self.told.append(id)
        self.holders[id] = 1

    def retain(self, id: int) -> None:
        if id in self.cached:
            self.cached.remove(id)
            self.revivals += 1
        self.holders[id] = self.holders.get(id, 0) + 1

    def release(self, id: int) -> None:
        self.holders[id] -= 1
        if not self.holders[id]:
            del self.holders[id]
            if id in self.keys:
                self.cached.append(id)
            else:
                self.clean.add(id)


class IdPoolMachine(RuleBasedStateMachine):
    """Each operation on both books."""

    @initialize(num_ids=st.integers(2, 12))
    def start(self, num_ids: int) -> None:
        self.pool, self.naive = IdPool(num_ids), _NaivePool(num_ids)
        self.held: list[int] = []
        self.told: list[int] = []
        self.pool.on_evict = lambda id, key: self.told.append(id)

    @rule(n=st.integers(0, 5))
    def acquire(self, n: int) -> None:
        ids = self.pool.acquire(n)
        assert (ids is None) == (n > len(self.naive.clean) + len(self.naive.cached))
        for id in ids or []:
            self.naive.take(id)
        self.held += ids or []

    @rule(data=st.data(), n=st.integers(1, 4))
    def release(self, data, n: int) -> None:
        ids = [self.held.pop(data.draw(st.integers(0, len(self.held) - 1))) for _ in range(min(n, len(self.held)))]
        self.pool.release(ids)
        for id in ids:
            self.naive.release(id)

    @rule(data=st.data(), key=st.integers(0, 3))
    def publish(self, data, key: int) -> None:
        unpublished = [id for id in self.held if id not in self.naive.keys]
        if unpublished:
            id = data.draw(st.sampled_from(unpublished))
            canonical = self.naive.id_of(_key(key)) or id
            assert self.pool.publish(id, _key(key)) == canonical
            self.naive.keys[canonical] = _key(key)

    @rule(data=st.data())
    def withdraw(self, data) -> None:
        keyed = [id for id in self.held if id in self.naive.keys]
        if keyed:
            id = data.draw(st.sampled_from(keyed))
            self.pool.withdraw(id)
            del self.naive.keys[id]
            self.naive.told.append(id)

    @rule(key=st.integers(0, 3))
    def unkey(self, key: int) -> None:
        id = self.naive.id_of(_key(key))
        assert self.pool.unkey(_key(key)) == (id != 0)
        if id:
            del self.naive.keys[id]
        if id in self.naive.cached:
            self.naive.cached.remove(id)
            self.naive.clean.add(id)

    @rule(key=st.integers(0, 3))
    def hit(self, key: int) -> None:
        id = self.pool.find(_key(key))
        assert id == self.naive.id_of(_key(key))
        if id:
            self.pool.retain(id)
            self.naive.retain(id)
            self.held.append(id)

    @invariant()
    def books_are_equal(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, naive = self.pool, self.naive
        pool.check_invariants(naive.holders)
        assert self.told == naive.told
        assert (pool.num_clean, pool.num_cached, pool.num_live) == (
            len(naive.clean),
            len(naive.cached),
            len(naive.holders),
        )
        assert (pool.evictions, pool.revivals, pool.num_keyed) == (naive.evictions, naive.revivals, len(naive.keys))


TestIdPoolMachine = IdPoolMachine.TestCase
TestIdPoolMachine.settings = settings(max_examples=50, stateful_step_count=40)
