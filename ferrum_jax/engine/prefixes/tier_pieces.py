"""Pieces: how what pools keep is cut into objects of a KV tier.

    full blocks of a cache group    up to _TOKENS of them, from each multiple of _TOKENS to the next or to an end
    snapshots of recurrent states   one each
    a whole prompt                  its tail in each group, its last hidden state, its snapshot

A piece goes by its last key, which names all tokens before it. So prompts that share a beginning share its pieces, and
where one ends within a piece, the next turn of a chat finds what there was by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from checkpoints.kv_objects import header_of
from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.core.request import Request
from ferrum_jax.engine.prefixes.saved_prefixes import PrefixCache
from ferrum_jax.io.ints import first_needed

_TOKENS = 256  # of a piece, or one block if that has more


class Piece(NamedTuple):
    """Rows of one pool. index: of the pool, as in `plan.Copy`. parent: the key before the first one."""

    index: int
    stem: str
    keys: list[bytes]
    parent: bytes
    token_ids: bytes  # int32


class Pieces:
    """The pieces of one engine's requests."""

    def __init__(self, prefixes: PrefixCache) -> None:
        self._prefixes, self._copies = prefixes, prefixes.copies
        sizes = prefixes.caches[0].sizes
        self._block_size, self._windows = sizes.block_size, sizes.windows
        self._num_blocks = max(1, _TOKENS // sizes.block_size)
        self.identity = prefixes.identity()
        self._rows: dict[int, dict[str, jax.ShapeDtypeStruct]] = {}  # by pool: its arrays by name, of one row
        for index, _ in prefixes.caches[0].numbered_pools():
            shapes = jax.tree.leaves(self._copies.shapes(index))
            self._rows[index] = dict(zip(prefixes.names(index), shapes, strict=True))

    def num_bytes(self, piece: Piece) -> int:
        row = sum(shape.size * shape.dtype.itemsize for shape in self._rows[piece.index].values())
        return row * len(piece.keys)

    def dtypes(self, piece: Piece) -> dict[str, Any]:
        """The dtypes of its arrays, by name."""
        return {name: shape.dtype for name, shape in self._rows[piece.index].items()}

    def header(self, piece: Piece) -> dict[str, Any]:
        """The header of its object."""
        arrays = {
            name: jax.ShapeDtypeStruct((len(piece.keys), *row.shape[1:]), row.dtype)
            for name, row in self._rows[piece.index].items()
        }
        return header_of(
            identity=self.identity,
            pool=self._prefixes.name(piece.index),
            keys=piece.keys,
            parent=piece.parent,
            token_ids=piece.token_ids,
            arrays=arrays,
        )

    def of_computed(self, request: Request) -> Iterator[Piece]:
        """The pieces of what a request has computed; of a prompt that has just ended, those of the whole prompt too.

        Its last token is not computed.
        """
        cache = self._prefixes.caches[request.shard]
        num_tokens = len(request.token_ids) - 1
        num_blocks = num_tokens // self._block_size
        for index in self._copies.of_blocks:
            for start in range(0, num_blocks, self._num_blocks):
                yield self._blocks(cache, request, index, start, min(start + self._num_blocks, num_blocks))
        if cache.states is not None:
            for end, key in enumerate(cache.keys_of(request)[:num_blocks], 1):
                if cache.states.pool.find(key):
                    yield self._blocks(cache, request, self._copies.of_states, end - 1, end)
        if num_tokens == request.num_prompt_tokens:
            yield from self._whole(cache, request, num_tokens)

    def missing(self, request: Request, is_known: Callable[[str], bool]) -> tuple[list[Piece], int]:
        """Known pieces that a request lacks, its first tokens' first, and the tokens that need not be computed then."""
        cache = max(self._prefixes.caches, key=lambda cache: cache.num_hit_tokens(request))
        num_hit, keys = cache.num_hit_tokens(request), cache.keys_of(request)
        covers = [self._covering(cache, request, index, is_known) for index in self._copies.of_blocks]
        end = self._end(cache, keys, covers, is_known)
        found: dict[str, Piece] = {}
        for group, cover in enumerate(covers):
            first = first_needed(self._windows[group], end * self._block_size, self._block_size)
            lacking = [piece for i in range(first, end) if (piece := cover[i]) and not cache.has(group, keys[i])]
            found |= {piece.stem: piece for piece in lacking}
        if end and cache.states is not None and not cache.states.pool.find(keys[end - 1]):
            piece = self._blocks(cache, request, self._copies.of_states, end - 1, end)
            found[piece.stem] = piece
        num_tokens = min(end, request.hit_limit // self._block_size) * self._block_size
        if end == len(keys) and cache.prompts.keeps(request):
            whole = list(self._whole(cache, request, len(request.token_ids)))
            if all(is_known(piece.stem) for piece in whole):
                found |= {piece.stem: piece for piece in whole}
                num_tokens = len(request.token_ids)
        return list(found.values()), max(num_tokens - num_hit, 0)

    def _end(
        self, cache: CacheManager, keys: list[bytes], covers: list[list[Piece | None]], is_known: Callable[[str], bool]
    ) -> int:
        """The most blocks at whose end every group resumes, with what is known."""
        states = cache.states

        def resumes(end: int) -> bool:
            key = keys[end - 1]
            if states is not None and not (states.pool.find(key) or is_known(self._stem(self._copies.of_states, key))):
                return False
            return all(
                covers[group][i] or cache.has(group, keys[i])
                for group, window in enumerate(self._windows)
                if window is not None
                for i in range(first_needed(window, end * self._block_size, self._block_size), end)
            )

        end = len(keys)
        for group, window in enumerate(self._windows):
            if window is None:
                there = (bool(covers[group][i]) or cache.has(group, keys[i]) for i in range(end))
                end = next((i for i, is_there in enumerate(there) if not is_there), end)
        return next((shorter for shorter in range(end, 0, -1) if resumes(shorter)), 0)

    def _covering(
        self, cache: CacheManager, request: Request, index: int, is_known: Callable[[str], bool]
    ) -> list[Piece | None]:
        """For each full block of a request the longest known piece that has it."""
        keys = cache.keys_of(request)
        found: list[Piece | None] = [None] * len(keys)
        for start in range(0, len(keys), self._num_blocks):
            for end in range(min(start + self._num_blocks, len(keys)), start, -1):
                if is_known(self._stem(index, keys[end - 1])):
                    found[start:end] = [self._blocks(cache, request, index, start, end)] * (end - start)
                    break
        return found

    def _whole(self, cache: CacheManager, request: Request, num_tokens: int) -> Iterator[Piece]:
        """What a whole prompt has beside its full blocks."""
        start = num_tokens // self._block_size
        key, rest = cache.key_of_whole(request, num_tokens), request.token_ids[start * self._block_size : num_tokens]
        indices = [*self._copies.of_blocks, *([] if cache.states is None else [self._copies.of_states])]
        for index in indices if rest else ():
            yield self._piece(cache, request, index, [key], start, rest.tobytes())
        if cache.prompts.slots is not None:
            yield self._piece(cache, request, self._copies.of_prompts, [key], start, rest.tobytes())

    def _blocks(self, cache: CacheManager, request: Request, index: int, start: int, end: int) -> Piece:
        token_ids = request.token_ids[start * self._block_size : end * self._block_size].tobytes()
        return self._piece(cache, request, index, cache.keys_of(request)[start:end], start, token_ids)

    def _piece(
        self, cache: CacheManager, request: Request, index: int, keys: list[bytes], start: int, token_ids: bytes
    ) -> Piece:
        """start: blocks before it."""
        parent = cache.keys_of(request)[start - 1] if start else cache.root_of(request)
        return Piece(index, self._stem(index, keys[-1]), keys, parent, token_ids)

    def _stem(self, index: int, key: bytes) -> str:
        return f"{key.hex()}.{self._prefixes.name(index)}"
