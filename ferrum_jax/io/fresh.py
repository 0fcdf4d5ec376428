"""A function called in a fresh interpreter: nothing is forked, and what it imports and opens is not in this one."""

from __future__ import annotations

import contextlib
import importlib
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from ferrum_jax.io.fresh import call; call()"


def start(function: str, order: object, *, environment: Sequence[str] = (), **how: Any) -> subprocess.Popen[bytes]:
    """A process that calls function(order). Ctrl-C is not for it, but for this one to handle.

    function: "package.module:name". order: whatever can be pickled; it goes through standard input.
    environment: more of it, in words as NAME=value. how: of subprocess.Popen.
    """
    words = ["/usr/bin/env", *environment, sys.executable, "-X", "faulthandler", "-c", _PROGRAM, str(_ROOT), function]
    process: subprocess.Popen[Any] = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, **how)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
        process.stdin.write(pickle.dumps(order))
        process.stdin.close()
    return process


def call() -> None:
    """In the process: argv has the root of the packages and the function; stdin the order."""
    module, name = sys.argv[2].split(":")
    getattr(importlib.import_module(module), name)(pickle.load(sys.stdin.buffer))
