"""Whatever a seed does to a job's workers, its output is that of an undisturbed job, and it ends once faults end."""

import math
import os
import subprocess
import sys

import pytest

from ferrum_jax.io import system
from scripts.csv_tables import read
from scripts.mutants import Mutant
from tests.forked import call
from tests.histories import seeded
from tests.marks import few
from tests.support import ROOT
from tests.world.__main__ import (
    KINDS,
    TABLE,
    histories,
    history_of,
    mutants,
    seconds_to_find,
    smallest,
    table_of,
)
from tests.world.disk import Disk
from tests.world.history import FAULTS, Failed, History, Plan, expected
from tests.world.world import Machine, Process, World

# Histories that failed once, and are tried again; rare ones, for which no mutant stands in mutants.toml.
REMEMBERED = {
    "bucket 23974 40": "a bucket listed the first segment late, so another model went on with the rows of the first",
    "disk 10713 40": "a worker that got notice before its turn said that the output is there, and nobody had merged it",
    "server-bucket 200219 40": "a clerk began anew what had ended and was deleted, which a bucket still listed",
}


@pytest.mark.parametrize("kind", KINDS)
def test_histories_of_a_job_or_of_a_server(kind):
    most = 1 if "published" in kind else 4 if "server" in kind else 8
    found = histories([kind], 40, None, seeded(0) % 1_000_000_007, seconds=math.inf, most=most)
    assert not found["failed"] and found["histories"][kind] == most


@pytest.mark.slow
@pytest.mark.parametrize("has_servers", [False, True])
def test_many_histories_reach_every_rare_state(has_servers):
    kinds = [kind for kind in KINDS if ("server" in kind) == has_servers and "published" not in kind]
    found = histories(kinds, 40, None, seeded(10_000) % 1_000_000_007, seconds=math.inf, most=1500)
    assert not found["failed"] and not found["missing"]


@pytest.mark.parametrize("name", REMEMBERED)
def test_a_history_that_failed_once_does_not_fail_again(name):
    kind, seed, num_rows = name.split()
    history_of(Plan.of(int(seed), kind, num_rows=int(num_rows))).run()


def trace(hash_seed: str) -> str:
    """The digest of all calls of a history, in a process of its own."""
    command = [sys.executable, "-m", "tests.world", "replay", "shared", "26", "40"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    return shown.splitlines()[-1]


def test_a_seed_replays_to_the_byte_in_another_process():
    expected(40)
    history = History(Plan.of(26, "shared", num_rows=40)).run()
    assert trace("1") == trace("2") == f"trace {history.world.trace:08x}"


def test_a_plan_that_fails_is_made_as_small_as_it_can_be(monkeypatch):
    def lies(history: History) -> None:
        if any(fault.kind == "kill" for fault in history.plan.faults):
            raise Failed("there was a kill")

    monkeypatch.setattr(History, "_prove", lies)
    plan = next(
        plan
        for plan in (Plan.of(seed, "disk", num_rows=40) for seed in range(99))
        if len(plan.faults) > 2 and any(fault.kind == "kill" for fault in plan.faults)
    )
    least, why = smallest(plan)
    assert [fault.kind for fault in least.faults] == ["kill"] and why == "there was a kill"


def test_the_world_has_every_name_of_the_machine():
    world = World(1)
    world.task.process.machine = Machine("m", Disk(world))
    real = {name: getattr(system, name) for name in system.__all__}
    with world.installed():
        assert all(getattr(system, name) != real[name] for name in real)
        assert all(hasattr(world, f"_{name}") or hasattr(Disk, name) for name in real)
    assert all(getattr(system, name) is real[name] for name in real)


@pytest.fixture
def disk() -> Disk:
    world = World(1)
    disk = Disk(world)
    world.task.process = Process(world, Machine("m", disk), "tester")
    return disk


def written(disk: Disk, path: str, content: bytes, *, is_synced: bool) -> None:
    with disk.open(path, "wb") as file:
        file.write(content)
        file.flush()
        if is_synced:
            disk.fsync(file.fileno())


def test_a_power_cut_keeps_what_was_synced_and_any_part_of_what_was_not(disk):
    for syncs_bytes, syncs_name, kept in (
        (True, True, {b"new"}),
        (True, False, {None, b"new"}),
        (False, True, {b"new", b""}),
    ):
        found = set[bytes | None]()
        for _ in range(60):
            fresh = Disk(disk._world)
            written(fresh, "/a", b"new", is_synced=syncs_bytes)
            fresh.rename("/a", "/b")
            if syncs_name:
                fresh.sync_folder("/")
            fresh.cut()
            node = fresh._find("/b")
            found.add(None if node is None else node.data)
        assert found == kept or (not syncs_bytes and found > kept)


def test_the_page_has_the_counts_of_a_run_for_every_fault():
    counts = {kind: int(row[2].replace(",", "")) for kind, row in zip(FAULTS, read("survives")[1:], strict=True)}
    assert read("survives") == table_of(counts) and min(counts.values()) > 500


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_a_fault_that_is_put_back_stands_in_its_file_once(mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, f"say in {TABLE.name} what it is now"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", few(mutants()), ids=lambda mutant: mutant.name)
def test_histories_find_a_fault_that_is_put_back(mutant: Mutant):
    assert call(seconds_to_find, mutant, 40) is not None  # in a process that may fork
