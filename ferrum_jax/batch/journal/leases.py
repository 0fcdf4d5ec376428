"""Leases: which worker does which part of a job. Many workers share a folder, and no process coordinates them.

A lease is a file `leases/LAYOUT/PART.EPOCH` that names its worker. Creating is exclusive, so one worker has it; the
part is taken over by creating the next epoch, once its worker is dead. Its own worker creates the next epoch too, to
give the part back (the file is then empty) or to keep only what lies before a cut, which stands behind the worker's
name. A worker is dead when it says so at its end, when its process is gone (seen on the same machine), or when its
heartbeat has stood still for `expiry_s` of the observer's own time. Clocks of machines are never compared and no time
of day is read, so a clock may jump. A worker that is taken for dead gets a tombstone. If it still lives, it finds it at
its next heartbeat and must stop.
Workers with other layouts, for their input is another, never work at one time: a heartbeat has its worker's layout, and
the newest file of `layouts` the one that counts.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from ferrum_jax.batch.journal.journal_file import object_in
from ferrum_jax.io import system
from ferrum_jax.io.files.store import Store

_MAX_BYTES = 100  # of a lease


class LeaseLost(OSError):
    """Another worker took this one for dead."""


class Lease(NamedTuple):
    """A lease's contents. worker: "" for a part that was given back. cut: the place before which rows were kept."""

    worker: str
    cut: int | None = None


class Leases:
    """The leases of one worker. layout: names how the job's rows are laid out; another layout has other leases."""

    def __init__(
        self,
        store: Store,
        worker: str,
        layout: str,
        *,
        expiry_s: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._store, self.worker, self._layout, self._folder = store, worker, layout, f"leases/{layout}"
        self._expiry_s, self._clock = expiry_s, clock or system.monotonic
        self._num_beats = 0
        self._seen: dict[str, tuple[bytes, float]] = {}  # other workers' last heartbeat, and when it was first seen
        self._dead: set[str] = set()
        self._known: dict[str, Lease] = {}  # by name; a lease never changes
        self.beat()

    def beat(self) -> None:
        """Says that this worker lives. Raises LeaseLost if another took it for dead, OSError if the journal is gone."""
        if self._store.size(f"workers/{self.worker}.dead") is not None:
            raise LeaseLost(f"this worker was silent for {self._expiry_s:.0f} s and another took over its rows")
        if self._num_beats and self._store.size(f"workers/{self.worker}.beat") is None:
            raise OSError(
                "the journal was deleted or moved while the job ran; put it back and start again, or begin anew"
            )
        self._num_beats += 1
        content = json.dumps({**_process(), "layout": self._layout, "beats": self._num_beats}).encode()
        self._store.replace(f"workers/{self.worker}.beat", content)

    def claim_layout(self, poll_s: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Has the layout of this worker count. Raises ValueError where one with another layout is at work.

        It may have been killed on another machine, so its heartbeat is waited for, up to `expiry_s`, unless is_over
        says that this worker is to end; False then.
        """
        while True:
            newest = max((int(name) for name in self._store.names("layouts") if name.isdecimal()), default=0)
            found = self._store.read(f"layouts/{newest}") if newest else None
            counts = (found or b"").decode(errors="replace")
            if counts == self._layout:
                return True
            if not self._require_nobody_with(counts, poll_s, is_over):
                return False
            if self._store.create(f"layouts/{newest + 1}", self._layout.encode()):
                return self._require_nobody_with(counts, poll_s, is_over)  # one that came meanwhile saw its own

    def _require_nobody_with(self, layout: str, poll_s: float, is_over: Callable[[], bool]) -> bool:
        seen: dict[str, bytes] = {}
        while found := {name: beat for name, beat in self._beats(layout) if self.lives(name)}:
            for name, beat in found.items():
                if _is_here(beat) or seen.setdefault(name, beat) != beat:
                    raise ValueError(
                        f"worker {name} is at work on this job with another input, or takes its rows in another order, "
                        "as --deadline, --within and --budget have it: stop it, start this one with the same, or name "
                        "another output"
                    )
            if is_over():
                return False
            system.sleep(poll_s)
            self.beat()
        return True

    def _beats(self, layout: str) -> list[tuple[str, bytes]]:
        """Workers with this layout and their last heartbeats."""
        names = [name.removesuffix(".beat") for name in self._store.names("workers") if name.endswith(".beat")]
        found = [(name, self._store.read(f"workers/{name}.beat")) for name in names]
        return [(name, beat) for name, beat in found if beat and _said(beat).get("layout") == layout]

    def leave(self) -> None:
        """Gives all leases back."""
        self._store.create(f"workers/{self.worker}.dead", b"")

    def acquire(self, part: str) -> int | None:
        """The epoch under which this worker has the part from now on; None while a living worker has it."""
        newest = max(self.epochs().get(part, ()), default=0)
        if newest:
            owner = self.lease(part, newest).worker
            if owner == self.worker:
                return newest
            if self.lives(owner):
                return None
        return newest + 1 if self.advance(part, newest + 1) else None

    def epochs(self) -> dict[str, list[int]]:
        """The epochs of each part that was ever taken."""
        found: dict[str, list[int]] = {}
        listed = self._store.names(self._folder)
        for name in dict.fromkeys((*listed, *self._known)):  # a listing may lag behind what this worker has made
            part, _, epoch = name.rpartition(".")
            if epoch.isdecimal():  # another file is nobody's lease
                found.setdefault(part, []).append(int(epoch))
        return found

    def lease(self, part: str, epoch: int) -> Lease:
        """The lease's contents. Raises OSError where the file is damaged or has vanished."""
        name = f"{part}.{epoch}"
        if name not in self._known:
            content = self._store.read(f"{self._folder}/{name}", 0, _MAX_BYTES + 1)
            if content is None:
                raise OSError(f"the lease {name} has vanished from the journal; start the job again")
            worker, _, cut = content.decode(errors="replace").partition(" ")
            if len(content) > _MAX_BYTES or (cut and not (cut.isascii() and cut.isdigit())):
                raise OSError(f"the lease {name} of the journal is damaged, it holds {content!r}; delete it")
            self._known[name] = Lease(worker, int(cut) if cut else None)
        return self._known[name]

    def advance(self, part: str, epoch: int, *, cut: int | None = None) -> bool:
        """Creates the epoch for this worker; False if it is there. cut: keeps only what lies before it."""
        return self._create(part, epoch, Lease(self.worker, cut))

    def give(self, part: str, epoch: int, *, cut: int | None = None) -> None:
        """Opens a part of this worker from the epoch on. cut: keeps what lies before it; None keeps nothing.

        Raises LeaseLost if another worker has the part.
        """
        lease = Lease("") if cut is None else Lease(self.worker, cut)
        if not self._create(part, epoch, lease):
            raise LeaseLost(f"another worker took over the rows of part {part}")

    def _create(self, part: str, epoch: int, lease: Lease) -> bool:
        content = lease.worker.encode() + (b"" if lease.cut is None else b" %d" % lease.cut)
        # a lease need not survive a loss of power, because its worker does not either
        if self._store.create(f"{self._folder}/{part}.{epoch}", content, lasts=False):
            self._known[f"{part}.{epoch}"] = lease
        return self.lease(part, epoch) == lease  # which may be there already: the store's answer was lost

    def is_held_elsewhere(self, part: str) -> bool:
        """Whether another worker, which lives, has the part."""
        newest = max(self.epochs().get(part, ()), default=0)
        owner = self.lease(part, newest).worker if newest else ""
        return owner not in ("", self.worker) and self.lives(owner)

    def lives(self, worker: str) -> bool:
        """Whether the worker may still be at work; one that is found dead gets its tombstone."""
        if not worker or worker in self._dead:
            return False
        if self._store.size(f"workers/{worker}.dead") is None:
            beat = self._store.read(f"workers/{worker}.beat")
            if beat is not None and not _is_gone(beat) and not self._is_still(worker, beat):
                return True
            self._store.create(f"workers/{worker}.dead", self.worker.encode())
        self._dead.add(worker)
        return False

    def _is_still(self, worker: str, beat: bytes) -> bool:
        now = self._clock()
        last, since = self._seen.get(worker, (b"", now))
        if beat != last:
            self._seen[worker] = beat, now
            return False
        return now - since > self._expiry_s


def is_idle(store: Store) -> bool:
    """Whether all workers of a job are known to have ended, without waiting for any."""
    names = [name.removesuffix(".beat") for name in store.names("workers") if name.endswith(".beat")]
    return all(
        store.size(f"workers/{name}.dead") is not None or _is_gone(store.read(f"workers/{name}.beat") or b"")
        for name in names
    )


def require_nobody(store: Store, *, expiry_s: float, poll_s: float) -> list[str]:
    """The workers of a job, once none of them lives any more; each has its tombstone. Waits up to `expiry_s`.

    Raises ValueError for one whose heartbeat moves meanwhile.
    """
    started_s, seen = system.monotonic(), dict[str, bytes]()
    names = [name.removesuffix(".beat") for name in store.names("workers") if name.endswith(".beat")]
    while silent := [name for name in names if store.size(f"workers/{name}.dead") is None]:
        for name in silent:
            beat = store.read(f"workers/{name}.beat")
            if beat is None or _is_gone(beat) or system.monotonic() - started_s > expiry_s:
                store.create(f"workers/{name}.dead", b"")
            elif seen.setdefault(name, beat) != beat:
                raise ValueError(f"worker {name} is at work on this job; stop it before the job is begun anew")
            else:
                system.sleep(poll_s)
    return names


def _process() -> dict[str, object]:
    """This process: its number, its start, and the place in which numbers are unique, "" where the system hides it."""
    return {"place": system.process_place(), "pid": system.getpid(), "started": system.process_start(system.getpid())}


def _is_here(beat: bytes) -> bool:
    """Whether a heartbeat comes from a process of this place, which may have ended."""
    return bool(here := system.process_place()) and _said(beat).get("place") == here


def _is_gone(beat: bytes) -> bool:
    """Whether a heartbeat comes from a process of this place that has ended."""
    found = _said(beat)
    return _is_here(beat) and system.process_start(found.get("pid")) != found.get("started")


def _said(beat: bytes) -> dict[str, Any]:
    """A heartbeat's fields; none of a damaged file, whose changes alone then show that its worker lives."""
    return object_in(beat) or {}
