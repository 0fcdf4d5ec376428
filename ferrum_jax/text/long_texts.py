"""LongTexts: what is asked of a text that may be too long for its model, without encoding more than the answer needs.

    encoding(text, most)     all of it: not begun where its length says that it has more tokens, piece by piece else
    start(text, count)       as much of its start as has more tokens than `count`
    end(text, count)         likewise, of its end

A text is taken in pieces only at `cuts`, where that changes no token. What has none is encoded as a whole, up to
MOST_WHOLE characters, or where its length says that it may fit.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tokenizers

from ferrum_jax.text.cuts import Cuts, fuses_unknown, steps_of

_COMPOSED = 3  # NFC turns at most this many bytes into one. Source: Unicode's FAQ on normalisation
_ROUNDING = 1e-9
_PART = 1 << 20
LONG = 1 << 16  # characters; shorter texts are encoded at once
MOST_WHOLE = 1 << 21


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary, and the byte.

    Source: Radford et al. 2019 (GPT-2), `bytes_to_unicode` of the released encoder: printable Latin-1 stands
    for itself, the other bytes take the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_alphabet()


class FewestTokens:
    """A lower bound of a text's number of tokens, from its bytes or characters alone.

    A token of n bytes gives each byte a share of 1 / n. In a vocabulary whose longest entry with byte b has longest[b]
    bytes, a byte b of a text has a share of at least 1 / longest[b], whatever the tokens are. That holds where entries
    together are the text's bytes; where bytes are a fallback, characters are counted likewise. Other tokenizers have
    no bound: one token may stand for any text. longest: characters of the vocabulary's longest entry.
    """

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


class TextTooLong(ValueError):
    """how: how long it is, in words that follow "the text has"."""

    def __init__(self, how: str) -> None:
        super().__init__(f"the text has {how}; shorten it")
        self.how = how


class LongTexts:
    """Encodes long texts with one tokenizer."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library

    @functools.cached_property
    def _cuts(self) -> Cuts | None:
        return Cuts.of(self._library)

    @functools.cached_property
    def _fewest(self) -> FewestTokens:
        return FewestTokens(self._library)

    def encoding(self, text: str, most: int) -> tokenizers.Encoding:
        """The text without special tokens. Raises TextTooLong for one of more than `most` tokens."""
        self._require_room(text, most)
        found, count = [], 0
        for piece in self._pieces(text):
            if self._fewest.is_known:
                self._require_room(text[piece], most - count)
            else:
                require_whole(text[piece])
            found.append(self._encoded(text[piece]))
            count += len(found[-1].ids)
            if count > most:
                raise TextTooLong(f"more than {most:,} tokens")
        return found[0] if len(found) == 1 else tokenizers.Encoding.merge(found, growing_offsets=False)

    def start(self, text: str, count: int) -> str:
        """The start of the text, of more than `count` tokens; all of it where it has no more.

        Raises TextTooLong for a text without cuts that is too long to be encoded as a whole.
        """
        return text[: self._place(text, self._pieces(text), count, lambda piece: piece.stop, len(text))]

    def end(self, text: str, count: int) -> str:
        """Like `start`, for the end."""
        pieces = self._pieces(text, backwards=True)
        return text[self._place(text, pieces, count, lambda piece: piece.start, 0) :]

    def _place(
        self, text: str, pieces: Iterator[slice], count: int, edge: Callable[[slice], int], otherwise: int
    ) -> int:
        """The edge of the piece with which they have more than `count` tokens."""
        found = 0
        for piece in pieces:
            require_whole(text[piece])
            found += len(self._encoded(text[piece]).ids)
            if found > count:
                return edge(piece)
        return otherwise

    def _require_room(self, text: str, most: int) -> None:
        """Raises TextTooLong for what has more tokens than `most` whatever they are."""
        if (fewest := self._fewest.of(text)) > most:
            raise TextTooLong(f"at least {fewest:,} tokens, as its {len(text):,} characters say")

    def _pieces(self, text: str, *, backwards: bool = False) -> Iterator[slice]:
        if self._cuts is None:
            return iter((slice(0, len(text)),))
        return self._cuts.pieces_backwards(text, LONG) if backwards else self._cuts.pieces(text, LONG)

    def _encoded(self, piece: str) -> tokenizers.Encoding:
        return self._library.encode(piece, add_special_tokens=False)


def require_whole(text: str, what: str = "without a space between two words") -> None:
    """Raises TextTooLong for what is too long to be encoded at once. what: it is."""
    if len(text) > MOST_WHOLE:
        raise TextTooLong(f"{len(text):,} characters {what}, and {MOST_WHOLE:,} such are taken at most")
