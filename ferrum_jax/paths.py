"""Paths that are written at the end of long work, or read after it, and are looked at before it begins."""

from __future__ import annotations

import os


def require_folder_of(path: str | os.PathLike[str], what: str) -> None:
    """Raises ValueError unless the folder in which `path` is to stand is there and may be written. what: its name."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ValueError(f"{folder}, where the {what} belongs, is no folder; make it, or name another place")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{folder}, where the {what} belongs, may not be written to; name another place")


def require_free(path: str | os.PathLike[str]) -> None:
    """Raises ValueError unless `path` is not there, or an empty folder."""
    if os.path.exists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        raise ValueError(f"{os.fspath(path)} exists and is not an empty folder; name another output or remove it first")
