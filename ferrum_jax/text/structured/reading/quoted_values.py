"""Objects whose keys stand bare and whose texts stand between quotes of their own: {city:<|"|>Oslo<|"|>,days:2}."""

from __future__ import annotations

import re
from typing import Any

from ferrum_jax.text.structured.reading.text_reader import Marks, NoCall, Reading, TextReader, loads

_BARE = re.compile(r"[^,{}\[\]]+")
_KEY = re.compile(r"[^:,{}\[\]]+")
_CUT_NUMBER = re.compile(r"-?\d+\.")
_DEEPEST = 64


def quoted_value(reader: TextReader, at: int, quote: str) -> Reading[tuple[dict[str, Any], int]]:
    """The object that stands here, and where it ends. Raises NoCall."""
    return (yield from _Values(reader, quote).object(at, 0))


class _Values:
    def __init__(self, reader: TextReader, quote: str) -> None:
        self._reader, self._quote = reader, quote
        self._end = Marks([quote])

    def object(self, at: int, depth: int) -> Reading[tuple[dict[str, Any], int]]:
        place, found = (yield from self._after(at, "{")), dict[str, Any]()
        while not (yield from self._stands(place, "}")):
            place = (yield from self._after(place, ",")) if found else place
            key, place = yield from self._key(place)
            found[key], place = yield from self._value((yield from self._after(place, ":")), depth + 1)
        return found, (yield from self._after(place, "}"))

    def _key(self, at: int) -> Reading[tuple[str, int]]:
        at = yield from self._reader.after_space(at)
        if (yield from self._stands(at, self._quote)):
            return (yield from self._text(at))
        key = yield from self._reader.matched(_KEY, at)
        return key.strip(), at + len(key)

    def _value(self, at: int, depth: int) -> Reading[tuple[Any, int]]:
        at = yield from self._reader.after_space(at)
        if depth > _DEEPEST:
            raise NoCall
        if (yield from self._stands(at, self._quote)):
            return (yield from self._text(at))
        if (yield from self._stands(at, "{")):
            return (yield from self.object(at, depth))
        if (yield from self._stands(at, "[")):
            return (yield from self._list(at, depth))
        bare = yield from self._reader.matched(_BARE, at)
        end, bare = at + len(bare), bare.strip()
        try:
            return loads(bare + "0" if _CUT_NUMBER.fullmatch(bare) else bare), end
        except ValueError:
            return bare, end

    def _list(self, at: int, depth: int) -> Reading[tuple[list[Any], int]]:
        place, found = (yield from self._after(at, "[")), list[Any]()
        while not (yield from self._stands(place, "]")):
            place = (yield from self._after(place, ",")) if found else place
            value, place = yield from self._value(place, depth + 1)
            found.append(value)
        return found, (yield from self._after(place, "]"))

    def _text(self, at: int) -> Reading[tuple[str, int]]:
        start = at + len(self._quote)
        end, after = yield from self._reader.find(self._end, start)
        return self._reader.part(start, end), after

    def _after(self, at: int, wanted: str) -> Reading[int]:
        return (yield from self._reader.after((yield from self._reader.after_space(at)), wanted))

    def _stands(self, at: int, wanted: str) -> Reading[bool]:
        at = yield from self._reader.after_space(at)
        if at == len(self._reader):
            raise NoCall
        try:
            return (yield from self._reader.after(at, wanted)) > at
        except NoCall:
            return False
