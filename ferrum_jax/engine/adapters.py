"""Adapters of an engine: which are loaded by name, and which slot each has on the device.

`LoadedAdapters` is what users load and unload, and outlives engines. `HeldSlots` is an engine's book: an `IdPool` whose
ids are slots and whose keys are digests. A slot is live while a submission that names its adapter is unfinished, cached
as long as nobody else needs it, and given away least recently used first. A request whose adapter has no slot yet
waits, in order of arrival; requests without an adapter pass.
"""

import concurrent.futures
import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Any

import jax

from checkpoints import Adapter
from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.core.outputs import ADAPTER_FAILED
from ferrum_jax.runtime.lora.adapter_slots import AdapterSlots

Staged = tuple[jax.Array, ...]
_STAGED_AHEAD = 2  # adapters that lie on the devices beside their slots, waiting for one


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoadedAdapter:
    """An adapter by its name; another one of that name is another value."""

    name: str
    content: Adapter

    @property
    def digest(self) -> str:
        return self.content.digest

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.digest)


class LoadedAdapters:
    """The adapters loaded by name; any thread may ask."""

    def __init__(self, slots: AdapterSlots | None, read: Callable[[str], Adapter]) -> None:
        """slots: of the engine, None for none. read: the adapter in a folder, which fits the model."""
        self.slots = slots
        self._read = read
        self._by_name: dict[str, LoadedAdapter] = {}
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        return sorted(self._by_name)

    @property
    def identity(self) -> str:
        """Names and contents of all, as text; "" for none."""
        return " ".join(f"{name}={loaded.digest}" for name, loaded in sorted(self._by_name.items()))

    def load(self, name: str, path: str | os.PathLike[str]) -> LoadedAdapter:
        """Reads an adapter and gives it a name; requests that name it from now on have this one.

        Raises ValueError, with nothing changed, for a folder that holds none, or one that does not fit.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"an adapter's name is {name!r}; it must be a text that is not empty")
        if self.slots is None:
            raise ValueError("max_adapters is 0, so there is no slot for an adapter; set EngineConfig(max_adapters=8)")
        content = self._read(os.fspath(path))
        problems = self.slots.problems(content)
        if problems:
            raise ValueError(f"adapter {os.fspath(path)} cannot be served: {'; '.join(problems)}")
        loaded = self._by_name[name] = LoadedAdapter(name=name, content=content)
        return loaded

    def unload(self, name: str) -> None:
        """Forgets a name; requests that have named it run to their end. Raises ValueError for one that is not there."""
        if self._by_name.pop(name, None) is None:
            raise ValueError(self._unknown(name))

    def get(self, name: str) -> LoadedAdapter:
        """Raises ValueError for a name that is not loaded."""
        loaded = self._by_name.get(name)
        if loaded is None:
            raise ValueError(self._unknown(name))
        return loaded

    def _unknown(self, name: str) -> str:
        there = f"loaded are {', '.join(self.names)}" if self._by_name else "none is loaded"
        return f"no adapter is called {name!r}; {there}: LLM.load_adapter(name, path)"

    def stage(self, adapter: LoadedAdapter) -> concurrent.futures.Future[Staged]:
        """Its arrays on the devices, made in a thread beside the steps."""
        assert self.slots is not None, "an adapter is loaded only where there are slots"
        slots = self.slots
        with self._lock:
            if self._threads is None:
                self._threads = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="adapters")
        return self._threads.submit(lambda: tuple(jax.tree.leaves(slots.stage(adapter.content))))


class HeldSlots:
    """The slots of one engine."""

    def __init__(self, loaded: LoadedAdapters, max_adapters: int, write: Callable[[int, Staged], None]) -> None:
        """write: puts an adapter's arrays into a slot, between steps."""
        self.loaded = loaded
        self._pool = IdPool(max_adapters + 1)
        self._write = write
        self._staged: dict[bytes, concurrent.futures.Future[Any]] = {}
        self._num_writes = 0

    def prepare(self, adapter: LoadedAdapter) -> bool:
        """Whether `hold` would give a slot at once. Begins to bring the adapter to the devices where it has none."""
        pool = self._pool
        if pool.find(adapter.key):
            return True
        if adapter.key not in self._staged and len(self._staged) < _STAGED_AHEAD:
            self._staged[adapter.key] = self.loaded.stage(adapter)
        staged = self._staged.get(adapter.key)
        return pool.num_free > 0 and staged is not None and staged.done()

    def wait(self, adapter: LoadedAdapter) -> None:
        """Waits until the adapter is on the devices."""
        if not self.prepare(adapter) and (staged := self._staged.get(adapter.key)) is not None:
            concurrent.futures.wait([staged])

    def hold(self, adapter: LoadedAdapter) -> int:
        """The slot of the adapter, with one holder more; written now if it had none. `prepare` must have said yes.

        Raises ValueError where it could not be brought to the devices; who asks next tries again.
        """
        pool = self._pool
        slot = pool.find(adapter.key)
        if slot:
            pool.retain(slot)
            self._staged.pop(adapter.key, None)
            return slot
        try:
            staged = self._staged.pop(adapter.key).result()
        except Exception as error:
            raise ValueError(f"{ADAPTER_FAILED}, {adapter.name!r}: {type(error).__name__}: {error}") from error
        (slot,) = pool.take(1)
        self._write(slot, staged)
        self._num_writes += 1
        pool.publish(slot, adapter.key)
        return slot

    def release(self, slot: int) -> None:
        self._pool.release((slot,))

    def keep_staged(self, waiting: set[bytes]) -> None:
        """Drops what was staged for adapters that nobody waits for any more."""
        for key in self._staged.keys() - waiting:
            del self._staged[key]

    def counts(self) -> dict[str, int]:
        """Counts so far, with the gauges of this moment."""
        return {
            "adapters_loaded": len(self.loaded.names),
            "adapters_live": self._pool.num_live,
            "adapter_writes": self._num_writes,
            "adapter_evictions": self._pool.evictions,
        }

    def check_invariants(self, holders: dict[int, int]) -> None:
        """Prove the book. holders: submissions that hold each slot."""
        self._pool.check_invariants(holders)
