"""Argument checks whose calls document the arguments."""

import math
from typing import Any


def check_shapes(*arrays: tuple[str, Any], **sizes: int) -> dict[str, int]:
    """The size of each named axis: check_shapes(("T N H", q), ("T K H", k), T=64) gives {"T": 64, "N": ...}.

    Raises ValueError where an array has another rank or two sizes of one axis differ.
    """
    known = dict(sizes)
    for axes, array in arrays:
        names = axes.split()
        if len(names) != array.ndim:
            raise ValueError(f"an array of shape {array.shape} was given for [{axes}]")
        for name, size in zip(names, array.shape, strict=True):
            if known.setdefault(name, size) != size:
                raise ValueError(f"axis {name} of an array of shape {array.shape}, [{axes}], must be {known[name]}")
    return known


def check_counts(least: int = 1, **counts: int | None) -> None:
    """Raises ValueError unless every count is a whole number, `least` or more. None stands for a count not given."""
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < least):
            raise ValueError(f"{name} is {count!r}; it must be a whole number, {least} or more")


def check_positive(hint: str = "", **numbers: float | None) -> None:
    """Raises ValueError unless every number is finite and above 0. None stands for a number that was not given."""
    for name, number in numbers.items():
        if number is not None and not 0 < number < math.inf:  # NaN is refused too
            raise ValueError(f"{name} is {number!r}; it must be a finite number above 0{hint}")
