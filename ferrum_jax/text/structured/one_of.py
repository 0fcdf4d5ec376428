"""Branches of a oneOf, made so narrow that exactly one matches whatever is written.

A value that two branches match is invalid, and no grammar looks back at what was written. So a branch that may overlap
another is narrowed until it cannot: an optional property that the other requires is left out, or one that tells them
apart is demanded. All that is written is valid; some values that are valid are not written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ferrum_jax.text.structured.overlap import Overlap, required, typed


class CannotTellApartError(ValueError):
    """Two branches may both match, and neither can be narrowed."""


def narrowed(beside: Mapping[str, Any], branches: Sequence[Any], overlap: Overlap) -> dict[int, list[Any]]:
    """The branches whose union is written, and what more each must match. beside: the rest of their schema.

    Raises CannotTellApartError naming two branches.
    """
    found: dict[int, list[Any]] = {}
    for at, branch in enumerate(branches):
        others = {
            place: other
            for place, other in enumerate(branches)
            if place != at and not overlap.is_impossible([beside, branch, other])
        }
        more: list[Any] = []
        for place, other in others.items():
            mine = [beside, branch, *more]
            if overlap.is_impossible([*mine, other]):
                continue
            step = next((each for each in _steps(overlap, mine, other) if _tells(each, overlap, mine, other)), None)
            if step is None and overlap.is_exhausted:
                raise CannotTellApartError("it has too many branches to be told apart: say fewer, or use anyOf")
            if step is None:
                raise CannotTellApartError(
                    f"branches {min(at, place)} and {max(at, place)} may both match: give them a required property "
                    "with another const in each, or use anyOf"
                )
            more.append(step)
        found[at] = more
    return found


def _tells(step: Any, overlap: Overlap, mine: list[Any], other: Any) -> bool:
    """Whether some value may match `mine` with the step, and none may match the other branch too."""
    return not overlap.is_impossible([*mine, step]) and overlap.is_impossible([*mine, step, other])


def _steps(overlap: Overlap, mine: list[Any], other: Any) -> Iterator[Any]:
    """What more one branch may have to match so that it no longer overlaps another."""
    parts, others = overlap.parts(mine) or [], overlap.parts([mine[0], other]) or []
    own = _declared(overlap.parts(mine[1:]) or [])
    is_object = {"type": "object"} if "object" in typed(parts) else {}  # properties say nothing of other types
    for name in sorted(required(others) - required(parts), key=lambda name: (name in own, name)):
        yield {**is_object, "properties": {name: False}}
    yield from ({**is_object, "required": [name]} for name in _declared(parts) if name not in required(parts))
    if (values := overlap.listed(parts)) is not None:
        yield {"enum": [value for value in values if not overlap.may_match(value, others)]}


def _declared(parts: Sequence[Mapping[str, Any]]) -> dict[str, None]:
    return {name: None for part in parts for name in part.get("properties", ())}
