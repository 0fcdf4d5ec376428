"""The host tier's books: random histories against a naive model, and the order in which blocks go."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ferrum_jax.core.kv_cache.host_tier import HostTier
from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.core.metrics import ReuseMetrics
from ferrum_jax.core.plan import Copy
from tests.scheduling.fake_device import Engine


def _key(number: int) -> bytes:
    return number.to_bytes(16, "little")


_keys = st.builds(_key, st.integers(0, 9))


class TierMachine(RuleBasedStateMachine):
    """One device pool, one host pool and the memory of both, in which a block's content is its key.

    The model of host memory is a list of keys, the least recently used first, and how many loads hold each.
    """

    @initialize(device=st.integers(1, 6), host=st.integers(1, 6))
    def start(self, device: int, host: int) -> None:
        self.pool, self.tier = IdPool(device + 1), HostTier([host + 1], [7])
        self.pool.on_evict = lambda id, key: self.evict(id, key)
        self.device_memory: list[bytes | None] = [None] * (device + 1)
        self.host_memory: list[bytes | None] = [None] * (host + 1)
        self.room = host
        self.live: list[int] = []
        self.filled: dict[int, bytes] = {}  # by the step that is being planned
        self.recent: list[bytes] = []  # host keys that no load holds
        self.held: list[bytes] = []  # by loads, in their order
        self.evicted: list[bytes] = []  # from the device, as the tier was told

    def evict(self, id: int, key: bytes) -> None:
        self.evicted.append(key)
        self.tier.spill(0, id, key)
        if key in self.held:
            return
        if key in self.recent:
            self.recent.remove(key)
        elif len(self.recent) + len(set(self.held)) == self.room:
            if not self.recent:
                return
            self.recent.pop(0)
        self.recent.append(key)

    def take(self, n: int) -> list[int]:
        """Device ids; what they evict goes in the order of the ring."""
        order = [key for id, key in self.pool.keyed() if self.pool.num_holders(id) == 0]
        clean = self.pool.num_clean
        self.evicted = []
        ids = self.pool.take(n)
        assert self.evicted == order[: max(n - clean, 0)], "not the least recently used ones"
        self.live += ids
        return ids

    @rule(keys=st.lists(_keys, min_size=1, max_size=4, unique=True))
    def compute(self, keys: list[bytes]) -> None:
        keys = [key for key in keys if not self.pool.find(key)][: self.pool.num_free]
        for id, key in zip(self.take(len(keys)), keys, strict=True):
            self.filled[id] = key
            assert self.pool.publish(id, key) == id

    @rule(key=_keys)
    def look_up(self, key: bytes) -> None:
        host_id = self.tier.find(0, key)
        assert (host_id != 0) == (key in self.recent or key in self.held)
        if id := self.pool.find(key):
            self.pool.retain(id)
            self.live.append(id)
        elif host_id and self.pool.num_free:
            self.tier.hold(0, host_id)
            if key in self.recent:
                self.recent.remove(key)
            self.held.append(key)
            (id,) = self.take(1)
            self.pool.publish(id, key)
            self.tier.load(0, host_id, id)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data) -> None:
        id = data.draw(st.sampled_from(self.live))
        if id in self.filled or any(copy.target == id for copy in self.tier._loads):
            self.dispatch()  # a row holds its blocks until its plan is made
        self.live.remove(id)
        self.pool.release((id,))

    @rule()
    def dispatch(self) -> None:
        """The plan is made, and its step runs: spills, loads, rows."""
        spills, loads = self.tier.take()
        for copy in spills:
            self.host_memory[copy.target] = self.device_memory[copy.source]
        for copy in loads:
            self.device_memory[copy.target] = self.host_memory[copy.source]
        for id, key in self.filled.items():
            self.device_memory[id] = key
        for i, key in enumerate(self.held):
            if key not in self.held[i + 1 :]:  # its last holder goes
                self.recent.append(key)
        self.filled, self.held = {}, []
        for memory, pool in ((self.device_memory, self.pool), (self.host_memory, self.tier.pools[0])):
            assert all(memory[id] == key for id, key in pool.keyed()), "a block has the content of another key"

    @rule(key=_keys)
    def unkey(self, key: bytes) -> None:
        """Between steps; neither memory has it any more."""
        self.dispatch()
        self.pool.unkey(key)
        self.tier.unkey(key)
        assert not self.pool.find(key) and not self.tier.find(0, key)
        self.recent = [k for k in self.recent if k != key]

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "tier"):
            self.pool.check_invariants({id: self.live.count(id) for id in self.live})
            self.tier.check_invariants()
            pool = self.tier.pools[0]
            cached = [key for id, key in pool.keyed() if pool.num_holders(id) == 0]
            assert cached == self.recent, "host memory has other blocks, or would give them up in another order"

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.dispatch()


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=40, stateful_step_count=30)


@pytest.mark.slow
def test_the_tier_holds_in_long_histories() -> None:
    machine = type("LongTierMachine", (TierMachine,), {}).TestCase
    machine.settings = settings(max_examples=200, stateful_step_count=50)
    machine().runTest()


def _engine(**sizes) -> Engine:
    return Engine(**{"num_blocks": 4, "num_host_blocks": 12, "max_model_len": 20, **sizes})


def _run(engine: Engine, *prompts: list[int], max_tokens: int = 1):
    requests = [engine.add(prompt, max_tokens) for prompt in prompts]
    engine.drain()
    return requests


def test_a_prompt_that_was_evicted_is_hit_and_not_computed_again():
    engine = _engine()
    _run(engine, [1] * 16)
    _run(engine, [2] * 16)
    before = engine.device.num_computed
    (request,) = _run(engine, [1] * 16)
    assert request.num_cached_tokens == 12 and engine.device.num_computed - before == 4
    metrics = engine.cache.metrics()
    assert (metrics.host_hits, metrics.loaded_blocks, metrics.host_entries) == (1, 3, 8)


def test_blocks_go_deepest_first_so_the_head_of_a_prompt_outlives_its_tail():
    engine = _engine()
    _run(engine, [1] * 16)
    _run(engine, [2] * 8)
    spills = [copy.source for plan in engine.plans for copy in plan.shards[0].spills]
    first_table = engine.plans[0].shards[0].block_tables[0][0].tolist()
    assert spills == first_table[:1:-1], "the two deepest, the last one first"


def test_a_block_that_host_memory_has_is_not_copied_there_again():
    engine = _engine()
    for prompt in ([1] * 16, [2] * 16) * 3:
        _run(engine, prompt)
    metrics = engine.cache.metrics()
    assert metrics.spilled_blocks == metrics.host_entries == 8 and metrics.evictions > 8


def test_what_is_evicted_and_asked_for_in_one_plan_comes_back_in_it():
    """The second admission of a plan asks for what the first one evicts."""
    engine = _engine(num_blocks=6, max_num_batched_tokens=32)
    _run(engine, [1] * 16)
    (first, second) = _run(engine, [2] * 16, [1] * 8)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4)
    plan = next(plan for plan in engine.plans if len(plan.admitted) == 2)
    assert plan.shards[0].spills


def test_an_admission_loads_what_its_own_blocks_push_out_of_host_memory():
    """Host memory of four blocks is full of the prompt; the blocks that it takes evict four others."""
    engine = _engine(num_host_blocks=4)
    _run(engine, [1] * 16)
    _run(engine, [2] * 16)
    (request,) = _run(engine, [1] * 16)
    assert request.num_cached_tokens == 12
    engine.scheduler.check_invariants()


def test_copies_name_their_group_and_a_window_loads_its_own_blocks_alone():
    engine = _engine(num_blocks=6, num_host_blocks=20, windows=(None, 6), max_model_len=28)
    _run(engine, [1] * 22)
    _run(engine, [2] * 22)
    (request,) = _run(engine, [1] * 22)
    assert request.num_cached_tokens == 20
    groups = [copy.pool for plan in engine.plans for copy in plan.shards[0].loads]
    assert groups.count(0) == 5 and groups.count(1) == 2


def test_a_repeat_loads_its_tail_into_a_block_of_its_own():
    engine = _engine(max_cached_prompts=4, num_blocks=6)
    _run(engine, [1] * 14)
    _run(engine, [2] * 18)
    before = engine.device.num_computed
    (request,) = _run(engine, [1] * 14)
    assert request.num_cached_tokens == 14 and engine.device.num_computed == before
    assert engine.cache.metrics().prompt_hits == 1
    assert not engine.plans[-1].shards[0].copies_before


def test_a_reset_forgets_host_memory_too():
    engine = _engine()
    _run(engine, [1] * 16)
    _run(engine, [2] * 16)
    engine.cache.reset()
    (request,) = _run(engine, [1] * 16)
    assert request.num_cached_tokens == 0 and engine.cache.metrics().loaded_blocks == 0


def test_a_full_host_memory_whose_blocks_are_all_read_drops_what_is_spilled():
    tier, metrics = HostTier([2], [7]), ReuseMetrics(enabled=True, block_size=4, kv_dtype="float32")
    tier.spill(0, 5, _key(1))
    assert tier.take() == ((Copy(pool=0, source=5, target=1),), ())
    tier.hold(0, tier.find(0, _key(1)))
    tier.load(0, 1, 9)
    tier.spill(0, 6, _key(2))
    assert tier.find(0, _key(2)) == 0
    assert tier.take() == ((), (Copy(pool=0, source=1, target=9),))
    tier.measure(metrics)
    assert (metrics.spilled_blocks, metrics.loaded_blocks, metrics.host_bytes) == (1, 1, 7)
    tier.check_invariants()
