"""Store: the few file operations that a job needs, in a local folder or in one that fsspec opens.

Files are written whole and are durable when a call returns, except those that need not outlive the machine. `create` is
exclusive: if many processes create the same name, one succeeds. That is all that leases and segments build on; nothing
is appended to, locked or listed in an order that matters. Object stores give it by conditional writes, a local file
system by hard links. Clients of stores raise errors of their own classes; here each becomes an OSError with the URL.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from ferrum_jax.io import system
from ferrum_jax.io.files.whole_files import beside, sync_folder, write_whole
from ferrum_jax.io.paths import errors_naming, is_url, open_url

_MAX_TRIES, _MAX_PAUSE_S = 4, 0.5  # for a create that failed and left no file
_OF_TEMPORARY = 8  # letters at the end of a temporary file's name


class Store(Protocol):
    """A folder. Names are relative to it, with "/" between parts."""

    def create(self, name: str, content: bytes, *, lasts: bool = True) -> bool:
        """Makes the file whole; False, with nothing changed, if the name is taken. lasts: make it durable."""
        ...

    def replace(self, name: str, content: bytes, *, lasts: bool = True) -> None:
        """The file has this content from now on; a reader sees the old one or the new one whole. lasts: as `create`."""
        ...

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """The file's bytes from `start`; None if there is no such file. Raises OSError for what is no file."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of the file; None if there is no such file."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder, without the folder; empty where there is no such folder."""
        ...

    def move(self, name: str, target: str, *, mark: str) -> None:
        """Renames a file or folder; the target must be free. Files in it that others have open stay readable to them.

        mark: a file of the folder. Where files are moved one by one, it is copied first and deleted last, so after an
        interrupted move it is in both places.
        """
        ...

    def remove(self, name: str) -> None:
        """Deletes a file, or a folder with all that is in it, for good; nothing where there is none."""
        ...

    def writing(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A file to write and seek in, which takes the name when the block ends without an error."""
        ...


def open_store(path: str) -> Store:
    """The store of a local folder, or of a URL such as gs://bucket/folder. The first write makes a missing folder.

    Raises ValueError, with what to install, for a URL that cannot be opened.
    """
    if not is_url(path):
        return LocalStore(Path(path))
    files, root = open_url(path)
    from fsspec.implementations.local import LocalFileSystem

    return LocalStore(Path(root)) if isinstance(files, LocalFileSystem) else UrlStore(files, root)


def split(path: str) -> tuple[str, str]:
    """Folder and name of a local path or URL. The folder of a URL is a URL, also where it is the root: memory://."""
    folder, slash, name = path.rpartition("/")
    if is_url(path):
        return (f"{folder}/" if folder.endswith(":/") else folder), name
    return folder or slash or ".", name


class LocalStore:
    """A folder of this machine, or one that machines share.

    A new file is written under a temporary name and synced; then it is linked to its name and the folder is synced.
    After a loss of power the name is there with all its bytes, or not at all. A link stays, and its target is written.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._lasting = root, set[Path]()

    def create(self, name: str, content: bytes, *, lasts: bool = True) -> bool:
        path = self._path(name)
        with beside(path, content, lasts=lasts) as written:
            try:
                system.link(written, path)
            except FileExistsError:
                return False
        if lasts:
            self._sync(path.parent)
        return True

    def replace(self, name: str, content: bytes, *, lasts: bool = True) -> None:
        path = self._path(name)
        write_whole(path, content, lasts=lasts)
        if lasts:
            self._sync(path.parent)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        path = self._root / name
        try:
            if not stat.S_ISREG(system.stat(path).st_mode):  # a pipe would be waited for, and a device has no end
                raise IsADirectoryError(errno.EISDIR, "It is no file", str(path))
            with system.open(path, "rb") as file:
                file.seek(start)
                return file.read(-1 if length is None else length)
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        try:
            return system.stat(self._root / name).st_size
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        try:
            return [name for name in system.listdir(self._root / folder) if not name.startswith(".")]
        except FileNotFoundError:
            return []

    def move(self, name: str, target: str, *, mark: str) -> None:
        system.rename(self._root / name, self._root / target)
        sync_folder(self._root)

    def remove(self, name: str) -> None:
        path = self._root / name
        with contextlib.suppress(FileNotFoundError):  # another process removes it too
            if system.isdir(path):
                with system.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as aside:
                    system.rename(path, Path(aside) / path.name)  # at once: what another writes there from now on stays
            else:
                system.unlink(path)
            self._sync(path.parent)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        path = self._path(name)
        for torn in system.listdir(path.parent):  # what a killed process left
            if torn.startswith(prefix := f".{path.name}.") and len(torn) == len(prefix) + _OF_TEMPORARY:
                with contextlib.suppress(FileNotFoundError):
                    system.unlink(path.parent / torn)
        with beside(path, lasts=False) as written:
            with system.open(written, "wb") as file:
                yield file
                file.flush()
                system.fsync(file.fileno())
            system.replace(written, path)
        self._sync(path.parent)

    def _path(self, name: str) -> Path:
        path = Path(system.realpath(self._root / name))
        system.makedirs(path.parent, exist_ok=True)
        return path

    def _sync(self, folder: Path) -> None:
        """Makes the names in a folder durable, and at its first use those of the folders that lead to it.

        Who made them may have been killed before it synced them.
        """
        sync_folder(folder)
        root = Path(system.realpath(self._root))
        if folder not in self._lasting and folder.is_relative_to(root):
            for each in (folder, *folder.parents[: len(folder.relative_to(root).parts)]):
                with contextlib.suppress(PermissionError):  # one above the root, which was not made here
                    sync_folder(each.parent, of=folder)
            self._lasting.add(folder)


class UrlStore:
    """A folder of an fsspec file system. An object is written by one put: a reader sees it whole or not at all."""

    def __init__(self, files: Any, root: str, url: str | None = None) -> None:
        """url: as errors name the folder; None is as the file system writes it."""
        self._system, self._root = files, root
        self.url = files.unstrip_protocol(root) if url is None else url if url.endswith("://") else url.rstrip("/")

    @classmethod
    def of(cls, url: str) -> UrlStore:
        """Raises ValueError, with what to install, for a URL that cannot be opened."""
        return cls(*open_url(url), url)

    def sizes(self) -> dict[str, int]:
        """Bytes of each file, in folders of it too, by its name."""
        with errors_naming(self.url):
            found = self._system.find(self._root, detail=True)
        root = self._root.rstrip("/") + "/"
        return {name.removeprefix(root): int(entry["size"]) for name, entry in found.items() if name != self._root}

    def copy_to(self, name: str, path: Path) -> None:
        """Copies a file to a path of this machine."""
        system.makedirs(path.parent, exist_ok=True)
        with self._at(name) as source:
            self._system.get_file(source, str(path))

    def create(self, name: str, content: bytes, *, lasts: bool = True) -> bool:
        for left in reversed(range(_MAX_TRIES)):
            try:
                with self._at(name) as path:
                    self._system.pipe_file(path, content, mode="create")
                return True
            except FileExistsError:
                return False
            except OSError:
                # The name may be taken: some stores report that in a way their client does not know, and the answer to
                # a write that succeeded may be lost. Or it is free: S3 refuses everybody who creates it at one moment.
                if self.read(name) is not None:
                    return False
                if not left:
                    raise
                system.sleep(_MAX_PAUSE_S * system.random())
        raise AssertionError("the last try returns or raises")

    def replace(self, name: str, content: bytes, *, lasts: bool = True) -> None:
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

    def move(self, name: str, target: str, *, mark: str) -> None:
        with self._at(name) as source, self._at(target) as goal:
            self._system.invalidate_cache()
            files = sorted(self._system.find(source), key=lambda file: not file.endswith(f"/{mark}"))
            for file in files:
                self._system.cp_file(file, goal + file.removeprefix(source))
            for file in reversed(files):
                self._system.rm_file(file)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._at(name) as path:
            self._system.invalidate_cache()
            self._system.rm(path, recursive=True)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        with system.TemporaryDirectory() as folder:
            path = Path(folder) / "content"
            with system.open(path, "wb") as file:
                yield file
            with self._at(name) as target:
                self._system.put_file(str(path), target)

    @contextlib.contextmanager
    def _at(self, name: str) -> Iterator[str]:
        """The path of a name in the file system."""
        path = f"{self._root.rstrip('/')}/{name}"
        with errors_naming(f"{self.url}/{name}"):
            yield path


@contextlib.contextmanager
def open_local(path: str) -> Iterator[BinaryIO]:
    """A file to read and seek in; a URL's is copied to this machine first.

    Raises OSError if there is none, and ValueError for a URL that cannot be opened.
    """
    if not is_url(path):
        with system.open(path, "rb") as file:
            yield file
        return
    files, remote = open_url(path)
    with system.TemporaryFile() as file:
        with errors_naming(path), files.open(remote, "rb") as source:
            shutil.copyfileobj(source, file, 1 << 20)
        file.seek(0)
        yield file  # type: ignore[misc]
