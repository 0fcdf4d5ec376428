"""Branches of a oneOf, made so narrow that exactly one matches whatever is written.

A value that two branches match is invalid, and no grammar looks back at what was written. So a branch that may overlap
another is narrowed until it cannot: an optional property that the other requires is left out, or one that tells them
apart is demanded. All that is written is valid; some values that are valid are not written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ferrum_jax.structured.overlap import Overlap
from ferrum_jax.structured.schema_facts import kinds, listed, required

_MEANS_NOTHING = frozenset(("title", "description", "default", "examples", "example", "$comment", "deprecated"))

_MOST_LETTERS = 500  # of texts that a pattern leaves out
_EXACT = frozenset(("type", "enum", "const", "minLength", "maxLength", "minimum", "maximum"))  # as values are compared


class CannotTellApartError(ValueError):
    """Two branches may both match, and neither can be narrowed."""


def narrowed(beside: Mapping[str, Any], branches: Sequence[Any], overlap: Overlap) -> list[Any]:
    """Schemas, whose union is written in place of the branches. beside: the rest of their schema.

    Raises CannotTellApartError naming two branches, or that there is no value which matches one alone.
    """
    found = []
    for at, branch in enumerate(branches):
        mine = [beside, branch]
        others = {
            place: [beside, other]
            for place, other in enumerate(branches)
            if place != at and not overlap.is_impossible(mine, [beside, other])
        }
        if any(_covers(overlap, other[1], branch) for other in others.values()):
            continue  # what matches it matches the other too
        more: list[Any] = []
        for place, other in others.items():
            if overlap.is_impossible([*mine, *more], other):
                continue
            step = _step(overlap, [*mine, *more], other)
            if step is None:
                raise CannotTellApartError(
                    f"branches {min(at, place)} and {max(at, place)} may both match: give them a required property "
                    "with another const in each, or use anyOf"
                )
            more.append(step)
        found.append({"allOf": [branch, *more]} if more else branch)
    if not found:
        raise CannotTellApartError("whatever matches one branch matches another too: use anyOf")
    return found


def _step(overlap: Overlap, mine: list[Any], other: list[Any]) -> Any | None:
    """What more one branch must match so that it no longer overlaps another; None where nothing helps."""
    for more in _steps(overlap, mine, other):
        if not overlap.is_impossible(mine, [more]) and overlap.is_impossible([*mine, more], other):
            return more
    return None


def _steps(overlap: Overlap, mine: list[Any], other: list[Any]) -> Iterator[Any]:
    parts, others = overlap.parts(mine) or [], overlap.parts(other) or []
    own = _declared(overlap.parts(mine[1:]) or [])
    names = sorted(required(others) - required(parts), key=lambda name: (name in own, name))
    without = [{"properties": {name: False}} for name in names]
    demanded = [{"required": [name]} for name in _declared(parts) if name not in required(parts)]
    yield from (*without, *demanded)
    yield {"minItems": 1}
    if "object" in kinds(parts):  # a schema of properties that leaves out the type
        yield from ({"type": "object", **each} for each in (*without, *demanded))
    values, left = listed(others), listed(parts)
    if left is not None:
        yield {"enum": [value for value in left if not overlap.may_match(value, others)]}
    if values is not None and kinds(parts) == {"string"}:
        texts = [value for value in values if isinstance(value, str)]
        if sum(map(len, texts)) <= _MOST_LETTERS:
            yield {"pattern": f"^({all_but(texts)})$"}


def _declared(parts: Sequence[Mapping[str, Any]]) -> dict[str, None]:
    return {name: None for part in parts if isinstance(part.get("properties"), Mapping) for name in part["properties"]}


def _covers(overlap: Overlap, larger: Any, smaller: Any) -> bool:
    """Whether whatever matches `smaller` matches `larger`: both say the same, or `larger` its types or values alone."""
    one, other = overlap.parts([larger]), overlap.parts([smaller])
    if one is None or other is None:
        return other is None
    if not one and larger not in (True, {}):  # a reference that was not followed
        return False
    plain = [{key: value for key, value in part.items() if key not in _MEANS_NOTHING} for part in one]
    if plain == [{key: value for key, value in part.items() if key not in _MEANS_NOTHING} for part in other]:
        return not _refers(larger) or larger == smaller
    if _refers(larger):
        return False
    values = listed(other)
    if values is not None and all(set(part) <= _EXACT for part in plain):
        return all(overlap.may_match(value, one) for value in values)
    return all(set(part) <= {"type"} for part in plain) and kinds(other) <= kinds(one)


def _refers(schema: Any) -> bool:
    return isinstance(schema, Mapping) and "$ref" in schema and len(schema) > 1


def all_but(texts: Sequence[str]) -> str:
    """A regular expression of every text that is none of these."""
    ends = "" in texts
    firsts: dict[str, list[str]] = {}
    for text in texts:
        if text:
            firsts.setdefault(text[0], []).append(text[1:])
    below = [f"{_literal(first)}({all_but(rest)})" for first, rest in sorted(firsts.items())]
    other = f"[^{''.join(map(_in_class, sorted(firsts)))}]" if firsts else r"(.|\n)"
    whole = [f"{other}(.|\\n)*", *below]
    return "|".join(whole if ends else ["", *whole])


def _literal(character: str) -> str:
    return f"[{_in_class(character)}]" if character not in "^" else r"\^"


def _in_class(character: str) -> str:
    return f"\\{character}" if character in r"\^]-[&~" else character
