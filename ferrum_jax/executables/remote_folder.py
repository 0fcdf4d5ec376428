"""A folder in an object store, such as gs://bucket/compiled, and the private folder in which its files are kept here.

An object is written by one put, so a reader sees it whole or not at all, and of two writers of a name the last one
stays; both wrote the same program. Who may write there may run code here, as with a local folder that is named.
"""

from __future__ import annotations

import hashlib
import pathlib
from typing import Any

from ferrum_jax.paths import errors_naming, is_url, open_url

FETCHED = "~/.cache/ferrum_jax"  # where a folder for each URL is made


class FolderBehindUrl:
    """Files of a folder behind a URL, by name. Raises ValueError where fsspec or the URL's own package is missing."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") if not url.endswith("://") else url
        self._system, self._root = open_url(url)

    def read(self, name: str) -> bytes | None:
        """The file's bytes; None if there is no such file. Raises OSError where the store does not answer."""
        try:
            with errors_naming(f"{self.url}/{name}"):
                return self._system.cat_file(self._path(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Puts the whole file. Raises OSError where that cannot be done."""
        with errors_naming(f"{self.url}/{name}"):
            self._system.pipe_file(self._path(name), data)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def remote_of(path: str) -> FolderBehindUrl | None:
    """The folder that a URL names; None of a local path, and of a file:// URL, which is one."""
    return FolderBehindUrl(path) if is_url(path) and not path.lower().startswith(("file://", "local://")) else None


def local_folder(path: Any) -> pathlib.Path:
    """A local folder as it is; of a URL the one where its files are kept on this machine.

    Each URL has one of its own: what came from a remote is never found by who did not name it.
    """
    text = str(path)
    if not is_url(text):
        return pathlib.Path(text).expanduser()
    scheme, _, rest = text.partition("://")
    if scheme.lower() in ("file", "local"):
        return pathlib.Path(rest)
    name = hashlib.blake2b(text.rstrip("/").encode(), digest_size=12).hexdigest()
    return pathlib.Path(FETCHED).expanduser() / f"fetched-{name}"
