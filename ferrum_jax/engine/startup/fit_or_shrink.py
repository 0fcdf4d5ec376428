"""Starting: an engine that fits the memory which is really there.

    fit (the compiler's numbers) ─► load ─► live memory, pools, the largest steps without a row ─► ready
      ▲                                         │ too little: once more, with a smaller pool
      └─────────────────────────────────────────┘

A pool whose size the user named is never made smaller.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from checkpoints.fingerprints import Fingerprint
from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.engine import Engine
from ferrum_jax.engine.startup.behind import compile_behind, starts_first
from ferrum_jax.engine.startup.build_engine import build_engine
from ferrum_jax.engine.startup.load import Loaded, load
from ferrum_jax.engine.startup.model_source import ModelSource
from ferrum_jax.inputs.sizes.engine_sizes import Reach
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.runtime.compile.executable_store import ExecutableCache, ExecutableStore
from ferrum_jax.runtime.distributed.processes import current, own_device, smallest
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.placing.fit import fit, missing_bytes, temporaries_bytes
from ferrum_jax.runtime.settled import Room
from ferrum_jax.text.structured.reading.message_stream import MessageForms
from ferrum_jax.text.tokenizer import Tokenizer

_SMALLER = 0.75  # of the pool that did not fit
_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """An engine's start; see `LLM`. executable_cache: where executables come from.

    store: of executables, where no bundle stands before it: with it an engine may be ready before all of them are.

    check: called with the layout before weights are read, and again with their fingerprint; may raise ValueError.
    """

    model: ModelSource
    config: EngineConfig
    mesh: Mesh
    executable_cache: ExecutableCache | None
    tokenizer: Tokenizer | None
    forms: MessageForms
    on_progress: Callable[[str, int, int], None]
    store: ExecutableStore | None = None
    check: Callable[[Layout, Fingerprint | None], None] = lambda layout, fingerprint: None

    def run(self, reach: Reach | None) -> tuple[Loaded, Engine]:
        """Weights and executables, and the first engine over them, whose largest steps were tried on an accelerator.

        Warns with both numbers where the pool had to be made smaller. Raises ValueError saying what to set where that
        was not enough, where the config names the pool's size, or where other processes have chosen theirs.
        """
        loaded, engine = self._load(reach)
        if self.store is not None and self.config.ready == "first" and current() is None:
            compile_behind(loaded.layout, loaded.executables, self.store)
        if loaded.layout.ledger.num_host_blocks:
            loaded.copies.warm_up(tier=True)
        if self.config.check_writes:
            loaded.copies.warm_up(tier=False)
        if current() is not None:
            loaded.executables.load()  # one process that loads in the middle of a step would hold up all
        smallest(0)  # no process steps before all are ready
        return loaded, engine

    @property
    def _first(self) -> ExecutableStore | None:
        """The store of an engine that is ready before all of its executables are; None makes all."""
        return self.store if starts_first(self.config, self.mesh) else None

    def _load(self, reach: Reach | None) -> tuple[Loaded, Engine]:
        layout = self._fit(reach)
        self.check(layout, None)
        try:
            return self._attempt(self.model, layout)
        except MemoryShort as short:
            room, model = self._smaller(layout, short), short.keeps(self.model)
            smaller, problem = self._fit(reach, room), str(short)
        warnings.warn(
            f"{_pool(layout)} does not fit ({problem}); going on with {_pool(smaller)}", RuntimeWarning, stacklevel=5
        )
        try:
            return self._attempt(model, smaller)
        except MemoryShort as short:
            raise ValueError(
                f"{_pool(layout)} does not fit, nor does {_pool(smaller)} ({short}); set kv_memory_bytes to less than "
                f"{smaller.ledger.kv_bytes}, or lower max_num_batched_tokens or max_num_seqs"
            ) from short

    def _fit(self, reach: Reach | None, room: Room | None = None) -> Layout:
        assert isinstance(self.model.spec, ModelSpec), "only models that generate have pools"
        temporaries_of = functools.partial(temporaries_bytes, executable_cache=self.executable_cache)
        return fit(self.model.spec, self.config, self.mesh, reach, room, temporaries_of=temporaries_of)

    def _attempt(self, model: ModelSource, layout: Layout) -> tuple[Loaded, Engine]:
        """Raises MemoryShort."""
        weights = engine = None
        try:
            check = functools.partial(self.check, layout)
            loaded = load(model, layout, self.executable_cache, self.on_progress, check, self._first)
            weights = loaded.weights
            missing = -smallest(-missing_bytes(layout, own_device(self.mesh)))
            if missing > 0:
                raise MemoryShort(f"{missing / _GIB:.2f} GiB too little are free", missing, loaded.weights)
            engine = build_engine(loaded, self.config, self.tokenizer, forms=self.forms)
            if layout.options.target.platform != "cpu":
                engine.runner.rehearse(len(layout.options.spec.kv_groups))
            return loaded, engine
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("RESOURCE_EXHAUSTED"):
                raise
            if engine is not None:
                engine.close()
            raise MemoryShort(str(error).partition("\n")[0], 0, weights) from error

    def _smaller(self, layout: Layout, short: MemoryShort) -> Room:
        """Room for a smaller pool. Raises ValueError where it may not be chosen here."""
        named = [name for name in ("num_blocks", "kv_memory_bytes") if getattr(self.config, name) is not None]
        if named:
            raise ValueError(
                f"{_pool(layout)} does not fit ({short}); lower {named[0]}, or max_num_batched_tokens or max_num_seqs"
            ) from short
        kv_bytes = layout.ledger.kv_bytes
        left = min(int(kv_bytes * _SMALLER), kv_bytes - short.missing_bytes)
        if jax.process_count() > 1 or left <= 0:
            raise ValueError(
                f"{_pool(layout)} does not fit ({short}); set kv_memory_bytes to at most {max(left, 0)}, in every "
                "process, or lower max_num_batched_tokens or max_num_seqs"
            ) from short
        return Room(max_num_seqs=layout.max_num_seqs, kv_memory_bytes=left, why=layout.settled.room.why)


class MemoryShort(Exception):
    """Pools or the largest steps do not fit. missing_bytes: by how much, 0 where that is not known.

    weights: those that are on the devices, None if they are not.
    """

    def __init__(self, why: str, missing_bytes: int, weights: tuple[jax.Array, ...] | None) -> None:
        super().__init__(why)
        self.missing_bytes, self._weights = missing_bytes, weights

    def keeps(self, model: ModelSource) -> ModelSource:
        """The model, with the weights that are on the devices already."""
        weights = self._weights
        if weights is None:
            return model

        def read(targets: Any, expansions: Any) -> dict[str, jax.Array]:
            return dict(zip(targets, weights, strict=True))

        return dataclasses.replace(model, read=read)


def _pool(layout: Layout) -> str:
    ledger = layout.ledger
    return f"a KV pool of {ledger.num_blocks:,} blocks ({ledger.kv_bytes / _GIB:.2f} GiB)"
