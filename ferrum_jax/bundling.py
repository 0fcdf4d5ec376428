"""Bundling: fills a bundle by compiling in processes, on a machine that need not have the target's devices.

Processes, because the TPU's compiler crashes where two threads of one process use it without a TPU. Each lays the
engine out by itself, from the same config; what goes between them is the number of a part and its bytes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import jax

from checkpoints.folder import read_json
from ferrum_jax.config import EngineConfig, MeshShape
from ferrum_jax.models import registry
from ferrum_jax.runtime.block_copies import BlockCopies
from ferrum_jax.runtime.bundle import BundleWriter, purpose_of
from ferrum_jax.runtime.compile import Part, parts_of
from ferrum_jax.runtime.fit import fit
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.store import serialize
from ferrum_jax.runtime.topology import target_devices
from ferrum_jax.sharding import make_mesh
from ferrum_jax.spec import ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleOrder:
    """What to make a bundle of. model: a folder whose config.json is read and nothing else. target: a name that
    runtime/topology.py knows."""

    model: str
    target: str
    config: EngineConfig

    def lay_out(self) -> Layout:
        """The engine's layout. Raises ValueError with every reason why the target cannot run it."""
        mesh = make_mesh(MeshShape.parse(self.config.mesh), target_devices(self.target))
        return fit(self.spec, self.config, mesh, None)

    @functools.cached_property
    def spec(self) -> ModelSpec:
        """Raises ValueError where there is no config.json, or it is not understood."""
        return registry.spec_of(read_json(Path(self.model) / "config.json"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleSummary:
    num_compiled: int
    num_kept: int  # from an earlier run
    num_bytes: int


def make_bundle(
    order: BundleOrder,
    out: str | os.PathLike[str],
    *,
    num_processes: int,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> BundleSummary:
    """Puts every executable of an engine into a bundle; on_done(done, total) is called after each.

    Parts that are there are kept, so a bundle that was begun is gone on with. Raises ValueError where the target
    cannot run the engine, or the compiler crashed.
    """
    layout = order.lay_out()
    chosen = dataclasses.replace(order.config, num_blocks=layout.ledger.num_blocks, kv_memory_bytes=None)
    writer = BundleWriter(os.fspath(out), purpose_of(order.target, chosen, layout))
    parts = _parts(layout)
    missing = [number for number, part in enumerate(parts) if not writer.has(part.description)]
    num_kept = len(parts) - len(missing)
    on_done(num_kept, len(parts))
    order = dataclasses.replace(order, config=chosen)  # free memory may be another when a process asks
    processes = concurrent.futures.ProcessPoolExecutor(
        max_workers=max(min(num_processes, len(missing)), 1),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(order,),
    )
    try:
        jobs = {processes.submit(_compile, number): parts[number] for number in missing}
        for done, job in enumerate(concurrent.futures.as_completed(jobs), num_kept + 1):
            writer.put(jobs[job].description, _executable(jobs[job], job, order.target))
            on_done(done, len(parts))
    except BrokenProcessPool as error:
        raise ValueError(
            f"a compiler for {order.target} crashed; what was finished is in {out}, and the same command goes on from "
            "there (fewer --processes take less memory)"
        ) from error
    finally:
        processes.shutdown(cancel_futures=True)
    return BundleSummary(num_compiled=len(missing), num_kept=num_kept, num_bytes=writer.num_bytes)


def _executable(part: Part, job: concurrent.futures.Future[bytes], target: str) -> bytes:
    """Raises ValueError with what the compiler says against a part."""
    try:
        return job.result()
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the compiler for {target} refuses the {part.what}: {error}") from error


def _parts(layout: Layout) -> list[Part]:
    """The largest first: they take longest, and one of them alone at the end would leave cores idle."""
    steps, others = parts_of(layout)
    return [*reversed(steps.values()), *others.values(), *BlockCopies(layout, None).parts().values()]


_of_process: list[Part] = []  # of a process that compiles


def _begin(order: BundleOrder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, and it is the parent who speaks of it
    _of_process.extend(_parts(order.lay_out()))


def _compile(number: int) -> bytes:
    return serialize(_of_process[number].compile())
