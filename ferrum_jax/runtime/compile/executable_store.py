"""The store: compiled executables on disk, so that a second start neither traces nor compiles.

One file per executable, named by a digest of its lowered program and of the Environment, and for each description a
file that says which executable it is. So a change of a traced source lowers its programs once more, and compiles those
that became others. A file is written under a temporary name, then renamed, so that processes may share a folder; the
least recently used go when the folder is over its size. A file begins with a digest of the rest and is not unpickled
if the digest differs: a damaged executable would crash the process. A file is code: a folder that others may write to
is refused. A URL names a folder that machines share: what it has is fetched into the folder once, what is compiled is
put there too.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import pickle
import re
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import serialize_executable

from ferrum_jax.io.files.store import UrlStore
from ferrum_jax.io.files.whole_files import write_whole
from ferrum_jax.runtime.compile.deferred import DeferredExecutable
from ferrum_jax.runtime.compile.environment import Environment
from ferrum_jax.runtime.compile.lowered import Lowered
from ferrum_jax.runtime.compile.pieces import CallPlan, LoweredPieces, PiecedExecutable
from ferrum_jax.runtime.compile.remote_folder import FETCHED, local_folder, remote_of

MAX_BYTES = 8 << 30
_PICKLED = 2  # another number where a class that executables hold moves to another module
write_beside = functools.partial(write_whole, lasts=False, mode=0o600)
_CHECK_BYTES = 32
_SUFFIX = ".executable"
STRAY_S = 3600  # nobody writes a file for so long
_EXECUTABLE = re.compile(r"[0-9a-f]{32,64}\.executable")
_STRAY = re.compile(r"tmp[a-z0-9_]{8}")  # of a process that ended while it wrote


class ExecutableCache(Protocol):
    """Where executables come from: the store, or a bundle."""

    def get(self, description: str, lower: Callable[[], Lowered | LoweredPieces]) -> DeferredExecutable:
        """The executable that `description` names: kept from an earlier time, to be loaded, or compiled now.

        description: all that decides it beside the environment; equal text must mean equal programs.
        """
        ...


class Unloadable(Exception):
    """An executable that is whole, and the runtime does not take it."""


class ExecutableStore:
    """Executables by description. `hits` and `misses` count what was asked for: what was found, what was compiled.

    folder: local, or a URL. devices: those of the mesh, in its order; None for the default device. max_bytes: of
    the local folder; nothing is deleted behind a URL.
    Raises ValueError if the folder cannot be made, belongs to somebody else, or others may write to it.
    """

    def __init__(self, folder: str, devices: Sequence[Any] | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self._devices = list(devices or jax.devices()[:1])
        environment = Environment.of_device(self._devices[0])
        self._tracing = repr(dataclasses.astuple(environment))
        self._compiling = repr((_PICKLED, *dataclasses.astuple(dataclasses.replace(environment, sources=""))))
        self._max_bytes = max_bytes
        self._remote = remote_of(folder)
        self._folder = local_folder(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ValueError(
                f"compilation_cache_dir is {self._folder}, which cannot be made ({error}); choose another, or None "
                "(--compilation-cache-dir '') to keep nothing"
            ) from error
        if others_may_write(self._folder):
            raise ValueError(
                f"compilation_cache_dir is {self._folder}, and others can write to it; what lies there is run as "
                "code: make it yours alone (chmod 700), or choose another"
            )
        self.hits = 0
        self.misses = 0

    def get(self, description: str, lower: Callable[[], Lowered | LoweredPieces]) -> DeferredExecutable:
        """The executable that `description` names, from disk, or compiled and kept.

        A damaged file is compiled again and replaced, and so is one that cannot be loaded, with a warning. So is one
        that cannot be written.
        """
        path = self._named_by(description)
        payload = None if path is None else self._find(path)
        if path is not None and payload is not None:
            return self._found(path, payload, lower)
        began_s = time.monotonic()
        lowered, described = lower(), self._path(self._tracing, description)
        path = self._path_of(lowered, described)
        self._write(described, _checked(path.name.encode()))
        payload = self._find(path)
        if payload is not None:
            return self._found(path, payload, lambda: lowered)
        made = DeferredExecutable.made(self._make(path, lowered))
        self._write(self._path_of_seconds(description), _checked(f"{time.monotonic() - began_s:.3f}".encode()))
        return made

    def compile_seconds(self, description: str) -> float | None:
        """Seconds of the last compile of a program whose description differs in its first line at most, or None."""
        try:
            return float(self._find(self._path_of_seconds(description)) or b"")
        except ValueError:  # there is none, or another version wrote it otherwise
            return None

    def has(self, description: str) -> bool:
        """Whether there is a file for `description`, which is fetched from behind a URL; it may be damaged."""
        path = self._named_by(description)
        return path is not None and (path.is_file() or self._fetch(path) is not None)

    def _named_by(self, description: str) -> pathlib.Path | None:
        """The file of the executable that a description was found to be."""
        name = self._find(self._path(self._tracing, description))
        return None if name is None else self._folder / pathlib.PurePath(name.decode()).name

    def _path_of_seconds(self, description: str) -> pathlib.Path:
        """Programs of one layout take about as long, those that sample as those that sample."""
        return self._path(f"seconds {self._compiling}", description.partition("\n")[2])

    def _path_of(self, lowered: Lowered | LoweredPieces, described: pathlib.Path) -> pathlib.Path:
        """The file of a lowered program; where its text does not hold all of it, one for its description alone."""
        text = lowered.text()
        return self._path(self._compiling, text) if text is not None else self._path("", described.name)

    def _found(
        self, path: pathlib.Path, payload: bytes, lower: Callable[[], Lowered | LoweredPieces]
    ) -> DeferredExecutable:
        self.hits += 1
        return DeferredExecutable(lambda: self._load(path, payload, lower))

    def _load(self, path: pathlib.Path, payload: bytes, lower: Callable[[], Lowered | LoweredPieces]) -> Any:
        try:
            return load_executable(payload, self._devices)
        except Unloadable as error:
            self.hits -= 1
            warnings.warn(f"{path} is compiled anew: {error}", RuntimeWarning, stacklevel=2)
            return self._make(path, lower())

    def _make(self, path: pathlib.Path, lowered: Lowered | LoweredPieces) -> Any:
        self.misses += 1
        executable = lowered.compile()
        payload = serialize(executable)
        if _has_functions(payload, self._devices):
            self._write(path, _checked(payload))
        elif jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
            text = (
                "executables that come from jax's own cache (JAX_COMPILATION_CACHE_DIR) are not kept in "
                "compilation_cache_dir; unset the variable, and later starts need not trace them"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return executable

    def _find(self, path: pathlib.Path) -> bytes | None:
        """A file's content, from here or behind the URL; None if it is missing or damaged."""
        return _read(path) or self._fetch(path)

    def _write(self, path: pathlib.Path, data: bytes) -> None:
        self._keep(path, data)
        with self._asking() as remote:
            if remote is not None:
                remote.replace(path.name, data)

    def _fetch(self, path: pathlib.Path) -> bytes | None:
        """The remote file's content, kept here from now on; None if it is missing or damaged."""
        data = None
        with self._asking() as remote:
            data = None if remote is None else remote.read(path.name)
        payload = None if data is None else _unchecked(data)
        if data is not None and payload is not None:
            self._keep(path, data)
        return payload

    def _keep(self, path: pathlib.Path, data: bytes) -> None:
        try:
            write_beside(path, data)
            self._drop_oldest()
        except OSError as error:  # a full disk, say: it runs all the same
            text = f"{path} cannot be kept, so the next start compiles it again: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[UrlStore | None]:
        """The remote folder, if there is one. After its first error it is asked no more, which is said once."""
        remote = self._remote
        try:
            yield remote
        except OSError as error:
            if remote is None:
                raise
            if self._remote is not None:
                self._remote = None
                warnings.warn(
                    f"compilation_cache_dir is {remote.url}, which does not answer; executables are kept in "
                    f"{self._folder} alone: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _path(self, environment: str, text: str) -> pathlib.Path:
        ids = [device.id for device in self._devices]
        return self._folder / f"{digest(environment, f'{ids} {text}')}{_SUFFIX}"

    def _drop_oldest(self) -> None:
        """Deletes what was used longest ago until the folder is within its size. A reader may be faster or slower.

        What a process left that ended while it wrote is deleted as well, and never what one is writing.
        """
        files: list[tuple[float, int, pathlib.Path]] = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process deletes too
                status = path.stat()
                if path.suffix == _SUFFIX or status.st_mtime < time.time() - STRAY_S:
                    files.append((status.st_mtime, status.st_size, path))
        excess = sum(size for _, size, _ in files) - self._max_bytes
        for _, size, path in sorted(files)[:-1]:  # the newest stays, however large
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size


def serialize(executable: Any) -> bytes:
    """An executable that `load_executable` brings back, in this environment or an equal one."""
    if isinstance(executable, PiecedExecutable):
        return pickle.dumps((executable.plan, [serialize(piece) for piece in executable.pieces]))
    return pickle.dumps(serialize_executable.serialize(executable))


def load_executable(payload: bytes, devices: Sequence[Any]) -> Any:
    """The executable, for these devices in their order. It is unpickled: whoever wrote the payload is trusted.

    Raises Unloadable, and where memory lacks what the runtime raises.
    """
    if b"lapack_" in payload:
        _prepare_lapack()
    try:
        first, *rest = pickle.loads(payload)
        if isinstance(first, CallPlan):
            return PiecedExecutable(first, [load_executable(piece, devices) for piece in rest[0]])
        if not _has_functions(payload, devices):
            raise ValueError("it lacks its functions, as a copy of one from jax's own cache does")
        return serialize_executable.deserialize_and_load(first, *rest, execution_devices=list(devices))
    except Exception as error:  # of pickle, of jax or of a plugin
        if str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise Unloadable(f"it cannot be loaded: {type(error).__name__}: {error}") from error


def _has_functions(payload: bytes, devices: Sequence[Any]) -> bool:
    """Whether an executable can run once it is loaded.

    XLA's CPU back end writes no object code of an executable that was loaded itself, as jax's own cache does.
    """
    if devices[0].platform != "cpu":
        return True
    first, *rest = pickle.loads(payload)
    if isinstance(first, CallPlan):
        return all(_has_functions(piece, devices) for piece in rest[0])
    return b"\x7fELF" in first


@functools.cache
def _prepare_lapack() -> None:
    """Gives jax's CPU kernels the addresses of LAPACK's functions.

    They get them where a call of LAPACK is lowered, so here is one: a loaded executable lowers nothing, and would call
    a function at address 0. Gated DeltaNet solves a triangular system.
    """
    matrix = jax.ShapeDtypeStruct((1, 1), np.float32)
    jax.jit(lambda a: jax.lax.linalg.triangular_solve(a, a, left_side=True)).trace(matrix).lower(
        lowering_platforms=("cpu",)
    )


def others_may_write(path: pathlib.Path) -> bool:
    """Whether somebody else than this user or root owns a file or folder, or may write to it."""
    status = path.stat()
    return status.st_uid not in (os.getuid(), 0) or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def digest(*parts: str) -> str:
    """A digest of the texts, one by one."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    return state.hexdigest()


def _read(path: pathlib.Path) -> bytes | None:
    """The file's content; None if it is missing or damaged."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    with contextlib.suppress(OSError):  # another process deletes too, and a folder may be one that is only read
        os.utime(path)  # it was used
    return _unchecked(data)


def _unchecked(data: bytes) -> bytes | None:
    """The payload of what `_checked` gave; None of what it did not give."""
    payload = data[_CHECK_BYTES:]
    return payload if data == _checked(payload) else None


def _checked(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_CHECK_BYTES).digest() + payload


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
