"""Folders that requests over HTTP may name: those below one root, which no path and no link leaves."""

import os
from pathlib import Path

from ferrum_jax.io.paths import is_url

_MOST_FILES = 10_000  # of a folder and those in it; PEFT saves a handful


def folder_below(
    root: str | os.PathLike[str], path: str, *, field: str = "lora_path", option: str = "--adapter-root"
) -> Path:
    """The folder that a request names, with links followed. path: relative to the root, or absolute and below it.

    Raises ValueError for a URL, for what is no folder, for one that is, or holds a file that is, outside the root,
    and for one that holds a pipe or a device.
    """
    if is_url(path) or "\0" in path:
        raise ValueError(f"{field} is {path!r}; over HTTP it must be a folder below {option}")
    if ".." in Path(path).parts:
        raise ValueError(f"{field} is {path!r}; it must not go up with '..'")
    try:
        return _looked_at(Path(root).resolve(), path, field, option)
    except (OSError, RuntimeError) as error:  # RuntimeError is of links that lead to themselves
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{field} is {path!r}, which cannot be read ({why}); name another folder") from error


def _looked_at(top: Path, path: str, field: str, option: str) -> Path:
    found = (top / path).resolve()
    if not found.is_relative_to(top):
        raise ValueError(f"{field} is {path!r}, which is outside {option}; put it below that folder")
    if found == top or not found.is_dir():
        raise ValueError(f"{field} is {path!r}; there is no such folder below {option}")
    for number, file in enumerate(found.rglob("*")):
        if number == _MOST_FILES:
            raise ValueError(
                f"{field} is {path!r}, a folder of more than {_MOST_FILES:,} files; name one that has nothing else"
            )
        if not file.resolve().is_relative_to(top):
            raise ValueError(f"{field} is {path!r}, whose {file.name} is a link out of {option}; copy the file")
        if not (file.is_file() or file.is_dir()):  # a pipe would be waited for
            raise ValueError(f"{field} is {path!r}, whose {file.name} is no file; take it out of the folder")
    return found
