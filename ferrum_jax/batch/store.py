"""Store: the few operations a job needs of the place where its files are: a local folder, or what fsspec opens.

Files are written whole and, but for those that need not outlive the machine, durable when a call returns. `create` is
exclusive: of many processes that create one name, one succeeds. That is all that leases and segments build on; nothing
is appended to, locked or listed in an order that matters. Object stores give it by conditional writes, a local file
system by hard links. Clients of stores raise errors of classes of their own; here all are OSErrors that name the URL.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

_MOST_TRIES, _MOST_PAUSE_S = 4, 0.5  # of a create that failed and made nothing


class Store(Protocol):
    """A folder. Names are relative to it, with "/" between parts."""

    def create(self, name: str, content: bytes, *, lasts: bool = True) -> bool:
        """Makes the file whole; False, with nothing changed, if there is one of this name. lasts: it is durable."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """The file has this content from now on; a reader sees the old one or the new one whole."""
        ...

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """The file's bytes from `start`; None if there is no such file."""
        ...

    def size(self, name: str) -> int | None:
        """Of the file in bytes; None if there is no such file."""
        ...

    def names(self, folder: str) -> list[str]:
        """Of the files in a folder, without the folder; none where there is no such folder."""
        ...

    def writing(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A file to write and seek in, which takes the name when the block ends without an error."""
        ...


def open_store(path: str) -> Store:
    """The store of a local folder, or of a URL such as gs://bucket/folder. A folder that is not there is made later.

    Raises ValueError, with what to install, for a URL that cannot be opened.
    """
    if not is_url(path):
        return LocalStore(Path(path))
    system, root = _file_system(path)
    from fsspec.implementations.local import LocalFileSystem

    return LocalStore(Path(root)) if isinstance(system, LocalFileSystem) else UrlStore(system, root)


def _file_system(url: str) -> tuple[Any, str]:
    """What opens a URL, and the path that it is there."""
    try:
        import fsspec
    except ImportError as error:
        raise ValueError(f"{url} needs fsspec; pip install 'ferrum-jax[store]'") from error
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:  # it says which
        raise ValueError(f"{url} needs a package that is missing: {error}") from error
    except ValueError as error:
        raise ValueError(f"{url} cannot be opened: {error}; give a local path or a URL such as gs://") from error


@contextlib.contextmanager
def _naming(url: str) -> Iterator[None]:
    """Errors of a client as OSErrors that name the URL: no credentials, no connection, no such bucket."""
    try:
        yield
    except FileExistsError:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no such file or bucket", url) from error
    except Exception as error:
        raise OSError(f"{url}: {error or type(error).__name__}") from error


def is_url(path: str) -> bool:
    return "://" in path


def split(path: str) -> tuple[str, str]:
    """Folder and name of a local path or URL."""
    folder, _, name = path.rpartition("/")
    return (folder or "/" if path.startswith("/") else folder or ".") if not is_url(path) else folder, name


class LocalStore:
    """A folder of this machine, or one that machines share.

    A new file is written under another name, synced, linked to its name and the folder is synced: after a loss of
    power the name is there with all its bytes, or not at all.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, name: str, content: bytes, *, lasts: bool = True) -> bool:
        path = self._path(name)
        with _temporary(path, content, lasts=lasts) as written:
            try:
                os.link(written, path)
            except FileExistsError:
                return False
        if lasts:
            _sync_folder(path.parent)
        return True

    def replace(self, name: str, content: bytes) -> None:
        path = self._path(name)
        with _temporary(path, content) as written:
            os.replace(written, path)
        _sync_folder(path.parent)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        try:
            with open(self._root / name, "rb") as file:
                file.seek(start)
                return file.read(-1 if length is None else length)
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        try:
            return (self._root / name).stat().st_size
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        try:
            return [name for name in os.listdir(self._root / folder) if not name.startswith(".")]
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        path = self._path(name)
        for torn in path.parent.glob(f".{glob.escape(path.name)}.????????"):  # what a killed process left
            torn.unlink(missing_ok=True)
        with _temporary(path, lasts=False) as written:
            with open(written, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(written, path)
        _sync_folder(path.parent)

    def _path(self, name: str) -> Path:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


@contextlib.contextmanager
def _temporary(path: Path, content: bytes = b"", *, lasts: bool = True) -> Iterator[str]:
    """The path of a file beside `path` that holds the content, on disk if it lasts; it is gone afterwards."""
    handle, written = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            if lasts:
                os.fsync(file.fileno())
        os.chmod(written, 0o666 & ~_UMASK)
        yield written
    finally:
        with contextlib.suppress(FileNotFoundError):  # it took its name
            os.unlink(written)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


_UMASK = _umask()  # read once: reading it changes it for a moment


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class UrlStore:
    """A folder of an fsspec file system. An object is written by one put, whole or not at all."""

    def __init__(self, system: Any, root: str) -> None:
        self._system, self._root = system, root

    def create(self, name: str, content: bytes, *, lasts: bool = True) -> bool:
        for left in reversed(range(_MOST_TRIES)):
            try:
                with self._at(name) as path:
                    self._system.pipe_file(path, content, mode="create")
                return True
            except FileExistsError:
                return False
            except OSError:
                # the name may be taken: not every store says so in words that its client knows, and the answer to a
                # write that was made may be lost. S3 refuses all who create a name at one moment; then it is not.
                if self.read(name) is not None:
                    return False
                if not left:
                    raise
                time.sleep(_MOST_PAUSE_S * random.random())
        raise AssertionError("the last try returns or raises")

    def replace(self, name: str, content: bytes) -> None:
        with self._at(name) as path:
            self._system.pipe_file(path, content)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        end = None if length is None else start + length
        try:
            with self._at(name) as path:
                return self._system.cat_file(path, start=start or None, end=end)
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        try:
            with self._at(name) as path:
                self._system.invalidate_cache()  # listings are cached, and others write here too
                return self._system.size(path)
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        try:
            with self._at(folder) as path:
                self._system.invalidate_cache()
                return [PurePosixPath(found).name for found in self._system.ls(path, detail=False)]
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "content"
            with open(path, "wb") as file:
                yield file
            with self._at(name) as target:
                self._system.put_file(str(path), target)

    @contextlib.contextmanager
    def _at(self, name: str) -> Iterator[str]:
        """The path of a name in the file system."""
        path = f"{self._root.rstrip('/')}/{name}"
        with _naming(self._system.unstrip_protocol(path)):
            yield path


@contextlib.contextmanager
def open_local(path: str) -> Iterator[BinaryIO]:
    """A file to read and seek in; a URL's is copied to this machine first.

    Raises OSError if there is none, and ValueError for a URL that cannot be opened.
    """
    if not is_url(path):
        with open(path, "rb") as file:
            yield file
        return
    system, remote = _file_system(path)
    with tempfile.TemporaryFile() as file:
        with _naming(path), system.open(remote, "rb") as source:
            shutil.copyfileobj(source, file, 1 << 20)
        file.seek(0)
        yield file  # type: ignore[misc]
