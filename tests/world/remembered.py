"""Pure functions of the product and of the engine, which a process of histories computes once for equal arguments.

Histories of one job differ in what happens when, so rows are read and lines written that are equal to the bit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ferrum_jax.batch import worker
from ferrum_jax.batch.input import rows
from tests.batch import fake_llm


def _by(
    function: Callable[..., Any], key: Callable[..., Any], fresh: Callable[[Any], Any] = lambda found: found
) -> Any:
    """The function, which is called once for each key. fresh: makes a result that a caller may change."""
    known: dict[Any, Any] = {}

    @functools.wraps(function)
    def remembered(*args: Any, **how: Any) -> Any:
        asked = key(*args, **how)
        if asked not in known:
            known[asked] = function(*args, **how)
        return fresh(known[asked])

    return remembered


def _tokens(outputs: Any) -> Any:
    return tuple((choice.token_ids, choice.text) for output in outputs for choice in output.outputs)


_REMEMBERED = (
    (rows, "parse_file", _by(rows.parse_file, lambda file, seed, defaults: (file.getvalue(), seed), copy.deepcopy)),
    (rows, "parse_line", _by(rows.parse_line, lambda raw, *more, seed, defaults: (raw, more, seed))),
    (rows.Row, "over", _by(rows.Row.over, lambda row, generation: (row.id, repr(generation)))),
    (
        worker,
        "answered_line",
        _by(worker.answered_line, lambda row, found, job: (row.id, _tokens(found), job.fingerprint)),
    ),
    (fake_llm, "answer", _by(fake_llm.answer, lambda text, params: (text, params.seed, params.n, params.max_tokens))),
)


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Inside, they are asked in place of the functions."""
    before = [getattr(owner, name) for owner, name, _ in _REMEMBERED]
    for owner, name, remembered in _REMEMBERED:
        setattr(owner, name, remembered)
    try:
        yield
    finally:
        for (owner, name, _), function in zip(_REMEMBERED, before, strict=True):
            setattr(owner, name, function)
