"""Bundling: fills a bundle by compiling in processes, on a machine that need not have the target's devices.

Processes, because the TPU's compiler crashes where two threads of one process use it without a TPU. Each lays the
engine out by itself, from the same config; what goes between them is the number of a part and its bytes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from checkpoints.folder import read_json
from checkpoints.sentence import read_sentence_layout
from ferrum_jax.config import EngineConfig, MeshShape
from ferrum_jax.models import registry
from ferrum_jax.runtime.block_copies import BlockCopies
from ferrum_jax.runtime.bundle import BundleWriter, Purpose, purpose_of
from ferrum_jax.runtime.compile import Part, parts_of
from ferrum_jax.runtime.encoder import EncoderLayout, encoder_parts, lay_out_encoder
from ferrum_jax.runtime.fit import fit
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.store import serialize
from ferrum_jax.runtime.topology import target_devices
from ferrum_jax.sharding import make_mesh
from ferrum_jax.spec import ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleOrder:
    """What to make a bundle of. model: a folder whose config.json is read and no weight. target: a name that
    runtime/topology.py knows."""

    model: str
    target: str
    config: EngineConfig

    def lay_out(self) -> Layout:
        """The engine's layout. Raises ValueError with every reason why the target cannot run it."""
        return fit(self.spec, self.config, self._mesh(), None)

    def lay_out_encoder(self) -> EncoderLayout:
        """An encoder's layout. Raises ValueError as `lay_out` does."""
        spec, longest = registry.encoder_spec_of(self._model), read_sentence_layout(Path(self.model)).max_seq_length
        return lay_out_encoder(spec, self.config, self._mesh(), longest)

    @functools.cached_property
    def spec(self) -> ModelSpec:
        """Raises ValueError where there is no config.json, it is not understood, or it is of an encoder."""
        if self.is_encoder:
            raise ValueError(f"{self.model} is an encoder, and has none of the pools that would be planned")
        return registry.spec_of(self._model)

    @property
    def is_encoder(self) -> bool:
        return registry.is_encoder(self._model)

    @functools.cached_property
    def _model(self) -> Mapping[str, Any]:
        return read_json(Path(self.model) / "config.json")

    def _mesh(self) -> Mesh:
        return make_mesh(MeshShape.parse(self.config.mesh), target_devices(self.target))


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
    order, purpose, parts = _begun(order)
    writer = BundleWriter(os.fspath(out), purpose)
    missing = [number for number, part in enumerate(parts) if not writer.has(part.description)]
    num_kept = len(parts) - len(missing)
    on_done(num_kept, len(parts))
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


def _begun(order: BundleOrder) -> tuple[BundleOrder, Purpose, list[Part]]:
    """The order with the pool's size in it (free memory may be another when a process asks), what the bundle is for,
    and its parts, the largest first: they take longest, and one of them alone at the end would leave cores idle."""
    if order.is_encoder:
        layout = order.lay_out_encoder()
        purpose = purpose_of(order.target, order.config, layout.mesh, layout.spec)
        return order, purpose, [*reversed(encoder_parts(layout).values())]
    layout = order.lay_out()
    chosen = dataclasses.replace(order.config, num_blocks=layout.ledger.num_blocks, kv_memory_bytes=None)
    steps, others = parts_of(layout)
    parts = [*reversed(steps.values()), *others.values(), *BlockCopies(layout, None).parts().values()]
    return (
        dataclasses.replace(order, config=chosen),
        purpose_of(order.target, chosen, layout.mesh, order.spec),
        parts,
    )


_of_process: list[Part] = []  # of a process that compiles


def _begin(order: BundleOrder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, and it is the parent who speaks of it
    end_with_parent()
    _of_process.extend(_begun(order)[-1])


def end_with_parent() -> None:
    """Lets this process end at once when the one that started it has: nobody waits for what it compiles."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a process of its own"

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _compile(number: int) -> bytes:
    return serialize(_of_process[number].compile())
