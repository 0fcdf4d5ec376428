"""An extension of griffe, which reads docstrings for mkdocstrings: parameters and fields become a list.

A docstring of this project says `name: what it is. other: what that is.` in running text. Here each name that the
object really has, as a parameter, a field or a member, begins an item of its own.
"""

import re
from typing import Any

try:
    from griffe import Extension  # pyright: ignore[reportMissingImports]
except ImportError:  # tests of `as_list` have no griffe
    Extension = object


class Parameters(Extension):  # pyright: ignore[reportGeneralTypeIssues]
    """Rewrites the docstrings of functions and classes as they are loaded."""

    def on_function(self, *, func: Any, **_: Any) -> None:
        _rewrite(func, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: Any, **_: Any) -> None:
        constructor = cls.members.get("__init__")
        own = set() if constructor is None else {parameter.name for parameter in constructor.parameters}
        _rewrite(cls, own | set(cls.members))


def _rewrite(described: Any, names: set[str]) -> None:
    if described.docstring is not None and names:
        described.docstring.value = as_list(described.docstring.value, names)


def as_list(text: str, names: set[str]) -> str:
    """The docstring with an item for each `name: ...` or `name, other: ...` that begins a line or a sentence."""
    name = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    heads = re.compile(rf"(?:^|(?<=[.;] )|(?<=[.;]\n))((?:{name})(?:(?:, | / )(?:{name}))*): ", re.MULTILINE)
    first, *rest = heads.split(text)
    if not rest:
        return text
    items = []
    for head, body in zip(rest[::2], rest[1::2], strict=True):
        paragraphs = re.split(r"\n\s*\n|(?:(?<=\. )|(?<=\.\n)|\n)(?=Raises )", body.strip(), maxsplit=1)
        named = ", ".join(f"`{word}`" for word in re.split(r", | / ", head))
        items.append(f"- {named}: {' '.join(paragraphs[0].split()).rstrip(';')}")
        items += ["", paragraphs[1].strip(), ""] if len(paragraphs) > 1 else []
    return f"{first.rstrip()}\n\n" + "\n".join(items).strip()
