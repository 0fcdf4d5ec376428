"""Paths and URLs: the one place where URLs are opened, and what must hold of paths before long work begins."""

import contextlib
import dataclasses
import errno
import importlib.util
import itertools
import os
import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ferrum_jax.io import system

_ALIASES = {"gcs": "gs", "s3a": "s3", "local": "file"}  # of schemes that name one store
_OF_MODELS = (".json", ".safetensors", ".jinja", ".model")  # files that make up a model's folder
_REPORT = ".report.json"  # of a batch job; one that an earlier start wrote is no model's
_PICTURES = (".png", ".svg", ".pdf")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")
_ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedPath:
    """A path or URL that somebody gave. what: the name under which it was given.

    is_owned: it is a folder in which nothing else may be written. is_model: it is a folder with a model's files.
    """

    what: str
    path: str
    is_written: bool = False
    is_owned: bool = False
    is_model: bool = False


def require_apart(paths: Sequence[NamedPath]) -> None:
    """Raises ValueError, naming both, if writing one of these paths would change what another names."""
    for one, other in itertools.combinations(paths, 2):
        if (one.is_written or other.is_written) and _is_same(one.path, other.path):
            free = other if other.is_written else one
            raise ValueError(f"{one.what} and {other.what} are both {free.path}; name another place for {free.what}")
        for written, folder in ((one, other), (other, one)):
            if written.is_written and _would_change(written, folder):
                raise ValueError(
                    f"{written.what} is {written.path}, which belongs to {folder.what}, {folder.path}; name a place "
                    "outside that folder"
                )


def kept_beside(output: str, what: str) -> tuple[NamedPath, NamedPath]:
    """The files that a batch job writes beside its output. what: the output's name."""
    return (
        NamedPath(what=f"the journal of {what}", path=f"{output}.journal", is_written=True, is_owned=True),
        NamedPath(what=f"the report of {what}", path=f"{output}{_REPORT}", is_written=True),
    )


def _would_change(written: NamedPath, folder: NamedPath) -> bool:
    """Whether the path lies in the folder and may not be written there."""
    inside = _resolved(written.path).startswith(_resolved(folder.path).rstrip("/") + "/")
    if not inside or not folder.is_model:
        return inside and folder.is_owned
    is_there = is_url(written.path) or system.exists(written.path)
    return is_there and written.path.endswith(_OF_MODELS) and not written.path.endswith(_REPORT)


def _is_same(one: str, other: str) -> bool:
    if _resolved(one) == _resolved(other):
        return True
    try:
        return system.samefile(_resolved(one), _resolved(other))  # names of one file, as hard links are
    except OSError:
        return False


def _resolved(path: str) -> str:
    """One text for all spellings of a path or URL, with links followed."""
    scheme, separator, rest = path.partition("://")
    scheme = _ALIASES.get(scheme.lower(), scheme.lower())
    if not separator or scheme == "file":
        return system.realpath(rest if separator else os.path.expanduser(path))
    return f"{scheme}://{posixpath.normpath('/' + rest.lstrip('/'))[1:]}"


def require_folder_of(path: str | os.PathLike[str], what: str) -> None:
    """Raises ValueError unless the folder in which `path` is to stand is there and may be written. what: its name."""
    folder = os.path.dirname(os.path.abspath(path))
    if not system.isdir(folder):
        raise ValueError(f"{folder}, where the {what} belongs, is not a folder; make it, or name another place")
    if not system.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{folder}, where the {what} belongs, may not be written to; name another place")


def make_folder(path: str | os.PathLike[str], what: str) -> None:
    """Makes a missing folder. Raises ValueError where that fails. what: the contents, as an error names them."""
    try:
        system.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{os.fspath(path)}, where the {what} belongs, cannot be made ({error.strerror}); name another place"
        ) from error


def require_free(path: str | os.PathLike[str]) -> None:
    """Raises ValueError unless `path` is not there, or an empty folder."""
    if system.exists(path) and not (system.isdir(path) and not system.listdir(path)):
        raise ValueError(f"{os.fspath(path)} exists and is not an empty folder; name another output or remove it first")


def is_hub_id(model: str) -> bool:
    """Whether it names a model of a hub, as ORG/NAME. What is there as a path is that path.

    checkpoints/NAME is always a path, as are names that begin with a dot or a slash and those with no slash or several.
    """
    is_id = _HUB_ID.fullmatch(model) is not None and "--" not in model and ".." not in model
    return is_id and not model.startswith("checkpoints/") and not system.lexists(model)


def install_command(extra: str, root: Path = _ROOT) -> str:
    """The pip command for an extra: the project is on no package index, so the checkout is installed.

    root: where the packages lie, which is the checkout unless they were copied out of it.
    """
    if system.isfile(root / "pyproject.toml"):
        return f"pip install -e {shlex.quote(f'{root}[{extra}]')}"
    return f"pip install -e '.[{extra}]' in a checkout of ferrum_jax"


def require_plot(path: str | os.PathLike[str]) -> None:
    """Raises ValueError unless --plot can draw into `path`: matplotlib and its folder are there, its ending is known.

    Asked before minutes of work.
    """
    ending = os.path.splitext(path)[1].lower()
    if ending not in _PICTURES:
        raise ValueError(f"--plot is {os.fspath(path)!r}; its ending must be one of {', '.join(_PICTURES)}")
    try:
        found = importlib.util.find_spec("matplotlib") is not None
    except ValueError:  # of a module that was set aside
        found = False
    if not found:
        raise ValueError(f"--plot needs matplotlib; {install_command('plot')}")
    require_folder_of(path, "plot")


def is_url(path: str) -> bool:
    return "://" in path


def open_url(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path that it has there.

    Raises ValueError, with what to install or to change, for a URL that cannot be opened.
    """
    try:
        import fsspec
    except ImportError as error:
        raise ValueError(f"{url} needs fsspec; {install_command('store')}") from error
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:  # it says which
        raise ValueError(f"{url} needs a package that is missing: {error}") from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{url} cannot be opened: {error}; give a local path or a URL such as gs://") from error


@contextlib.contextmanager
def errors_naming(url: str) -> Iterator[None]:
    """Errors of a store's client as OSErrors that name the URL: no credentials, no connection, no such bucket."""
    try:
        yield
    except FileExistsError:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no such file or bucket", url) from error
    except Exception as error:
        raise OSError(f"{url}: {error or type(error).__name__}") from error
