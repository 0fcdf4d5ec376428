"""Patterns of module names that come with data: matched within a number of steps, whatever the pattern says.

Python's `re` tries one way after the other, and a pattern such as (a+)+$ has more ways than there is time. Here each
part of a pattern leads from all places that are reached to all that are reached next, and `re` reads single characters
alone. The syntax is that of `re`, without flags, references to groups, and atomic or possessive parts.
"""

import re
from collections.abc import Callable

_MAX_LENGTH = 10_000  # characters of a pattern
_MAX_DEPTH = 50
_MAX_STEPS = 1_000_000  # characters that are looked at for one name
# What `re` matches in bounded time: a class, an escape, a look behind, which has one width, and other characters.
_ATOM = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\[^0-9xuUN]|\(\?<[=!](?:\\.|[^\\()])*\)|[^()|*+?\\\[]", re.DOTALL)
_GROUP = re.compile(r"\((?:\?:|\?P<\w+>|\?=|\?!|(?!\?))")
_REPEAT = re.compile(r"([*+?])\??|\{(?=[\d,])(\d*)(?:(,)(\d*))?\}\??")
_Part = Callable[[str, set[int]], set[int]]  # name, places in it -> the places behind the part


class Pattern:
    """A pattern of names. Raises ValueError for a text that is none, is too large, or has what is left out."""

    def __init__(self, text: str) -> None:
        self.steps = 0  # of the last name
        self._text, self._place = text, 0
        if len(text) > _MAX_LENGTH:
            raise ValueError(f"it has {len(text)} characters, more than {_MAX_LENGTH}")
        try:
            re.compile(text)
        except (re.error, OverflowError) as error:
            raise ValueError(f"it is no regular expression: {error}") from None
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        self._whole = self._branches(0)

    def match(self, name: str) -> bool:
        """Whether the name begins with what the pattern stands for. Raises ValueError where that takes too long."""
        self.steps = 0
        return bool(self._whole(name, {0}))

    def _took(self, found: re.Pattern[str]) -> re.Match[str] | None:
        """The next piece of the pattern, if it is of this kind."""
        match = found.match(self._text, self._place)
        self._place = match.end() if match else self._place
        return match

    def _branches(self, depth: int) -> _Part:
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        branches = [self._chain(depth)]
        while self._text.startswith("|", self._place):
            self._place += 1
            branches.append(self._chain(depth))
        return lambda name, places: set[int]().union(*(branch(name, places) for branch in branches))

    def _chain(self, depth: int) -> _Part:
        parts: list[_Part] = []
        while self._place < len(self._text) and self._text[self._place] not in "|)":
            part = self._part(depth)
            repeat = self._took(_REPEAT)
            if repeat and self._text.startswith("+", self._place):
                raise ValueError("a possessive repeat is not supported")
            parts.append(_repeated(part, repeat) if repeat else part)

        def chain(name: str, places: set[int]) -> set[int]:
            for part in parts:
                places = part(name, places) if places else places
            return places

        return chain

    def _part(self, depth: int) -> _Part:
        if atom := self._took(_ATOM):
            return self._atom(re.compile(atom[0]))
        if not (group := self._took(_GROUP)):
            raise ValueError(f"{self._text[self._place : self._place + 3]!r} is not supported")
        inner = self._branches(depth + 1)
        self._place += 1  # of the closing parenthesis
        if group[0] not in ("(?=", "(?!"):
            return inner
        wanted = group[0] == "(?="
        return lambda name, places: {place for place in places if bool(inner(name, {place})) == wanted}

    def _atom(self, atom: re.Pattern[str]) -> _Part:
        def after(name: str, places: set[int]) -> set[int]:
            self.steps += len(places)
            if self.steps > _MAX_STEPS:
                raise ValueError(
                    f"the pattern {self._text[:200]!r} takes more than {_MAX_STEPS} steps for {name[:200]!r}"
                )
            return {match.end() for place in places if (match := atom.match(name, place))}

        return after


def _repeated(part: _Part, repeat: re.Match[str]) -> _Part:
    """The part as often as a repeat says: exactly `least` times, and then up to `more` times, None without an end."""
    sign, least, comma, most = repeat.groups()
    least = int(least or 0) if sign is None else int(sign == "+")
    more = int(sign == "?") or None if sign else int(most) - least if most else None if comma else 0

    def repeated(name: str, places: set[int]) -> set[int]:
        for _ in range(least):
            before, places = places, part(name, places)
            if places in (before, set()):
                break
        fresh, found, num = places, set(places), 0
        while fresh and (more is None or num < more):
            fresh, num = part(name, fresh) - found, num + 1
            found |= fresh
        return found

    return repeated
