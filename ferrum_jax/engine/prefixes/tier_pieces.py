"""Pieces: how what pools keep is cut into objects of a KV tier, and the form of an object.

    full blocks of a cache group    up to _TOKENS of them, from each multiple of _TOKENS to the next or to an end
    snapshots of recurrent states   one each
    a whole prompt                  its tail in each group, its last hidden state, its snapshot

A piece goes by its last key, which names all tokens before it. So prompts that share a beginning share its pieces, and
where one ends within a piece, the next turn of a chat finds what there was by then.

An object is a sha256 of all behind it, the length of its header, the header in JSON, and arrays one after the other.
The header says what they are. A reader knows it before it reads and takes no other: a name only says where to look.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.core.request import Request
from ferrum_jax.engine.prefixes.saved_prefixes import PrefixCache
from ferrum_jax.io.ints import first_needed
from ferrum_jax.runtime.compile.environment import Environment

_FORMAT = 1
_TOKENS = 256  # of a piece, or one block if that has more
_DIGEST, _LENGTH = 32, 4  # bytes


class TierPiece(NamedTuple):
    """Rows of one pool. index: of the pool, as in `plan.Copy`. parent: the key before, b"" at the beginning."""

    index: int
    stem: str
    keys: list[bytes]
    parent: bytes
    token_ids: bytes  # int32


class Pieces:
    """The pieces of one engine's requests."""

    def __init__(self, prefixes: PrefixCache) -> None:
        self._prefixes, self._copies, sizes = prefixes, prefixes.copies, prefixes.caches[0].sizes
        self._block_size, self._windows = sizes.block_size, sizes.windows
        self._num_blocks = max(1, _TOKENS // sizes.block_size)
        self.identity = prefixes.identity() | {"format": _FORMAT}
        if prefixes.invariant:  # bits are promised where machine, versions and mesh are equal
            mesh = self._copies.mesh
            environment = dataclasses.asdict(Environment.of_device(mesh.devices.flat[0]))
            self.identity |= environment | {"mesh": dict(mesh.shape)}
        self._rows: dict[int, dict[str, jax.ShapeDtypeStruct]] = {}  # by pool: its arrays by name, of one row
        for index, _ in prefixes.caches[0].numbered_pools():
            shapes = jax.tree.leaves(self._copies.shapes(index))
            self._rows[index] = dict(zip(prefixes.names(index), shapes, strict=True))

    def num_bytes(self, piece: TierPiece) -> int:
        """Bytes of its arrays."""
        row = sum(shape.size * shape.dtype.itemsize for shape in self._rows[piece.index].values())
        return row * len(piece.keys)

    def encode(self, piece: TierPiece, arrays: Sequence[np.ndarray]) -> bytes:
        """Its object. arrays: in the order of their names, with rows in the order of its keys."""
        header = json.dumps(self._header(piece)).encode()
        parts = [len(header).to_bytes(_LENGTH, "little"), header]
        parts += [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        return b"".join([digest.digest(), *parts])

    def decode(self, piece: TierPiece, content: bytes) -> dict[str, np.ndarray]:
        """The arrays of its object by name, over these bytes. Raises ValueError that says what is wrong with them."""
        whole = memoryview(content)
        if hashlib.sha256(whole[_DIGEST:]).digest() != whole[:_DIGEST]:
            raise ValueError(f"it is damaged or cut off: its {len(content)} bytes have another digest")
        end = _DIGEST + _LENGTH + int.from_bytes(whole[_DIGEST : _DIGEST + _LENGTH], "little")
        there, here = json.loads(bytes(whole[_DIGEST + _LENGTH : end])), self._header(piece)
        wrong = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
        if wrong:
            texts = (f"{name} is {str(there.get(name))[:80]} there, {str(here.get(name))[:80]} here" for name in wrong)
            raise ValueError(f"it is of another engine or block: {'; '.join(texts)}")
        arrays = {}
        for name, (dtype, shape) in here["arrays"].items():
            arrays[name] = np.frombuffer(content, dtype, math.prod(shape), end).reshape(shape)
            end += arrays[name].nbytes
        return arrays

    def _header(self, piece: TierPiece) -> dict[str, Any]:
        rows = self._rows[piece.index].items()
        return self.identity | {
            "pool": self._prefixes.name(piece.index),
            "parent": piece.parent.hex(),
            "tokens": hashlib.sha256(piece.token_ids).hexdigest(),
            "keys": [key.hex() for key in piece.keys],
            "arrays": {name: [str(row.dtype), [len(piece.keys), *row.shape[1:]]] for name, row in rows},
        }

    def computed(self, request: Request) -> Iterator[TierPiece]:
        """The pieces of a request's tokens but the last; of a prompt that has just ended, of the whole one too."""
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

    def missing(self, request: Request, is_known: Callable[[str], bool]) -> tuple[list[TierPiece], int]:
        """Known pieces that a request lacks, its first tokens' first, and the tokens that need not be computed then."""
        cache = max(self._prefixes.caches, key=lambda cache: cache.num_hit_tokens(request))
        keys, size, states = cache.keys_of(request), self._block_size, cache.states
        rows = [self._row(cache, request, index, is_known) for index in self._copies.of_blocks]
        groups = list(zip(self._windows, rows, strict=True))

        def resumes(end: int) -> bool:
            stem = self._stem(self._copies.of_states, keys[end - 1])
            if states is not None and not (states.pool.find(keys[end - 1]) or is_known(stem)):
                return False
            return all(all(row[first_needed(w, end * size, size) : end]) for w, row in groups if w is not None)

        most = min((row.index(None) for w, row in groups if w is None and None in row), default=len(keys))
        end = next((end for end in range(most, 0, -1) if resumes(end)), 0)
        found: dict[str, TierPiece] = {}
        for window, row in groups:
            needed = row[first_needed(window, end * size, size) : end]
            found |= {piece.stem: piece for piece in needed if isinstance(piece, TierPiece)}
        if end and states is not None and not states.pool.find(keys[end - 1]):
            piece = self._blocks(cache, request, self._copies.of_states, end - 1, end)
            found[piece.stem] = piece
        num_tokens = min(end, request.hit_limit // size) * size
        if end == len(keys) and cache.prompts.keeps(request):
            whole = list(self._whole(cache, request, len(request.token_ids)))
            if all(is_known(piece.stem) for piece in whole):
                found |= {piece.stem: piece for piece in whole}
                num_tokens = len(request.token_ids)
        return list(found.values()), max(num_tokens - cache.num_hit_tokens(request), 0)

    def _row(
        self, cache: CacheManager, request: Request, index: int, is_known: Callable[[str], bool]
    ) -> list[TierPiece | bool | None]:
        """For each full block of a request True if it is cached, else the longest known piece that has it."""
        keys = cache.keys_of(request)
        row: list[TierPiece | bool | None] = [cache.has(index, key) or None for key in keys]
        for start in range(0, len(keys), self._num_blocks):
            ends = range(min(start + self._num_blocks, len(keys)), start, -1)
            end = next((end for end in ends if is_known(self._stem(index, keys[end - 1]))), start)
            if not all(row[start:end]):
                piece = self._blocks(cache, request, index, start, end)
                row[start:end] = [is_there or piece for is_there in row[start:end]]
        return row

    def _whole(self, cache: CacheManager, request: Request, num_tokens: int) -> Iterator[TierPiece]:
        """The pieces of a whole prompt beside its full blocks."""
        start = num_tokens // self._block_size
        key, rest = cache.key_of_whole(request, num_tokens), request.token_ids[start * self._block_size : num_tokens]
        states = [] if cache.states is None else [self._copies.of_states]
        prompts = [] if cache.prompts.slots is None else [self._copies.of_prompts]
        for index in [*([*self._copies.of_blocks, *states] if rest else ()), *prompts]:
            yield self._piece(cache, request, index, [key], start, rest.tobytes())

    def _blocks(self, cache: CacheManager, request: Request, index: int, start: int, end: int) -> TierPiece:
        token_ids = request.token_ids[start * self._block_size : end * self._block_size].tobytes()
        return self._piece(cache, request, index, cache.keys_of(request)[start:end], start, token_ids)

    def _piece(
        self, cache: CacheManager, request: Request, index: int, keys: list[bytes], start: int, token_ids: bytes
    ) -> TierPiece:
        """start: blocks before it."""
        parent = cache.keys_of(request)[start - 1] if start else b""
        return TierPiece(index, self._stem(index, keys[-1]), keys, parent, token_ids)

    def _stem(self, index: int, key: bytes) -> str:
        return f"{key.hex()}.{self._prefixes.name(index)}"
