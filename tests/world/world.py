"""A world in one thread of time: machines with processes and threads that have their turns from one seed.

Each thread of a process is a thread of Python, and one of them runs at a time: whoever sleeps, waits or uses a disk
names the moment at which it goes on, and the world wakes the thread whose moment is next. No time passes otherwise. A
process that is killed gets `Killed` from whatever it calls, so nothing that it does afterwards has an effect.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import math
import queue
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

from ferrum_jax.io import system

EPOCH_S = 1_800_000_000.0
MOST_CALLS = 100_000  # of a history


class Killed(BaseException):
    """The process is no more."""


class Machine:
    """rate: of its clocks, beside that of the world. disk: of its files, which machines may share."""

    def __init__(self, name: str, disk: Any, *, rate: float = 1.0) -> None:
        self.name, self.disk, self.rate = name, disk, rate
        self.skew_s = 0.0  # of its time of day
        self.boots = 0
        self.away_until = 0.0  # what it asks of others waits so long
        self.processes: list[Process] = []


class Process:
    """fuse: at which of its calls of the world something happens, and what. result: what its main task returned or
    raised, or the code with which it left. notice, options: of the job that it runs. closes: called at its end."""

    notice: Any = None
    options: Any = None

    def __init__(self, world: World, machine: Machine, name: str) -> None:
        self.world, self.machine, self.name = world, machine, name
        self.pid = next(world.pids)
        self.is_dead = False
        self.frozen_until = 0.0
        self.handlers: dict[int, Callable[..., Any]] = {}
        self.signals: deque[int] = deque()
        self.tasks: list[Task] = []
        self.num_calls = 0
        self.fuse: tuple[int, Callable[[str, str], None]] | None = None
        self.result: Any = None
        self.closes: list[Callable[[], None]] = []
        self.began_s = self.ended_s = world.now_s
        machine.processes.append(self)

    @property
    def has_ended(self) -> bool:
        return all(task.has_ended for task in self.tasks)

    def die(self) -> None:
        self.is_dead = True
        for close in self.closes:
            close()


class Task:
    """A thread of a process. wake_s: when it goes on; infinity where another task must wake it."""

    daemon = True

    def __init__(
        self, world: World, process: Process, target: Callable[..., Any], args: tuple[Any, ...] = (), name: str = ""
    ) -> None:
        self.world, self.process, self._target, self._args = world, process, target, args
        self.name, self.baton = name, _thread.allocate_lock()
        self.baton.acquire()
        self.wake_s, self.has_ended, self._joined = 0.0, False, list[Task]()

    def start(self) -> None:
        self.wake_s = self.world.now_s
        self.process.tasks.append(self)
        self.world.tasks.append(self)
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        self.baton.acquire()
        try:
            if not self.process.is_dead:
                self._target(*self._args)
        except Killed:
            pass  # its process ended under it, as the history wanted
        except BaseException as error:
            self.world.failures.append(error)
        finally:
            self.has_ended = True
            self.world.tasks.remove(self)
            for task in self._joined:
                task.wake_s = self.world.now_s
            self.world.hand_over()

    def is_alive(self) -> bool:
        return not self.has_ended

    def join(self, timeout: float | None = None) -> None:
        world = self.world
        until_s = math.inf if timeout is None else world.now_s + timeout
        while not self.has_ended and world.now_s < until_s:
            self._joined.append(world.task)
            world.block(until_s)


class Bell:
    """Wakes the tasks that wait for it."""

    def __init__(self, world: World) -> None:
        self.world, self._waiting = world, list[Task]()

    def ring(self) -> None:
        for task in self._waiting:
            task.wake_s = min(task.wake_s, self.world.now_s)
        self._waiting.clear()

    def wait_until(self, until_s: float, is_over: Callable[[], object]) -> bool:
        """Whether it is over, at the latest at this moment."""
        while not is_over() and self.world.now_s < until_s:
            self._waiting.append(self.world.task)
            self.world.block(until_s)
        return bool(is_over())

    def until(self, timeout: float | None) -> float:
        return math.inf if timeout is None else self.world.now_s + self.world.long(timeout)


class Event(Bell):
    _is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self.ring()
        if self.world.random.random() < 0.2:  # whoever waits for it may go on before its caller does
            self.world.pause(self.world.random.random())

    def wait(self, timeout: float | None = None) -> bool:
        return self.wait_until(self.until(timeout), self.is_set)


class Queue(Bell):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._items = deque[Any]()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self.ring()

    def get(self, timeout: float | None = None) -> Any:
        if not self.wait_until(self.until(timeout), lambda: self._items):
            raise queue.Empty
        return self._items.popleft()


class Lock:
    def __init__(self, world: World) -> None:
        self._world, self._is_held, self._waiting = world, False, deque[Task]()

    def __enter__(self) -> bool:
        while self._is_held:
            self._waiting.append(self._world.task)
            self._world.block(math.inf)
        self._is_held = True
        return True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        if self._waiting:
            task = self._waiting.popleft()
            task.wake_s = min(task.wake_s, self._world.now_s)


class World:
    """Everything that happens from one seed. now_s: its time. met: rare states, and how often each was met."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s, self.num_calls, self.trace = 0.0, 0, 0  # trace: a digest of all calls
        self.pids = iter(range(100, 1 << 30))
        self.tasks: list[Task] = []
        self.failures: list[BaseException] = []
        self.met: Counter[str] = Counter()
        self.log: list[str] | None = None
        self._numbers = iter(range(1 << 30))
        director = Process(self, Machine("director", None), "director")
        self.task = Task(self, director, lambda: None, name="director")
        self.task.wake_s = 0.0
        self.tasks.append(self.task)

    # -- turns -------------------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Lets the task go on whose moment is next; of several at one moment the seed chooses."""
        best, first_s = None, math.inf
        for task in self.tasks:
            wake_s = task.wake_s
            if task.process.frozen_until > wake_s:
                wake_s = task.process.frozen_until
            if wake_s < first_s or (wake_s == first_s and best is not None and self.random.random() < 0.5):
                best, first_s = task, wake_s
        assert best is not None, "all wait for each other"
        self.now_s = max(self.now_s, first_s)
        self.task = best
        best.baton.release()

    def block(self, until_s: float) -> None:
        """The calling task goes on at this moment, or when another wakes it."""
        task = self.task
        if task.process.is_dead:
            raise Killed
        task.wake_s = until_s
        self.hand_over()
        task.baton.acquire()
        self.check()

    def pause(self, seconds: float) -> None:
        """Passes some time, in which others may have their turns."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.block(until_s)

    def check(self) -> None:
        """Raises what the calling task is to hear: that its process was killed, or a signal."""
        process = self.task.process
        if process.is_dead:
            raise Killed
        if process.signals and self.task is process.tasks[0]:
            number = process.signals.popleft()
            process.handlers[number](number, None)

    def call(self, what: str, about: str = "", seconds: float = 0.0) -> None:
        """Every call by which a process changes or asks something outside of it begins here."""
        process = self.task.process
        if process.is_dead:
            raise Killed
        self.num_calls += 1
        assert self.num_calls < MOST_CALLS, "a worker spins"
        process.num_calls += 1
        self.trace = zlib.crc32(f"{self.now_s:.6f} {process.name} {what} {about}".encode(), self.trace)
        if self.log is not None:
            self.log.append(f"{self.now_s:10.4f} {process.name} {self.task.name} {what} {about}")
        if process.fuse is not None and process.num_calls >= process.fuse[0]:
            happens, process.fuse = process.fuse[1], None
            happens(what, about)
        if seconds:
            self.pause(seconds)
        if process.signals:
            self.check()

    def kill(self, process: Process) -> None:
        """Ends a process, wherever its threads are."""
        process.die()
        process.frozen_until = 0.0
        for task in process.tasks:
            task.wake_s = self.now_s
        if self.task.process is process:
            raise Killed
        while not process.has_ended:
            self.block(self.now_s)

    def start(self, machine: Machine, name: str, work: Callable[[], Any]) -> Process:
        process = Process(self, machine, name)

        def main() -> None:
            try:
                process.result = work()
            except Killed:
                raise
            except BaseException as error:
                process.result = error
            finally:
                process.ended_s = self.now_s
                self.tasks[0].wake_s = self.now_s  # the director looks at it
                if process.result is not None:
                    process.die()

        Task(self, process, main, name="main").start()
        return process

    def long(self, seconds: float) -> float:
        """Seconds of the world that pass while so many pass on the calling task's machine."""
        return max(seconds, 0.0) / self.task.process.machine.rate

    def met_with(self, state: str) -> None:
        self.met[state] += 1

    # -- what processes see of it ------------------------------------------------------------------------

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the product's `system` is this world."""
        real = {name: getattr(system, name) for name in system.__all__}
        seen = {name: getattr(self, f"_{name}", None) or functools.partial(self._on_disk, name) for name in real}
        for name, of_world in seen.items():
            setattr(system, name, of_world)
        try:
            yield
        finally:
            for name, of_machine in real.items():
                setattr(system, name, of_machine)

    def _on_disk(self, name: str, *args: Any, **how: Any) -> Any:
        return getattr(self.task.process.machine.disk, name)(*args, **how)

    def _monotonic(self) -> float:
        return 1000.0 + self.now_s * self.task.process.machine.rate

    _perf_counter = _monotonic

    def _now(self) -> float:
        return EPOCH_S + self.now_s + self.task.process.machine.skew_s

    def _sleep(self, seconds: float) -> None:
        self.call("sleep")
        self.pause(self.long(seconds))

    def _random(self) -> float:
        return self.random.random()

    def _token_hex(self, num_bytes: int) -> str:
        return f"{self.random.getrandbits(8 * num_bytes):0{2 * num_bytes}x}"

    def _Event(self) -> Event:
        return Event(self)

    def _Lock(self) -> Lock:
        return Lock(self)

    def _Thread(
        self, *, target: Callable[..., Any], args: tuple[Any, ...] = (), name: str = "", daemon: bool = True
    ) -> Task:
        return Task(self, self.task.process, target, args, name)

    def _SimpleQueue(self) -> Queue:
        return Queue(self)

    def _Timer(self, interval: float, function: Callable[[], None]) -> Task:
        def later() -> None:
            self.pause(self.long(interval))
            function()

        return Task(self, self.task.process, later, name="timer")

    def _leave(self, code: int) -> None:
        self.task.process.result = code
        self.kill(self.task.process)

    def _in_main_thread(self) -> bool:
        return self.task is self.task.process.tasks[0]

    def _signal(self, number: int, handler: Any) -> Any:
        handlers = self.task.process.handlers
        before, handlers[number] = handlers.get(number, lambda number, frame: None), handler
        return before

    def _getpid(self) -> int:
        return self.task.process.pid

    def _process_start(self, pid: object) -> str | None:
        here = self.task.process.machine.processes
        return next((f"start-{each.pid}" for each in here if each.pid == pid and not each.is_dead), None)

    def _process_place(self) -> str:
        machine = self.task.process.machine
        return f"{machine.name} boot {machine.boots}"
