"""A checkpoint's problems as one error of a readable length: a damaged file may have many."""

from collections.abc import Sequence

_MOST, _LONGEST = 100, 500


def listed(problems: Sequence[str]) -> str:
    """The problems, one a line, each shortened; beyond the first hundred their number."""
    lines = [text if len(text) <= _LONGEST else f"{text[:_LONGEST]}.." for text in problems[:_MOST]]
    more = len(problems) - _MOST
    return "\n  ".join([*lines, *([f"and {more} more"] if more > 0 else [])])


def shown(names: Sequence[str]) -> str:
    """The first of these names, and how many more there are."""
    first = [name if len(name) <= 100 else f"{name[:100]}.." for name in names[:10]]
    return f"{first}" + (f" and {len(names) - 10} more" if len(names) > 10 else "")
