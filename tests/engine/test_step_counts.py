"""What the host does in a decode step: launches, transfers, calls of Python functions. None of it may rise.

The device computes nothing, so that nothing is compiled and no call of jax's is counted. step_counts.json has the
counts by how a step runs and by rows; where one has fallen, write the lower one.
"""

import collections
import dataclasses
import inspect
import json
import pathlib
import statistics
import sys

import jax
import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.engine.startup.build_engine import build_engine
from ferrum_jax.runtime.block_copies import BlockCopies
from ferrum_jax.runtime.compile.deferred import DeferredExecutable, Prepared
from ferrum_jax.runtime.horizons import Horizons
from ferrum_jax.runtime.layout import lay_out
from ferrum_jax.runtime.programs import Executables, others_of
from ferrum_jax.runtime.transfers import NamedTransfers
from tests.support import SMALL, small_llm

KEPT = json.loads(pathlib.Path(__file__).with_name("step_counts.json").read_text())
CONFIG = dataclasses.replace(SMALL, max_num_seqs=256, max_num_batched_tokens=2048, num_blocks=1024, max_model_len=64)
ASKED = {"launch": SamplingParams(max_tokens=40, seed=1, ignore_eos=True)}
ASKED["halves"] = dataclasses.replace(ASKED["launch"], top_k=5)
ASKED["launch of four"] = dataclasses.replace(ASKED["launch"], max_tokens=60)


class IdleDevice:
    """Executables that give back what they were given. seen: launches, and arrays of the host that went in."""

    def __init__(self, layout) -> None:
        self.layout, self.seen = layout, collections.Counter()
        pools = layout.pools
        shapes = pools.flat_caches(), pools.slots, pools.prompts, pools.masks, pools.hidden
        fresh = jax.tree.map(NamedTransfers().zeros, shapes)
        others = {name: lambda first, *_: first for name in others_of(layout)} | {"fresh_pools": lambda fill: fresh}
        ladder = layout.ladder
        self.executables = Executables(
            forwards=self._made(dict.fromkeys(ladder.buckets, (1, 3))),
            samples=self._made(dict.fromkeys(ladder.row_buckets, (1, 2))),
            launches=self._made(dict.fromkeys(ladder.launches, (1, 2, 3))),
            others=Prepared({name: DeferredExecutable.made(other) for name, other in others.items()}),
        )

    def _made(self, parts) -> Prepared:
        return Prepared({part: DeferredExecutable.made(self._part(pools)) for part, pools in parts.items()})

    def _part(self, pools):
        def run(*given):
            self.seen["launches"] += 1
            self.seen["inputs"] += list(map(type, given)).count(np.ndarray)
            return *(given[i] for i in pools), *given[-1]

        return run


def counted(rows: int, how: str, monkeypatch) -> dict[str, float]:
    """The median counts of a step of a few, each with this many rows that decode."""
    table = ((rows, 1, 4),) if how == "launch of four" else ()
    monkeypatch.setattr(Horizons, "look", lambda *_: table)
    loaded = small_llm("qwen3").loaded
    layout = lay_out(loaded.layout.spec, CONFIG, loaded.layout.mesh)
    device = IdleDevice(layout)
    idle = dataclasses.replace(loaded, layout=layout, executables=device.executables, copies=BlockCopies(layout, None))
    engine = build_engine(idle, CONFIG, None)
    array = type(loaded.weights[0])
    copy = array.copy_to_host_async
    monkeypatch.setattr(array, "copy_to_host_async", lambda x: device.seen.update(outputs=1) or copy(x))
    for _ in range(rows):
        engine.add([5, 6, 7], ASKED[how])
    for _ in range(5):
        engine.step()
    step = inspect.unwrap(type(engine).step)  # without the tests' guard around it
    found = collections.defaultdict(list)
    for _ in range(9):
        device.seen.clear()
        sys.setprofile(lambda frame, event, _: device.seen.update(calls=event == "call"))
        try:
            step(engine)
        finally:
            sys.setprofile(None)
        for what, count in device.seen.items():
            found[what].append(count)
    assert len(engine.runner.recent_steps) > 9 and engine.runner.recent_steps[-1][0] == rows
    return {what: statistics.median(counts) for what, counts in found.items()}


@pytest.mark.parametrize("rows", [1, 16, 256])
@pytest.mark.parametrize("how", ASKED)
def test_no_count_of_a_decode_step_rises(rows, how, monkeypatch):
    found, kept = counted(rows, how, monkeypatch), KEPT[how][str(rows)]
    assert found.keys() == kept.keys()
    assert {what: count for what, count in found.items() if count > kept[what]} == {}, f"kept are {kept}"
