"""TierStore: the objects of a KV tier, as threads beside the engine's read, write and prune them.

    PATH/IDENTITY/STEM.BYTES.SECOND     an object: STEM is its last key and its pool, SECOND its time stamp

IDENTITY digests what the objects belong to, so models share a folder and read none of each other's. Listings say what
there is, so to look for a key asks no store. Nothing is locked: objects appear whole and never change, but one that is
used gets a new stamp, which is its name, once in an hour. The engine's thread leaves jobs in queues and takes what has
come; it waits for none, so a store that hangs costs hits and no more.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import queue
import re
import weakref
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from ferrum_jax.engine.prefixes.tier_pieces import Pieces, TierPiece
from ferrum_jax.io import system
from ferrum_jax.io.files.store import open_store

MAX_QUEUED_BYTES = 1 << 30  # of objects that wait for the writer, in host memory
COUNTED = ("kv_tier_hits", "kv_tier_hit_tokens", "kv_tier_read_bytes", "kv_tier_written_bytes", "kv_tier_slower")
COUNTED += ("kv_tier_late", "kv_tier_damaged", "kv_tier_dropped", "kv_tier_failed")
_READERS = 4
_LIST_S = 10.0  # between looks at what others have written
_STAMP_S = 3600
_NAME = re.compile(r"([0-9a-f]{32}\.(?:[0-9]+|states|prompts))\.([0-9]+)\.([0-9]+)")
_FOLDER = re.compile(r"[0-9a-f]{32}")
_log = logging.getLogger("ferrum_jax.engine")
_Jobs = queue.SimpleQueue[Callable[[], None] | None]


@dataclasses.dataclass(kw_only=True, eq=False)
class Read:
    """One object to read, and its arrays once it was found."""

    piece: TierPiece
    is_dropped: bool = False  # nobody waits for it any more
    arrays: Mapping[str, np.ndarray] | None = None
    ended_s: float = 0.0


class TierStore:
    """The objects of one engine's identity. counts, arrived, news: what its threads tell the engine's."""

    def __init__(self, path: str, pieces: Pieces, max_bytes: int) -> None:
        """max_bytes: of all objects below the path. Raises ValueError for a URL that cannot be opened."""
        self._store, self._path, self._max_bytes, self._pieces = open_store(path), path, max_bytes, pieces
        self._folder = hashlib.sha256(json.dumps(pieces.identity, sort_keys=True).encode()).hexdigest()[:32]
        self.counts: Counter[str] = Counter()
        self.arrived: queue.SimpleQueue[Read] = queue.SimpleQueue()
        self.news = system.Event()
        self.is_listed, self._next_listing_s = False, 0.0
        self._known: dict[str, str] = {}  # names by stem, "" of what is on its way to the store
        self._said: set[str] = set()
        self._unpruned_bytes, self._queued_bytes = max_bytes, 0
        self._lock = system.Lock()
        self._reads, self._writes = _Jobs(), _Jobs()
        self._threads = [*[self._reads] * _READERS, self._writes]  # the jobs of each
        self._leaves = system.Event()
        for jobs in self._threads:
            thread = system.Thread(target=self._work, args=(jobs,), name="kv tier", daemon=True)
            thread.start()
        weakref.finalize(self, _leave, self._leaves, self._writes, thread)
        self.look()

    def close(self) -> None:
        """Its threads end behind what is queued."""
        for jobs in self._threads:
            jobs.put(None)

    def count(self, **more: int) -> None:
        with self._lock:
            self.counts.update(more)

    # -- on the engine's thread ------------------------------------------------------------------------

    def look(self) -> None:
        """Has the folder listed anew if the last listing is old."""
        if system.monotonic() >= self._next_listing_s:
            self._next_listing_s = math.inf
            self._reads.put(self._list)

    def has(self, stem: str) -> bool:
        return bool(self._known.get(stem))

    def orders(self, stem: str) -> bool:
        """Whether an object is neither there nor on its way; it is on its way then, until `write` or `drop`."""
        return stem not in self._known and not self._known.setdefault(stem, "")

    def drop(self, stem: str) -> None:
        """It is not there, nor on its way."""
        self._known.pop(stem, None)

    def read(self, read: Read) -> None:
        """Has an object read; it comes in `arrived`, with arrays or without."""
        self._reads.put(lambda: self._read(read))

    def has_room(self, piece: TierPiece) -> bool:
        """Whether the writer's queue takes a piece."""
        has_room = not self._queued_bytes or self._queued_bytes + self._pieces.num_bytes(piece) <= MAX_QUEUED_BYTES
        self.count(dropped=not has_room)
        return has_room

    def write(self, piece: TierPiece, arrays: Callable[[], list[np.ndarray]]) -> None:
        """Has a piece written. arrays: asked on the writer's thread."""
        with self._lock:
            self._queued_bytes += self._pieces.num_bytes(piece)
        self._writes.put(lambda: self._write(piece, arrays))

    # -- on the others ---------------------------------------------------------------------------------

    def _work(self, jobs: _Jobs) -> None:
        while (job := jobs.get()) is not None and not self._leaves.is_set():
            try:
                job()
            except Exception as error:
                self.count(failed=1)
                what = f"reading or writing {self._path} failed, which costs hits and no more"
                self._say("failed", f"{what}: {type(error).__name__}: {error}")

    def _list(self) -> None:
        before = {stem for stem, name in self._known.copy().items() if name}
        try:
            found = {match[1]: match[0] for match in map(_NAME.fullmatch, self._store.names(self._folder)) if match}
            self._known.update(found)
            for stem in before - found.keys():
                self.drop(stem)
            others = [name for name in self._store.names("") if _FOLDER.fullmatch(name) and name != self._folder]
            if others:
                text = "another model, KV dtype, block size or mode), which this one does not read"
                self._say("others", f"{self._path} also holds blocks of {len(others)} other engines ({text}")
        finally:
            self.is_listed, self._next_listing_s = True, system.monotonic() + _LIST_S
            self.news.set()

    def _read(self, read: Read) -> None:
        stem = read.piece.stem
        name = self._known.get(stem)
        try:
            content = None if read.is_dropped or not name else self._store.read(f"{self._folder}/{name}")
            if name and content is not None:
                read.arrays = self._pieces.decode(read.piece, content)
                self.count(read_bytes=len(content))
                if system.now() - int(name.rpartition(".")[2]) > _STAMP_S:
                    self._writes.put(lambda: self._stamp(stem, name))
            elif not read.is_dropped:
                self.drop(stem)  # another engine has removed it
        except ValueError as error:
            self.count(damaged=1)
            self._say(str(name), f"{self._path}/{self._folder}/{name} counts as a miss and is removed: {error}")
            self._writes.put(lambda: self._remove(stem, str(name)))
        finally:
            read.ended_s = system.monotonic()
            self.arrived.put(read)
            self.news.set()

    def _write(self, piece: TierPiece, arrays: Callable[[], list[np.ndarray]]) -> None:
        try:
            content = self._pieces.encode(piece, arrays())
            name = f"{piece.stem}.{len(content)}.{int(system.now())}"
            self._store.replace(f"{self._folder}/{name}", content, lasts=False)
            self._known[piece.stem] = name
        finally:
            if not self.has(piece.stem):
                self.drop(piece.stem)
            with self._lock:
                self._queued_bytes -= self._pieces.num_bytes(piece)
        self.count(written_bytes=len(content))
        self._unpruned_bytes += len(content)
        if self._unpruned_bytes > self._max_bytes // 16:
            self._prune()

    def _remove(self, stem: str, name: str) -> None:
        """An object that is not what it should be leaves room for one that is."""
        self.drop(stem)
        self._store.remove(f"{self._folder}/{name}")

    def _stamp(self, stem: str, name: str) -> None:
        """Says that an object was used now."""
        stamped = f"{name.rpartition('.')[0]}.{int(system.now())}"
        if self._known.get(stem) == name:
            with contextlib.suppress(FileNotFoundError):  # another engine has stamped it
                self._store.move(f"{self._folder}/{name}", f"{self._folder}/{stamped}", mark=name)
            self._known[stem] = stamped

    def _prune(self) -> None:
        """Removes what was used least recently, of all engines, until a sixteenth is free."""
        self._unpruned_bytes = 0
        found = []
        for folder in filter(_FOLDER.fullmatch, self._store.names("")):
            matches = filter(None, map(_NAME.fullmatch, self._store.names(folder)))
            found += [(int(match[3]), int(match[2]), f"{folder}/{match[0]}") for match in matches]
        left = sum(num_bytes for _, num_bytes, _ in found)
        enough = self._max_bytes - self._max_bytes // 16 if left > self._max_bytes else left
        for _, num_bytes, name in sorted(found):
            if left <= enough:
                return
            self._store.remove(name)
            left -= num_bytes

    def _say(self, about: str, text: str) -> None:
        """Logs what a user should know, once."""
        if about not in self._said:
            self._said.add(about)
            _log.warning("KV tier: %s", text)


def _leave(leaves: system.Event, writes: _Jobs, writer: system.Thread) -> None:
    """Lets the writer end before the process does: to be cut off while it copies from a device ends that badly."""
    leaves.set()
    writes.put(None)
    if writer is not system.current_thread():
        writer.join(2.0)  # seconds; a store may hang
