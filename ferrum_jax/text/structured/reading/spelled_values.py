"""Arguments that stand without quotes between marks: the value of one, whose end mark may be missing.

A value ends at its end mark, or where a line begins like the next argument or like the end of the call. So such a line
is no part of a text that a grammar allows.
"""

from __future__ import annotations

import bisect
import re
from typing import Any

from ferrum_jax.text.structured.forms.tool_forms import ToolForm, spelled
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


class SpelledValues:
    """The arguments of a text's calls. Where values end is looked for once, whatever call they are of.

    failed: places of arguments that are of no call, in whichever they stand.
    """

    def __init__(self, form: ToolForm, reader: TextReader) -> None:
        _, after_key, after_value = form.argument
        self._form, self._reader = form, reader
        self._end = after_value.strip()
        self._stop = Marks((self._end, *form.stop_lines))
        begins = (each.split()[0] for each in spelled(form.begin))  # no key goes on behind the begin of another call
        self._key_end = Marks((after_key.split()[0], *begins))
        self._starts: list[int] = []  # of the stops up to `_looked`, in order
        self._ends: list[int] = []
        self._looked = 0
        self.failed: set[int] = set()

    def argument(self, at: int) -> Reading[tuple[str, str, int]]:
        """The key that stands here, its value and where they end. Raises NoCall."""
        before_key, after_key, after_value = self._form.argument
        reader = self._reader
        at = yield from reader.after(at, before_key)
        stop, _ = yield from reader.find(self._key_end, at)
        start = yield from reader.after(stop, after_key.rstrip())
        end, place = yield from self._stop_from(start)
        value = reader.part(start, end)
        if after_key.endswith("\n"):
            value = value.removeprefix("\n")
        if after_value.startswith("\n"):
            value = value.removesuffix("\n")
        return reader.part(at, stop).strip(), value, place

    def _stop_from(self, at: int) -> Reading[tuple[int, int]]:
        """Where the value that begins here ends, and where the text goes on."""
        while not self._starts or self._starts[-1] < at:
            if (found := self._reader.search(self._stop.pattern, self._looked)) is not None:
                self._looked = found[1]
                self._note(*found)
            else:
                self._looked = max(self._looked, len(self._reader) - self._stop.longest + 1)
                yield from self._reader.more()
        number = bisect.bisect_left(self._starts, at)
        return self._starts[number], self._ends[number]

    def _note(self, place: int, end: int) -> None:
        """An end mark, or what is one if no more than blanks stand before it on its line."""
        if self._reader.part(place, end) != self._end:
            while (before := self._reader.part(place - 1, place)) in (" ", "\t"):
                place -= 1
            if before != "\n":
                return
            place = end = place - 1
        self._starts.append(place)
        self._ends.append(end)
