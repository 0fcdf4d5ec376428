"""Verdicts: what a check on this chip found of a kernel, kept beside the store of executables.

A file for each key: chip, versions and the digest of the kernels' source. In it an entry for each op, dtype and shape
class. An engine whose implementation is not named follows the entries of its own shapes; nothing else reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ferrum_jax.runtime.compile.executable_store import digest, others_may_write, write_beside
from ferrum_jax.runtime.compile.remote_folder import local_folder

_FOLDER = "verdicts"  # beside that of the executables
_COMPILERS = ("libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")  # of Mosaic kernels, as packages
_NOT_KERNELS = ("cases.py", "oracle.py", "run_case.py", "work.py", "fastest_tiles.py", "ceilings.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerdictKey:
    """Where a verdict holds. chip: what the PCI bus says of it, so that it is known before the device is opened."""

    chip: str
    jax: str
    compiler: str
    kernels: str

    @classmethod
    def here(cls, chip: str) -> VerdictKey:
        return cls(
            chip=chip,
            jax=f"{importlib.metadata.version('jax')} {importlib.metadata.version('jaxlib')}",
            compiler=" ".join(f"{name} {version}" for name, version in _versions().items()),
            kernels=_kernel_digest(),
        )

    @property
    def name(self) -> str:
        return digest(*dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """A check's result for one kernel. speed: the time of "xla" over its own, or None.

    problem: None where it is right; else in a clause what is wrong. device_kind: as jax names the chip. tiles: faster
    ones than the kernel's own, as measured.
    """

    implementation: str
    device_kind: str
    problem: str | None = None
    speed: float | None = None
    tiles: Mapping[str, Any] | None = None

    @property
    def is_right(self) -> bool:
        return self.problem is None

    @property
    def is_well_formed(self) -> bool:
        """Whether each field is of its type, which one that was read from a file need not be."""
        names = isinstance(self.implementation, str) and isinstance(self.device_kind, str)
        tiles = self.tiles is None or (
            isinstance(self.tiles, dict) and all(type(size) is int and size > 0 for size in self.tiles.values())
        )
        speed = self.speed is None or (isinstance(self.speed, int | float) and 0 < self.speed < math.inf)
        return names and isinstance(self.problem, str | None) and speed and tiles


class VerdictStore:
    """Verdicts of one key. executables: the folder of these, None where nothing is kept."""

    def __init__(self, executables: str | None, key: VerdictKey) -> None:
        self._key = key
        self._path: pathlib.Path | None = None
        if executables is not None:
            self._path = local_folder(executables).parent / _FOLDER / f"{key.name}.json"

    def find(self, entry: str) -> Verdict | None:
        """The verdict of an entry, as `entry_of` names it; None where there is none, or the file is not one of ours."""
        found = self._read().get(entry)
        if found is None:
            return None
        try:
            verdict = Verdict(**found)
        except TypeError:  # of another version
            return None
        return verdict if verdict.is_well_formed else None

    def keep(self, verdicts: Mapping[str, Verdict]) -> None:
        """Adds verdicts, in place of those of the same entries."""
        if self._path is None or not verdicts:
            return
        self._write(self._read() | {name: dataclasses.asdict(verdict) for name, verdict in verdicts.items()})

    def forget(self, prefix: str) -> None:
        """Drops the entries whose names begin so."""
        known = self._read()
        left = {name: verdict for name, verdict in known.items() if not name.startswith(prefix)}
        if len(left) < len(known):
            self._write(left)

    def _write(self, entries: Mapping[str, Any]) -> None:
        assert self._path is not None, "something was read, or is to be kept"
        content = {"key": dataclasses.asdict(self._key), "entries": entries}
        with contextlib.suppress(OSError):  # a folder that cannot be written to: the next start checks again
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_beside(self._path, json.dumps(content, indent=1, sort_keys=True).encode())

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            found = json.loads(self._path.read_bytes())
            entries = found["entries"]
            mine = found["key"] == dataclasses.asdict(self._key) and not others_may_write(self._path)
            return entries if mine and isinstance(entries, dict) else {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # the last of brackets without end
            return {}


START = "start "  # before the name of an entry that is of a whole engine's start


def entry_of(op: str, dtype: str, shape: str) -> str:
    """The name of an entry. shape: of a class, all that a kernel is specialised to but for the sizes of a step."""
    return f"{op} {dtype} {shape}"


def together(verdicts: Sequence[Verdict], *, by_slowest: bool = False) -> Verdict:
    """One verdict of several: right if all are, as fast as their geometric mean or slowest, with the first tiles."""
    first = next((v for v in verdicts if not v.is_right), verdicts[0])
    tiles = next((v.tiles for v in verdicts if v.tiles), None)
    speeds = [v.speed for v in verdicts if v.speed]
    mean = math.exp(sum(map(math.log, speeds)) / len(speeds)) if speeds else None
    return dataclasses.replace(first, speed=min(speeds) if speeds and by_slowest else mean, tiles=tiles)


def _versions() -> dict[str, str]:
    """The versions of the compilers of kernels that are installed."""
    found = {}
    for name in _COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@functools.cache
def _kernel_digest() -> str:
    """Digest of every source file of the kernels, without what only tests them."""
    state = hashlib.blake2b(digest_size=16)
    root = pathlib.Path(__file__).parents[3] / "pallas_kernels"
    for path in sorted(root.rglob("*.*")):
        if path.name not in _NOT_KERNELS and path.suffix in (".py", ".json"):
            state.update(f"{path.relative_to(root)} {path.stat().st_size} ".encode() + path.read_bytes())
    return state.hexdigest()
