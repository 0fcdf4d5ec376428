"""Reading ahead: the rows that run next are parsed by a process meanwhile.

    expect(rows)  ->  a chunk of lines at the process  ->  ready  ->  take(row)

One chunk is with the process while the one before it is taken from. What is ready here is a copy of what the input
says and no more: whether a row runs, and when, is decided by whoever takes it, so a crash or a notice loses nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection

from ferrum_jax.batch.formats import Row
from ferrum_jax.batch.parsing import Line, parser_errors

_MOST_AT_ONCE = 256  # lines that the process parses while as many rows are taken


class ReadAhead:
    """Over the connection to a process that `parsing.parser` began."""

    def __init__(self, connection: Connection, line: Callable[[int], Line]) -> None:
        """line: of a row, by its index; may raise."""
        self._connection, self._line = connection, line
        self._expected: deque[int] = deque()
        self._asked: list[int] = []
        self._ready: dict[int, Row] = {}

    def expect(self, indices: Iterable[int]) -> None:
        """These will be taken after those that were expected before, in about this order."""
        self._expected.extend(indices)
        if not self._asked:
            self._ask()

    def take(self, index: int) -> Row | None:
        """The row, or None if it is none of those that come next. Raises OSError if the process has ended."""
        if index not in self._ready and index in self._asked:
            with parser_errors():
                self._ready.update(zip(self._asked, map(Row._make, self._connection.recv()), strict=True))
            self._ask()
        return self._ready.pop(index, None)

    def _ask(self) -> None:
        count = min(_MOST_AT_ONCE, len(self._expected))
        self._asked = [self._expected.popleft() for _ in range(count)]
        lines = [self._line(index) for index in self._asked]
        if lines:
            with parser_errors():
                self._connection.send(lines)
