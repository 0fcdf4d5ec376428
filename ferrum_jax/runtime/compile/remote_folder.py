"""A folder in an object store, such as gs://bucket/compiled, and the private folder in which its files are kept here.

An object is written by one put, so a reader sees it whole or not at all, and of two writers of a name the last one
stays; both wrote the same program. Who may write there may run code here, as with a local folder that is named.
"""

import hashlib
import pathlib
from typing import Any

from ferrum_jax.io.files.store import UrlStore
from ferrum_jax.io.paths import is_url

FETCHED = "~/.cache/ferrum_jax"  # where a folder for each URL is made


def remote_of(path: str) -> UrlStore | None:
    """The folder that a URL names; None of a local path, and of a file:// URL, which is one."""
    return UrlStore.of(path) if is_url(path) and not path.lower().startswith(("file://", "local://")) else None


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
