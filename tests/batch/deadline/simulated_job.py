"""A job on simulated workers with a simulated clock: rows, steps that take time, and an Forecaster for each worker."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ferrum_jax.batch.deadline.forecaster import Forecaster, Outlook, WorkerReport
from ferrum_jax.batch.journal.leases import Leases
from ferrum_jax.batch.journal.parts import JobParts
from ferrum_jax.batch.share import WorkShare
from ferrum_jax.batch.timekeeper import look_pause_s
from ferrum_jax.io.ints import ceil_div

_READ_S, _STEP_S, _ROW_S = 2e-4, 0.02, 0.6e-3  # of a token of a prompt; of a step; and of each row in it
_LEAST_S = 2.0  # as `JobOptions.share_s`


class DictStore:
    """What leases need of a store."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def create(self, name: str, content: bytes, *, lasts: bool = True) -> bool:
        return self.files.setdefault(name, content) is content

    def replace(self, name: str, content: bytes, *, lasts: bool = True) -> None:
        self.files[name] = content

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        return self.files.get(name)

    def size(self, name: str) -> int | None:
        return len(self.files[name]) if name in self.files else None

    def names(self, folder: str) -> list[str]:
        return [name.removeprefix(f"{folder}/") for name in self.files if name.startswith(f"{folder}/")]


class Forecast(NamedTuple):
    """What a worker expected at a time."""

    at_s: float
    outlook: Outlook

    @property
    def end_s(self) -> float:
        return self.at_s + self.outlook.seconds


@dataclasses.dataclass(kw_only=True)
class SimulatedWorker:
    """Runs up to `width` rows at once, `speed` times as fast as others."""

    forecaster: Forecaster
    width: int
    speed: float
    share: WorkShare
    known: np.ndarray  # [rows] bool: done, as it has read
    running: dict[int, int] = dataclasses.field(default_factory=dict)  # by index: tokens that it writes yet
    most_running: int = 0
    epochs: dict[int, int] = dataclasses.field(default_factory=dict)  # by index: of its lease
    num_done: int = 0
    ended_s: float = 0.0  # its last row
    left_s: float = 0.0  # when it left
    outlook: Outlook | None = None
    look_s: float = 0.0  # when it looks at the job next
    told_s: float = 0.0  # when it looked at others
    said: WorkerReport | None = None  # then
    waits: bool = False
    has_left: bool = False


class SimulatedJob:
    """Runs to the end, to the deadline or to the budget; then `done`, `end_s` and `forecasts` say how it went.

    Rows read 50 to 800 tokens and may write 64, 128 or 256; where they stop by themselves, after 100 on average.
    within_s: the deadline. A worker that is at its end leaves its rows, with the tokens that they have.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_rows: int = 1500,
        workers: Sequence[tuple[int, float]] = ((16, 1.0),),
        rows_stop: bool = True,
        most: Sequence[int] = (64, 128, 256),
        lengths: Callable[[np.random.Generator, int], np.ndarray] = lambda random, count: random.geometric(0.01, count),
        step_s: float = _STEP_S,
        row_s: float = _ROW_S,
        read_s: float = _READ_S,
        within_s: float | None = None,
        goes_on: SimulatedJob | None = None,
        order: Callable[[np.ndarray], np.ndarray] = lambda tokens: np.arange(len(tokens)),
        takes_s: float = 0.0,
        slows: tuple[int, float, float] | None = None,
        **terms: float,
    ) -> None:
        """workers: width and speed of each. goes_on: a job of this seed that was stopped, whose other rows run.
        takes_s: of a look at other workers. slows: a worker's number, when it slows, and its speed from then on."""
        self.random, self.read_s, self.now_s = np.random.default_rng(seed), read_s, 0.0
        self.takes_s, self.slows = takes_s, slows
        self.step_s, self.row_s = step_s, row_s
        may = self.random.choice(most, num_rows)
        self.tokens = np.stack([self.random.integers(50, 800, num_rows), may], axis=1).astype(np.uint32)
        self.written = np.clip(lengths(self.random, num_rows), 1, may).astype(int) if rows_stop else may
        size = max(8, min(1024, ceil_div(num_rows, 64)))
        self.store = DictStore()
        self.done = np.zeros(num_rows, bool) if goes_on is None else goes_on.done.copy()
        rows = order(self.tokens)
        rows = rows[~self.done[rows]]
        self.parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        self.left = self.written.tolist() if goes_on is None else list(goes_on.left)  # tokens that each writes yet
        self.end_s, self.forecasts = 0.0, list[Forecast]()
        how = {"clock": lambda: self.now_s, "end_s": within_s, **terms}
        forecasters = [Forecaster(self.tokens, worker=str(number), **how) for number in range(len(workers))]
        self.workers = [
            self._worker(forecaster, width, speed)
            for forecaster, (width, speed) in zip(forecasters, workers, strict=True)
        ]
        self._run()

    def _worker(self, forecaster: Forecaster, width: int, speed: float) -> SimulatedWorker:
        leases = Leases(self.store, forecaster.worker, "l", expiry_s=1e9, clock=lambda: self.now_s)
        known = self.done.copy()

        def refresh() -> None:
            known[:] = self.done

        parts = JobParts(self.parts, leases, unfinished=lambda rows: rows[~known[rows]], refresh=refresh)
        share = WorkShare(parts, leases, forecaster, num_undone=lambda: int((~known).sum()), least_s=_LEAST_S)
        worker = SimulatedWorker(forecaster=forecaster, width=width, speed=speed, share=share, known=known)
        forecaster.progress = lambda: {
            index: (1.0, self._tokens_of(index, left)) for index, left in worker.running.items()
        }
        return worker

    def _tokens_of(self, index: int, left: int) -> int:
        """Tokens that a row has that writes so many yet."""
        return int(self.written[index]) - left

    @property
    def kept(self) -> int:
        """Tokens of rows that are not done."""
        return sum(self._tokens_of(index, self.left[index]) for index in np.flatnonzero(~self.done).tolist())

    def _run(self) -> None:
        steps = [(0.0, number) for number in range(len(self.workers))]
        while steps:
            self.now_s, number = heapq.heappop(steps)
            worker = self.workers[number]
            self._end_rows(worker)
            took_s = self._look(worker) if self.now_s >= worker.look_s else 0.0
            num_read = 0 if worker.forecaster.over else self._begin_rows(worker)
            waits = not (worker.running or worker.share.is_closed or worker.share.num_passed or self.done.all())
            worker.has_left = bool(worker.forecaster.over) or not (worker.running or waits)
            if worker.has_left:
                self._leave(worker)
            if waits and not worker.has_left:
                worker.known[:] = self.done
                if not worker.waits:
                    worker.told_s = -math.inf
                heapq.heappush(steps, (self.now_s + 1.0, number))
            elif not worker.has_left:
                seconds = self.step_s + self.row_s * len(worker.running) + num_read * self.read_s
                seconds *= max(1 + 0.05 * self.random.standard_normal(), 0.5) / self._speed(number)
                heapq.heappush(steps, (self.now_s + seconds + took_s, number))
            worker.waits = waits

    def _leave(self, worker: SimulatedWorker) -> None:
        """Its rows run no more, and keep their tokens."""
        worker.left_s = self.now_s
        for index, left in worker.running.items():
            self.left[index] = left
            worker.forecaster.meter.drop(index)
        worker.running.clear()

    def _speed(self, number: int) -> float:
        """How fast a worker is now."""
        is_slow = self.slows is not None and self.slows[0] == number and self.now_s >= self.slows[1]
        return self.slows[2] if self.slows is not None and is_slow else self.workers[number].speed

    def _end_rows(self, worker: SimulatedWorker) -> None:
        """Ends what the last step ended."""
        worker.running = {index: left - 1 for index, left in worker.running.items()}
        for index in [index for index, left in worker.running.items() if left <= 0]:
            del worker.running[index]
            worker.forecaster.meter.end(index, int(self.written[index]))
            worker.num_done += 1
            worker.ended_s = self.now_s
            assert not self.done[index], "a row has two lines"
            self.done[index] = worker.known[index] = True
            self.end_s = self.now_s

    def _begin_rows(self, worker: SimulatedWorker) -> int:
        """The tokens of the prompts of rows that are begun."""
        num_read = 0
        while len(worker.running) < min(worker.width, worker.forecaster.most_together) and not worker.share.is_closed:
            if not (worker.share.queue or worker.share.take()):
                break
            index, epoch = worker.share.queue.popleft()
            assert index not in worker.running and not self.done[index], "a row is begun twice"
            if worker.share.admits(index, epoch):
                worker.forecaster.meter.begin(index, self._tokens_of(index, self.left[index]))
                worker.running[index] = self.left[index]
                worker.most_running = max(worker.most_running, len(worker.running))
                worker.epochs[index] = epoch
                num_read += int(self.tokens[index, 0])
        return num_read

    def _look(self, worker: SimulatedWorker) -> float:
        """Looks at the job, and now and then at other workers; how long that took."""
        left_s, spent_s = math.inf if worker.outlook is None else worker.outlook.seconds, worker.forecaster.spent_s
        pause_s = look_pause_s(left_s, spent_s, self.takes_s if worker.said else 0.0, least_s=_LEAST_S / 2)
        tells = self.now_s - worker.told_s >= pause_s
        if tells:
            self._tell(worker)
        worker.outlook = worker.forecaster.outlook(np.flatnonzero(~worker.known))
        if worker.outlook is not None:
            self.forecasts.append(Forecast(self.now_s, worker.outlook))
        took_s = self.takes_s if tells else 0.0
        worker.look_s = self.now_s + took_s + _LEAST_S / 2
        return took_s

    def _tell(self, worker: SimulatedWorker) -> None:
        """The worker says how it is, hears what others said last, and shares."""
        worker.told_s = self.now_s + self.takes_s
        worker.said = worker.forecaster.report()
        worker.known[:] = self.done
        others = [(other.said, other.has_left) for other in self.workers if other is not worker]
        worker.forecaster.tell(
            [dataclasses.replace(said, is_alive=not left) for said, left in others if said is not None]
        )
        worker.share.look()
        if worker.share.breaks:
            running = sorted((index, worker.epochs[index]) for index in worker.running)
            self._leave(worker)
            worker.share.leave_engine(running)

    def forecast_at(self, share: float) -> Forecast:
        """The first forecast after this share of the job's time."""
        return next(each for each in self.forecasts if each.at_s >= share * self.end_s)
