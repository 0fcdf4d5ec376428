"""A job on simulated workers with a simulated clock: rows, steps that take time, and an Ending for each worker."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ferrum_jax.batch.ending.ending import Ending, Outlook
from ferrum_jax.ints import ceil_div

_READ_S, _STEP_S, _ROW_S = 2e-4, 0.02, 0.6e-3  # of a token of a prompt; of a step; and of each row in it
_LOOK_S = 5.0


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

    ending: Ending
    width: int
    speed: float
    queue: list[int] = dataclasses.field(default_factory=list)
    running: dict[int, int] = dataclasses.field(default_factory=dict)  # by index: tokens that it writes yet
    look_s: float = 0.0
    has_left: bool = False


class SimulatedJob:
    """Runs to the end, to the deadline or to the budget; then `done`, `end_s` and `forecasts` say how it went.

    Rows read 50 to 800 tokens and may write 64, 128 or 256; where they stop by themselves, after 100 on average.
    within_s: the deadline. A worker that is at its end leaves its rows.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_rows: int = 1500,
        workers: Sequence[tuple[int, float]] = ((16, 1.0),),
        rows_stop: bool = True,
        read_s: float = _READ_S,
        within_s: float | None = None,
        goes_on: SimulatedJob | None = None,
        order: Callable[[np.ndarray], np.ndarray] = lambda tokens: np.arange(len(tokens)),
        **terms: float,
    ) -> None:
        """workers: width and speed of each. goes_on: a job of this seed that was stopped, whose other rows run."""
        self.random, self.read_s, self.now_s = np.random.default_rng(seed), read_s, 0.0
        most = self.random.choice([64, 128, 256], num_rows)
        self.tokens = np.stack([self.random.integers(50, 800, num_rows), most], axis=1).astype(np.uint32)
        self.written = np.minimum(self.random.geometric(0.01, num_rows), most) if rows_stop else most
        size = max(8, min(1024, ceil_div(num_rows, 64)))
        self.done = np.zeros(num_rows, bool) if goes_on is None else goes_on.done.copy()
        rows = order(self.tokens)
        rows = rows[~self.done[rows]]
        self.parts = [rows[start : start + size].tolist() for start in range(0, len(rows), size)]
        self.end_s, self.forecasts = 0.0, list[Forecast]()
        how = {"part_size": size, "clock": lambda: self.now_s, "end_s": within_s, **terms}
        self.workers = [
            SimulatedWorker(ending=Ending(self.tokens, **how), width=width, speed=speed) for width, speed in workers
        ]
        self._run()

    def _run(self) -> None:
        steps = [(0.0, number) for number in range(len(self.workers))]
        while steps:
            self.now_s, number = heapq.heappop(steps)
            worker = self.workers[number]
            self._end_rows(worker)
            if self.now_s >= worker.look_s:
                self._look(worker)
            num_read = 0 if worker.ending.over else self._begin_rows(worker)
            worker.has_left = bool(worker.ending.over) or not worker.running
            if not worker.has_left:
                seconds = _STEP_S + _ROW_S * len(worker.running) + num_read * self.read_s
                seconds *= max(1 + 0.05 * self.random.standard_normal(), 0.5) / worker.speed
                heapq.heappush(steps, (self.now_s + seconds, number))

    def _end_rows(self, worker: SimulatedWorker) -> None:
        """Ends what the last step ended."""
        worker.running = {index: left - 1 for index, left in worker.running.items()}
        for index in [index for index, left in worker.running.items() if left <= 0]:
            del worker.running[index]
            worker.ending.end(index)
            self.done[index], self.end_s = True, self.now_s

    def _begin_rows(self, worker: SimulatedWorker) -> int:
        """The tokens of the prompts of rows that are begun."""
        num_read = 0
        while len(worker.running) < worker.width and not worker.ending.is_closed:
            if not worker.queue and self.parts:
                worker.queue = self.parts.pop(0)
            if not worker.queue:
                break
            index = worker.queue.pop(0)
            if worker.ending.admits(index):
                worker.ending.begin(index)
                worker.running[index] = int(self.written[index])
                num_read += int(self.tokens[index, 0])
        return num_read

    def _look(self, worker: SimulatedWorker) -> None:
        worker.look_s = self.now_s + _LOOK_S
        others = [other for other in self.workers if other is not worker]
        worker.ending.tell(
            [dataclasses.replace(other.ending.report(), is_alive=not other.has_left) for other in others]
        )
        outlook = worker.ending.outlook(np.flatnonzero(~self.done))
        if outlook is not None:
            self.forecasts.append(Forecast(self.now_s, outlook))

    def forecast_at(self, share: float) -> Forecast:
        """The first forecast after this share of the job's time."""
        return next(each for each in self.forecasts if each.at_s >= share * self.end_s)
