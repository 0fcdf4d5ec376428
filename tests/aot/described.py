"""What programs of this folder say, each in a process of its own: a compiler keeps the environment it began with.

By hand: python -m tests.aot.described PROGRAM ARGUMENT...   prints JSON; arguments are of `main`, lists as JSON
"""

import importlib
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from tests.forked import call


def described(program: str, *arguments: Any) -> Any:
    """What main(*arguments) of a module of this folder returns. Only there is it imported: it sets the environment."""
    return call(_main, program, arguments)


def _main(program: str, arguments: tuple[Any, ...]) -> Any:
    return importlib.import_module(f"tests.aot.{program}").main(*arguments)


def or_error(describe: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What it returns; where it does not compile, the compiler's error, which the test reports."""
    try:
        return describe(*arguments)
    except Exception as error:  # whatever the compiler raises
        return {"error": f"{type(error).__name__}: {str(error)[:2000]}"}


def turn_of(name: str, among: Sequence[str]) -> str:
    """The target for which .ci/run compiles what has this name."""
    return among[zlib.crc32(name.encode()) % len(among)]


if __name__ == "__main__":
    given = [json.loads(text) if text[0] in "[{" else text for text in sys.argv[2:]]
    print(json.dumps(described(sys.argv[1], *given)))
