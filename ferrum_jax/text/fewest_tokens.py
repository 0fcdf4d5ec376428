"""FewestTokens: how few tokens a text can have, from its length alone.

A token of n bytes spreads over its bytes: 1 / n of it for each. In a vocabulary whose longest entry with byte b has
longest[b] bytes, a byte b of a text stands for at least 1 / longest[b] of a token, whatever the tokens are. That holds
for byte-level vocabularies, whose entries together are the text's bytes. Where bytes are a fallback, characters are
counted in the same way. Nothing is known of other tokenizers: one token may stand for any text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tokenizers

from ferrum_jax.text.byte_alphabet import BYTES
from ferrum_jax.text.cuts import fuses_unknown, steps_of

_COMPOSED = 3  # NFC turns at most this many bytes into one. Source: Unicode's FAQ on normalisation
_ROUNDING = 1e-9
_PART = 1 << 20


class FewestTokens:
    """longest: characters of the vocabulary's longest entry."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        rules, entries = json.loads(library.to_str()), library.get_vocab(with_added_tokens=True)
        self.longest = max(map(len, entries), default=1)
        model, added = rules["model"], rules.get("added_tokens") or ()
        normalisers = steps_of(rules.get("normalizer"), "normalizers")
        steps = steps_of(rules.get("pre_tokenizer"), "pretokenizers")
        takes_spaces = any(token["lstrip"] or token["rstrip"] for token in added)  # any number of them
        is_known = model["type"] == "BPE" and not fuses_unknown(model) and not takes_spaces
        self._composes = bool(normalisers)
        self._shares: np.ndarray | None = None  # [256] float64: of a token, by byte
        if is_known and any(step["type"] == "ByteLevel" for step in steps) and _spells_bytes(entries, normalisers):
            self._shares = _shares(entries, {token["content"] for token in added})
        self._counts_characters = bool(is_known and model.get("byte_fallback") and all(map(_shortens_not, normalisers)))

    @property
    def is_known(self) -> bool:
        """Whether it says anything of a text."""
        return self._shares is not None or self._counts_characters

    def of(self, text: str) -> int:
        """A number of tokens that the text has at least; 0 where nothing is known."""
        if self._shares is None:
            return len(text) // self.longest if self._counts_characters else 0
        content = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        if self._composes and not text.isascii():
            return int(len(content) * self._shares[self._shares > 0].min() / _COMPOSED)
        parts = (content[start : start + _PART] for start in range(0, len(content), _PART))  # each is copied as int64
        counts = sum((np.bincount(part, minlength=256) for part in parts), np.zeros(256, np.int64))
        return int(counts @ self._shares * (1 - _ROUNDING))


def _spells_bytes(entries: Mapping[str, int], normalisers: Iterable[Mapping[str, Any]]) -> bool:
    return all(each["type"] == "NFC" for each in normalisers) and all(letter in entries for letter in BYTES)


def _shortens_not(normaliser: Mapping[str, Any]) -> bool:
    """Whether a text has at least as many characters afterwards."""
    if normaliser["type"] == "Replace":
        return len(normaliser["pattern"].get("String", "")) == 1 and len(normaliser["content"]) >= 1
    return normaliser["type"] == "Prepend"


def _shares(entries: Iterable[str], added: set[str]) -> np.ndarray:
    """[256] float64: 1 over the length of the longest entry with each byte."""
    longest = np.ones(256)
    for entry in entries:
        content = entry.encode() if entry in added or any(c not in BYTES for c in entry) else None
        spelt = content if content is not None else bytes(BYTES[c] for c in entry)
        for byte in set(spelt):
            longest[byte] = max(longest[byte], len(spelt))
    return 1 / longest
