"""Errors of bodies: each names its field, down to its place (`messages[0].content`)."""

import contextlib
import re
from collections.abc import Collection, Container, Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from ferrum_jax.io.error_text import named

_LONGEST_TYPO = 64  # characters of a name for which a known one is looked for


class FieldError(ValueError):
    """An error about a field. param: the field's name."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


def not_known(name: str, known: Collection[str]) -> str:
    """That a name is not known, and which one may have been meant."""
    meant = get_close_matches(name, known, n=1) if len(name) <= _LONGEST_TYPO else []
    return f"{named([name])} is not known" + (f" (did you mean {meant[0]}?)" if meant else "")


@contextlib.contextmanager
def naming_fields(body: Container[str]) -> Iterator[None]:
    """Makes a ValueError a FieldError of the field that its message begins with."""
    try:
        yield
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(str(error), param_of(str(error), body)) from error


def param_of(message: str, fields: Container[str]) -> str | None:
    """The field that a message is about, if it is one of these: it begins with it, or with other words for it.

    Parts such as messages[0].content stay.
    """
    found = re.match(r"[A-Za-z_]\w*(?:\[[^\]]*\]|\.\w+)*", message)
    name = "" if found is None else found[0]
    if re.split(r"[.\[]", name)[0] in fields:
        return name
    meant = next((names for words, names in _MEANT.items() if message.startswith(words)), ())
    return next((each for each in meant if each in fields), None)


_PROMPT, _SCHEMA = ("prompt", "messages", "input"), ("response_format", "text", "structured_outputs")
_MEANT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "the prompt": _PROMPT,
        "this model's maximum context length": _PROMPT,
        "the JSON schema": _SCHEMA,
        "structured_outputs.json": _SCHEMA,
        "the chat template reads": ("chat_template_kwargs",),
    }
)
