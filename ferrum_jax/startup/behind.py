"""Behind: executables that a start left out, compiled while the engine works.

A child process traces and compiles them into the store, niced, because tracing holds Python's lock and the compiler's
threads inherit no priority. A thread here asks it for one after the other, what would have saved most so far first, and
loads what it made. The child ends when this program does, however that ends: its input closes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from ferrum_jax.config import EngineConfig
from ferrum_jax.executables.environment import JAX_OPTIONS
from ferrum_jax.executables.executable_store import ExecutableStore
from ferrum_jax.processes import fresh
from ferrum_jax.processes.processes import current
from ferrum_jax.runtime.buckets import Bucket, Ladder, RowBucket
from ferrum_jax.runtime.compile import Program
from ferrum_jax.runtime.layout import Layout, lay_out
from ferrum_jax.runtime.programs import Executables, Part, in_order_of_use, programs_of
from ferrum_jax.runtime.settled import Room
from ferrum_jax.sharding import make_mesh
from ferrum_jax.sizes.engine_sizes import Reach
from ferrum_jax.spec import ModelSpec

_NICE = 15
_LOOK_S = 0.2  # how often the thread looks whether it is still wanted
_BEGIN_S = 2.0  # a program that is over sooner needs no child


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Order:
    """What the child lays out: the same engine. options: of jax, which decide executables."""

    spec: ModelSpec
    config: EngineConfig
    room: Room
    reach: Reach | None
    options: Mapping[str, Any]


def starts_first(config: EngineConfig, mesh: Mesh) -> bool:
    """Whether an engine with a store is ready before all of its executables are: on the CPU, in one process.

    An accelerator's pools are sized by what its largest executables need; several processes would have to agree.
    """
    return config.ready == "first" and mesh.devices.flat[0].platform == "cpu" and current() is None


def compile_behind(
    layout: Layout, executables: Executables, store: ExecutableStore, reach: Reach | None
) -> threading.Thread | None:
    """The thread that adds what is missing to the executables; None where nothing is. It ends with their last user."""
    if not executables.missing(layout.ladder):
        return None
    order = _Order(
        spec=layout.options.spec,
        config=layout.settled.config,
        room=Room(max_num_seqs=layout.max_num_seqs, num_blocks=layout.ledger.num_blocks),
        reach=reach,
        options={name: jax.config.values[name] for name in JAX_OPTIONS},
    )
    work = _Behind(order, layout, weakref.ref(executables), store)
    thread = threading.Thread(target=work.run, name="executables behind")
    thread.start()
    return thread


class _Behind:
    """What the thread does."""

    def __init__(
        self, order: _Order, layout: Layout, executables: weakref.ref[Executables], store: ExecutableStore
    ) -> None:
        self._order, self._ladder, self._executables, self._store = order, layout.ladder, executables, store
        self._programs = programs_of(layout)
        self._numbers = {part: number for number, part in enumerate(self._programs)}
        self._by_need = _by_need(layout)

    def run(self) -> None:
        """Until nothing is missing, nobody is left who wants it, or a compile fails, which is said once."""
        until = time.monotonic() + _BEGIN_S
        while time.monotonic() < until:
            if not self._is_wanted:
                return
            time.sleep(_LOOK_S)
        self._run_child()

    def _run_child(self) -> None:
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        asked = fresh.start(
            "ferrum_jax.startup.behind:main", self._order, environment=["JAX_PLATFORMS=cpu"], is_told_more=True, **how
        )
        with asked as child:
            try:
                self._ask(child)
            except _NotWanted:
                pass
            except Exception as error:  # the engine goes on, whatever it was
                self._say(None, f"{type(error).__name__}: {error}")
            finally:
                child.kill()

    def _ask(self, child: subprocess.Popen[bytes]) -> None:
        while (part := self._next()) is not None:
            self._send(child, b"%d\n" % self._numbers[part])
            problem = self._wait(child)
            if problem is not None or not self._add(part):
                self._say(part, problem or "the store does not have it")
                return

    def _next(self) -> Bucket | RowBucket | None:
        """What to compile next: what steps were seen to want, else in an order that suits any work."""
        executables = self._wanting()
        missing = executables.missing(self._ladder)
        left = [part for part in self._by_need if part in missing]
        return max(left, key=lambda part: executables.wanted[part]) if left else None

    def _add(self, part: Bucket | RowBucket) -> bool:
        program: Program = self._programs[part]
        if not self._store.has(program.description):
            return False
        deferred = program.get(self._store)
        deferred.result()  # loaded here, so that no step waits for it
        self._wanting().put(part, deferred)
        return True

    @property
    def _is_wanted(self) -> bool:
        return self._executables() is not None and threading.main_thread().is_alive()

    def _wanting(self) -> Executables:
        """Raises _NotWanted when nobody has the executables any more, or the program ends."""
        executables = self._executables()
        if executables is None or not self._is_wanted:
            raise _NotWanted
        return executables

    def _send(self, child: subprocess.Popen[bytes], content: bytes) -> None:
        assert child.stdin is not None
        child.stdin.write(content)
        child.stdin.flush()

    def _wait(self, child: subprocess.Popen[bytes]) -> str | None:
        """None when the child has made what it was asked for, else what went wrong."""
        assert child.stdout is not None
        while not select.select([child.stdout], [], [], _LOOK_S)[0]:
            self._wanting()
        line = child.stdout.readline()
        return json.loads(line) if line else f"its process ended with exit code {child.wait()}"

    def _say(self, part: Part | None, problem: str) -> None:
        what = "executables" if part is None else f"the executable {part}"
        text = f"compiling {what} in the background failed ({problem}); the engine continues with those that it has"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


class _NotWanted(Exception):
    """Nobody is left who would use what is compiled."""


def _by_need(layout: Layout) -> list[Bucket | RowBucket]:
    """All buckets: decodes of all rows, the largest prefill, a row alone, then the others in order of use."""
    ladder: Ladder = layout.ladder
    decode = [bucket for bucket in ladder.buckets if bucket.decode_only]
    first = [*decode[-1:], *ladder.largest[:1], *decode[:1], ladder.row_buckets[0]]
    others = [part for part in in_order_of_use(layout) if not isinstance(part, str)]
    return list(dict.fromkeys([*first, *others]))


def main(order: _Order) -> None:
    """The child: on its input are numbers of programs; for each it writes a line, null or what went wrong."""
    os.nice(_NICE)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # nothing else that is printed is an answer
    numbers: queue.Queue[int] = queue.Queue()
    threading.Thread(target=_listen, args=(numbers,), daemon=True).start()
    for name, value in order.options.items():
        jax.config.update(name, value)
    mesh = make_mesh(order.config.mesh_shape, order.config.among(jax.devices()))
    programs = [*programs_of(lay_out(order.spec, order.config, mesh, order.reach, order.room)).values()]
    assert order.config.compilation_cache_dir is not None, "parts are handed over through it"
    store = ExecutableStore(order.config.compilation_cache_dir, mesh.devices.flatten().tolist())
    while True:
        program = programs[numbers.get()]
        answers.write(json.dumps(_problem(program, store)).encode() + b"\n")


def _problem(program: Program, store: ExecutableStore) -> str | None:
    """None once the store has the program, else what went wrong."""
    try:
        program.get(store)
    except Exception as error:  # compilers raise whatever they like
        return f"{type(error).__name__}: {error}"[:1000]
    return None


def _listen(numbers: queue.Queue[int]) -> None:
    """Hands on what is asked for, and ends the process at once when nobody can ask any more."""
    for line in sys.stdin.buffer:
        numbers.put(int(line))
    os._exit(0)
