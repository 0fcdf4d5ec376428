"""TierStore: the objects of a KV tier, as threads beside the engine's read, write and prune them.

    PATH/IDENTITY/STEM.BYTES.SECOND    an object (checkpoints/kv_objects.py): STEM is its last key and its pool, SECOND
                                       when it was written
    PATH/used/HOUR.TOKEN               objects that one engine used in an hour, each with the second

IDENTITY digests what the objects belong to, so models share a folder and read none of each other's. Listings say what
there is: to look for a key asks no store. Nothing is locked; objects never change and appear whole. The engine's thread
leaves jobs in queues and takes what has arrived: it waits for none, so a store that hangs costs hits and no more.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import queue
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from checkpoints.kv_objects import decode
from ferrum_jax.io import system
from ferrum_jax.io.files.store import open_store

MAX_QUEUED_BYTES = 1 << 30  # of objects that wait for the writer, in host memory
_READERS = 4
_LIST_S = 10.0  # between looks at what others have written
_STAMP_S = 600.0  # between writes of what was used
_USED = "used"
_NAME = re.compile(r"([0-9a-f]{32}\.(?:[0-9]+|states|prompts))\.([0-9]+)\.([0-9]+)")
_FOLDER = re.compile(r"[0-9a-f]{32}")
_MAX_SAID = 1000
_log = logging.getLogger("ferrum_jax.engine")


@dataclasses.dataclass(kw_only=True)
class TierCounts:
    """Counts of one engine; fields are named as in `LLM.stats`, behind `kv_tier_`."""

    hits: int = 0
    hit_tokens: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    slower: int = 0
    late: int = 0
    damaged: int = 0
    dropped: int = 0
    failed: int = 0


@dataclasses.dataclass(kw_only=True, eq=False)
class Read:
    """One object to read, and its arrays once it was found. header, dtypes: as `decode` takes them."""

    stem: str
    header: Mapping[str, Any]
    dtypes: Mapping[str, Any]
    is_dropped: bool = False  # nobody waits for it any more
    arrays: Mapping[str, np.ndarray] | None = None
    num_bytes: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0


class TierStore:
    """The objects of one identity, for one engine. counts, arrived, news: what its threads tell the engine's."""

    def __init__(self, path: str, identity: Mapping[str, Any], max_bytes: int) -> None:
        """max_bytes: of all objects below the path. Raises ValueError for a URL that cannot be opened."""
        self._store, self._path, self._max_bytes = open_store(path), path, max_bytes
        self._folder = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
        self._token = system.token_hex(8)
        self.counts = TierCounts()
        self.arrived: queue.SimpleQueue[Read] = queue.SimpleQueue()
        self.news = system.Event()
        self.is_listed, self._is_listing, self._listed_s = False, False, 0.0
        self._known: dict[str, str] = {}  # names by stem
        self._pending: set[str] = set()  # stems on their way to the store
        self._bad: set[str] = set()  # names of what was read and is not what it should be
        self._said: set[str] = set()
        self._uses: dict[str, int] = {}  # of this hour: second by name
        self._stamped_s, self._unpruned_bytes, self._queued_bytes = system.monotonic(), max_bytes, 0
        self._lock = system.Lock()
        self._reads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        for jobs in (*[self._reads] * _READERS, self._writes):
            system.Thread(target=_work, args=(jobs,), name="kv tier", daemon=True).start()
        self.look()

    def close(self) -> None:
        """Its threads end behind what they do now and what is queued."""
        for jobs in (*[self._reads] * _READERS, self._writes):
            jobs.put(None)

    def count(self, **more: int) -> None:
        """Raises these fields of the counts."""
        with self._lock:
            for name, value in more.items():
                setattr(self.counts, name, getattr(self.counts, name) + value)

    # -- on the engine's thread ------------------------------------------------------------------------

    def look(self) -> None:
        """Has the folder listed anew if the last listing is old."""
        if not self._is_listing and (not self.is_listed or system.monotonic() - self._listed_s > _LIST_S):
            self._is_listing = True
            self._reads.put(self._list)

    def has(self, stem: str) -> bool:
        return stem in self._known

    def lacks(self, stem: str) -> bool:
        """Whether an object is neither there nor on its way."""
        return stem not in self._known and stem not in self._pending

    def order(self, stem: str) -> None:
        """An object is on its way, until `write` or `drop`."""
        self._pending.add(stem)

    def drop(self, stem: str) -> None:
        """It is not written after all."""
        self._pending.discard(stem)

    def read(self, read: Read) -> None:
        """Has an object read; it comes in `arrived`, with arrays or without."""
        self._reads.put(lambda: self._read(read))

    def has_room(self, num_bytes: int) -> bool:
        """Whether the writer's queue takes an object of this size."""
        return not self._queued_bytes or self._queued_bytes + num_bytes <= MAX_QUEUED_BYTES

    def write(self, stem: str, num_bytes: int, content: Callable[[], bytes]) -> None:
        """Has an object written. content: its bytes, asked on the writer's thread."""
        with self._lock:
            self._queued_bytes += num_bytes
        self._writes.put(lambda: self._write(stem, num_bytes, content))

    # -- on the others ---------------------------------------------------------------------------------

    def _list(self) -> None:
        before = set(self._known)
        try:
            names = set(self._store.names(self._folder)) - self._bad
            found = {match[1]: name for name in names if (match := _NAME.fullmatch(name))}
            others = [name for name in self._store.names("") if _FOLDER.fullmatch(name) and name != self._folder]
            self._known.update(found)
            for stem in before - found.keys():
                self._known.pop(stem, None)
            if others:
                self._say(
                    "others",
                    f"{self._path} also holds blocks of {len(others)} other engines (another model, KV dtype, block "
                    "size or mode), which this one does not read",
                )
        except Exception as error:
            self._fail("listing", error)
        finally:
            self.is_listed, self._is_listing, self._listed_s = True, False, system.monotonic()
            self.news.set()

    def _read(self, read: Read) -> None:
        read.began_s, name = system.monotonic(), self._known.get(read.stem)
        try:
            content = None if read.is_dropped or name is None else self._store.read(f"{self._folder}/{name}")
            if content is not None:
                read.arrays, read.num_bytes = decode(content, read.header, read.dtypes), len(content)
                self.count(read_bytes=len(content))
                self._use(f"{self._folder}/{name}")
            elif not read.is_dropped:
                self._known.pop(read.stem, None)  # another engine has removed it
        except ValueError as error:
            self.count(damaged=1)
            self._bad.add(str(name))
            self._known.pop(read.stem, None)
            self._say(str(name), f"{self._path}/{self._folder}/{name} counts as a miss: {error}")
        except Exception as error:
            self._fail("reading", error)
        read.ended_s = system.monotonic()
        self.arrived.put(read)
        self.news.set()

    def _write(self, stem: str, num_bytes: int, content: Callable[[], bytes]) -> None:
        try:
            found = content()
            name = f"{stem}.{len(found)}.{int(system.now())}"
            self._store.replace(f"{self._folder}/{name}", found, lasts=False)
            self._known[stem] = name
            self.count(written_bytes=len(found))
            self._unpruned_bytes += len(found)
            if self._unpruned_bytes > self._max_bytes // 16:
                self._prune()
        except Exception as error:
            self._fail("writing", error)
        finally:
            self._pending.discard(stem)
            with self._lock:
                self._queued_bytes -= num_bytes

    def _use(self, name: str) -> None:
        self._uses[name] = int(system.now())
        if system.monotonic() - self._stamped_s > _STAMP_S:
            self._stamped_s = system.monotonic()
            self._writes.put(self._stamp)

    def _stamp(self) -> None:
        """Writes what was used in this hour, for those who prune."""
        hour = int(system.now()) // 3600
        self._uses = {name: second for name, second in self._uses.copy().items() if second // 3600 == hour}
        lines = "".join(f"{name} {second}\n" for name, second in self._uses.items())
        try:
            self._store.replace(f"{_USED}/{hour}.{self._token}", lines.encode(), lasts=False)
        except Exception as error:
            self._fail("writing", error)

    def _prune(self) -> None:
        """Removes what was used least recently, of all engines, until a sixteenth is free."""
        self._unpruned_bytes = 0
        sizes, last = {}, {}
        for folder in filter(_FOLDER.fullmatch, self._store.names("")):
            for name in self._store.names(folder):
                if match := _NAME.fullmatch(name):
                    sizes[f"{folder}/{name}"], last[f"{folder}/{name}"] = int(match[2]), int(match[3])
        left, gone = sum(sizes.values()), set()
        if left <= self._max_bytes:
            return
        stamps = [stamp for stamp in self._store.names(_USED) if stamp.partition(".")[0].isdecimal()]
        lines = [line for stamp in stamps for line in (self._store.read(f"{_USED}/{stamp}") or b"").splitlines()]
        stamped = [line.decode(errors="replace").partition(" ")[::2] for line in lines]
        for name, second in [*stamped, *((name, str(second)) for name, second in self._uses.copy().items())]:
            if name in last and second.isdecimal():
                last[name] = max(last[name], int(second))
        for name in sorted(sizes, key=last.__getitem__):
            if left <= self._max_bytes - self._max_bytes // 16:
                break
            self._store.remove(name)
            left -= sizes[name]
            gone.add(name)
        self._known = {stem: name for stem, name in self._known.copy().items() if f"{self._folder}/{name}" not in gone}
        oldest = min((last[name] for name in sizes.keys() - gone), default=0) // 3600
        for stamp in stamps:
            if int(stamp.partition(".")[0]) < oldest:
                self._store.remove(f"{_USED}/{stamp}")

    def _fail(self, what: str, error: Exception) -> None:
        self.count(failed=1)
        self._say(what, f"{what} {self._path} failed, which costs hits and no more: {type(error).__name__}: {error}")

    def _say(self, about: str, text: str) -> None:
        """Logs what a user should know, once."""
        if about not in self._said and len(self._said) < _MAX_SAID:
            self._said.add(about)
            _log.warning("KV tier: %s", text)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
