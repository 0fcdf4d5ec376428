"""Patterns of module names that come with data: matched in steps that the lengths of pattern and name bound.

Python's `re` tries one way after the other, and a pattern such as (a+)+$ has more ways than there is time. Here all
ways are followed at once, as a set of states that each character moves on; sets that come again are looked up.
Source: Thompson 1968, Regular Expression Search Algorithm. The syntax is that of `re`, which parses it, without flags,
references to groups and possessive repeats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from re import _constants as op  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any, NamedTuple

_MOST_STATES = 2000
_MOST_KNOWN = 20_000  # moves that are remembered
_LONGEST = 10_000  # characters of a pattern
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    op.CATEGORY_DIGIT: str.isdecimal,
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    op.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    op.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    op.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}
_PLACES: dict[Any, Callable[[str, int], bool]] = {
    op.AT_BEGINNING: lambda text, place: place == 0,
    op.AT_BEGINNING_STRING: lambda text, place: place == 0,
    op.AT_END: lambda text, place: place == len(text),
    op.AT_END_STRING: lambda text, place: place == len(text),
}

_LEFT_OUT = {
    op.AT: "a boundary of words",
    op.SUBPATTERN: "a flag",
    op.GROUPREF: "a reference to a group",
    op.GROUPREF_EXISTS: "a reference to a group",
}


class _State(NamedTuple):
    """takes: which character leads to `next`. holds: where one gets there without a character; None is everywhere."""

    next: tuple[int, ...]
    takes: Callable[[str], bool] | None = None
    holds: Callable[[str, int], bool] | None = None


class _Set:
    """States that are followed at once. moves: the set after a character, with "$" behind it where it is the last."""

    __slots__ = ("has_end", "moves", "states")

    def __init__(self, states: frozenset[int]) -> None:
        self.states, self.has_end = states, 0 in states
        self.moves: dict[str, _Set] = {}


class Pattern:
    """A pattern of names. Raises ValueError for a text that is none, is too large, or has what is left out."""

    def __init__(self, text: str) -> None:
        self.steps = 0  # states that were visited
        self._states: list[_State] = [_State(())]  # the first is the end of the pattern
        self._sets: dict[frozenset[int], _Set] = {}
        self._num_moves = 0
        self._looks = False  # ahead or back, so that a move depends on more than its character
        self._has_looked = False  # since a move began
        try:
            if len(text) > _LONGEST:
                raise ValueError(f"it has {len(text)} characters, more than {_LONGEST}")
            parsed = _parser.parse(text)
            if parsed.state.flags & ~re.UNICODE:
                raise ValueError(f"{_LEFT_OUT[op.SUBPATTERN]} is not supported")
            self._first = self._chain(parsed, 0)
        except (re.error, OverflowError) as error:
            raise ValueError(f"it is no regular expression: {error}") from None
        except RecursionError:
            raise ValueError("it is nested too deeply") from None

    def match(self, text: str) -> bool:
        """Whether the text begins with what the pattern stands for; `$` is its end alone."""
        return self._matches_from(text, 0)

    def _matches_from(self, text: str, place: int) -> bool:
        found, last = self._reached((self._first,), text, place), len(text) - 1
        while not found.has_end and found.states and place <= last:
            key = text[place] if place < last else f"{text[place]}$"
            found = found.moves.get(key) or self._moved(found, key, text, place)
            place += 1
        return found.has_end

    def _moved(self, before: _Set, key: str, text: str, place: int) -> _Set:
        """The set after the character at this place."""
        self._has_looked = False
        own = [self._states[i] for i in before.states]
        taken = [i for state in own if state.takes and state.takes(text[place]) for i in state.next]
        found = self._reached(taken, text, place + 1)
        if not self._has_looked and self._num_moves < _MOST_KNOWN:
            before.moves[key] = found
            self._num_moves += 1
        return found

    def _reached(self, seeds: Iterable[int], text: str, place: int) -> _Set:
        """The states that one gets to without another character."""
        waiting, found = list(seeds), set[int]()
        while waiting:
            i = waiting.pop()
            if i not in found:
                self.steps += 1
                found.add(i)
                state = self._states[i]
                if state.takes is None and (state.holds is None or state.holds(text, place)):
                    waiting.extend(state.next)
        states = frozenset(found)
        if len(self._sets) >= _MOST_KNOWN:
            return self._sets.get(states) or _Set(states)
        return self._sets.setdefault(states, _Set(states))

    # -- from a parsed pattern, its last part first -----------------------------------------------------------

    def _add(self, state: _State) -> int:
        """Its number, once it stands among the states."""
        if len(self._states) >= _MOST_STATES:
            raise ValueError(f"it has more than {_MOST_STATES} parts")
        self._states.append(state)
        return len(self._states) - 1

    def _chain(self, parts: Any, after: int) -> int:
        for kind, value in reversed(list(parts)):
            after = self._part(kind, value, after)
        return after

    def _part(self, kind: Any, value: Any, after: int) -> int:
        """The first state of a part that leads to `after`."""
        if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            return self._add(_State((after,), takes=_taker(kind, value)))
        if kind is op.BRANCH:
            return self._add(_State(tuple(self._chain(parts, after) for parts in value[1])))
        if kind is op.SUBPATTERN and not (value[1] or value[2]):  # no flags
            return self._chain(value[3], after)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, repeated = value
            return self._repeat(least, most, repeated, after)
        if kind is op.AT and value in _PLACES:
            return self._add(_State((after,), holds=_PLACES[value]))
        if kind in (op.ASSERT, op.ASSERT_NOT):
            return self._add(_State((after,), holds=self._around(*value, wanted=kind is op.ASSERT)))
        raise ValueError(f"{_LEFT_OUT.get(kind, str(kind).lower().replace('_', ' '))} is not supported")

    def _repeat(self, least: int, most: Any, parts: Any, after: int) -> int:
        if most is op.MAXREPEAT:
            loop = self._add(_State(()))
            self._states[loop] = _State((self._chain(parts, loop), after))
            after = loop
        else:
            end = after
            for _ in range(most - least):
                after = self._add(_State((self._chain(parts, after), end)))
        for _ in range(least):
            before, after = after, self._chain(parts, after)
            if before == after:  # nothing is repeated
                break
        return after

    def _around(self, direction: int, parts: Any, *, wanted: bool) -> Callable[[str, int], bool]:
        """Whether what stands behind a place, or before it, is so; that depends on more than the next character."""
        if self._looks:
            raise ValueError("more than one of (?=, (?!, (?<= and (?<! is not supported")
        self._looks, inner = True, Pattern("")
        inner._looks = True
        inner._first = inner._chain(parts, 0)
        least, most = (0, 0) if direction > 0 else parts.getwidth()
        if least != most:
            raise ValueError("what (?<= and (?<! look at must have one width")

        def holds(text: str, place: int) -> bool:
            inner.steps, self._has_looked = 0, True
            given = text if direction > 0 else text[:place]
            found = place >= least and inner._matches_from(given, place - least)
            self.steps += inner.steps
            return found == wanted

        return holds


def _taker(kind: Any, value: Any) -> Callable[[str], bool]:
    """Whether a character is one of those that a part stands for."""
    if kind is op.ANY:
        return lambda c: c != "\n"
    if kind is op.LITERAL:
        return chr(value).__eq__
    if kind is op.NOT_LITERAL:
        return chr(value).__ne__
    if kind is op.RANGE:
        return lambda c: value[0] <= ord(c) <= value[1]
    if kind is op.CATEGORY:
        return _CATEGORIES[value]
    is_other = value[0][0] is op.NEGATE
    takers = [_taker(*each) for each in value[is_other:]]
    return lambda c: any(taker(c) for taker in takers) != is_other
