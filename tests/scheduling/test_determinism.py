"""Hosts with the same requests make the same plans, whatever seeds their processes have."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys

from tests.histories import seeded
from tests.scheduling.test_long_histories import History
from tests.support import ROOT


def plans_of(seed: int) -> str:
    """A digest of all plans and tables of random histories."""
    rng, state = random.Random(seed), hashlib.blake2b(digest_size=16)
    for _ in range(6):
        history = History(rng)
        history.run(60)
        for plan in history.engine.plans:
            state.update(repr((plan.step, plan.admitted)).encode())
            for shard in plan.shards:
                tables = [table.tolist() for table in shard.block_tables]
                rows = [a.tolist() for a in (shard.slots, shard.starts, shard.counts, shard.samples, shard.state_slots)]
                slots = [shard.source_slots.tolist(), shard.target_slots.tolist()]
                copies = [shard.spills, shard.loads, shard.copies_before, shard.copies_after]
                state.update(repr((rows, slots, tables, copies)).encode())
    return state.hexdigest()


def test_one_process_and_n_processes_have_equal_tables_and_plans() -> None:
    seed = seeded(5)
    program = f"from tests.scheduling.test_determinism import plans_of; print(plans_of({seed}))"
    found = set()
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
        )
        found.add(run.stdout.strip())
    assert found == {plans_of(seed)}
