"""API keys: who may ask, compared in constant time, and whose cached prefixes they see.

A file has a key a line, then perhaps a name and the name of a cache; `#` begins a comment:

    sk-3f9a...                   # its own cache, named by its place
    sk-77b0... alice
    sk-c1d2... bob   research    # keys of one cache share cached prefixes
"""

import base64
import contextlib
import dataclasses
import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

_LEAST_CHARACTERS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiKey:
    """digest: of the secret. name: for metrics and turns. salt: of its prompts' blocks, which only its cache has."""

    digest: bytes
    name: str
    salt: str

    @property
    def owner(self) -> str:
        """Whose are the files and batches that are asked for with it: tells nothing of the secret, "" without one."""
        return hashlib.blake2b(self.digest, digest_size=16).hexdigest() if self.digest else ""


OPEN = ApiKey(digest=b"", name="", salt="")  # of a server without keys


def read_keys(path: str | Path) -> tuple[ApiKey, ...]:
    """The keys of a file. Raises ValueError, naming the line, for what is none; a secret is never in the message."""
    found: list[ApiKey] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            found.append(_key(words, f"{path}, line {number}", len(found)))
    if not found:
        raise ValueError(f"{path} holds no keys; write one a line")
    for what, values in (("key", [key.digest for key in found]), ("name", [key.name for key in found])):
        if len(set(values)) < len(values):
            raise ValueError(f"{path} has a {what} twice; give each once")
    return tuple(found)


def _key(words: Sequence[str], where: str, place: int) -> ApiKey:
    if len(words) > 3:
        raise ValueError(f"{where} has {len(words)} words; it must have a key, and may have a name and a cache")
    secret, name, cache = (*words, *("", "")[: 3 - len(words)])[:3] if len(words) < 3 else words
    if len(secret) < _LEAST_CHARACTERS:
        raise ValueError(f"{where}: the key has {len(secret)} characters; give it {_LEAST_CHARACTERS} or more")
    digest = _digest(secret)
    salt = f"cache {cache}" if cache else f"key {digest.hex()}"
    return ApiKey(digest=digest, name=name or f"key-{place + 1}", salt=salt)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def find_key(keys: Sequence[ApiKey], authorization: str | None, *, basic: bool = False) -> ApiKey | None:
    """The key of a header `Authorization: Bearer KEY`. All are compared, so that time tells nothing.

    basic: a browser's way is taken too, with the key as password and any name.
    """
    scheme, _, secret = (authorization or "").partition(" ")
    if basic and scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            scheme, secret = "bearer", base64.b64decode(secret, validate=True).decode().partition(":")[2]
    digest = _digest(secret.strip())
    found = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found if scheme.lower() == "bearer" else None
