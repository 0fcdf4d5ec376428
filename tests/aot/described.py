"""What programs of this folder say, each in a process of its own: a compiler keeps the environment it began with."""

from __future__ import annotations

import importlib
from typing import Any

from tests.forked import call


def described(program: str, *arguments: Any) -> Any:
    """What main(*arguments) of a module of this folder returns. Only there is it imported: it sets the environment."""
    return call(_main, program, arguments)


def _main(program: str, arguments: tuple[Any, ...]) -> Any:
    return importlib.import_module(f"tests.aot.{program}").main(*arguments)
