"""The forecaster: when a job is done and what it costs, whether that fits, and which rows a worker begins.

    tokens that are left  /  the throughputs of all workers  +  the last row of all  =  seconds to the end

It knows what it was told: which rows began and ended here, how far those are that run, which rows are left, and what
other workers wrote of their own throughputs. It reads no file and no clock but the one that it was given.

A row is begun only where it may end in time, and only as many together as may, so that each of them ends sooner: a few
before anything is measured, and fewer again towards the end. A row that no run of this length could finish is begun all
the same, because its tokens are kept.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence, Sized

import numpy as np

from ferrum_jax.batch.deadline.row_lengths import Written
from ferrum_jax.batch.deadline.row_meter import VARIATION, RowMeter, Throughput

_SIGMAS = 2.0
_LAST_SHARE = 0.4  # of the last row's time that comes on top: its tokens are counted, and it runs with few others
_FIRST_ROWS, _FIRST_TOKENS = 4, 64  # where there is an end: so many rows run together until these are written
_MAX_LIMITS = 4096  # rows whose limits stand for those of all
_HASTE = 0.7  # a row may take this share of the time that is expected
_BEGUN = 0.7  # of the rows that would end in time together, as many are begun
_CLOSING_S, _ROW_CLOSING_S = 2.0, 40e-6  # what is written at the end, for a job and for each of its rows
_MAX_CLOSING = 0.1  # of the whole time
TIME, BUDGET = "time", "budget"
_EARLIER_SPREAD = 0.1  # of a throughput that another run measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """A worker's own measurements, for other workers and for later runs.

    throughput: None before it was measured. under_way: tokens read and written of rows that it has begun and not ended.
    row_s: how long its rows take. last_s: the longest of them. spent_s: since it started. is_alive: whether it is at
    work now. worker: its name. num_slots: the most rows that it has run at once. num_running, num_queued: rows that it
    has begun, and rows that wait.
    """

    throughput: Throughput | None
    row_s: float
    spent_s: float
    price_per_hour: float | None
    under_way: tuple[float, float] = (0.0, 0.0)
    last_s: float = 0.0
    is_alive: bool = False
    worker: str = ""
    num_slots: int = 0
    num_running: int = 0
    num_queued: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlook:
    """A forecast: seconds to the end of the job, and its cost by then, each with a range.

    spread: the standard error of the seconds, as a share. cost: of all workers and runs; None without a price. fits:
    None where the range says neither. share: of what is left, done when time or money ends. num_workers: how many like
    this one would be done in time; None where that is not asked or none would.
    """

    seconds: float
    spread: float
    low_s: float
    high_s: float
    cost: float | None = None
    low_cost: float | None = None
    high_cost: float | None = None
    spent: float | None = None
    fits: bool | None = None
    share: float = 1.0
    num_workers: int | None = None
    num_alive: int = 1


class Forecaster:
    """The forecaster of one worker's run. All seconds are those of `clock`."""

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        clock: Callable[[], float],
        end_s: float | None = None,
        budget: float | None = None,
        price_per_hour: float | None = None,
        worker: str = "",
    ) -> None:
        """tokens: [rows, 2] as of `Rows`. end_s: when the process has ended. worker: its name."""
        self._tokens, self.worker, self._clock = tokens, worker, clock
        self._budget, self._price = budget, price_per_hour
        self._began_s = clock()
        self._closing_s = _CLOSING_S + _ROW_CLOSING_S * len(tokens)
        self._end_s = end_s
        self.others: Sequence[WorkerReport] = ()
        self._others_s = self._began_s  # when they were told
        self.meter = RowMeter(tokens, clock)
        self.mean = _mean(_sum(tokens), len(tokens))  # of a row
        self.queue: Sized = ()  # rows that the worker has and has not begun
        self.progress: Callable[[], Mapping[int, tuple[float, float]]] = dict  # of rows that run; see `RowMeter.note`
        self.kept = 0.0  # tokens that rows have from earlier runs, where none of them goes on yet

    # -- what happens ------------------------------------------------------------------------------------

    def note(self) -> None:
        """Notes how far rows are."""
        self.meter.note(self.progress())

    def tell(self, others: Sequence[WorkerReport]) -> None:
        """Takes the reports of other workers and earlier runs."""
        self.others, self._others_s = others, self._clock()

    # -- what a worker asks ------------------------------------------------------------------------------

    @property
    def spent_s(self) -> float:
        """Seconds of this worker."""
        return self._clock() - self._began_s

    @property
    def spent(self) -> float | None:
        """The cost of all workers and runs so far."""
        return None if self._price is None else self.spent_s * self._price / 3600 + self.spent_elsewhere

    @property
    def spent_elsewhere(self) -> float:
        """The cost of other workers and earlier runs so far."""
        since = self._clock() - self._others_s
        return sum(self._price_of(each) * (each.spent_s + since * each.is_alive) for each in self.others) / 3600

    @property
    def left_s(self) -> float | None:
        """Seconds until the worker must stop, so that it has ended in time and within budget; None without an end."""
        return min(self._left().values(), default=None)

    @property
    def over(self) -> str:
        """TIME or BUDGET if one is at an end; "" if none is."""
        return next((what for what, left_s in self._left().items() if left_s <= 0.0), "")

    def _left(self) -> dict[str, float]:
        """Seconds until each end, less those that the last writing takes."""
        found = {}
        if self._end_s is not None:
            found[TIME] = self._end_s - self._clock()
        if self._budget is not None:
            found[BUDGET] = (self._budget - (self.spent or 0.0)) * 3600 / self._rate
        return {what: each - self._closing(each + self.spent_s) for what, each in found.items()}

    def _closing(self, whole_s: float) -> float:
        return min(self._closing_s, _MAX_CLOSING * max(whole_s, 0.0))

    def fits(self, index: int) -> bool:
        """Whether the row should be begun, as far as is known now."""
        left_s = self.left_s
        need_s = _HASTE * self.meter.row_s(self._tokens[index])
        return left_s is None or need_s <= left_s or need_s > left_s + self.spent_s

    @property
    def most_together(self) -> float:
        """How many rows may run together: those that end in time even if more rows write no more tokens together."""
        left_s = self.left_s
        if left_s is None:
            return math.inf
        if self.meter.num_written < _FIRST_TOKENS and self.meter.num_ended < _FIRST_ROWS:
            return _FIRST_ROWS  # the first steps load executables and read prompts: they say nothing of those to come
        rows_a_second = self.meter.rows_a_second(self.mean)
        if not rows_a_second:
            return _FIRST_ROWS
        if rows_a_second * (left_s + self.spent_s) < _HASTE:
            return math.inf  # no run of this length could finish one
        return max(math.floor(_BEGUN * rows_a_second * left_s), 1)

    # -- what is expected --------------------------------------------------------------------------------

    @property
    def throughput(self) -> Throughput | None:
        """The worker's own, or the mean of other workers and earlier runs where that is surer."""
        found = (self.meter.throughput, mean_throughput(self.others))
        return min((each for each in found if each is not None), key=lambda each: each.spread, default=None)

    def report(self) -> WorkerReport:
        """The worker's own report."""
        throughput = self.meter.throughput
        return WorkerReport(
            throughput=throughput,
            under_way=self.meter.under_way,
            row_s=self.meter.row_s(self.mean),
            last_s=0.0
            if throughput is None
            else self.meter.last_s(throughput, float(self._tokens[:, 1].max(initial=0))),
            spent_s=self.spent_s,
            price_per_hour=self._price,
            is_alive=True,
            worker=self.worker,
            num_slots=self.meter.max_running,
            num_running=len(self.meter.running),
            num_queued=len(self.queue),
        )

    def outlook(self, undone: np.ndarray) -> Outlook | None:
        """The forecast while these rows lack answers; None before any measurement. Takes a sample."""
        limits = self._tokens[undone[:: max(len(undone) // _MAX_LIMITS, 1)], 1].astype(float)
        self.note()
        self.meter.look(limits, is_held=self.most_together <= len(self.meter.running))
        throughput = self.throughput
        if throughput is None:
            return None
        alive = [each for each in self.others if each.is_alive]
        like_others = mean_throughput(self.others) or throughput  # who is at work and was not measured yet
        throughputs = [throughput, *(each.throughput or like_others for each in alive)]
        begun = _sum(self._tokens[self.meter.running])
        done = [begun, (0.0, self.kept), *(each.under_way for each in alive)]
        reads, writes = np.maximum(np.array(_sum(self._tokens[undone])) - np.sum(done, axis=0), 0.0).tolist()
        rest_reads, rest = self.meter.rest
        num_waiting = len(undone) - len(self.meter.running) - sum(each.num_running for each in alive)
        own_s = self.meter.last_s(throughput, float(limits.max(initial=0)) if num_waiting > 0 else 0.0)
        last_s = max([own_s, *(each.last_s for each in (alive if own_s else self.others))]) if len(undone) else 0.0
        of_few = VARIATION / math.sqrt(max(len(undone), 1))
        factor = 1 + _SIGMAS * math.hypot(max(each.spread for each in throughputs), of_few)
        tokens = reads + rest_reads, writes
        least_s, queue_s, most_s = (_seconds(throughputs, tokens, which, rest) for which in range(3))
        add = operator.add if num_waiting > 0 else max  # where none waits, those that run are the last ones
        seconds = add(queue_s, _LAST_SHARE * last_s)
        low_s, high_s = least_s / factor, add(most_s, last_s) * factor
        one_s = _seconds([throughput], tokens, 1, rest)
        return self._judged(seconds, low_s, high_s, one_s=one_s, last_s=_LAST_SHARE * last_s, num_alive=1 + len(alive))

    def _judged(
        self, seconds: float, low_s: float, high_s: float, *, one_s: float, last_s: float, num_alive: int
    ) -> Outlook:
        """one_s: what one worker like this one needs for the tokens that are left. last_s: for the last row beside."""
        spent, left_s = self.spent, self.left_s
        costs = [None] * 3 if spent is None else [spent + each * self._rate / 3600 for each in (seconds, low_s, high_s)]
        fits, num_workers, share = None, None, 1.0
        if left_s is not None:
            fits = True if high_s <= left_s else False if low_s > left_s else None
            share = min(max(left_s, 0.0) / max(seconds, 1e-9), 1.0)
            room_s = self._left().get(TIME, 0.0) - last_s
            if room_s > 0:
                num_workers = max(math.ceil(one_s / room_s), 1)
        return Outlook(
            seconds=seconds,
            spread=(math.sqrt(high_s / max(low_s, 1e-9)) - 1) / _SIGMAS,
            low_s=low_s,
            high_s=high_s,
            cost=costs[0],
            low_cost=costs[1],
            high_cost=costs[2],
            spent=spent,
            fits=fits,
            share=share,
            num_workers=num_workers,
            num_alive=num_alive,
        )

    @property
    def _rate(self) -> float:
        """The cost of an hour of all workers that are at work."""
        assert self._price is not None, "a budget has a price"
        return self._price + sum(self._price_of(each) for each in self.others if each.is_alive)

    def _price_of(self, other: WorkerReport) -> float:
        return (self._price or 0.0) if other.price_per_hour is None else other.price_per_hour


def mean_throughput(workers: Sequence[WorkerReport]) -> Throughput | None:
    """The throughput of a worker that is as these were on average; None without any."""
    throughputs = [each.throughput for each in workers if each.throughput is not None]
    if not throughputs:
        return None
    counts = np.maximum([each.num_rows for each in throughputs], 1)
    mean = Throughput(*np.average(np.array(throughputs), axis=0, weights=counts).tolist())
    return mean._replace(spread=math.hypot(mean.spread, _EARLIER_SPREAD), num_rows=int(counts.sum()))


def _seconds(throughputs: Sequence[Throughput], tokens: tuple[float, float], which: int, rest: Written) -> float:
    """The time of tokens by all workers together. tokens: to read, to write. rest: to write beside, by `which`."""
    reads, writes = tokens
    times = (each.read_s * reads + each.write_s * (writes * each.shares[which] + rest[which]) for each in throughputs)
    return 1 / sum(1 / max(each, 1e-9) for each in times)


def _sum(tokens: np.ndarray) -> tuple[float, float]:
    return float(tokens[:, 0].sum(dtype=np.uint64)), float(tokens[:, 1].sum(dtype=np.uint64))


def _mean(tokens: tuple[float, float], num_rows: int) -> tuple[float, float]:
    return tokens[0] / max(num_rows, 1), tokens[1] / max(num_rows, 1)
