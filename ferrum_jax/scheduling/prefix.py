"""Keys of KV blocks: a chain of digests, equal in every process and after every restart.

    root   = blake2b-128(model fingerprint, adapter, KV dtype, block size, salt)
    key[i] = blake2b-128(key[i - 1] or root, the C token ids of block i, extra keys of block i)

A key therefore names a block's content and all that stands before it. Only full blocks have keys. Extra
keys carry content that token ids do not show (digests of images and their spans).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b

KEY_BYTES = 16


def root_key(*, fingerprint: bytes, kv_dtype: str, block_size: int, adapter: str = "", salt: bytes = b"") -> bytes:
    """The key before the first block: requests share blocks only where all of these are equal."""
    return blake2b(
        _joined((fingerprint, adapter.encode(), kv_dtype.encode(), str(block_size).encode(), salt)),
        digest_size=KEY_BYTES,
    ).digest()


def extend_keys(
    keys: list[bytes],
    root: bytes,
    token_ids: Sequence[int],
    num_blocks: int,
    block_size: int,
    extra_keys: Mapping[int, Sequence[bytes]] | None = None,
) -> None:
    """Append to `keys`, the chain so far, those of the following blocks until there are `num_blocks`.

    token_ids: of the whole sequence, each an int32; block i holds [i * block_size, (i + 1) * block_size).
    extra_keys: for a block's index, in their order, what else its content is.
    """
    first = len(keys)
    if first >= num_blocks:
        return
    start, end = first * block_size, num_blocks * block_size
    assert end <= len(token_ids), f"{num_blocks} blocks of {block_size} exceed {len(token_ids)} tokens"
    data = struct.pack(f"<{end - start}i", *token_ids[start:end])
    size = 4 * block_size
    key = keys[-1] if keys else root
    if not extra_keys:
        for offset in range(0, len(data), size):
            key = blake2b(key + data[offset : offset + size], digest_size=KEY_BYTES).digest()
            keys.append(key)
        return
    for index in range(first, num_blocks):
        offset = (index - first) * size
        extra = _joined(extra_keys.get(index, ()))
        key = blake2b(key + data[offset : offset + size] + extra, digest_size=KEY_BYTES).digest()
        keys.append(key)


def _joined(parts: Sequence[bytes]) -> bytes:
    """The parts with their lengths before them, so that no two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
