"""The reports of a job's workers, in its journal: a file `paces/WORKER.json` that each worker writes as it goes.

Others read it for their forecasts, later runs and `--plan` begin with it, and it says what the job has cost so far,
also of a worker that was killed. A file that appears or changes while they are watched is of a worker at work; where it
stands still, for workers write seldom to a slow store, the leases say whether its worker lives.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrum_jax.batch.deadline.forecaster import WorkerReport
from ferrum_jax.batch.deadline.row_meter import Throughput
from ferrum_jax.batch.journal.journal_file import file_of, object_in
from ferrum_jax.io.files.store import Store

_FOLDER = "paces"
_COUNTS = ("num_slots", "num_running", "num_queued")


class WorkerReports:
    """The reports of a job, for one of its workers."""

    def __init__(
        self, store: Store, worker: str, *, lives: Callable[[str], bool] = lambda worker: False, least_s: float = 1.0
    ) -> None:
        """lives: whether a worker may still be at work. least_s: between two looks at other workers, at least."""
        self.least_s = least_s
        self._store, self.worker, self._lives = store, worker, lives
        self._seen: dict[str, bytes] | None = None
        self._moving = set[str]()  # files that were seen to appear or to change

    def write(self, own: WorkerReport, *, ended: bool = False) -> None:
        """Says what this worker knows of itself."""
        throughput = None if own.throughput is None else own.throughput._asdict()
        found = {**vars(own), "pace": throughput, "is_alive": not ended}
        del found["throughput"]  # the file calls it pace
        with contextlib.suppress(OSError):  # of a full disk the journal says more
            # the engine waits for it, and a loss of power may take it; what a run ends with lasts
            self._store.replace(f"{_FOLDER}/{self.worker}.json", file_of(found), lasts=ended)

    def own(self) -> WorkerReport | None:
        """This worker's last report."""
        said = object_in(self._store.read(f"{_FOLDER}/{self.worker}.json"))
        return None if said is None else _report_in(said)

    def others(self) -> list[WorkerReport]:
        """The reports of other workers and of earlier runs. A damaged file is passed over."""
        found, before = [], self._seen
        self._seen = {} if before is None else before
        for name in sorted(self._store.names(_FOLDER)):
            content = self._store.read(f"{_FOLDER}/{name}") if name != f"{self.worker}.json" else None
            said = object_in(content)
            throughput = None if said is None else _report_in(said)
            if content is None or throughput is None:
                continue
            worker, has_moved = name.removesuffix(".json"), before is not None and before.get(name) != content
            self._seen[name] = content
            if has_moved:
                self._moving.add(name)
            is_alive = throughput.is_alive and name in self._moving and (has_moved or self._lives(worker))
            found.append(dataclasses.replace(throughput, is_alive=is_alive, worker=worker))
        return found


def earlier_reports(store: Store) -> Sequence[WorkerReport]:
    """The reports of a job's workers, as if none were at work."""
    return WorkerReports(store, "").others()


def _report_in(said: dict[str, Any]) -> WorkerReport | None:
    """The throughput that a file says; None where it is damaged."""
    try:
        reads, writes = (_number(each) for each in said.get("under_way", (0, 0)))  # an older version's: 0
        throughput, price = said["pace"], said["price_per_hour"]
        counts: dict[str, Any] = {name: int(_number(said.get(name, 0))) for name in _COUNTS}
        return WorkerReport(
            throughput=None if throughput is None else _throughput_in(throughput),
            under_way=(reads, writes),
            row_s=_number(said["row_s"]),
            last_s=_number(said.get("last_s", said["row_s"])),
            spent_s=_number(said["spent_s"]),
            price_per_hour=None if price is None else _number(price),
            is_alive=said["is_alive"] is True,
            **counts,
        )
    except (KeyError, TypeError, ValueError):
        return None


def _throughput_in(said: Mapping[str, Any]) -> Throughput:
    shares = {name: _number(said[name]) for name in Throughput._field_defaults if name in said}
    read_s, write_s, spread, num_rows = (_number(said[name]) for name in Throughput._fields[:4])
    return Throughput(read_s, write_s, spread, int(num_rows), **shares)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError("not a number of this file")
    return float(value)
