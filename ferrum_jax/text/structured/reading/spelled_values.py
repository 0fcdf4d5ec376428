"""Arguments that stand without quotes between marks: the value of one, whose end mark may be missing.

A value ends at its end mark, or where a line begins like the next argument or like the end of the call. So such a line
is no part of a text that a grammar allows.
"""

from __future__ import annotations

import bisect

from ferrum_jax.text.structured.forms.tool_forms import ToolForm, spelled
from ferrum_jax.text.structured.reading.text_reader import Marks, Reading, TextReader


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
