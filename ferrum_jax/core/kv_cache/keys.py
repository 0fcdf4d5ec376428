"""Keys of KV blocks and of requests: a chain of digests, equal in every process and after every restart.

    root   = blake2b-128(model fingerprint, adapter, KV dtype, block size, salt)
    key[i] = blake2b-128(the C token ids of block i, extra keys of block i; salted with key[i - 1] or root)
    whole  = blake2b-128(the tokens after the last full block; salted with its key, and of another person)

A key therefore names a block's content and all that stands before it. Only full blocks have chain keys; a
whole prompt has one more. Extra keys carry content that token ids do not show: of each media span that touches
the block its kind, its digest, its start relative to the block and its length.
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from ferrum_jax.core.request import Request
from ferrum_jax.inputs.prompt import MediaSpan

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
    """The spans' bytes in the key of the block at position `start`; empty where none touches it."""
    parts: list[bytes] = []
    touching = [span for span in media if span.start < start + block_size and span.end > start]
    for span in sorted(touching, key=lambda span: (span.start, span.length, span.kind, span.digest)):
        parts += (span.kind.encode(), span.digest, struct.pack("<qq", span.start - start, span.length))
    return _joined(parts)


def _joined(parts: Sequence[bytes]) -> bytes:
    """The parts with their lengths before them, so that no two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


class RequestKeys:
    """The keys of one model, KV dtype and block size; a request remembers those of its full blocks."""

    def __init__(self, *, fingerprint: bytes, kv_dtype: str, block_size: int) -> None:
        self._block_size, self._kv_dtype = block_size, kv_dtype
        self.renew(fingerprint)

    def renew(self, fingerprint: bytes) -> None:
        """Other weights: no key is what it was. Requests that remember theirs must forget them."""
        # most requests have no adapter and no salt
        self._root_key = functools.lru_cache(maxsize=1024)(
            functools.partial(root_key, fingerprint, self._kv_dtype, self._block_size)
        )

    def of_blocks(self, request: Request, num_blocks: int) -> list[bytes]:
        """The keys of at least the first `num_blocks` blocks, which must be full."""
        keys = request.keys
        if len(keys) < num_blocks:
            root = b"" if keys else self._root(request)
            extend_keys(keys, root, request.token_ids, num_blocks, self._block_size, request.media)
        return keys

    def of_prefix(self, request: Request, num_tokens: int) -> bytes:
        """The key of the first `num_tokens`: of the block that ends there, or of the whole request."""
        num_full, rest = divmod(num_tokens, self._block_size)
        assert rest == 0 or num_tokens == len(request.token_ids), f"{num_tokens} tokens end within a block"
        return self.of_whole(request) if rest else self.of_blocks(request, num_full)[num_full - 1]

    def of_whole(self, request: Request, num_tokens: int | None = None) -> bytes:
        """The key of the request's first tokens, or of all, the partial block at their end included."""
        num_tokens = len(request.token_ids) if num_tokens is None else num_tokens
        num_full = num_tokens // self._block_size
        parent = self.of_blocks(request, num_full)[num_full - 1] if num_full else self._root(request)
        return whole_key(parent, request.token_ids[:num_tokens], num_full, self._block_size, request.media)

    def all_of(self, request: Request) -> list[bytes]:
        """Every key under which something of the request may be kept: of its full blocks and of its whole prompt."""
        keys = self.of_blocks(request, len(request.token_ids) // self._block_size)
        return [*keys, self.of_whole(request, request.num_prompt_tokens)]

    def _root(self, request: Request) -> bytes:
        return self._root_key(request.adapter, request.cache_salt)
