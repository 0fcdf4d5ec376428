"""Keys of KV blocks: a chain of digests, equal in every process and after every restart.

    root   = blake2b-128(model fingerprint, adapter, KV dtype, block size, salt)
    key[i] = blake2b-128(the C token ids of block i, extra keys of block i; salted with key[i - 1] or root)
    whole  = blake2b-128(the tokens after the last full block; salted with its key, and of another person)

A key therefore names a block's content and all that stands before it. Only full blocks have chain keys; a
whole prompt has one more. Extra keys carry content that token ids do not show: of each media span that touches
the block its kind, its digest, its start relative to the block and its length.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from ferrum_jax.prompt import MediaSpan

KEY_BYTES = 16


def root_key(fingerprint: bytes, kv_dtype: str, block_size: int, adapter: str = "", salt: bytes = b"") -> bytes:
    """The key before the first block: requests share blocks only where all of these are equal."""
    return blake2b(
        _joined((fingerprint, adapter.encode(), kv_dtype.encode(), str(block_size).encode(), salt)),
        digest_size=KEY_BYTES,
    ).digest()


def extend_keys(
    keys: list[bytes],
    root: bytes,
    token_ids: array[int],
    num_blocks: int,
    block_size: int,
    media: Sequence[MediaSpan] = (),
) -> None:
    """Append to `keys`, the chain so far, those of the following blocks until there are `num_blocks`.

    token_ids: int32, of the whole sequence; block i holds [i * block_size, (i + 1) * block_size).
    media: spans of the same sequence; their order does not matter.
    """
    first = len(keys)
    if first >= num_blocks:
        return
    start, end = first * block_size, num_blocks * block_size
    assert end <= len(token_ids), f"{num_blocks} blocks of {block_size} exceed {len(token_ids)} tokens"
    blocks = struct.iter_unpack(f"{4 * block_size}s", token_ids[start:end].tobytes())
    key = keys[-1] if keys else root
    if not media:
        for (block,) in blocks:
            key = blake2b(block, digest_size=KEY_BYTES, salt=key).digest()
            keys.append(key)
        return
    media = [span for span in media if span.end > start]
    for index, (block,) in enumerate(blocks, first):
        content = block + _extra_keys(media, index * block_size, block_size)
        key = blake2b(content, digest_size=KEY_BYTES, salt=key).digest()
        keys.append(key)


def whole_key(
    parent: bytes, token_ids: array[int], num_full: int, block_size: int, media: Sequence[MediaSpan] = ()
) -> bytes:
    """The key of a whole sequence: of the `num_full` full blocks under `parent` and what follows them, if anything.

    No block has this key, however many tokens follow.
    """
    tail = token_ids[num_full * block_size :].tobytes()
    content = tail + _extra_keys(media, num_full * block_size, block_size)
    return blake2b(content, digest_size=KEY_BYTES, salt=parent, person=b"whole").digest()


def _extra_keys(media: Sequence[MediaSpan], start: int, block_size: int) -> bytes:
    """What the spans add to the key of the block at position `start`; nothing where none touches it."""
    parts: list[bytes] = []
    touching = [span for span in media if span.start < start + block_size and span.end > start]
    for span in sorted(touching, key=lambda span: (span.start, span.length, span.kind, span.digest)):
        parts += (span.kind.encode(), span.digest, struct.pack("<qq", span.start - start, span.length))
    return _joined(parts)


def _joined(parts: Sequence[bytes]) -> bytes:
    """The parts with their lengths before them, so that no two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
