"""Whether two JSON schemas may both match one value: proved to be impossible, or taken to be possible.

A side is a conjunction: schemas that all must match. What a schema says that is not read here is passed over, which
makes a side larger, so a proof never errs. Work is counted, never timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrum_jax.asked.schema import NAMES, pointed
from ferrum_jax.structured.schema_facts import (
    Side,
    beyond,
    choices,
    fits_text,
    highest,
    kind_of,
    kinds,
    least,
    listed,
    lists_of,
    longer,
    lowest,
    most,
    name_of,
    of_item,
    of_name,
    required,
    typed,
)

_MOST_STEPS = 100_000  # of one schema
_DEEPEST = 12


class Overlap:
    """Proofs within one schema, whose references it follows."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        self._names: dict[int, tuple[list[Any], set[str]]] = {}  # of a list's values; the list is kept, and so its id

    def is_impossible(self, left: Side, right: Side, depth: int = 0) -> bool:
        """Whether no value can match all of `left` and all of `right`."""
        self._steps += 1
        if depth > _DEEPEST or self._steps > _MOST_STEPS:
            return False
        one, other = self.parts(left), self.parts(right)
        if one is None or other is None:
            return True
        if (values := listed([*one, *other])) is not None:
            self._steps += len(values)
            return not any(self.may_match(value, [*one, *other], depth + 1) for value in values)
        both = kinds(one) & kinds(other)
        if all(self._apart(kind, one, other, depth) for kind in both):
            return True
        return any(
            all(self.is_impossible([*rest, branch], against, depth + 1) for branch in branches)
            for side, against in ((one, other), (other, one))
            for rest, branches in choices(side)
        )

    def parts(self, side: Side, depth: int = 0) -> list[Mapping[str, Any]] | None:
        """What must match, without references and allOf; None where nothing can.

        What stands beside a reference is left out: older drafts pass over it.
        """
        found: list[Mapping[str, Any]] = []
        for schema in side:
            self._steps += 1
            if schema is False:
                return None
            if not isinstance(schema, Mapping) or depth > _DEEPEST or self._steps > _MOST_STEPS:
                continue
            nested = [{key: schema[key] for key in schema if key != "allOf"}] if "$ref" not in schema else []
            below = list(schema.get("allOf", ())) if nested else self._referred(schema["$ref"])
            more = self.parts(below, depth + 1) if below else []
            if more is None:
                return None
            found += [*nested, *more]
        return found

    def _referred(self, reference: Any) -> list[Any]:
        """The schema of a reference; none where it may be another than it seems."""
        if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
            return []
        above, part = [self._root], self._root
        for name in reference[2:].split("/") if reference != "#" else ():
            found = pointed(part, f"/{name}")
            if found is None:
                return []
            above.append(part := found[0])
        inner = above[1:]
        if any(isinstance(each, Mapping) and any(isinstance(each.get(key), str) for key in NAMES) for each in inner):
            return []  # a base of its own
        return [part]

    def _apart(self, kind: str, left: Side, right: Side, depth: int) -> bool:
        """Whether no value of this kind can match both."""
        if kind in ("integer", "fraction"):
            return beyond(left, right) or beyond(right, left)
        if kind == "string":
            return longer(left, right, "Length") or longer(right, left, "Length")
        if kind == "array":
            return longer(left, right, "Items") or longer(right, left, "Items") or self._items(left, right, depth)
        if kind == "object":
            names = sorted(required(left) | required(right))
            return any(self.is_impossible(of_name(left, n), of_name(right, n), depth + 1) for n in names)
        return False

    def _is_listed(self, value: Any, parts: Side) -> bool:
        """Whether each const and enum has a value."""
        lists = lists_of(parts)
        for each in lists:
            if id(each) not in self._names:
                self._names[id(each)] = each, {name_of(known) for known in each}
        name = name_of(value) if lists else ""
        return all(name in self._names[id(each)][1] for each in lists)

    def _items(self, left: Side, right: Side, depth: int) -> bool:
        count = int(min(max(most(left, "minItems"), most(right, "minItems")), 8))
        return any(self.is_impossible(of_item(left, i), of_item(right, i), depth + 1) for i in range(count))

    def may_match(self, value: Any, side: Side, depth: int = 0) -> bool:
        """False where a value surely does not match all of a side."""
        parts = self.parts(side)
        if parts is None:
            return False
        if depth > _DEEPEST or self._steps > _MOST_STEPS:
            return True
        if kind_of(value) not in typed(parts) or not self._is_listed(value, parts):
            return False
        if isinstance(value, str):
            return fits_text(value, parts)
        if isinstance(value, Mapping):
            if not required(parts) <= set(value):
                return False
            return all(self.may_match(each, of_name(parts, name), depth + 1) for name, each in value.items())
        if isinstance(value, list):
            if not most(parts, "minItems") <= len(value) <= least(parts, "maxItems"):
                return False
            return all(self.may_match(each, of_item(parts, at), depth + 1) for at, each in enumerate(value))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return lowest(parts)[0] <= value <= highest(parts)[0]
        return True
