"""TextReader: what stands at a place of a text that may still grow.

What reads is a generator that yields None where it waits for more text, and goes on where it stopped: no character is
read again because text has come.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Generator, Iterable
from typing import Any, TypeAlias, TypeVar

from ferrum_jax.text.structured.forms.tool_forms import Spellings, spelled

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]


class _More(Exception):
    """Raised where the reading depends on text that has not come."""


class NoCall(Exception):
    """Raised where something other than a call stands."""


_CLOSERS = {"{": "}", "[": "]", "(": ")"}
# What stands outside of texts and brackets. No mark has such characters alone: a call in which another one begins has
# failed, unless that one stands in a text.
_PLAIN = {"{": re.compile(r"[\s,:\d.+\-truefalsnNIityE]*"), "(": re.compile(r"""[^"'\\<|`()\[\]{}]*""")}
_WITHIN = {quote: re.compile(rf"(?:[^{quote}\\]++|\\.)*+", re.DOTALL) for quote in "\"'"}
_SPACE = re.compile(r"\s*")


class TextReader:
    """A text and the places in it. Every look at the text goes through `match`, `search` and `part`.

    is_last: no more text will come, so what is cut off is not there.
    """

    def __init__(self) -> None:
        self._text = ""
        self.is_last = False
        self._space = (0, 0)  # the run of white space that was looked at last

    def __len__(self) -> int:
        return len(self._text)

    def grow(self, piece: str) -> None:
        text, self._text = self._text, ""  # the only reference to it: Python lengthens it in place
        text += piece
        self._text = text

    def match(self, pattern: re.Pattern[str], at: int) -> int:
        """Where what the pattern matches here ends; -1 where it does not."""
        found = pattern.match(self._text, at)
        return -1 if found is None else found.end()

    def search(self, pattern: re.Pattern[str], at: int) -> tuple[int, int] | None:
        """Where the pattern next begins and ends."""
        found = pattern.search(self._text, at)
        return None if found is None else found.span()

    def part(self, start: int, stop: int) -> str:
        return self._text[start:stop]

    def more(self) -> Reading[None]:
        """Waits for more text. Raises NoCall where none will come."""
        if self.is_last:
            raise NoCall
        yield

    def after(self, at: int, spellings: Spellings, *, may_be_cut: bool = False) -> Reading[int]:
        """Where the longest of the spellings that stands here ends; each run of white space in one stands for any.

        White space after it is left.

        may_be_cut: a spelling that the end of the last text cuts off, or leaves no room for, counts as whole.
        """
        while True:
            try:
                return self._after_one(at, spellings, may_be_cut)
            except _More:
                yield

    def stands(self, at: int, spellings: Spellings) -> Reading[bool]:
        """Whether one of the spellings stands here; of the last text, a beginning of one will do."""
        try:
            return (yield from self.after(at, spellings, may_be_cut=True)) > at
        except NoCall:
            return False

    def _after_one(self, at: int, spellings: Spellings, may_be_cut: bool) -> int:
        for parts in _in_order(spellings):
            place = self._after(at, parts)
            if place is not None:
                return place
            if may_be_cut and self.is_last and self._after(at, parts, is_cut=True) is not None:
                return len(self)
        raise NoCall

    def _after(self, at: int, parts: tuple[str, ...], *, is_cut: bool = False) -> int | None:
        for part in parts:
            if part.isspace():
                at = self.space_end(at)
                continue
            here = self.part(at, at + len(part))
            if here != part:
                if not part.startswith(here) or at + len(here) < len(self):
                    return None
                if not self.is_last:
                    raise _More
                return len(self) if is_cut else None
            at += len(part)
        return at

    def space_end(self, at: int) -> int:
        """The next place that is not white space, as far as the text has come."""
        start, end = self._space
        if not start <= at <= end:
            start = end = at
        self._space = start, self.match(_SPACE, end)
        return self._space[1]

    def after_space(self, at: int) -> Reading[int]:
        """The next place that is not white space."""
        while (place := self.space_end(at)) == len(self) and not self.is_last:
            yield
        return place

    def matched(self, pattern: re.Pattern[str], at: int) -> Reading[str]:
        """The characters here that a pattern of single ones matches, at least one, with more text after them."""
        end = at
        while (end := max(end, self.match(pattern, end))) == len(self):
            yield from self.more()
        if end == at:
            raise NoCall
        return self.part(at, end)

    def find(self, marks: Marks, at: int) -> Reading[tuple[int, int]]:
        """Where the next mark begins and ends."""
        while (found := self.search(marks.pattern, at)) is None:
            at = max(at, len(self) - marks.longest + 1)
            yield from self.more()
        return found

    def up_to(self, marks: Marks, at: int) -> tuple[int, int | None]:
        """Where the next mark begins and ends; where none has come, up to where there is none, and None."""
        if (found := self.search(marks.pattern, at)) is not None:
            return found
        tail = self.part(max(at, len(self) - marks.longest), len(self))
        return len(self) - (0 if self.is_last else marks.kept(tail)), None

    def end_of_brackets(self, at: int, opening: str) -> Reading[int]:
        """Where the bracket that opens here is closed, brackets in texts aside: of JSON for "{", of Python for "("."""
        if (yield from self.after(at, opening)) == at:
            raise NoCall
        place, waiting = at, list[str]()
        while True:
            place = self.match(_PLAIN[opening], place)
            character = self.part(place, place + 1)
            if not character:
                yield from self.more()
            elif character == '"' or (character == "'" and opening == "("):
                place = yield from self._end_of_text(place + 1, character)
            elif character in _CLOSERS:
                waiting.append(_CLOSERS[character])
                place += 1
            elif character == waiting.pop():
                place += 1
                if not waiting:
                    return place
            else:
                raise NoCall

    def _end_of_text(self, at: int, quote: str) -> Reading[int]:
        while self.part(at := self.match(_WITHIN[quote], at), at + 1) != quote:
            yield from self.more()
        return at + 1


@functools.cache
def _in_order(spellings: Spellings) -> tuple[tuple[str, ...], ...]:
    """The spellings in their parts, white space apart, the longest first.

    Where one ends by opening a list, or begins by closing one, white space may stand beside the bracket.
    """
    ordered = sorted(
        (each.rstrip() for each in spelled(spellings)), key=lambda each: len("".join(each.split())), reverse=True
    )
    loose = [re.sub(r"^(\s*\])(?=\S)", r"\1 ", re.sub(r"(?<=\S)\[$", " [", each)) for each in ordered]
    return tuple(tuple(part for part in re.split(r"(\s+)", each) if part) for each in loose)


class Marks:
    """Texts that are looked for in a growing one."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = tuple(sorted(filter(None, texts), key=len, reverse=True))
        self._starts = frozenset(text[0] for text in self._texts)
        self.longest = max(map(len, self._texts), default=1)
        self.pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")

    def kept(self, text: str) -> int:
        """How long an end of a text that has none of them may become one."""
        tail = text[len(text) - min(len(text), self.longest - 1) :]
        ends = (tail[at:] for at in range(len(tail)) if tail[at] in self._starts)
        return next((len(end) for end in ends if any(mark.startswith(end) for mark in self._texts)), 0)


_BEYOND = {"Infinity": sys.float_info.max, "-Infinity": -sys.float_info.max}


def loads(text: str) -> Any:
    """The JSON value, of numbers that are beyond float64 its largest, and null for NaN. Raises ValueError for none."""
    try:
        return json.loads(text, parse_float=_number, parse_constant=_BEYOND.get)
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error


def _number(text: str) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))
