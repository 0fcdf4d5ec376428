"""The order of rows: rows that share a prefix are neighbours, and rows of equal prefixes are sorted by length.

Each prompt gets a chain of keys, hashes of its first 128, 256, ... 16,384 bytes. Sorted by their chains, rows lie as
in a walk through the trie of prefixes: every shared prefix is one run of neighbours, so a pool that holds few
prefixes still hits each but once. A key that only one row has is no shared prefix and does not count. Rows that
share nothing are sorted by length alone, so that rows which run together end together. Rows of one adapter are
neighbours, so that few slots do, and few are read in a step. Rows that ask for a vector come last, since an engine does
one or the other. A row of several prompts stands where its first one does.

Where rows have priorities, or the job may be stopped before it is done, parts of the job come by priority, then in the
order of the input, and only the rows of one part lie as above.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping

import numpy as np

from ferrum_jax.batch.input.formats import BadRow, Row
from ferrum_jax.inputs.prompt import Prompt, PromptParts, take_apart
from ferrum_jax.openai.asked import GENERATES, TRANSCRIBES

DEPTHS = tuple(128 << k for k in range(8))  # bytes of a prompt; a token id counts for four
_MAX_LENGTH = 2**32 - 1
_UNLIMITED_TOKENS = 1024  # how many a row without max_tokens is expected to generate


class Features:
    """The values that decide the order of rows, row by row."""

    def __init__(self) -> None:
        self._keys = array("I")  # [rows, depths]; keys that are equal by chance only make a worse order
        self._lengths = array("I")
        self._reads, self._writes = array("I"), array("I")
        self._priorities = array("i")
        self._kinds = bytearray()

    def add(self, row: Row | BadRow) -> None:
        if isinstance(row, BadRow):
            self._keys.extend([0] * len(DEPTHS))
            for column in (self._lengths, self._reads, self._writes, self._priorities, self._kinds):
                column.append(0)
            return
        contents = [_content(prompt) for prompt in row.prompts]
        self._keys.extend(_chain(*contents[0]))
        max_tokens = _UNLIMITED_TOKENS if row.asked.max_tokens is None else row.asked.max_tokens
        length = sum(len(content) // 4 + max_tokens for _, content in contents)
        self._lengths.append(min(length, _MAX_LENGTH))
        choices = row.asked.n if row.kind == GENERATES else int(row.kind == TRANSCRIBES)
        self._reads.append(min(sum(len(content) // 4 for _, content in contents) or 1, _MAX_LENGTH))
        self._writes.append(min(max_tokens * len(contents) * choices, _MAX_LENGTH))
        self._priorities.append(row.priority)
        self._kinds.append(row.kind)

    def extend(self, other: Features) -> None:
        """Append the features of the rows that follow."""
        self._keys.extend(other._keys)
        self._lengths.extend(other._lengths)
        self._reads.extend(other._reads)
        self._writes.extend(other._writes)
        self._priorities.extend(other._priorities)
        self._kinds.extend(other._kinds)

    @property
    def kinds(self) -> np.ndarray:
        """[rows] uint8: `Row.kind`, 0 of bad rows."""
        return np.frombuffer(self._kinds, np.uint8)

    @property
    def priorities(self) -> np.ndarray:
        """[rows] int32: lower runs first; 0 of bad rows."""
        return np.frombuffer(self._priorities, np.int32)

    @property
    def tokens(self) -> np.ndarray:
        """[rows, 2] uint32: about how many tokens a row reads, and how many it may write; 0 of bad rows."""
        return np.stack([np.frombuffer(each, np.uint32) for each in (self._reads, self._writes)], axis=1)

    def order(self, adapters: np.ndarray) -> np.ndarray:
        """[rows] uint32: the indices in the order in which rows should run. adapters: [rows] uint64, 0 for none."""
        keys = np.frombuffer(self._keys, np.uint32).reshape(-1, len(DEPTHS))
        for depth in range(len(DEPTHS)):
            _, places, counts = np.unique(keys[:, depth], return_inverse=True, return_counts=True)
            keys[counts[places] == 1, depth] = 0
        columns = [np.frombuffer(self._lengths, np.uint32), *(keys[:, depth] for depth in reversed(range(len(DEPTHS))))]
        columns += [adapters, self.kinds]
        return np.lexsort(columns).astype(np.uint32)


def by_priority(order: np.ndarray, priorities: np.ndarray, size: int, *, in_turn: bool) -> np.ndarray:
    """[rows to run]: the rows by priority, in parts of `size` rows; those of a part lie as they are best run.

    order: [rows to run], as they are best run. priorities: [rows]. in_turn: the parts come in the order of the input.
    """
    places = np.lexsort((order, priorities[order])) if in_turn else np.argsort(priorities[order], kind="stable")
    parts = np.arange(len(order)) // size
    found = places[np.lexsort((places, priorities[order[places]], parts))]
    return order[found]


def _content(content: Prompt) -> tuple[bytes, bytes]:
    """A prompt's salt, and its content as bytes that begin alike where token ids begin alike."""
    salt = b""
    if isinstance(content, Mapping) and "document" in content:  # a pair
        return content.get("cache_salt", "").encode(), f"{content['query']}\0{content['document']}".encode()
    if isinstance(content, Mapping | PromptParts):
        parts = take_apart(content)
        salt, content = parts.cache_salt.encode(), parts.content
    if isinstance(content, str):
        return salt, content.encode()
    if isinstance(content, array):
        return salt, content.tobytes()
    return salt, b"".join(f"{m['role']}\0{m['content']}\0".encode() for m in content)  # type: ignore[index]


def _chain(salt: bytes, content: bytes) -> list[int]:
    """The key of each depth that the content reaches, 0 beyond."""
    keys, start = [0] * len(DEPTHS), 0
    state = hashlib.blake2b(digest_size=4, key=salt[:64])
    for place, depth in enumerate(DEPTHS):
        if len(content) < depth:
            break
        state.update(content[start:depth])
        keys[place], start = int.from_bytes(state.copy().digest(), "little"), depth
    return keys
