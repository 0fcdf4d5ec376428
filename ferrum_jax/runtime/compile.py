"""Executables: the step of every bucket, compiled ahead of time in threads, and the guard that counts compiles.

Compiling needs shapes alone, so it runs while weights load. What a store or a bundle has is loaded when it is needed
(`later.py`). After warm-up an engine calls executables and nothing else; whatever still compiles then is a fault, and
`CompileCounter` sees it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import jax
from jax.sharding import Mesh

from ferrum_jax.cache.copies import trace_copies
from ferrum_jax.cache.pools import trace_fresh
from ferrum_jax.runtime.buckets import Bucket
from ferrum_jax.runtime.later import Executable, Later, Prepared, load_behind
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.step import trace_step, trace_write_slot
from ferrum_jax.runtime.store import ExecutableSource
from ferrum_jax.sharding import describe

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_STEP_EFFORT, _EFFORT_TOKENS = 16, 64  # for TPUs a step takes as long as 16 small parts, and one more for 64 tokens
Key = TypeVar("Key")
Made = TypeVar("Made")


class CompileCounter:
    """Counts compiles from its creation on: `count` those of the process, `count_here` those of the calling thread.

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
class Executables:
    """All that an engine calls: one step per bucket, and by name what stands beside them; see `parts_of`."""

    steps: Prepared[Bucket]
    others: Prepared[str]

    @property
    def write_slot(self) -> Executable:
        return self.others["write_slot"]

    @property
    def copy_blocks(self) -> Executable:
        return self.others["copy_blocks"]

    @property
    def fresh_pools(self) -> Executable:
        return self.others["fresh_pools"]

    @property
    def num_loaded(self) -> int:
        return self.steps.num_loaded + self.others.num_loaded

    def load(self) -> None:
        """All that is not loaded yet."""
        for mapping in (self.others, self.steps):
            list(mapping.values())

    def __len__(self) -> int:
        return len(self.steps) + len(self.others)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One executable that an engine calls, as it is asked of an ExecutableSource.

    what: a few words that name it among those of its layout. shapes: all else that decides it, beside the environment.
    effort: about how long it compiles, compared to others.
    """

    what: str
    shapes: str
    mesh: Mesh
    trace: Callable[[], jax.stages.Traced]
    effort: int = 1

    @property
    def description(self) -> str:
        return f"{self.what}\n{self.shapes}"

    def compile(self) -> Executable:
        """Compiled for the mesh's devices, whether they are here or known by description only."""
        platform = self.mesh.devices.flat[0].platform
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):  # kernels ask it what they are traced for
            return self.trace().lower(lowering_platforms=("cuda" if platform == "gpu" else platform,)).compile()

    def get(self, source: ExecutableSource | None) -> Later:
        return Later.made(self.compile()) if source is None else source.get(self.description, self.compile)


def parts_of(layout: Layout) -> tuple[dict[Bucket, Part], dict[str, Part]]:
    """The step of every bucket; beside them, by name, the write of a slot record, copies of
    blocks within the pools, and fresh pools."""
    pools, options, mesh = layout.pools, layout.options, layout.mesh
    arrays = describe((layout.targets, pools.kv, pools.slots, pools.prompts))
    shapes = f"{dict(mesh.shape)} {arrays} {options} {options.spec.digest_text()}"

    def step(bucket: Bucket) -> jax.stages.Traced:
        return trace_step(layout.graph, layout.targets, pools, bucket, options, mesh)

    def write_slot() -> jax.stages.Traced:
        return trace_write_slot(pools, mesh)

    def copy_blocks() -> jax.stages.Traced:
        return trace_copies(pools, options.spec.cache_groups, mesh)

    def part(what: str, trace: Callable[[], jax.stages.Traced], effort: int = 1) -> Part:
        return Part(what=what, shapes=shapes, mesh=mesh, trace=trace, effort=effort)

    steps = {
        bucket: part(str(bucket), functools.partial(step, bucket), _STEP_EFFORT + bucket.num_tokens // _EFFORT_TOKENS)
        for bucket in layout.ladder.buckets
    }
    return steps, {
        "write_slot": part("write of a slot", write_slot),
        "copy_blocks": part("copies of blocks", copy_blocks),
        "fresh_pools": part("fresh pools", lambda: trace_fresh(pools)),
    }


@contextlib.contextmanager
def beside(make: Callable[[threading.Event], Made]) -> Iterator[concurrent.futures.Future[Made]]:
    """make(abandoned) in a thread beside the block, which waits for what comes of it.

    A block that ends by an error or Ctrl-C sets `abandoned` and waits no longer: a compile cannot be cut off.
    """
    abandoned, thread = threading.Event(), concurrent.futures.ThreadPoolExecutor(max_workers=1)
    try:
        yield thread.submit(make, abandoned)
    except BaseException:
        abandoned.set()
        raise
    finally:
        thread.shutdown(wait=False)


def compile_all(
    layout: Layout,
    *,
    source: ExecutableSource | None,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    abandoned: threading.Event | None = None,
) -> Executables:
    """The executable of every bucket; see `make_all`. A thread goes on loading when this returns."""
    steps, others = parts_of(layout)
    largest_first: dict[Bucket | str, Part] = {bucket: steps[bucket] for bucket in reversed(steps)}
    made = make_all(largest_first | others, source=source, on_done=on_done, abandoned=abandoned)
    load_behind(made[key] for key in _in_order_of_use(tuple(steps)))
    return Executables(
        steps=Prepared({bucket: made[bucket] for bucket in steps}),
        others=Prepared({name: made[name] for name in others}),
    )


def _in_order_of_use(buckets: Sequence[Bucket]) -> Iterator[Bucket | str]:
    """Keys of `parts_of`: what the first request needs comes first, a prompt before its decodes, small before large."""
    yield from ("fresh_pools", "write_slot")
    kinds = [[bucket for bucket in buckets if bucket.decode_only == decode] for decode in (False, True)]
    for pair in itertools.zip_longest(*kinds):
        yield from (bucket for bucket in pair if bucket is not None)
    yield "copy_blocks"


def make_all(
    parts: Mapping[Key, Part],
    *,
    source: ExecutableSource | None,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    abandoned: threading.Event | None = None,
) -> dict[Key, Later]:
    """Each part: found in the source, to be loaded, or compiled from shapes, in a thread pool.

    parts: the largest first, for they take longest, and one of them alone at the end would leave cores idle.
    on_done(done, total) is called after each. abandoned: once set no more are begun, and CancelledError is raised.
    """

    def get(part: Part) -> Later:
        if abandoned is not None and abandoned.is_set():
            raise concurrent.futures.CancelledError
        return part.get(source)

    threads = concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count())
    try:
        jobs = {key: threads.submit(get, part) for key, part in parts.items()}
        for done, job in enumerate(concurrent.futures.as_completed(jobs.values()), 1):
            job.result()
            on_done(done, len(jobs))
    finally:
        threads.shutdown(cancel_futures=True)  # after an error or Ctrl-C only what runs is waited for
    return {key: job.result() for key, job in jobs.items()}
