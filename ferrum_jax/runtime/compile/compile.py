"""Compiling: programs become executables ahead of time, in threads, and a guard counts what is compiled later.

Compiling needs only shapes, so it runs while weights load. What a store or a bundle has is loaded when it is needed
(`runtime/compile/deferred.py`). After warm-up an engine calls executables and nothing else; a compile after that is a
fault, and `CompileCounter` counts it.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ferrum_jax.runtime.compile.deferred import DeferredExecutable, Executable, load_behind
from ferrum_jax.runtime.compile.executable_store import ExecutableCache
from ferrum_jax.runtime.compile.lowered import Lowered
from ferrum_jax.runtime.compile.pieces import LoweredPieces, lower_pieces
from ferrum_jax.runtime.compile.refused_kernel import is_of_kernel, refused_kernel

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
Key = TypeVar("Key")
Made = TypeVar("Made")


class CompileCounter:
    """Counts compiles since it was created: `count` in the process, `count_here` in the calling thread.

    No count ever falls.
    """

    def __init__(self) -> None:
        self.count = 0
        self._of_threads: collections.Counter[int] = collections.Counter()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def count_here(self) -> int:
        return self._of_threads[threading.get_ident()]

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT:
            self.count += 1
            self._of_threads[threading.get_ident()] += 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One executable of an engine, as an ExecutableCache finds or makes it.

    what: a few words that name it within its layout. shapes: all else that decides it, beside the environment.
    effort: about how long it compiles, as a relative number. kernels: its kernels with their shapes, or "".
    is_kept: a file can hold it; else each start compiles it. pieces_at: the function at whose calls it is cut into
    pieces, "" for one executable; together: calls of one piece. compiler_options: those of its trace, for its pieces.
    """

    what: str
    shapes: str
    mesh: Mesh
    trace: Callable[[], jax.stages.Traced]
    effort: int = 1
    kernels: str = ""
    is_kept: bool = True
    pieces_at: str = ""
    together: int = 1
    compiler_options: Mapping[str, str] | None = None

    @property
    def description(self) -> str:
        return f"{self.what}\n{f'in pieces of {self.together} ' if self.pieces_at else ''}{self.shapes}"

    def compile(self) -> Executable:
        """Compiled for the mesh's devices, whether they are here or known by description only.

        Raises RefusedKernel where the compiler refuses one of its kernels, and else what the compiler raises.
        """
        return self.lower().compile()

    def lower(self) -> Lowered | LoweredPieces:
        """Traced and lowered; raises as `compile` does."""
        platform = lowering_platform(self.mesh.devices.flat[0])

        def lower(traced: jax.stages.Traced) -> Lowered:
            return Lowered(traced.lower(lowering_platforms=(platform,)), self._watching)

        with self._watching():
            traced = self.trace()
            if not self.pieces_at:
                return lower(traced)
            whole = NamedSharding(self.mesh, PartitionSpec())
            how: Any = {"sharding": whole, "compiler_options": self.compiler_options}
            return lower_pieces(traced, self.pieces_at, self.together, lower, **how)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        try:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):  # kernels ask it what they are traced for
                yield
        except Exception as error:  # compilers of kernels raise whatever they like
            if not self.kernels or not is_of_kernel(error):
                raise
            raise refused_kernel(error, self.what, self.kernels, self.mesh.devices.flat[0]) from None

    def get(self, executable_cache: ExecutableCache | None) -> DeferredExecutable:
        return (
            DeferredExecutable.made(self.compile())
            if executable_cache is None or not self.is_kept
            else executable_cache.get(self.description, self.lower)
        )


def lowering_platform(device: Any) -> str:
    """The platform that jax lowers for; it has two kinds of "gpu"."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


@contextlib.contextmanager
def beside(make: Callable[[threading.Event], Made]) -> Iterator[concurrent.futures.Future[Made]]:
    """The future of make(abandoned), which runs in a thread while the block runs.

    An error or Ctrl-C in the block sets `abandoned` and does not wait for the thread: a compile cannot be interrupted.
    """
    abandoned, thread = threading.Event(), concurrent.futures.ThreadPoolExecutor(max_workers=1)
    try:
        yield thread.submit(make, abandoned)
    except BaseException:
        abandoned.set()
        raise
    finally:
        thread.shutdown(wait=False)


def make_all(
    programs: Mapping[Key, Program],
    order_of_use: Iterable[Key],
    *,
    executable_cache: ExecutableCache | None,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    abandoned: threading.Event | None = None,
) -> dict[Key, DeferredExecutable]:
    """Each program's executable, found in the cache or compiled from shapes, in a thread pool.

    programs: the largest first, because they take longest, and a large one alone at the end would leave cores idle.
    order_of_use: of all keys; a thread loads found executables in this order, and continues after this returns.
    on_done(done, total) is called after each. abandoned: once set, no more are begun and CancelledError is raised.
    """

    def get(program: Program) -> DeferredExecutable:
        if abandoned is not None and abandoned.is_set():
            raise concurrent.futures.CancelledError
        return program.get(executable_cache)

    threads = concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count())
    try:
        jobs = {key: threads.submit(get, program) for key, program in programs.items()}
        for done, job in enumerate(concurrent.futures.as_completed(jobs.values()), 1):
            job.result()
            on_done(done, len(jobs))
    finally:
        threads.shutdown(cancel_futures=True)  # after an error or Ctrl-C, waits only for those that run
    made = {key: job.result() for key, job in jobs.items()}
    load_behind(made[key] for key in order_of_use)
    return made
