"""One living worker has a part of a job at a time; the dead lose theirs, and no clock but one's own counts."""

import pytest

from ferrum_jax.batch.journal.leases import LeaseLost, Leases
from ferrum_jax.io.files.store import open_store


@pytest.fixture
def store(tmp_path):
    return open_store(f"memory://{tmp_path}")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def worker(store, name: str, clock: Clock | None = None, layout: str = "l") -> Leases:
    return Leases(store, name, layout, expiry_s=10.0, clock=clock or Clock())


def test_a_part_is_one_workers_until_it_leaves(store):
    first, second = worker(store, "w1"), worker(store, "w2")
    assert first.acquire("0") == 1 and second.acquire("0") is None and second.acquire("1") == 1
    assert first.acquire("0") == 1
    first.leave()
    assert second.acquire("0") == 2 and worker(store, "w3").acquire("0") is None


def test_a_heartbeat_that_stands_still_is_death_and_the_dead_learn_of_it(store):
    clock = Clock()
    silent, other = worker(store, "w1"), worker(store, "w2", clock)
    silent.acquire("0")
    assert other.acquire("0") is None
    clock.now = 9.0
    silent.beat()
    assert other.acquire("0") is None
    clock.now = 18.0  # nine seconds after the last beat that was seen
    assert other.acquire("0") is None
    clock.now = 19.5
    assert other.acquire("0") == 2
    with pytest.raises(LeaseLost, match="silent for 10 s and another took over its rows"):
        silent.beat()


def test_a_worker_whose_journal_was_deleted_learns_of_it_and_makes_no_new_one(store):
    worker_1 = worker(store, "w1")
    worker_1.beat()
    store.move("workers", "elsewhere", mark="")
    with pytest.raises(OSError, match="the journal was deleted or moved while the job ran"):
        worker_1.beat()
    assert store.names("workers") == []


OTHER_INPUT = "is at work on this job with another input, or takes its rows in another order"


def test_workers_with_other_rows_never_work_at_one_time(store):
    first, second = (
        worker(store, "w1", layout="a"),
        worker(store, "w2", layout="b"),
    )  # both are there before either looks
    first.claim_layout(0.0)
    with pytest.raises(ValueError, match=f"worker w1 {OTHER_INPUT}"):
        second.claim_layout(0.0)
    worker(store, "w3", layout="a").claim_layout(0.0)
    first.leave()
    with pytest.raises(ValueError, match=f"worker w3 {OTHER_INPUT}"):
        second.claim_layout(0.0)
