"""Clearing: what this package keeps of compiled programs on this machine is deleted, and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import time
from collections.abc import Iterator

from ferrum_jax.runtime.compile.executable_store import STRAY_S
from ferrum_jax.runtime.compile.remote_folder import FETCHED, local_folder

_EXECUTABLE = re.compile(r"[0-9a-f]{32,64}\.executable")
_STRAY = re.compile(r"tmp[a-z0-9_]{8}")  # of a process that ended while it wrote


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cleared:
    """The deleted files, and their folder."""

    folders: tuple[str, ...]
    num_files: int
    num_bytes: int


def clear(place: str, *, all_fetched: bool) -> Cleared:
    """Deletes the compiled programs in a folder, of a URL those that were fetched; the object store stays as it is.

    all_fetched: also what was fetched of every other URL. Files that others put there stay, and so do verdicts.
    """
    own = local_folder(place)
    others = sorted(local_folder(FETCHED).glob("fetched-*")) if all_fetched else []
    num_files = num_bytes = 0
    folders = [folder for folder in dict.fromkeys([own, *others]) if folder.is_dir() and not folder.is_symlink()]
    for folder in folders:
        for path in _ours(folder, is_fetched=folder.name.startswith("fetched-")):
            with contextlib.suppress(FileNotFoundError):  # another process deletes too
                size = path.stat().st_size
                path.unlink()
                num_files, num_bytes = num_files + 1, num_bytes + size
        for emptied in (folder / "parts", folder):
            with contextlib.suppress(OSError):  # it is not there, or holds what is not ours
                emptied.rmdir()
    return Cleared(folders=tuple(map(str, folders)), num_files=num_files, num_bytes=num_bytes)


def _ours(folder: pathlib.Path, *, is_fetched: bool) -> Iterator[pathlib.Path]:
    """The files that a store, or a bundle that was fetched, has written there."""
    for place in (folder, folder / "parts") if is_fetched else (folder,):
        if place.is_symlink() or not place.is_dir():
            continue
        for path in list(place.iterdir()):
            if path.is_symlink() or not path.is_file():
                continue
            is_stray = _STRAY.fullmatch(path.name) and path.stat().st_mtime < time.time() - STRAY_S
            if _EXECUTABLE.fullmatch(path.name) or is_stray or (is_fetched and path.name == "manifest.json"):
                yield path
