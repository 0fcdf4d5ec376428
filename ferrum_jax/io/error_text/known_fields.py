"""Fields: what an object that somebody else wrote may say. One table, and one error with all that is wrong in it.

    _FIELDS = Fields({"patch_size": Known(whole(1), 14), "do_pad": Elsewhere((False, None), "leave it out")})
    found = _FIELDS.read(settings)          the value of each Known, or its default where it is absent or null

A default must itself be of the field's kind, so a field whose default is not must be given. Any other key is refused.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ferrum_jax.io.error_text import Elsewhere, is_harmless, quoted


class FieldKind(NamedTuple):
    """The condition on a value. words: the condition in words, after "it must be"."""

    holds: Callable[[Any], bool]
    words: str


class Known(NamedTuple):
    """A key that is read."""

    kind: FieldKind
    default: Any = None


ANY = FieldKind(lambda value: True, "anything")
TRUTH = FieldKind(lambda value: isinstance(value, bool), "true or false")
TEXT = FieldKind(lambda value: isinstance(value, str), "text")
OBJECT = FieldKind(lambda value: isinstance(value, Mapping), "an object")
LIST = FieldKind(lambda value: isinstance(value, list), "a list")
NAMES = FieldKind(
    lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value), "a list of names"
)


def whole(least: int) -> FieldKind:
    return FieldKind(lambda value: type(value) is int and value >= least, f"a whole number, {least} or more")


def number(least: float, words: str = "") -> FieldKind:
    """A number of at least `least`, and not NaN. words: a fuller description."""
    return FieldKind(
        lambda value: type(value) in (int, float) and value >= least, words or f"a number, {least:g} or more"
    )


def require(name: str, value: Any, kind: FieldKind) -> Any:
    """The value. Raises ValueError where it is of another kind."""
    if not kind.holds(value):
        raise ValueError(f"{name} is {quoted(value)}; it must be {kind.words}")
    return value


def one_of(*choices: Any) -> FieldKind:
    """Equal to one of these, True and 1 being different; None among them leaves the key out."""
    return FieldKind(lambda value: is_harmless(value, choices), f"one of {choices}")


@dataclasses.dataclass(frozen=True)
class Fields:
    """Sentences have the places {name}, {value}, {kind} of a Known and {instead} of a key that is not here.

    unknown: of a key that the table has not, in the same places; None takes `refused`.
    """

    table: Mapping[str, Known | Elsewhere]
    wrong: str = "{name} is {value}; it must be {kind}"
    refused: str = "{name} is {value}, a setting that is not here: {instead}"
    unknown: str | None = None

    def problems(self, given: Mapping[str, Any]) -> list[str]:
        """A sentence for each fault: those of fields in the table's order, then other keys by name."""
        found = [
            self.wrong.format(name=name, value=quoted(value), kind=field.kind.words)
            for name, field in self.table.items()
            if isinstance(field, Known) and not field.kind.holds(value := _value(given, name, field))
        ]
        for name in sorted(given):
            entry = self.table.get(name)
            if entry is None:
                said = self.refused if self.unknown is None else self.unknown
                found.append(said.format(name=name, value=quoted(given[name]), instead=""))
            elif isinstance(entry, Elsewhere) and not is_harmless(given[name], entry.harmless):
                found.append(self.refused.format(name=name, value=quoted(given[name]), instead=entry.instead))
        return found

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The value of each Known. Raises one ValueError with all problems."""
        found = self.problems(given)
        if found:
            raise ValueError("; ".join(found))
        return self.values(given)

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields' values in an object without problems."""
        return {name: _value(given, name, field) for name, field in self.table.items() if isinstance(field, Known)}


def _value(given: Mapping[str, Any], name: str, field: Known) -> Any:
    value = given.get(name)
    return field.default if value is None else value
