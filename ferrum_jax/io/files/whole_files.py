"""A file that is put in place whole: it is written beside, and takes its name by one rename or link."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ferrum_jax.io import system


def write_whole(path: Path, content: bytes, *, lasts: bool = True, mode: int | None = None) -> None:
    """Puts a whole file in place of what is there: a reader sees the one or the other. lasts, mode: as `beside`."""
    with beside(path, content, lasts=lasts, mode=mode) as written:
        system.replace(written, path)


@contextlib.contextmanager
def beside(path: Path, content: bytes = b"", *, lasts: bool = True, mode: int | None = None) -> Iterator[str]:
    """The path of a file beside `path` that holds the content; it is gone afterwards.

    lasts: the content is on the disk. mode: None gives what the user's other new files have. What fails in the block
    for this file, or for none that is named, is an error of `path`.
    """
    with _errors_of(path):
        handle, written = system.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with system.open(handle, "wb") as file:
                file.write(content)
                file.flush()
                if lasts:
                    system.fsync(file.fileno())
            system.chmod(written, system.NEW_FILE_MODE if mode is None else mode)
            yield written
        finally:
            with contextlib.suppress(FileNotFoundError):  # it was renamed to `path`
                system.unlink(written)


def sync_folder(folder: Path, of: Path | None = None) -> None:
    """Makes the names in a folder durable. of: what an error is to name; None names the folder."""
    with _errors_of(of or folder):
        system.sync_folder(folder)


def is_of_full_disk(error: BaseException) -> bool:
    """Whether it was raised because a disk, or somebody's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Names the file in the system's errors: a full disk fails calls that know a handle, or a temporary name, alone."""
    try:
        yield
    except OSError as error:
        is_its = error.filename is None or Path(os.fsdecode(error.filename)).name.startswith(f".{path.name}.")
        if error.errno is None or not is_its:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
