"""Executables: the step of every bucket, compiled ahead of time in threads, and the guard that counts compiles.

Compiling needs shapes alone, so it runs while weights load. After warm-up an engine calls executables and
nothing else; whatever still compiles then is a fault, and `CompileCounter` sees it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ferrum_jax import sampling
from ferrum_jax.cache.copies import trace_copies
from ferrum_jax.runtime.buckets import Bucket
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.step import trace_step
from ferrum_jax.runtime.store import ExecutableStore

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
Executable = Callable[..., Any]


class CompileCounter:
    """Counts every compile of the process from its creation on; `count` never falls."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT:
            self.count += 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executables:
    """All that an engine calls: one step per bucket, the write of a slot record, and copies of blocks."""

    steps: Mapping[Bucket, Executable]
    write_slot: Executable
    copy_blocks: Executable

    def __len__(self) -> int:
        return len(self.steps) + 2


def compile_all(
    layout: Layout, *, store: ExecutableStore | None, on_done: Callable[[int, int], None] = lambda done, total: None
) -> Executables:
    """The executable of every bucket, from the store or compiled from shapes, in a thread pool.

    on_done(done, total) is called after each.
    """
    ladder, pools, options = layout.ladder, layout.pools, layout.options
    total = len(ladder.buckets) + 2
    shapes = repr((layout.targets, pools, options, options.spec.digest_text()))

    def get(description: str, compile: Callable[[], Executable]) -> Executable:
        return compile() if store is None else store.get(f"{description} {shapes}", compile)

    def step(bucket: Bucket) -> Executable:
        def compile() -> Executable:
            return trace_step(layout.graph, layout.targets, pools, bucket, options, layout.mesh).lower().compile()

        return get(str(bucket), compile)

    def write_slot() -> Executable:
        record = jax.ShapeDtypeStruct((pools.slots.shape[1],), jnp.int32)
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        function = jax.jit(sampling.write_slot, donate_argnums=(0,))
        return get("write_slot", lambda: function.lower(pools.slots, slot, record).compile())

    def copy_blocks() -> Executable:
        def compile() -> Executable:
            return trace_copies(pools, options.spec.cache_groups, layout.mesh).lower().compile()

        return get("copy_blocks", compile)

    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        # the largest first: they take longest, and one of them alone at the end would leave cores idle
        jobs = {bucket: threads.submit(step, bucket) for bucket in reversed(ladder.buckets)}
        writing, copying = threads.submit(write_slot), threads.submit(copy_blocks)
        for done, job in enumerate(concurrent.futures.as_completed([*jobs.values(), writing, copying]), 1):
            job.result()
            on_done(done, total)
    steps = {bucket: job.result() for bucket, job in jobs.items()}
    return Executables(steps=steps, write_slot=writing.result(), copy_blocks=copying.result())
