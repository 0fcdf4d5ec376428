"""An object of a KV tier: what a pool keeps under a few keys that follow each other, checked by itself.

    magic, sha256 of all behind it, length of the header, header in JSON, arrays one after the other

The header says what the object is: the identity of the model and its pools, the pool, the keys, the key before them, a
digest of the token ids, and each array's name, dtype and shape. A reader knows it before it reads, and takes nothing
that has another. A name says no more than where to look.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FORMAT = 1
_MAGIC = b"ferrumKV"
_DIGEST_BYTES, _LENGTH_BYTES = 32, 4
_BODY = len(_MAGIC) + _DIGEST_BYTES + _LENGTH_BYTES


def header_of(
    *, identity: Mapping[str, Any], pool: str, keys: Sequence[bytes], parent: bytes, token_ids: bytes, arrays: Any
) -> dict[str, Any]:
    """A header. token_ids: int32, of the keys' blocks. arrays: by name what has a dtype and the shape of all rows."""
    return {
        "format": FORMAT,
        "identity": dict(identity),
        "pool": pool,
        "parent": parent.hex(),
        "tokens": hashlib.sha256(token_ids).hexdigest(),
        "keys": [key.hex() for key in keys],
        "arrays": {name: [str(array.dtype), list(array.shape)] for name, array in arrays.items()},
    }


def encode(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """The object's bytes. arrays: as the header lists them, each with rows in the order of its keys."""
    text = json.dumps(header, sort_keys=True).encode()
    parts = [len(text).to_bytes(_LENGTH_BYTES, "little"), text]
    parts += [np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data for name in header["arrays"]]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join([_MAGIC, digest.digest(), *parts])


def decode(content: bytes, header: Mapping[str, Any], dtypes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of an object with this header, over its bytes. dtypes: of the arrays.

    Raises ValueError that says what is wrong: damaged, cut off, or of another model, block or form.
    """
    whole = memoryview(content)
    if whole[: len(_MAGIC)] != _MAGIC:
        raise ValueError("it is no object of a KV tier")
    digest, checked = whole[len(_MAGIC) : _BODY - _LENGTH_BYTES], whole[_BODY - _LENGTH_BYTES :]
    if hashlib.sha256(checked).digest() != digest:
        raise ValueError(f"it is damaged or cut off: its {len(content)} bytes have another digest")
    end = _BODY + int.from_bytes(whole[_BODY - _LENGTH_BYTES : _BODY], "little")
    _refuse_other(json.loads(bytes(whole[_BODY:end])), header)
    arrays = {}
    for name, (_, shape) in header["arrays"].items():
        count, dtype = math.prod(shape), np.dtype(dtypes[name])
        arrays[name] = np.frombuffer(content, dtype, count, end).reshape(shape)
        end += count * dtype.itemsize
    return arrays


def _refuse_other(found: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Raises ValueError for the first fields that differ, of the identity first."""
    for there, here in ((found.get("identity", {}), header["identity"]), (found, header)):
        wrong = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
        if wrong:
            texts = (f"{name} is {str(there.get(name))[:80]} there, {str(here.get(name))[:80]} here" for name in wrong)
            raise ValueError(f"it is of another engine or block: {'; '.join(texts)}")
