"""A setting: a config's field with its description, from which flags, checks and tables are made."""

import dataclasses
import numbers
from collections.abc import Callable, Iterator
from typing import Any

from ferrum_jax.inputs.sizes.speculative import SpeculativeConfig

_KEY = "setting"  # in the metadata of a field
_KINDS = {
    "int": (numbers.Integral, "a whole number"),
    "bool": (bool, "true or false"),
    "str": (str, "a text"),
    "SpeculativeConfig": (SpeculativeConfig, "a SpeculativeConfig or an object with its fields"),
    "tuple[int, ...]": (tuple, "a list of device ids, devices of jax, a mesh of jax"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A field's description.

    text: the field in one clause. more: further text of the reference. unset: the meaning of None, in words.
    choices, least, most: which values are allowed. rule: further checks. For a wrong value it returns
    the requirement as a text, or raises ValueError itself.
    is_common: `--help` shows its flag; others are in `--help-all`. is_planned: `ferrum-jax plan` counts with it.
    has_flag: False of fields for Python alone. metavar: of its flag.
    vllm: its name in vLLM. unlike: what is different there.
    """

    text: str
    more: str = ""
    unset: str | None = None
    choices: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None
    rule: Callable[[Any], object] | None = None
    is_common: bool = False
    is_planned: bool = True
    has_flag: bool = True
    metavar: str | None = None
    vllm: str | None = None
    unlike: str = ""

    def sentences(self) -> str:
        """All that is said of what it means."""
        default = "" if self.unset is None else f" (default: {self.unset})"
        return f"{self.text}{default}{self.more and f'; {self.more}'}"

    def problem(self, value: Any) -> str | None:
        """The rule that the value breaks, or None."""
        if self.choices and value not in self.choices:
            return f"be one of {self.choices}"
        if self.least is not None and value < self.least:
            return "be 0 (none) or more" if self.least == 0 else f"be at least {self.least}"
        if self.most is not None and value > self.most:
            return f"be at most {self.most}"
        wrong = None if self.rule is None else self.rule(value)
        return wrong if isinstance(wrong, str) else None


def setting(default: Any, text: str, **said: Any) -> Any:
    """A field of a dataclass, with what is said of it: see Setting."""
    return dataclasses.field(default=default, metadata={_KEY: Setting(text=text, **said)})


def some_of(*names: str) -> Callable[[str], str | None]:
    """The rule of a text that names some of these, once each, with commas between them."""

    def wrong(text: str) -> str | None:
        found = [part.strip() for part in text.split(",")]
        is_right = len(set(found)) == len(found) and set(found) <= set(names)
        return None if is_right else f"name some of {', '.join(names)}, once each, such as '{','.join(names[:2])}'"

    return wrong


def settings_of(kind: type) -> Iterator[tuple[dataclasses.Field[Any], Setting]]:
    """The fields of a config, each with what is said of it."""
    return ((field, field.metadata[_KEY]) for field in dataclasses.fields(kind))


def described(kind: type) -> str:
    """All that is said of the fields, a paragraph each."""
    return "\n".join(f"    {field.name}: {said.sentences()}" for field, said in settings_of(kind))


def check_settings(config: Any) -> None:
    """Raises ValueError for the first field whose value has not the type of its annotation or is not allowed."""
    for field, said in settings_of(type(config)):
        value = getattr(config, field.name)
        wrong = _wrong_type(str(field.type), value)
        if wrong is None and value is not None:
            wrong = said.problem(value)
        if wrong is not None:
            raise ValueError(f"{field.name} is {value!r}; it must {wrong}")


def _wrong_type(annotation: str, value: Any) -> str | None:
    name, *optional = annotation.split(" | ")
    kind, what = _KINDS[name]
    if (value is None and optional) or (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
        return None
    return f"be {what}{' or None' if optional else ''}"
