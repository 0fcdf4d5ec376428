"""Pure functions of the product and of the engine, which a process of histories computes once for equal arguments."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

from ferrum_jax.batch import worker
from ferrum_jax.batch.input import parsing, rows
from tests.batch import fake_llm

_KEYS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (  # by which a function's results are known
    (rows, "parse_file", lambda file, seed, defaults: (file.getvalue(), seed)),
    (rows, "parse_line", lambda raw, *more, seed, defaults: (raw, more, seed)),
    (rows.Row, "over", lambda row, generation: (row.id, repr(generation))),
    (
        worker,
        "answered_line",
        lambda row, found, job: (row.id, job.fingerprint, job.created, *(c.token_ids for c in found[0].outputs)),
    ),
    (fake_llm, "answer", lambda text, params: (str(text), params.seed, params.n, params.max_tokens)),
)


def _remembered(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    def asked(*args: Any, **how: Any) -> Any:
        if (name := key(*args, **how)) not in known:
            known[name] = function(*args, **how)
        return copy.deepcopy(known[name]) if isinstance(known[name], parsing.Columns) else known[name]

    return asked


_REMEMBERED = [_remembered(getattr(owner, name), key) for owner, name, key in _KEYS]


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Inside, they stand in place of the functions."""
    with contextlib.ExitStack() as stack:
        for (owner, name, _), remembered in zip(_KEYS, _REMEMBERED, strict=True):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, remembered)
        yield
