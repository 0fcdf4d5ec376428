"""CacheManager: its sentences over one and two groups, and random histories against a naive model."""

import itertools
from array import array
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.core.request import Request
from ferrum_jax.inputs.prompt import MediaSpan
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes
from tests.prefix_cache.subscriber import Subscriber

_ids = itertools.count()


def _manager(*pool_sizes: int, max_num_seqs: int = 4, max_model_len: int = 40, windows=(), **wishes) -> CacheManager:
    """pool_sizes: the null block included."""
    counts = [size - 1 for size in pool_sizes or (17,)]
    sizes = EngineSizes(
        block_size=4,
        group_blocks=counts,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=max_model_len,
        windows=windows or [None] * len(counts),
        block_bytes=[100] * len(counts),
    )
    return CacheManager(sizes, **wishes)


def _request(tokens: list[int] | int, **wishes) -> Request:
    ids = array("i", range(tokens) if isinstance(tokens, int) else tokens)
    return Request(id=next(_ids), token_ids=ids, num_prompt_tokens=len(ids), max_total_tokens=40, **wishes)


def _books(manager: CacheManager) -> list:
    """Everything that a failure must leave as it was, the order of eviction with it."""
    pools = [(list(p._next), list(p._prev), list(p._refs), dict(p._id_of), list(p._returned)) for p in manager.pools]
    return [
        pools,
        [t.tolist() for t in manager.blocks.tables],
        manager.blocks.num_blocks.tolist(),
        manager.blocks.num_published.tolist(),
    ]


def _run(manager: CacheManager, tokens: list[int] | int, slot: int = 1) -> Request:
    """A request that is admitted, computed, published and released."""
    request = _request(tokens)
    request.slot = slot
    assert manager.admit(request, slot) is not None
    manager.publish(request, slot, len(request.token_ids))
    manager.release(slot)
    return request


def test_rows_that_need_a_block_are_found_in_one_look() -> None:
    manager = _manager()
    for slot, length in ((1, 4), (2, 5), (3, 8)):
        manager.admit(_request([slot] * length), slot)
    slots = np.array([3, 2, 1], np.int32)
    assert manager.rows_to_grow(slots, np.array([9, 6, 5])).tolist() == [0, 2]


@pytest.mark.parametrize("sizes", [(9,), (9, 7), (7, 9)])
def test_a_failed_admission_leaves_books_and_tables_as_they_were(sizes: tuple[int, ...]) -> None:
    manager = _manager(*sizes)
    _run(manager, 16)
    manager.admit(_request([7] * 12), 2)
    before = _books(manager)
    assert manager.admit(_request([*range(16), *[5] * 12]), 1) is None
    assert _books(manager) == before and manager.counters.refusals == 1 and manager.counters.lookups == 2


def test_rows_with_full_unpublished_blocks_are_found_in_one_look() -> None:
    manager = _manager()
    for slot in (1, 2, 3):
        manager.admit(_request([slot] * 9), slot)
    slots, done = np.array([1, 2, 3], np.int32), np.array([3, 4, 8])
    assert manager.rows_to_publish(slots, done).tolist() == [1, 2]


def test_a_twin_is_replaced_by_the_first_published_block_and_freed_clean() -> None:
    manager = _manager()
    first, second = _request(8), _request(8)
    manager.admit(first, 1)
    manager.admit(second, 2)
    manager.publish(first, 1, 8)
    manager.publish(second, 2, 8)
    assert manager.blocks.tables[0][2].tolist() == manager.blocks.tables[0][1].tolist()
    metrics = manager.metrics()
    assert (metrics.twins_merged, metrics.live, metrics.cached) == (2, 2, 0)
    manager.release(1)
    manager.release(2)
    manager.check_invariants()
    assert manager.metrics().cached == 2 and manager.metrics().clean == 14


def test_a_sequence_is_freed_deepest_block_first_so_that_shared_heads_outlive_tails() -> None:
    manager = _manager(6)
    request = _run(manager, 20)
    manager.admit(_request([60] * 12), 1)
    found = [manager.pools[0].find(key) != 0 for key in request.keys]
    assert found == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("manager", "request_"),
    [
        ({"fingerprint": b"other"}, {}),
        ({"kv_dtype": "int8"}, {}),
        ({"block_size": 2}, {}),
        ({}, {"adapter": "a"}),
        ({}, {"cache_salt": b"a"}),
        ({}, {"media": (MediaSpan(kind="image", digest=b"a", start=3, length=1),)}),
    ],
    ids=("model", "kv_dtype", "block_size", "adapter", "salt", "media"),
)
def test_nothing_hits_across_model_dtype_block_size_adapter_salt_or_media(manager, request_) -> None:
    def keys(request: dict, block_size: int = 4, **names) -> list[bytes]:
        sizes = {"group_blocks": (16,), "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 40}
        manager = CacheManager(EngineSizes(block_size=block_size, **sizes), **names)
        return manager.keys_of(_request(12, **request))

    wishes = {"fingerprint": b"model", "kv_dtype": "float32"}
    assert keys({}, **wishes) == keys({}, **wishes)
    assert not {*keys({}, **wishes)} & {*keys(request_, **(wishes | manager))}


def test_a_media_mismatch_reuses_only_what_lies_before_it() -> None:
    def span(digest: bytes) -> MediaSpan:
        return MediaSpan(kind="image", digest=digest, start=6, length=5)

    manager = _manager()
    first = _request(20, media=(span(b"cat"),))
    manager.admit(first, 1)
    manager.publish(first, 1, 20)
    assert manager.admit(_request(20, media=(span(b"dog"),)), 2) == 4
    assert manager.admit(_request(20, media=(span(b"cat"),)), 3) == 16


def test_counters_are_exact() -> None:
    manager = _manager()
    _run(manager, 12)
    assert manager.admit(_request(14), 1) == 12
    assert manager.admit(_request([3] * 5), 2) == 0
    assert manager.admit(_request(14, takes_hits=False), 3) == 0
    none = [
        *("resumed_tokens", "recomputed_tokens", "prompt_hits", "twins_merged", "left_behind_blocks", "copied_blocks"),
        *("evictions", "prompt_evictions", "snapshot_evictions", "host_hits", "spilled_blocks", "loaded_blocks"),
        *("host_evictions", "refusals", "preemptions", "cached", "cached_prompts", "snapshots", "snapshot_bytes"),
        *("host_entries", "host_bytes", "pinned"),
    ]
    found = {"enabled": True, "block_size": 4, "kv_dtype": "float32", "lookups": 3, "hits": 1, "misses": 2}
    found |= {"hit_tokens": 12, "missed_tokens": 12 + 2 + 5, "saved_prefill_tokens": 12, "hit_blocks": 3}
    found |= {"published_blocks": 3, "revivals": 3, "live": 4 + 2 + 4, "clean": 6, "peak_live": 10, "entries": 3}
    assert manager.metrics().snapshot() == dict.fromkeys(none, 0) | found | {"bytes": 300}


def test_a_cache_that_is_off_neither_looks_up_nor_publishes() -> None:
    manager = _manager(enabled=False)
    _run(manager, 12)
    assert manager.admit(_request(12), 1) == 0
    metrics = manager.metrics()
    assert (metrics.lookups, metrics.entries, metrics.cached, metrics.enabled) == (0, 0, 0, False)
    assert manager.rows_to_publish(np.array([1], np.int32), np.array([12])).tolist() == []


def test_a_reset_forgets_every_prefix_and_is_refused_while_a_row_runs() -> None:
    manager = _manager()
    _run(manager, 12)
    manager.admit(_request(12), 1)
    with pytest.raises(ValueError, match="rows hold 3 of its ids; let them end first"):
        manager.reset()
    manager.release(1)
    manager.reset()
    assert manager.admit(_request(12), 1) == 0


class CacheManagerMachine(RuleBasedStateMachine):
    """Rows come, grow, publish and go over two groups; the naive model knows prefixes as tuples of tokens."""

    @initialize(
        first=st.integers(4, 14),
        second=st.integers(4, 14),
        windows=st.sampled_from([(None, None), (None, 6), (1, None), (9, 5), (4, 4)]),
    )
    def start(self, first: int, second: int, windows: tuple[int | None, ...]) -> None:
        self.manager = _manager(first, second, max_num_seqs=4, max_model_len=24, windows=windows, has_events=True)
        self.subscriber = Subscriber(2)
        self.windows = windows
        self.rows: dict[int, Request] = {}
        self.published: dict[int, int] = {}  # tokens, by slot
        self.num_refused = 0

    def _prefixes(self, group: int) -> dict[bytes, int]:
        return {
            key: id for id in range(self.manager.pools[group].num_ids) if (key := self.manager.pools[group].key_of(id))
        }

    def _needed(self, group: int, num_blocks: int) -> set[int]:
        """The blocks with a token that a query behind `num_blocks` full ones attends to."""
        end, window = 4 * num_blocks, self.windows[group]
        return {position // 4 for position in range(0 if window is None else max(end - window + 1, 0), end)}

    @rule(stem=st.integers(0, 1), cut=st.integers(1, 20), tail=st.lists(st.integers(0, 2), max_size=3))
    def admit(self, stem: int, cut: int, tail: list[int]) -> None:
        slot = next((slot for slot in range(1, 5) if slot not in self.rows), None)
        if slot is None:
            return
        request = _request([stem] * cut + tail)
        keyed = [self._prefixes(group) for group in range(2)]
        free = [pool.num_free for pool in self.manager.pools]
        before = _books(self.manager)
        hit = self.manager.admit(request, slot)
        keys, total = request.keys, -(-len(request.token_ids) // 4)
        expected = max(
            count
            for count in range((len(request.token_ids) - 1) // 4 + 1)
            if all(keys[index] in keyed[group] for group in range(2) for index in self._needed(group, count))
        )
        needed = [sorted(self._needed(group, expected)) for group in range(2)]
        missing = total - expected
        if hit is None:
            idle = [
                sum(pool.num_holders(k[keys[index]]) == 0 for index in indices)
                for pool, k, indices in zip(self.manager.pools, keyed, needed, strict=True)
            ]
            assert any(f - i < missing for f, i in zip(free, idle, strict=True)), "refused without need"
            assert _books(self.manager) == before
            self.num_refused += 1
            return
        assert hit == 4 * expected <= len(request.token_ids) - 1
        for group in range(2):
            ids = self.manager.blocks.tables[group][slot, :expected].tolist()
            assert ids == [keyed[group][keys[i]] if i in needed[group] else 0 for i in range(expected)]
        request.slot = slot
        self.rows[slot] = request
        self.published[slot] = hit

    @rule(data=st.data(), tokens=st.integers(1, 6))
    def grow(self, data, tokens: int) -> None:
        if self.rows:
            slot = data.draw(st.sampled_from(sorted(self.rows)))
            request = self.rows[slot]
            length = min(len(request.token_ids) + tokens, 24)
            before = _books(self.manager)
            if self.manager.grow(slot, length):
                request.token_ids += array("i", [1]) * (length - len(request.token_ids))
            else:
                assert _books(self.manager) == before

    @rule(data=st.data(), share=st.integers(1, 4))
    def publish(self, data, share: int) -> None:
        if self.rows:
            slot = data.draw(st.sampled_from(sorted(self.rows)))
            request = self.rows[slot]
            tokens = len(request.token_ids) * share // 4
            self.manager.publish(request, slot, tokens)
            self.published[slot] = max(self.published[slot], tokens // 4 * 4)

    @rule(data=st.data())
    def release(self, data) -> None:
        if self.rows:
            slot = data.draw(st.sampled_from(sorted(self.rows)))
            self.manager.release(slot)
            del self.rows[slot], self.published[slot]

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_invariants(list(self.rows.values()))
        assert self.manager.counters.refusals == self.num_refused
        self.subscriber.hear(self.manager)
        assert self.subscriber.stored == [set(self._prefixes(group)) for group in range(2)]
        for slot, request in self.rows.items():
            assert self.manager.blocks.num_published[slot] * 4 == self.published[slot]
            assert self.manager.blocks.num_blocks[0, slot] == -(-len(request.token_ids) // 4)
        for group, (pool, table) in enumerate(zip(self.manager.pools, self.manager.blocks.tables, strict=True)):
            owned = [
                (tuple(r.token_ids[: 4 * i + 4]), int(table[s, i]))
                for s, r in self.rows.items()
                for i in range(int(self.manager.blocks.num_behind[group, s]), self.published[s] // 4)
            ]
            assert all(int(table[s, i]) for s in self.rows for i in self._needed(group, self.published[s] // 4))
            assert len({id for _, id in owned}) == len({prefix for prefix, _ in owned}) == len(set(owned)), (
                "a twin remains"
            )
            unpublished = Counter(
                int(id)
                for s in self.rows
                for id in table[s, self.published[s] // 4 : self.manager.blocks.num_blocks[0, s]]
            )
            assert all(pool.num_holders(id) == count == 1 for id, count in unpublished.items()), (
                "a private block is shared"
            )


TestCacheManagerMachine = CacheManagerMachine.TestCase
TestCacheManagerMachine.settings = settings(max_examples=40, stateful_step_count=30)


def test_who_hears_events_knows_what_is_cached_after_each_way_to_forget():
    manager, subscriber = _manager(9, windows=[None], has_events=True), Subscriber(1)
    first = _run(manager, 13)
    subscriber.hear(manager)
    assert subscriber.stored == [{*first.keys[:3]}]
    manager.unkey(first)
    subscriber.hear(manager)
    assert subscriber.stored == [set()]
    for forget in (manager.reset, lambda: manager.renew(b"other")):
        request = _run(manager, [7] * 8)
        subscriber.hear(manager)
        assert subscriber.stored == [{*request.keys}]
        forget()
        subscriber.hear(manager)
        assert subscriber.stored == [set()]


def test_events_say_what_a_key_holds_beside_its_tokens():
    manager = _manager(9, has_events=True)
    image = MediaSpan(kind="image", digest=b"\xab", start=5, length=2)
    request = _request(9, adapter="a1", cache_salt=b"mine", media=(image,))
    request.slot = 1
    manager.admit(request, 1)
    manager.publish(request, 1, 8)
    assert manager.events is not None
    (event,) = manager.events.take()
    assert event["extra_keys"] == [["a1", "mine"], ["a1", ["ab", 1]]] and event["lora_name"] == "a1"
    assert event["parent_block_hash"] is None and event["token_ids"] == [*range(8)]
    manager.publish(request, 1, 8)
    assert manager.events.take() == []
