"""Histories of a job: what a seed plans to happen to its workers, what happens then, and what must hold all the same.

A plan is data: a seed, and faults that each happen at a second or at a call. So a plan that fails is made smaller by
leaving faults out. After its last fault everything is healed, and the job must end by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from ferrum_jax.batch.deadline.end_terms import EndTerms
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.job import EXIT_INTERRUPTED, EXIT_PREEMPTED, JobOptions, JobSettings, run_batch
from ferrum_jax.batch.journal.job_identity import JobIdentity
from ferrum_jax.batch.journal.journal import Journal
from ferrum_jax.batch.notice import Notice
from ferrum_jax.io.files.store import LocalStore, Store, UrlStore
from tests.batch.fake_llm import IDENTITY, FakeLLM
from tests.world.bucket import URL, Bucket
from tests.world.disk import Disk
from tests.world.remembered import remembering
from tests.world.world import EPOCH_S, Machine, Process, World

# before Python 3.12 a cached property has one lock for all objects, here of several processes
vars(JobIdentity)["label"].lock = contextlib.nullcontext()

STORES = ("disk", "shared", "bucket")  # of a machine that has all workers, of many; a store that many have
FAULTS_S, EXPIRY_S = 40.0, 20.0
SERVED = "/batches"  # a server's folder of batches
_SERVED_FILE = re.compile(rf"{SERVED}/(files|batches|clerk/leases|clerk/workers|jobs)(?!.*[.]journal/)")
_ID = re.compile(r"^(?:file-|batch_)[0-9a-f]{32}|^[0-9a-f]{16}|[.][0-9a-f]{8}$")
_ENDS = (0, 1)
_PLACES = ("fsync of the output", "sync of the output", "replace of merged.json", "link of model.json")
_PLACES += ("link of segments", "sync of segments", "put create of segments", "link of leases")
_SERVED_PLACES = ("fsync of files .jsonl", "sync of files", "replace of files .json", "replace of batches .state.json")
_SERVED_PLACES += (
    "sync of batches",
    "link of batches .end.json",
    "unlink of files .json",
    "rmtree of jobs .jsonl.journal",
)
_OTHER_WEIGHTS = "another"
OTHER = dataclasses.replace(IDENTITY, weights=_OTHER_WEIGHTS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """at: a second; with by_call, a call of the worker. size: seconds, mostly. place: the first such call, if any."""

    kind: str
    who: int
    at: float
    size: float = 0.0
    by_call: bool = False
    place: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """kind: of the history, and behind a dash of its store. steps_s: how long a step of each worker takes."""

    seed: int
    kind: str
    num_rows: int
    steps_s: tuple[float, ...]
    faults: tuple[Fault, ...]

    @property
    def store(self) -> str:
        return self.kind.rpartition("-")[2]

    @staticmethod
    def of(seed: int, kind: str, *, num_rows: int = 200, num_workers: int | None = None) -> Plan:
        chance = random.Random(f"{seed} {kind}")
        is_slow_fleet = chance.random() < 0.25  # whose workers leave rows to each other
        num_workers = num_workers or chance.choice((4, 5) if is_slow_fleet else (1, 2, 3, 4, 4, 5))
        if "server" in kind:  # one server or two, each with two processes
            num_workers = 2 if kind.endswith("disk") else 4
        steps_s = (0.4, 1.5, 1.5) if is_slow_fleet else (0.05, 0.05, 0.1, 0.1, 0.4, 0.4, 1.5)
        num_faults = chance.choice((0, 0, 1) if is_slow_fleet else (1, 2, 3, 5, 8, 13))
        kinds = [each for each, how in FAULTS.items() if re.fullmatch(how.kinds, kind)]
        places = _SERVED_PLACES if "server" in kind else _PLACES
        return Plan(
            seed=seed,
            kind=kind,
            num_rows=num_rows,
            steps_s=tuple(chance.choice(steps_s) for _ in range(num_workers)),
            faults=tuple(_drawn(chance, chance.choice(kinds), num_workers, places) for _ in range(num_faults)),
        )

    def without(self, place: int) -> Plan:
        return dataclasses.replace(self, faults=self.faults[:place] + self.faults[place + 1 :])


def _drawn(chance: random.Random, kind: str, num_workers: int, places: Sequence[str]) -> Fault:
    how = FAULTS[kind]
    by_call = how.by_call and chance.random() < 0.7
    at = float(int(400 ** chance.random())) if by_call else FAULTS_S * chance.random() ** 2
    place = chance.choice(places) if by_call and chance.random() < 0.5 else ""
    return Fault(
        kind=kind,
        who=chance.randrange(num_workers),
        at=at,
        size=how.most * chance.random(),
        by_call=by_call,
        place=place,
    )


class Failed(AssertionError):
    """A history in which something that must hold does not."""


class History:
    """A plan as it happens."""

    def __init__(self, plan: Plan, *, is_logged: bool = False) -> None:
        self.plan, self.world = plan, World(plan.seed)
        self.world.log = [] if is_logged else None
        disk = Disk(self.world, is_sure=plan.store == "shared")
        self.bucket = Bucket(self.world)
        self.machines = [Machine("m0", disk)]
        if plan.store != "disk":
            rates = [self.world.random.uniform(0.95, 1.05) for _ in plan.steps_s]
            self.machines = [
                Machine(f"m{i}", disk if plan.store == "shared" else Disk(self.world), rate=rate)
                for i, rate in enumerate(rates)
            ]
        self.input, self.model, self.identity = "/in.jsonl", "fake", IDENTITY
        for machine in self.machines:
            self._put_files(machine.disk)
        self.world.task.process.machine = self.machines[0]  # the reader's, when power has come back
        self.output = f"{URL}/out.jsonl" if plan.store == "bucket" else "/out.jsonl"
        self.slots: list[Process | None] = [None] * len(plan.steps_s)
        self.users: list[Process] = []  # of a server
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.told = 0  # rows that a worker was told are durable
        self.has_ended = False  # a worker said that the output is there
        self.codes: Counter[str] = Counter()
        self.num_starts = 0
        self.input_seen_s = 0.0

    def _put_files(self, disk: Disk) -> None:
        """What is there before anything happens."""
        disk.put(self.input, self.rows_content)

    @property
    def rows_content(self) -> bytes:
        return input_of(self.plan.num_rows)

    # -- workers -----------------------------------------------------------------------------------------

    def machine(self, who: int) -> Machine:
        return self.machines[who % len(self.machines)]

    def store(self, path: str) -> Store:
        return UrlStore(self.bucket, path.removeprefix("world://"), path) if "://" in path else LocalStore(Path(path))

    def _start(self, who: int) -> None:
        world, chance = self.world, self.world.random
        self.num_starts += 1
        is_healed = self.world.now_s >= FAULTS_S
        terms = EndTerms()
        if not is_healed and chance.random() < 0.05:
            terms = EndTerms(deadline=EPOCH_S + world.now_s + self.machine(who).skew_s + chance.uniform(5, 40))
        options = JobOptions(
            flush_s=chance.choice((0.5, 2.0, 2.0)),
            partials_s=chance.choice((2.0, 10.0)),
            expiry_s=EXPIRY_S,
            poll_s=1.0,
            share_s=chance.choice((0.3, 2.0)),
            leaves_early=chance.random() < 0.2,
            open_store=self.store,
            terms=terms,
            on_progress=self._hear,
        )
        order, width, loads_s = chance.getrandbits(20), chance.choice((4, 16, 16)), chance.choice((0.0, 0.5, 3.0))
        is_other = any(fault.kind == "other" and fault.who == who for fault in self.plan.faults)
        if is_healed:
            is_other = _OTHER_WEIGHTS.encode() in b"".join(self._files("", "model.json").values())
        step_s = self.plan.steps_s[who] * (1 if chance.random() < 0.8 else 2)

        def work() -> int:
            process = world.task.process
            process.notice = notice = Notice()

            def make(start: object) -> Any:
                world.pause(loads_s)
                how = {"order": order, "width": width, "limit": 200, "identity": OTHER if is_other else self.identity}
                return FakeLLM(**how, on_step=lambda llm: world.pause(world.long(step_s)))

            return run_batch(
                make,
                self.input,
                self.output,
                model=self.model,
                console=cast(Any, _Said(world)),
                notice=notice,
                options=options,
                settings=JobSettings(now=lambda: 1000.0),
            )

        process = self.slots[who] = world.start(self.machine(who), f"w{who}.{self.num_starts}", work)
        process.options = options
        self._set_fuse(who, process)

    def _set_fuse(self, who: int, process: Process) -> None:
        """The next fault that waits for a call of this process."""
        is_healed = self.world.now_s >= FAULTS_S
        for fault in self.plan.faults:
            if fault.by_call and fault.who == who and not is_healed and fault not in self._burnt:
                process.fuse = (
                    0 if fault.place else int(fault.at),
                    lambda what, about, fault=fault: self._burn(fault, what, about),
                )
                break

    def _burn(self, fault: Fault, what: str, about: str) -> None:
        process = self.world.task.process
        if fault.place and fault.place != f"{what} of {kind_of(about)}":
            process.fuse = 0, lambda what, about: self._burn(fault, what, about)
            return
        self._burnt.add(fault)
        self.world.met_with(f"{fault.kind} at {what} of {kind_of(about)}")
        FAULTS[fault.kind].happens(self, fault, process, about)

    def _hear(self, num_ok: int, num_failed: int) -> None:
        self.told = max(self.told, num_ok + num_failed)

    # -- the course --------------------------------------------------------------------------------------

    def at(self, second: float, act: Callable[[], None]) -> None:
        self.due.append((max(second, self.world.now_s), len(self.due), act))
        self.due.sort(key=lambda each: each[:2])

    def run(self) -> History:
        """Raises Failed."""
        self._burnt: set[Fault] = set()
        world = self.world
        with world.installed(), remembering():
            self._begin()
            for fault in self.plan.faults:
                if not fault.by_call:
                    self.at(fault.at, lambda fault=fault: self._happen(fault))
            last_s = max((fault.at + fault.size for fault in self.plan.faults if not fault.by_call), default=0.0)
            self.at(max(last_s, FAULTS_S), self._heal)
            try:
                self._until_done()
                self._prove()
            finally:
                for process in (*self.slots, *self.users):
                    if process is not None and not process.has_ended:
                        world.kill(process)
        return self

    def _begin(self) -> None:
        chance = self.world.random
        for who in range(len(self.slots)):
            self.at(chance.choice((0.0, 0.0, chance.uniform(0, 10))), lambda who=who: self._start(who))

    def _happen(self, fault: Fault) -> None:
        FAULTS[fault.kind].happens(self, fault, self.slots[fault.who], "")

    def _heal(self) -> None:
        for machine in self.machines:
            machine.away_until = 0.0
            machine.disk.pace, machine.disk.is_full = 1.0, False
        self.bucket.trouble, self.bucket.lag_s, self.bucket.pace = 0.0, 0.0, 1.0
        self.healed_s, self.healed_calls = self.world.now_s, self.world.num_calls

    pauses: float = 1.0  # how much longer they are
    healed_s: float | None = None
    healed_calls = 0

    def _until_done(self) -> None:
        world, me = self.world, self.world.task
        while True:
            while self.due and self.due[0][0] <= world.now_s:
                self.due.pop(0)[2]()
            for who, process in enumerate(self.slots):
                if process is not None and process.has_ended:
                    self.slots[who] = None
                    self._ended(who, process)
            if self.healed_s is not None and self._is_over():
                return
            self._require_life()
            me.wake_s = self.due[0][0] if self.due else world.now_s + 5.0
            world.hand_over()
            me.baton.acquire()

    def _is_over(self) -> bool:
        """Whether all has ended that was to end, once faults have ended."""
        is_over = not any(self.slots) and not self.due
        if is_over and not self.has_ended:
            raise Failed("nobody is at work and the job has not ended")
        return is_over

    @property
    def bound_s(self) -> float:
        """After the last fault, until when all must have ended."""
        return 4 * EXPIRY_S + self.plan.num_rows / 4 * 12 * 2 * max(self.plan.steps_s)

    def _require_life(self) -> None:
        if self.healed_s is None:
            return
        spent_s, calls = self.world.now_s - self.healed_s, self.world.num_calls - self.healed_calls
        bound_s = self.bound_s
        if spent_s > bound_s:
            raise Failed(f"the job has not ended {bound_s:.0f} s after the last fault")
        if calls > 3000 + 60 * len(self.slots) * spent_s:
            raise Failed(f"{calls} calls in {spent_s:.0f} s: a worker spins")

    def _ended(self, who: int, process: Process) -> None:
        """What a worker said at its end, and whether it is started again."""
        found = process.result
        name = "killed" if found is None else type(found).__name__ if isinstance(found, BaseException) else str(found)
        self.codes[name] += 1
        self.world.met_with(f"a worker ended with {name}")
        if isinstance(found, BaseException):
            self._require_known(found, process)
        elif found in _ENDS and (not process.options.leaves_early or self._is_whole()):
            self.has_ended = True
            if not self._is_whole():
                raise Failed("a worker said that the output is there, and it is not")
        elif found not in (None, *_ENDS, EXIT_PREEMPTED, EXIT_INTERRUPTED):
            raise Failed(f"a worker ended with {found}")
        deadline = process.options.terms.deadline
        late_s = 0.0 if deadline is None else process.ended_s + EPOCH_S - deadline
        if late_s > 4.0 + 2 * self.plan.steps_s[who] and self._is_only("kill", "disk error", "full disk"):
            raise Failed(f"a worker ended {late_s:.1f} s after its deadline")
        has_left = found in _ENDS and not self.has_ended  # others have the rest
        if not (self.has_ended or has_left) or (self.healed_s is None and self.world.random.random() < 0.2):
            self.at(self.world.now_s + self.world.random.choice((0.1, 1.0, 10.0)), lambda: self._again(who))

    def _require_known(self, error: BaseException, process: Process) -> None:
        """Raises Failed for an error that no fault explains, or that does not say enough."""
        known = ("at work on this job", *(("with other settings: weights",) if self._has_others else ()))
        is_refused = isinstance(error, ValueError) and any(each in str(error) for each in known)
        is_lost = isinstance(error, FileNotFoundError) and self.plan.store != "bucket"  # who took it away?
        if is_lost or not (isinstance(error, OSError) or is_refused):
            raise Failed(f"a worker raised {error!r}") from error
        if isinstance(error, OSError) and self.healed_s is not None and process.began_s > self.healed_s:
            raise Failed(f"a worker raised {error!r} though no fault was left") from error
        is_named = isinstance(error, OSError) and error.filename and "/." not in error.filename
        if isinstance(error, OSError) and error.errno in (errno.EIO, errno.ENOSPC) and not is_named:
            raise Failed(f"an error names no file of the job: {error!r}") from error

    def _again(self, who: int) -> None:
        if self.slots[who] is None:
            self._start(who)

    # -- what must hold ----------------------------------------------------------------------------------

    def content(self) -> bytes | None:
        if self.plan.store == "bucket":
            return self.bucket.objects.get("b/out.jsonl")
        node = self.machines[0].disk._find(self.output)
        return None if node is None else node.data

    def _is_whole(self) -> bool:
        content = self.content()
        return content == expected(self.plan.num_rows) or (
            self._has_others and content == expected(self.plan.num_rows, is_other=True)
        )

    @property
    def _has_others(self) -> bool:
        """Whether a worker has another model until all is healed."""
        return any(fault.kind == "other" for fault in self.plan.faults)

    def lose_power(self, machine: Machine) -> None:
        told, had_ended = self.told, self.has_ended
        for process in [each for each in machine.processes if not each.has_ended]:
            self.world.kill(process)
        machine.boots += 1
        if self.plan.store == "disk":
            machine.disk.cut()
            if had_ended and not self._is_whole():
                raise Failed("a worker said that the output is there, and later it is gone")
            if self.content() is not None and not self._is_whole():
                raise Failed("the output's name has a part of it after a power cut")
            self.require_rows(told)

    def require_rows(self, told: int) -> None:
        """Rows that were told to be durable are there."""
        import io

        rows = Rows(io.BytesIO(self.rows_content), 0, [self.model])
        journal = Journal(LocalStore(Path(f"{self.output}.journal")), rows, "reader")
        journal.refresh()
        found = journal.num_ok + journal.num_failed + rows.num_bad
        if found < told:
            raise Failed(f"{told} rows were durable before the power went, and {found} are there")

    def _prove(self) -> None:
        if self.world.failures:
            raise Failed(f"a thread failed: {self.world.failures[0]!r}") from self.world.failures[0]
        if not self._is_whole():
            raise Failed("the output is not that of an undisturbed job")
        twice = self._num_twice()
        is_exact = self.plan.store == "disk" and all(
            each.kind in ("kill", "notice", "skew") for each in self.plan.faults
        )
        if twice and is_exact:
            raise Failed(f"{twice} rows have two lines in the journal, and no worker was taken for dead wrongly")
        self._note_journal(twice)

    def _is_only(self, *kinds: str) -> bool:
        """Whether no other faults happen."""
        return all(fault.kind in kinds for fault in self.plan.faults)

    def _note_journal(self, twice: int) -> None:
        """What rare states the journal shows at the end."""
        met, leases = self.world.met_with, self._files("leases")
        states = {
            "a row had two lines": bool(twice),
            "a part was cut": any(b" " in content for content in leases.values()),
            "a part was given back": any(not content for content in leases.values()),
            "a piece of a part was taken": any("-" in name for name in leases),
            "a part was taken over": any(name.partition(".")[2] not in ("", "1") for name in leases),
            "a part had its fourth epoch": any(name.endswith(".4") for name in leases),
            "rows in progress were kept": any(b" partial " in content for content in self._files("segments").values()),
            "a worker was declared dead": any(self._files("workers", ".dead").values()),
            "two layouts counted in turn": len(self._files("layouts")) > 1,
        }
        for state, is_met in states.items():
            if is_met:
                met(state)

    def _files(self, folder: str, end: str = "") -> dict[str, bytes]:
        """Files of a folder of the journal by their names."""
        above = f"{self.output}.journal/{folder}/".replace("//", "/").replace("world:/", "world://")
        if self.plan.store == "bucket":
            names = {f"world://{name}": content for name, content in self.bucket.objects.items()}
        else:
            disk = self.machines[0].disk
            found = disk._find(above)
            names = {path: node.data for node, path in disk._nodes(found, above) if not node.is_folder} if found else {}
        found = {name.rpartition("/")[2]: content for name, content in names.items() if name.startswith(above)}
        return {name: each for name, each in found.items() if name.endswith(end) and not name.startswith(".")}

    def _num_twice(self) -> int:
        found: Counter[bytes] = Counter()
        for content in self._files("segments").values():
            records = (record.split(b" ", 4) for record in content.splitlines())
            found.update(each[3] for each in records if each[1] in (b"ok", b"failed"))
        return sum(count > 1 for count in found.values())


class _Said:
    """A console that looks in what it is told for states that no file shows."""

    is_terminal = False

    def __init__(self, world: World) -> None:
        self._world = world

    def print(self, *said: Any, **how: Any) -> None:
        text = str(said[0])
        for part in ("another took over its rows", "Ended early", "time of this run ends", "has the lines of those"):
            if part in text:
                self._world.met_with(f"a worker said: {part}")

    log = print

    def get_time(self) -> float:
        return 0.0


def kind_of(path: str) -> str:
    """The kind of file that a call was about."""
    name = path.rpartition("/")[2]
    if (
        served := re.search(rf"{SERVED}/(files|batches|clerk/leases|clerk/workers|jobs)(?!.*[.]journal/)", path)
    ) is not None:
        return f"{served[1]} {_ID.sub('', name.lstrip('.'))}".removesuffix(f" {served[1]}")
    if ".journal/" not in path:
        return "the report" if "report" in name else "the output" if "out.jsonl" in name else "the input"
    below = path.partition(".journal/")[2]
    return below.partition("/")[0] if "/" in below else ".".join(below.strip(".").split(".")[:2])


# -- faults ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _How:
    """said, promised: as users read of it. happens: takes the history, the fault, the process or None, and the path of
    the call. most: size. kinds: of histories, a regular expression."""

    said: str
    promised: str
    happens: Callable[[History, Fault, Any, str], None]
    most: float = 0.0
    by_call: bool = False
    kinds: str = ".*"


def _kill(history: History, fault: Fault, process: Process | None, about: str) -> None:
    if process is not None and not process.has_ended:
        history.world.kill(process)


def _cut(history: History, fault: Fault, process: Process | None, about: str) -> None:
    """Power goes at once, or as soon as the calling task has let go."""
    history.at(0.0, lambda: history.lose_power(history.machine(fault.who)))
    if history.world.task.process is process:
        history.world.tasks[0].wake_s = history.world.now_s
        history.world.block(history.world.now_s)


def _pause(history: History, fault: Fault, process: Process | None, about: str) -> None:
    if process is not None:
        process.frozen_until = history.world.now_s + fault.size * history.pauses
        if history.world.task.process is process:
            history.world.block(history.world.now_s)


def _away(history: History, fault: Fault, process: Process | None, about: str) -> None:
    history.machine(fault.who).away_until = history.world.now_s + fault.size


def _skew(history: History, fault: Fault, process: Process | None, about: str) -> None:
    history.machine(fault.who).skew_s += (fault.size - 500.0) * 10


def _error(number: int) -> Callable[[History, Fault, Any, str], None]:
    def happens(history: History, fault: Fault, process: Process | None, about: str) -> None:
        if process is not None and about:
            raise OSError(number, os.strerror(number), about)
        if process is not None:  # it is none of its calls that a disk answers: the next one
            process.fuse = 0, lambda what, about: happens(history, fault, process, about)

    return happens


def _full(history: History, fault: Fault, process: Process | None, about: str) -> None:
    if fault.by_call:
        _error(errno.ENOSPC)(history, fault, process, about)
    disk = history.machine(fault.who).disk
    disk.is_full = True
    history.at(history.world.now_s + fault.size, lambda: setattr(disk, "is_full", False))


def _slow(history: History, fault: Fault, process: Process | None, about: str) -> None:
    stores = [history.bucket] if history.plan.store == "bucket" else [each.disk for each in history.machines]
    for store in stores:
        store.pace = 1 + fault.size
        history.at(history.world.now_s + fault.size, lambda store=store: setattr(store, "pace", 1.0))


def _trouble(history: History, fault: Fault, process: Process | None, about: str) -> None:
    history.bucket.trouble = 0.01 * fault.size
    history.at(history.world.now_s + fault.size, lambda: setattr(history.bucket, "trouble", 0.0))


def _lag(history: History, fault: Fault, process: Process | None, about: str) -> None:
    history.bucket.lag_s = fault.size


def _notice(history: History, fault: Fault, process: Process | None, about: str) -> None:
    if process is not None and (notice := process.notice) is not None:
        notice.give("preemption notice", EXIT_PREEMPTED)
        history.at(history.world.now_s + 25.0, lambda: _kill(history, fault, process, about))


def _signal(history: History, fault: Fault, process: Process | None, about: str) -> None:
    """Ctrl-C, and often a second one."""

    def send() -> None:
        if process is not None and not process.has_ended and not process.is_dead and process.handlers:
            process.signals.append(signal.SIGINT)
            process.tasks[0].wake_s = history.world.now_s

    send()
    if fault.size > 1:
        history.at(history.world.now_s + fault.size - 1, send)


_GOES_ON = "the same command goes on; no finished row is run again"
_NAMED = f"the error names the file; {_GOES_ON}"
_TAKEN, _ONCE = "others take over; it ends with 75 and harms nothing", "a row may run twice; one line of it counts"
_REFUSED = "it is refused; all lines are one model's"
_MANY, _BUCKET, _JOBS = ".*(shared|bucket)", ".*bucket", "(?!server).*"
FAULTS = {
    "kill": _How("a kill, at any call", _GOES_ON, _kill, by_call=True),
    "cut": _How("a power cut, at any call", "what was written lasts, whatever else the disk keeps", _cut, by_call=True),
    "pause": _How("a worker that sleeps longer than its leases last", _TAKEN, _pause, most=60.0, by_call=True),
    "away": _How("a machine that does not reach the others", "others take over", _away, most=60.0, kinds=_MANY),
    "skew": _How("clocks that differ and jump, also back", "nothing depends on them", _skew, most=1000.0),
    "disk error": _How("a disk that fails, at any call", _NAMED, _error(errno.EIO), by_call=True),
    "full disk": _How("a full disk, at any call", _NAMED, _full, most=20.0, by_call=True),
    "slow": _How("a store that is up to 20 times as slow", "it takes longer", _slow, most=20.0),
    "trouble": _How("a bucket whose calls fail, or whose answers are lost", _ONCE, _trouble, most=30.0, kinds=_BUCKET),
    "lag": _How("a bucket whose listings come late", _ONCE, _lag, most=3.0, kinds=_BUCKET),
    "notice": _How("a preemption notice", "rows in progress keep their tokens", _notice),
    "other": _How(
        "a worker with another model", "it is refused; all lines are one model's", lambda *_: None, kinds=_JOBS
    ),
    "signal": _How("Ctrl-C, once or twice", f"code 130; {_GOES_ON}", _signal, most=3.0, kinds=_JOBS),
}


# -- the job ---------------------------------------------------------------------------------------------


def input_of(num_rows: int) -> bytes:
    """Rows with shared prefixes, several choices, log-probabilities; a few bad ones."""
    return b"".join(_line(index) for index in range(num_rows))


def _line(index: int) -> bytes:
    row = {"custom_id": f"row-{index}", "prompt": f"prefix {index % 5} {index}", "max_tokens": 3 + index % 11}
    row |= {"temperature": 0.8, "n": 1 + (index % 7 == 0)} | ({"logprobs": 1} if index % 9 == 0 else {})
    if index % 29 == 5:
        row["colour"] = "red"
    return json.dumps(row).encode() + b"\n"


@functools.cache
def expected(num_rows: int, *, is_other: bool = False) -> bytes:
    """The output of a job that nothing disturbs. is_other: of the other model."""
    faults = (Fault(kind="other", who=0, at=0.0),) if is_other else ()
    history = History(Plan(seed=0, kind="disk", num_rows=num_rows, steps_s=(0.1,), faults=faults))
    history._is_whole = lambda: True
    found = history.run().content() or b""
    assert found.count(b"\n") == num_rows
    return found
