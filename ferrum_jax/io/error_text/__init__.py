"""Other people's values, names and sentences in errors, cut to a bounded length, and what to use instead.

Bodies and rows have megabytes, and an error goes into an answer, a line of output, a log and a page. So `quoted` reads
no more of a value than it shows, and `bounded` is what every error passes before it leaves.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

MOST_CHARACTERS = 4000  # of an error
MAX_QUOTED = 200  # characters of a value
MAX_NAMED = 8  # of a list of names
_MOST_NAME = 100  # characters of a name
_END = 1000  # of an error that is cut: what to do stands at its end


def bounded(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text of an error without its middle where it is long, and with half surrogate pairs written out."""
    if len(text) > most:
        gap = f" .. ({len(text):,} characters in all) .. "
        text = text[: most - _END - len(gap)] + gap + text[-_END:]
    return text.encode("utf-8", "backslashreplace").decode()


def quoted(value: Any, write: Callable[[Any], str] = repr) -> str:
    """The value as `write` writes it, or of a long one the beginning and its size. write: of plain values."""
    if isinstance(value, str | bytes) and len(value) > MAX_QUOTED:
        what = "characters" if isinstance(value, str) else "bytes"
        return f"{write(value[:MAX_QUOTED])}.. ({len(value):,} {what})"
    if isinstance(value, int) and abs(value) >> 1000:
        return f"a whole number of {value.bit_length():,} bits"
    text = ""
    for piece in _pieces(value, write):
        text += piece
        if len(text) > MAX_QUOTED:
            size = f" ({len(value):,} entries)" if isinstance(value, Collection) and len(value) > 1 else ""
            return f"{text[:MAX_QUOTED]}..{size}"
    return text


def named(names: Collection[str]) -> str:
    """The first few names, and how many more there are."""
    first = [_cut(name) for name in islice(names, MAX_NAMED)]
    more = len(names) - len(first)
    return ", ".join(first) + (f" and {more:,} more" if more else "")


class Elsewhere(NamedTuple):
    """A name that other engines have, and this one has not. harmless: values that ask for what is done anyway."""

    harmless: tuple[Any, ...]
    instead: str


def require_harmless(name: str, value: Any, table: Mapping[str, Elsewhere]) -> None:
    """Raises ValueError for a value that asks for something there is not here. table: has the name."""
    harmless, instead = table[name]
    if not is_harmless(value, harmless):
        raise ValueError(f"{name} is {quoted(value)}, a setting that is not here: {instead}")


def is_harmless(value: Any, harmless: Collection[Any]) -> bool:
    """Whether the value is one of these; 1 and 1.0 are equal, and True is another."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless)


def _cut(name: str) -> str:
    return name if len(name) <= _MOST_NAME else f"{name[:_MOST_NAME]}.. ({len(name):,} characters)"


def _pieces(value: Any, write: Callable[[Any], str]) -> Iterator[str]:
    """The text of a value from its beginning on, for one who may stop reading."""
    kind = type(value)
    if kind in (str, bytes):
        yield write(value[: MAX_QUOTED + 1])
    elif kind in (list, tuple):
        opening, closing = "[]" if kind is list else ("(", ",)" if len(value) == 1 else ")")
        yield opening
        for index, item in enumerate(value):
            yield ", " if index else ""
            yield from _pieces(item, write)
        yield closing
    elif isinstance(value, Mapping):
        yield "{"
        for index, (name, item) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _pieces(name, write)
            yield ": "
            yield from _pieces(item, write)
        yield "}"
    else:
        yield write(value)
