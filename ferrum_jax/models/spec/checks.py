"""Checks of fields, whose errors name the key and its value."""

from typing import Any


def check_positive(spec: Any, *fields: str) -> None:
    for field in fields:
        if getattr(spec, field) < 1:
            raise ValueError(f"{field} is {getattr(spec, field)}; it must be at least 1")


def no_multiples(tp: int, **sizes: int) -> list[str]:
    """Which sizes cannot be spread over tp devices."""
    return [f"{name}, {size}, is not a multiple of tp, {tp}" for name, size in sizes.items() if size % tp]


def check_above_zero(spec: Any, *fields: str) -> None:
    for field in fields:
        value = getattr(spec, field)
        if value is not None and value <= 0:
            raise ValueError(f"{field} is {value}; it must be above 0, or null for none")
