"""A JSON schema as its compiler takes it: what says nothing is left out, and a oneOf is a union of what it allows."""

import functools
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from ferrum_jax.inputs.params.schema import EXACT, MAX_WHOLE, is_kept, says_no_format, subschemas
from ferrum_jax.inputs.params.schema_words import says_nothing
from ferrum_jax.inputs.params.structured_outputs import compact
from ferrum_jax.io.error_text import quoted
from ferrum_jax.text.structured.overlap import CannotTellApartError, Overlap, narrowed

_NOT_TAKEN = ("$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$schema")  # by the compiler, or of older drafts
NO_NUMBERS = "NaN, infinities and numbers beyond 64 bits are no JSON numbers"
_OLD_DRAFT = re.compile(r"draft-0[34]")  # in which a schema's name is `id`


@functools.lru_cache(maxsize=512)
def compiled_schema(text: str) -> str:
    """The text of a schema that was checked. Raises ValueError with the place of a oneOf that cannot be enforced."""
    original, made = json.loads(text, parse_float=_number), json.loads(text, parse_float=_number)
    overlap = Overlap(original)
    pairs = list(zip(subschemas(original), subschemas(made), strict=True))
    is_old = isinstance(original, dict) and bool(_OLD_DRAFT.search(str(original.get("$schema"))))
    leads_into = any(isinstance(part, dict) and "/oneOf/" in str(part.get("$ref")) for (_, part), _ in pairs)
    for (place, part), (_, copy) in pairs:
        if isinstance(copy, dict):
            _rewrite(part, copy)
            _narrow_bounds(place, copy)
            _rename(copy, of_old_draft=is_old)
            if not leads_into:  # else the compiler's own proofs must do
                _open(place, part, copy, overlap)
    return compact(made)


def _number(text: str) -> float:
    """A whole number is an int, however it is written."""
    found = float(text)
    return int(found) if abs(found) < math.inf and found.is_integer() else found


def _rewrite(part: Mapping[str, Any], copy: dict[str, Any]) -> None:
    for key in part:
        if key in _NOT_TAKEN or says_nothing(key, part):
            del copy[key]
    if says_no_format(part):
        del copy["format"]


def _narrow_bounds(place: str, copy: dict[str, Any]) -> None:
    """Moves bounds that the compiler would round to numbers within them, so that what is written is valid.

    Raises ValueError for a bound that only numbers beyond 64 bits are within.
    """
    for key, sign in (("minimum", 1), ("maximum", -1)):
        outside = f"exclusive{key.capitalize()}"
        if copy.get(outside) is True and key in copy:  # as draft 4 writes it
            copy[outside] = copy.pop(key)
        for name in (key, outside):
            bound = copy.get(name)
            if not isinstance(bound, int | float) or not (EXACT <= abs(bound) < math.inf or not is_kept(bound)):
                continue
            del copy[name]
            within = _within(sign * bound, operator.gt if name == outside else operator.ge)
            if within > MAX_WHOLE:
                raise ValueError(f"the JSON schema cannot be read: {quoted(bound)} at {place}/{name}; {NO_NUMBERS}")
            copy[key] = sign * max(within, sign * copy.get(key, sign * within))


def _within(bound: float, is_within: Callable[[Any, float], bool]) -> float:
    """The first number that the compiler reads as it is and whose shortest digits are within the bound too."""
    found = max(-MAX_WHOLE, float(min(bound, 2 * MAX_WHOLE)))
    while found <= MAX_WHOLE:
        exact = int(found) if found.is_integer() else found
        if is_kept(exact) and is_within(min(exact, Decimal(repr(found))), bound):
            return exact
        found = math.nextafter(found, math.inf)
    return found


def _rename(copy: dict[str, Any], *, of_old_draft: bool) -> None:
    """Gives a name of an older draft as one of 2020-12, which is what all is compiled as."""
    if of_old_draft and isinstance(copy.get("id"), str):
        copy["$id"] = copy.pop("id")
    name = copy.get("$id")
    if not isinstance(name, str):
        return
    copy.pop("$id", None)
    if name.startswith("#"):
        copy.setdefault("$anchor", name[1:])
    elif name:
        copy["$id"] = name


def _open(place: str, part: Mapping[str, Any], copy: dict[str, Any], overlap: Overlap) -> None:
    """Writes a oneOf as the anyOf of its branches, each so narrow that no other matches."""
    if not isinstance(part.get("oneOf"), list) or not part["oneOf"]:
        return
    beside = {key: value for key, value in part.items() if key != "oneOf"}
    try:
        union = narrowed(beside, part["oneOf"], overlap)
    except CannotTellApartError as error:
        raise ValueError(f"the JSON schema cannot be enforced: at {place}/oneOf: {error}") from error
    branches = copy.pop("oneOf")
    written = [{"allOf": [branches[at], *more]} if more else branches[at] for at, more in union.items()]
    if "anyOf" in copy:
        copy["allOf"] = [*copy.get("allOf", ()), {"anyOf": written}]
    else:
        copy["anyOf"] = written
