"""Bundling: fills a bundle by compiling in processes, on a machine that need not have the target's devices.

Processes, because the TPU's compiler crashes where two threads of one process use it without a TPU. A plan's programs
cannot be sent to another process, so each makes the plan once, from the order in it; what goes between them is the
number of a program and its bytes.
"""

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool

import jax

from ferrum_jax.planning.offline.bundle_order import BundleOrder, BundlePlan
from ferrum_jax.runtime.compile.bundle import BundleWriter, begun_bundle, config_for
from ferrum_jax.runtime.compile.compile import Program
from ferrum_jax.runtime.compile.executable_store import serialize
from ferrum_jax.runtime.placing.fit import temporaries_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleSummary:
    num_compiled: int
    num_kept: int  # from an earlier run
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Parts that are there, of all, and the share of the work that they are: the first take longest.

    left_s: what the rest takes at the pace so far, None before there is one.
    """

    done: int
    total: int
    share: float
    left_s: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pace:
    """How fast work goes on from now. all, missing: of the parts' effort."""

    all: int
    missing: int
    began: float = dataclasses.field(default_factory=time.monotonic)

    def progress(self, done: int, total: int, effort: int) -> Progress:
        """effort: of the missing that is done."""
        left = self.missing - effort
        seconds = (time.monotonic() - self.began) / effort * left if effort else None
        return Progress(done=done, total=total, share=1 - left / self.all, left_s=seconds)


class _NeedsMore(Exception):
    """A step needs more memory than was promised."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


def make_bundle(
    order: BundleOrder,
    out: str | os.PathLike[str],
    *,
    num_processes: int,
    on_done: Callable[[Progress], None] = lambda progress: None,
    on_mesh: Callable[[BundleOrder], None] = lambda order: None,
) -> BundleSummary:
    """Puts every executable of an engine into a bundle; on_done is called after each, on_mesh with the order that names
    the mesh.

    Parts that are there are kept, so an unfinished bundle is continued, with its own pool size if the order leaves that
    open. Raises ValueError where the target cannot run the engine, or the compiler crashed.
    """
    order = dataclasses.replace(order, config=config_for(order.config, begun_bundle(os.fspath(out)))).settled()
    on_mesh(order)
    least = 0
    while True:
        try:
            return _fill(order.plan(least), os.fspath(out), num_processes, on_done)
        except _NeedsMore as more:  # the pools must be smaller, and every executable another
            least = more.num_bytes


def _fill(plan: BundlePlan, out: str, num_processes: int, on_done: Callable[[Progress], None]) -> BundleSummary:
    """Raises _NeedsMore before anything is in the bundle."""
    parts, target = plan.programs, plan.order.target
    untried, made, finished_effort = set(plan.tried), dict[int, bytes](), 0
    writer = None if untried else BundleWriter(out, plan.purpose)
    missing = [n for n, part in enumerate(parts) if writer is None or not writer.has(part.description)]
    kept = len(parts) - len(missing)
    pace = _Pace(all=sum(part.effort for part in parts), missing=sum(parts[number].effort for number in missing))
    on_done(pace.progress(kept, len(parts), 0))
    processes = _start(plan.order, max(min(num_processes, len(missing)), 1))
    try:
        with _ended_at_once(processes):
            jobs = {processes.submit(_compile, number): number for number in missing}
            for done, job in enumerate(concurrent.futures.as_completed(jobs), kept + 1):
                number = jobs[job]
                made[number], temporaries = _made(parts[number], job, target)
                if number in untried and temporaries > plan.promised:
                    raise _NeedsMore(temporaries)
                untried.discard(number)
                if not untried:
                    writer = writer or BundleWriter(out, plan.purpose)
                    while made:
                        finished, payload = made.popitem()
                        writer.put(parts[finished].description, payload)
                finished_effort += parts[number].effort
                on_done(pace.progress(done, len(parts), finished_effort))
    except BrokenProcessPool as error:
        raise ValueError(
            f"a compiler for {target} crashed; what was finished is in {out}, and the same command goes on from "
            "there (fewer --processes take less memory)"
        ) from error
    assert writer is not None, "all parts were tried"
    return BundleSummary(num_compiled=len(missing), num_kept=kept, num_bytes=writer.num_bytes)


def _start(order: BundleOrder, num_processes: int) -> concurrent.futures.Executor:
    """Processes that compile the parts of an order."""
    return concurrent.futures.ProcessPoolExecutor(
        max_workers=num_processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(order,),
    )


@contextlib.contextmanager
def _ended_at_once(processes: concurrent.futures.Executor) -> Iterator[None]:
    """After an error or Ctrl-C nobody takes what the processes still compile, so they end in the middle of it."""
    others = multiprocessing.active_children()
    try:
        yield
    except BaseException:
        for child in multiprocessing.active_children():
            if child not in others:
                child.kill()
        raise
    finally:
        processes.shutdown(cancel_futures=True)


def _made(part: Program, job: concurrent.futures.Future[tuple[bytes, int]], target: str) -> tuple[bytes, int]:
    """The bytes of a part, and how many it needs beside its arguments. Raises ValueError if the compiler refuses it."""
    try:
        return job.result()
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the compiler for {target} refuses the {part.what}: {error}") from error


_of_process: list[Program] = []  # of a process that compiles


def _begin(order: BundleOrder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, and it is the parent who speaks of it
    end_with_parent()
    jax.config.update("jax_enable_compilation_cache", False)  # what comes from jax's own cache cannot be put in a file
    _of_process.extend(order.plan().programs)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # libtpu, which is loaded by now, prints its stack at this signal


def end_with_parent() -> None:
    """Lets this process end at once when the one that started it has: nobody waits for what it compiles."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a process of its own"

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _compile(number: int) -> tuple[bytes, int]:
    executable = _of_process[number].compile()
    return serialize(executable), temporaries_in(executable)
