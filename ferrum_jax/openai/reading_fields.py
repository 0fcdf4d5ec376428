"""Fields of bodies that read texts and generate none, as rows and HTTP have them. All raise FieldError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrum_jax.openai.parameters import FieldError
from ferrum_jax.quoting import quoted


def count_of(body: Mapping[str, Any], name: str) -> int | None:
    """A whole number, 1 or more; None where it is not given."""
    value = body.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise FieldError(f"{name} is {quoted(value)}; it must be a whole number, 1 or more", name)
    return value


def is_base64(body: Mapping[str, Any]) -> bool:
    """Whether vectors are to be written as base64."""
    form = body.get("encoding_format")
    if form not in (None, "float", "base64"):
        raise FieldError(f"encoding_format is {quoted(form)}; it must be 'float' or 'base64'", "encoding_format")
    return form == "base64"


def text_of(document: object) -> object:
    """A document's text, which some clients give in an object."""
    return document["text"] if isinstance(document, Mapping) and set(document) == {"text"} else document
