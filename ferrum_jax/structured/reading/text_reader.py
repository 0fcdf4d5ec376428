"""TextReader: what stands at a place of a text that may still grow."""

from __future__ import annotations

import dataclasses
import functools
import re

from ferrum_jax.structured.forms.tool_forms import Spellings, spelled


class More(Exception):
    """Raised where the reading depends on text that has not come."""


class NoCall(Exception):
    """Raised where something other than a call stands."""


_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_DOUBLE = r'"(?:[^"\\]|\\.)*"'
_JSON_PARTS = re.compile(rf'{_DOUBLE}|[{{}}\[\]()"]', re.DOTALL)
_PYTHON_PARTS = re.compile(rf"{_DOUBLE}|'(?:[^'\\]|\\.)*'|[{{}}\[\]()\"']", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class TextReader:
    """is_last: no more text will come, so what is cut off is not there."""

    text: str
    is_last: bool = False

    def after(self, at: int, spellings: Spellings, *, may_be_cut: bool = False) -> int:
        """Where the longest of the spellings that stands here ends; each run of white space in one stands for any.

        White space after it is left.

        may_be_cut: a spelling that the end of the last text cuts off, or leaves no room for, counts as whole.
        """
        for parts in _in_order(spellings):
            place = self._after(at, parts)
            if place is not None:
                return place
            if may_be_cut and self.is_last and self._after(at, parts, is_cut=True) is not None:
                return len(self.text)
        raise NoCall

    def stands(self, at: int, spellings: Spellings) -> bool:
        """Whether one of the spellings stands here; of the last text, a beginning of one will do."""
        try:
            return self.after(at, spellings, may_be_cut=True) > at
        except NoCall:
            return False

    def _after(self, at: int, parts: tuple[str, ...], *, is_cut: bool = False) -> int | None:
        for part in parts:
            if part.isspace():
                at = self.after_space(at)
                continue
            here = self.text[at : at + len(part)]
            if here != part:
                if not part.startswith(here) or at + len(here) < len(self.text):
                    return None
                if not self.is_last:
                    raise More
                return len(self.text) if is_cut else None
            at += len(part)
        return at

    def after_space(self, at: int) -> int:
        """The next place that is not white space."""
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        return at

    def matched(self, pattern: re.Pattern[str], at: int) -> str:
        """What of the pattern stands here, at least one character, and more text after it."""
        found = pattern.match(self.text, at)
        if (found is None and at == len(self.text)) or (found is not None and found.end() == len(self.text)):
            raise NoCall if self.is_last else More
        if found is None:
            raise NoCall
        return found.group()

    def find(self, wanted: str, at: int) -> int:
        """Where the text next stands."""
        place = self.text.find(wanted, at)
        if place < 0:
            raise NoCall if self.is_last else More
        return place

    def end_of_brackets(self, at: int, opening: str) -> int:
        """Where what `opening` opens here is closed, brackets within texts aside."""
        if self.text[at : at + 1] != opening:
            raise NoCall if self.is_last or at < len(self.text) else More
        waiting: list[str] = []
        for part in (_JSON_PARTS if opening == "{" else _PYTHON_PARTS).finditer(self.text, at):
            character = part.group()
            if character in ('"', "'"):  # a text that is not closed yet
                break
            if character in _CLOSERS:
                waiting.append(_CLOSERS[character])
            elif len(character) == 1 and character != waiting.pop():
                raise NoCall
            if not waiting:
                return part.end()
        raise NoCall if self.is_last else More


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


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of text that is a beginning of the mark and not all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
