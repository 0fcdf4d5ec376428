"""RequestKeys: under which keys a request's blocks, and its prompt as a whole, are found."""

from __future__ import annotations

import functools

from ferrum_jax.request import Request
from ferrum_jax.scheduling.prefix import extend_keys, root_key, whole_key


class RequestKeys:
    """The keys of one model, KV dtype and block size; a request remembers those of its full blocks."""

    def __init__(self, *, fingerprint: bytes, kv_dtype: str, block_size: int) -> None:
        self._block_size = block_size
        # most requests have no adapter and no salt
        self._root_key = functools.lru_cache(maxsize=1024)(
            functools.partial(root_key, fingerprint, kv_dtype, block_size)
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

    def of_whole(self, request: Request) -> bytes:
        """The key of all of the request's tokens, the partial block at their end included."""
        num_full = len(request.token_ids) // self._block_size
        parent = self.of_blocks(request, num_full)[num_full - 1] if num_full else self._root(request)
        return whole_key(parent, request.token_ids, num_full, self._block_size, request.media)

    def _root(self, request: Request) -> bytes:
        return self._root_key(request.adapter, request.cache_salt)
