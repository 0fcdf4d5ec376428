"""Behind: executables that a start left out, compiled while the engine works, each once it pays.

A thread looks which missing executable would have saved the steps so far most (`compile/worth.py`), and compiles it
once that is more than its compile takes: so no run loses more than twice what the best choice would have cost, however
long it goes on. No start makes or loads launches; those that the store has cost nothing. Tracing holds Python's lock
for some tenths of a second, because layers that are alike are traced once; XLA compiles without it.
"""

import functools
import threading
import time
import warnings
import weakref

from jax.sharding import Mesh

from ferrum_jax.config import EngineConfig
from ferrum_jax.runtime.buckets import Bucket, LaunchBucket
from ferrum_jax.runtime.compile.executable_store import ExecutableStore
from ferrum_jax.runtime.compile.worth import Came, Saving
from ferrum_jax.runtime.distributed.processes import current
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.placing.fit import temporaries_in
from ferrum_jax.runtime.programs import HORIZON_S, LAUNCH_S, Executables, StepPart, programs_of

_LOOK_S = 0.2  # how often the thread looks what is wanted, and whether it is
_COMPILE_S = 3.0  # where the store has not measured any


def starts_first(config: EngineConfig, mesh: Mesh) -> bool:
    """Whether an engine with a store is ready before all of its executables are: on the CPU, in one process.

    An accelerator's pools are sized by what its largest executables need; several processes would have to agree.
    """
    return config.ready == "first" and mesh.devices.flat[0].platform == "cpu" and current() is None


def compile_behind(layout: Layout, executables: Executables, store: ExecutableStore) -> threading.Thread | None:
    """The thread that adds what pays to the executables; None where nothing is missing. It ends with their last user,
    and with the program, after what it is compiling."""
    if not executables.missing(layout.ladder) and not layout.ladder.launches:
        return None
    thread = threading.Thread(target=_Behind(layout, executables, store).run, name="executables behind")
    thread.start()
    return thread


class _Behind:
    """The thread's work: compiling missing executables."""

    def __init__(self, layout: Layout, executables: Executables, store: ExecutableStore) -> None:
        self._ladder, self._store, self._executables = layout.ladder, store, weakref.ref(executables)
        self._launches = set(layout.ladder.launches)
        self._is_kept = functools.cache(lambda part: store.has(self._programs[part].description))
        self._programs, self._temporaries_bytes = programs_of(layout, self._launches), layout.ledger.temporaries_bytes

    def run(self) -> None:
        """Until nothing is missing, nobody is left who wants it, or a compile fails, which is said once."""
        while (executables := self._executables()) is not None and threading.main_thread().is_alive():
            missing = executables.missing(self._ladder) | self._launches
            if not missing:
                return
            part = self._what_pays(executables, missing)
            try:
                if part is not None:
                    self._add(part, executables)
            except Exception as error:  # compilers raise whatever they like, and the engine goes on
                text = f"compiling {part} in the background failed ({type(error).__name__}: {error})"[:1000]
                text = f"{text}; the engine continues with the executables that it has"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                return
            del executables
            if part is None:
                time.sleep(_LOOK_S)

    def _what_pays(self, executables: Executables, missing: frozenset[StepPart]) -> StepPart | None:
        """The part that would have saved most, if it saves more than its compile costs."""
        part, saved_s = executables.worth.most_wanted(missing)
        return part if part is not None and saved_s >= self._cost_s(part) else None

    def _cost_s(self, part: StepPart) -> float:
        if part in self._launches and self._is_kept(part):
            return 0.0
        measured = self._store.compile_seconds(self._programs[part].description)
        return _COMPILE_S if measured is None else measured

    def _add(self, part: StepPart, executables: Executables) -> None:
        began_s = time.monotonic()
        made = {each: self._programs[each].get(self._store) for each in self._left_of(part, executables)}
        loaded = [deferred.result() for deferred in made.values()]  # here, so that no step waits for it
        self._launches.discard(part)
        room = self._temporaries_bytes  # 0 where pools were not sized by what executables need
        if room and max(map(temporaries_in, loaded)) > room:
            return
        came = Came(began_s=began_s, seconds=time.monotonic() - began_s, saves=self._saves(part, executables))
        for each, deferred in made.items():
            executables.put(each, deferred)
        executables.worth.add(part, came)

    def _left_of(self, part: StepPart, executables: Executables) -> list[StepPart]:
        """The executables that a missing part still needs: its own, and its draft's."""
        drafts = self._ladder.drafts_of((part,)) if isinstance(part, Bucket) else ()
        return [each for each in (*drafts, part) if each not in executables.drafts and each not in executables.forwards]

    def _saves(self, part: StepPart, executables: Executables) -> Saving:
        """The part's saving in each step that runs it, beside the steps without it."""
        if isinstance(part, LaunchBucket):
            return Saving(seconds=LAUNCH_S if part.horizon == 1 else HORIZON_S * part.horizon)
        if not isinstance(part, Bucket):
            return Saving()  # it is little beside a forward's
        there = [b for b in executables.forwards if b.kind == part.kind and not b.decode_only]
        there += [b for b in executables.forwards if part.decode_only and b.decode_only and b.kind == part.kind]
        larger = [b.num_tokens for b in there if b.num_tokens > part.num_tokens]
        if larger:
            return Saving(tokens=min(larger) - part.num_tokens)
        return Saving(steps=1 - max(b.num_tokens for b in there) / part.num_tokens)
