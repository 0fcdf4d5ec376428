"""Lowered: a program that XLA has not compiled yet, and the text by which an equal one is known again."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from ferrum_jax.runtime.compile.deferred import Executable


class Lowered:
    """One program. watching: a context in which it is compiled, which may turn the compiler's errors into others."""

    def __init__(
        self,
        lowered: jax.stages.Lowered,
        watching: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._lowered = lowered
        self._watching = watching

    def text(self) -> str | None:
        """All that decides the executable beside the environment: programs of equal text are equal.

        None where jax does not say some of it in the way that is known here.
        """
        lowered = self._lowered
        try:
            inner: Any = lowered._lowering
            rest, options = inner.compile_args, inner._compiler_options_kvs
            called = [rest[name] for name in ("kept_var_idx", "in_shardings", "out_shardings")]
            if inner.const_args or rest["host_callbacks"]:  # which the text does not hold
                return None
        except (AttributeError, KeyError):
            return None
        trees = (lowered.in_tree, lowered.out_tree, lowered.args_info, lowered.out_info)
        return "\n".join(map(str, (*trees, options, *called, lowered.as_text())))

    def compile(self) -> Executable:
        """Compiled for the devices for which it was lowered."""
        with self._watching():
            return self._lowered.compile()
