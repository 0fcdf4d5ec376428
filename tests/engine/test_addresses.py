"""What goes into a step and comes out of it lies where it lay before, and what is still read is not written."""

import collections
import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ferrum_jax import SamplingParams
from ferrum_jax.engine.startup.build_engine import build_engine
from ferrum_jax.runtime.horizons import Horizons
from ferrum_jax.runtime.runner import Runner
from ferrum_jax.runtime.transfers import NamedTransfers
from tests.engine.test_launches import launching
from tests.forked import call
from tests.support import small_llm, step

KINDS = (
    SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=9, seed=4, logprobs=0, ignore_eos=True),
    SamplingParams(max_tokens=13, seed=5, top_k=7, logprobs=2, ignore_eos=True),
)


def address(array) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.unsafe_buffer_pointer()


@pytest.fixture
def seen(monkeypatch):
    """By place, the addresses since they were cleared: of pools behind each step, of results and inputs by part."""
    found, dispatch = collections.defaultdict(set), Runner.dispatch

    def spying(self, *arguments):
        step = dispatch(self, *arguments)
        pools = (*self._caches, self._slots, self._prompts, self._hidden)
        for place, array in enumerate(pools):
            found[place].add(address(array))
        for part, lent in step._give.args[0]:
            for place, array in enumerate(lent if isinstance(lent, tuple) else [lent]):
                found[part, place].add(address(array))
        return step

    monkeypatch.setattr(Runner, "dispatch", spying)
    return found


@pytest.mark.parametrize("horizons", [(), (1,), (1, 8)], ids=["halves", "launches", "horizons"])
def test_addresses_stay_for_a_hundred_steps_in_which_rows_come_and_go(family, seen, horizons, monkeypatch):
    llm = small_llm(family)
    loaded = launching(llm, horizons) if horizons else llm.loaded
    goes_on, table = 8 in horizons, [(rows, draw, 8 if rows == 4 else 1) for rows in (1, 2, 4) for draw in (0, 1)]
    monkeypatch.setattr(Horizons, "look", lambda *_: table if goes_on else ())
    engine = build_engine(loaded, dataclasses.replace(llm.config, max_cached_prompts=2), llm.tokenizer)
    rng = np.random.default_rng(7)
    known = {}
    warm = 219 if goes_on else 119
    for number in range(warm + 101):
        for _ in range(4 * (number % 20 == 0) if goes_on else number % 5 == 0):
            prompt = rng.integers(6, 90, int(rng.integers(1, 40))).tolist()
            engine.add(prompt, KINDS[number % (2 if goes_on else 3)])
        step(engine)
        if number == warm:
            known = {place: frozenset(addresses) for place, addresses in seen.items()}
    assert {place: addresses for place, addresses in seen.items() if place in known} == known
    assert any("horizon=8" in str(place) for place in known) == goes_on
    pools = [len(addresses) for place, addresses in known.items() if isinstance(place, int)]
    assert len(pools) > 3 and set(pools) == {1}, "pools stay where they are"
    assert max(map(len, known.values())) == 2, "the step in flight and the one before it"


def test_what_a_reader_holds_back_is_not_written_by_later_steps():
    llm = small_llm("qwen3")
    engine = build_engine(launching(llm), llm.config, llm.tokenizer)
    held, dispatch = [], engine.runner.dispatch

    def holding(*arguments):
        step = dataclasses.replace(dispatch(*arguments), _give=lambda: None)
        held.append((step, step.rows().copy()))
        return step

    engine.runner.dispatch = holding
    for prompt in ([5, 6], [7, 8, 9], [3] * 30, [4]):
        engine.add(prompt, KINDS[1])
    while engine.has_unfinished:
        step(engine)
    assert len(held) > 9
    for late, rows in held:
        np.testing.assert_array_equal(late.rows(), rows)


def ended_behind_a_fetch() -> list[bool]:
    """Each of two devices, which give the same rows: has it ended when the host has them?"""

    def slow(rows):
        return jax.lax.fori_loop(0, 3_000_000 * jax.lax.axis_index("tp"), lambda i, x: x * 0.5, rows)

    mesh, whole = Mesh(np.array(jax.devices()), ("tp",)), PartitionSpec()
    program = jax.shard_map(slow, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    rows, transfers = jax.jit(program)(np.ones((4, 1), np.float32)), NamedTransfers()
    transfers.send((rows,))
    transfers.fetch(rows)
    return [shard.data.is_ready() for shard in rows.addressable_shards]


def test_a_step_whose_rows_are_fetched_has_ended_on_each_device():
    assert call(ended_behind_a_fetch, devices=2) == [True, True]
