"""Bundling: fills a bundle by compiling in processes, on a machine that need not have the target's devices.

Processes, because the TPU's compiler crashes where two threads of one process use it without a TPU. Each lays the
engine out by itself, from the same config; what goes between them is the number of a part and its bytes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
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
from ferrum_jax.runtime.bundle import BundleWriter, Purpose, begun_bundle, config_for, purpose_of
from ferrum_jax.runtime.compile import Part, parts_of
from ferrum_jax.runtime.encoder import EncoderLayout, encoder_parts, lay_out_encoder
from ferrum_jax.runtime.fit import (
    TooSmall,
    changes_that_fit,
    expected_temporaries,
    fit,
    refuse_overfull,
    temporaries_bytes,
    temporaries_in,
)
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.store import serialize
from ferrum_jax.runtime.topology import target_devices
from ferrum_jax.sharding import make_mesh, takes_all_hosts
from ferrum_jax.spec import ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleOrder:
    """What to make a bundle of. model: a folder whose config.json is read and no weight. target: a name that
    runtime/topology.py knows."""

    model: str
    target: str
    config: EngineConfig

    def lay_out(self, temporaries_of: Callable[[Layout], int] | None = None) -> Layout:
        """The engine's layout. Raises ValueError with every reason why the target cannot run it.

        temporaries_of: see `fit`; without it the compiler is asked, which takes minutes for a large model.
        """
        asked = functools.partial(temporaries_bytes, source=None)
        try:
            layout = fit(self.spec, self.config, self._mesh(), temporaries_of=temporaries_of or asked)
        except TooSmall as small:
            changes = changes_that_fit(self.spec, self.config, target_devices(self.target), small)
            advice = f"Any one of these would do: {', '.join(changes)}" if changes else "No mesh would do"
            raise ValueError(f"{small.what}. {advice}") from small
        refuse_overfull(layout)
        return layout

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
        shape, devices = MeshShape.parse(self.config.mesh), target_devices(self.target)
        if not takes_all_hosts(shape, devices):
            raise ValueError(
                f"mesh is {str(shape)!r}, {shape.size} of the {len(devices)} devices of {self.target}, a slice of "
                f"several hosts, which all run every step; name a mesh of all {len(devices)}, or a slice of "
                f"{shape.size}"
            )
        return make_mesh(shape, devices)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Work:
    """What is to be compiled, the largest parts first.

    order: with the size of the pools in it (free memory may be another when a process asks). promised: bytes beside
    their arguments that `tried` of the parts may need, which the size of the pools counts on.
    """

    order: BundleOrder
    purpose: Purpose
    parts: list[Part]
    promised: int = 0
    tried: frozenset[int] = frozenset()


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
) -> BundleSummary:
    """Puts every executable of an engine into a bundle; on_done is called after each.

    Parts that are there are kept, so a bundle that was begun is gone on with, with its size of pools where the order
    leaves that open. Raises ValueError where the target cannot run the engine, or the compiler crashed.
    """
    order = dataclasses.replace(order, config=config_for(order.config, begun_bundle(Path(out))))
    least = 0
    while True:
        try:
            return _fill(_begun(order, least), os.fspath(out), num_processes, on_done)
        except _NeedsMore as more:  # the pools must be smaller, and every executable another
            least = more.num_bytes


def _fill(work: _Work, out: str, num_processes: int, on_done: Callable[[Progress], None]) -> BundleSummary:
    """Raises _NeedsMore before anything is in the bundle."""
    parts, target = work.parts, work.order.target
    untried, made, finished_effort = set(work.tried), dict[int, bytes](), 0
    writer = None if untried else BundleWriter(out, work.purpose)
    missing = [n for n, part in enumerate(parts) if writer is None or not writer.has(part.description)]
    kept = len(parts) - len(missing)
    pace = _Pace(all=sum(part.effort for part in parts), missing=sum(parts[number].effort for number in missing))
    on_done(pace.progress(kept, len(parts), 0))
    processes = _start(work.order, max(min(num_processes, len(missing)), 1))
    try:
        with _ended_at_once(processes):
            jobs = {processes.submit(_compile, number): number for number in missing}
            for done, job in enumerate(concurrent.futures.as_completed(jobs), kept + 1):
                number = jobs[job]
                made[number], temporaries = _made(parts[number], job, target)
                if number in untried and temporaries > work.promised:
                    raise _NeedsMore(temporaries)
                untried.discard(number)
                if not untried:
                    writer = writer or BundleWriter(out, work.purpose)
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
                child.terminate()
        raise
    finally:
        processes.shutdown(cancel_futures=True)


def _made(part: Part, job: concurrent.futures.Future[tuple[bytes, int]], target: str) -> tuple[bytes, int]:
    """The bytes of a part, and how many it needs beside its arguments. Raises ValueError if the compiler refuses it."""
    try:
        return job.result()
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the compiler for {target} refuses the {part.what}: {error}") from error


def _begun(order: BundleOrder, least: int = 0) -> _Work:
    """What an order comes to. least: bytes that a step was seen to need.

    The largest parts come first: they take longest, and one of them alone at the end would leave cores idle. So are
    those found soon that need more than shapes say.
    """
    if order.is_encoder:
        encoder = order.lay_out_encoder()
        purpose = purpose_of(order.target, order.config, encoder.mesh, encoder.spec)
        return _Work(order=order, purpose=purpose, parts=[*reversed(encoder_parts(encoder).values())])
    layout = order.lay_out(lambda probe: max(expected_temporaries(probe), least))
    chosen = dataclasses.replace(order.config, num_blocks=layout.ledger.num_blocks, kv_memory_bytes=None)
    steps, others = parts_of(layout)
    first = layout.ladder.largest
    buckets = [*first, *(bucket for bucket in reversed(steps) if bucket not in first)]
    promised = layout.ledger.temporaries_bytes
    return _Work(
        order=dataclasses.replace(order, config=chosen),
        purpose=purpose_of(order.target, chosen, layout.mesh, order.spec),
        parts=[*(steps[bucket] for bucket in buckets), *others.values(), *BlockCopies(layout, None).parts().values()],
        promised=promised,
        tried=frozenset(range(len(first))) if promised else frozenset(),
    )


_of_process: list[Part] = []  # of a process that compiles


def _begin(order: BundleOrder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, and it is the parent who speaks of it
    end_with_parent()
    _of_process.extend(_begun(order).parts)


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
