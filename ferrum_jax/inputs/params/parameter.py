"""A sampling parameter is one entry: its default, text, bounds, and the bodies that take it.

Checks, fields of bodies, flags of commands and tables of the documentation are made from it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

TEXTS = ("completion", "chat")  # bodies whose answers are texts
SAMPLED = (*TEXTS, "response")
Bounds = tuple[float, float | None, str]  # the least, the most (None: finite), and what a value must do


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """A sampling parameter's description.

    text: the parameter in one clause. bounds: of a number. more: what the reference says beside text. bodies:
    the bodies with it, () for Python alone. help: what a command says in place of text. flag: of a list, its flag
    and what a value is called. has_flag: False of a number that no command takes. kind: the annotation without None.
    """

    text: str
    bounds: Bounds | None = None
    more: str = ""
    bodies: tuple[str, ...] = SAMPLED
    help: str = ""
    flag: tuple[str, str] | None = None
    has_flag: bool = True
    kind: str = ""
    is_optional: bool = False

    def sentences(self) -> str:
        """All that is said of what it does."""
        return f"{self.text}{self.more and f'; {self.more}'}"

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """The JSON schema of a flag or a number; None of what has parts."""
        if self.kind == "bool":
            return {"type": "boolean"}
        if self.bounds is None:
            return None
        low, high, _ = self.bounds
        least = {"exclusiveMinimum": 0} if 0 < low < 1e-300 else {"minimum": low}
        most = {} if high is None else {"maximum": high}
        return {"type": "integer" if self.kind == "int" else "number", **least, **most}


def parameter(default: Any, text: str, bounds: Bounds | None = None, **said: Any) -> Any:
    """A field of SamplingParams with what is said of it: see Parameter."""
    return dataclasses.field(default=default, metadata={"said": Parameter(text=text, bounds=bounds, **said)})


def parameters_of(kind: type) -> dict[str, Parameter]:
    """Each field's description."""
    found = {}
    for field in dataclasses.fields(kind):
        name, *optional = str(field.type).split(" | ")
        found[field.name] = dataclasses.replace(field.metadata["said"], kind=name, is_optional=bool(optional))
    return found
