"""Objects whose keys stand bare and whose texts stand between quotes of their own: {city:<|"|>Oslo<|"|>,days:2}."""

from __future__ import annotations

import json
import re
from typing import Any

from ferrum_jax.structured.reading.text_reader import More, NoCall, TextReader

_BARE = re.compile(r"[^,{}\[\]]+")
_KEY = re.compile(r"[^:,{}\[\]]+")
_CUT_NUMBER = re.compile(r"-?\d+\.")
_DEEPEST = 64


def quoted_value(reader: TextReader, at: int, quote: str) -> tuple[dict[str, Any], int]:
    """The object that stands here, and where it ends. Raises More and NoCall."""
    value, end = _Values(reader, quote).object(at, 0)
    return value, end


class _Values:
    def __init__(self, reader: TextReader, quote: str) -> None:
        self._reader, self._quote = reader, quote

    def object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        place, found = self._after(at, "{"), dict[str, Any]()
        while not self._stands(place, "}"):
            place = self._after(place, ",") if found else place
            key, place = self._key(place)
            found[key], place = self._value(self._after(place, ":"), depth + 1)
        return found, self._after(place, "}")

    def _key(self, at: int) -> tuple[str, int]:
        at = self._reader.after_space(at)
        if self._stands(at, self._quote):
            return self._text(at)
        key = self._reader.matched(_KEY, at)
        return key.strip(), at + len(key)

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        at = self._reader.after_space(at)
        if depth > _DEEPEST:
            raise NoCall
        if self._stands(at, self._quote):
            return self._text(at)
        if self._stands(at, "{"):
            return self.object(at, depth)
        if self._stands(at, "["):
            return self._list(at, depth)
        bare = self._reader.matched(_BARE, at)
        end, bare = at + len(bare), bare.strip()
        try:
            return json.loads(bare + "0" if _CUT_NUMBER.fullmatch(bare) else bare), end
        except ValueError:
            return bare, end

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        place, found = self._after(at, "["), list[Any]()
        while not self._stands(place, "]"):
            value, place = self._value(self._after(place, ",") if found else place, depth + 1)
            found.append(value)
        return found, self._after(place, "]")

    def _text(self, at: int) -> tuple[str, int]:
        start = at + len(self._quote)
        end = self._reader.find(self._quote, start)
        return self._reader.text[start:end], end + len(self._quote)

    def _after(self, at: int, wanted: str) -> int:
        return self._reader.after(self._reader.after_space(at), wanted)

    def _stands(self, at: int, wanted: str) -> bool:
        at = self._reader.after_space(at)
        if at == len(self._reader.text):
            raise NoCall if self._reader.is_last else More
        try:
            return self._reader.after(at, wanted) > at
        except NoCall:
            return False
