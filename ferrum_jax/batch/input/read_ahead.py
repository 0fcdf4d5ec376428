"""Reading ahead: another process parses the rows that run next.

    expect(rows)  ->  a chunk of lines at the process  ->  ready  ->  take(row)

The process parses one chunk while rows are taken from the chunk before it. Ready rows are only copies of the input:
whoever takes a row decides whether and when it runs, so a crash or a notice loses nothing.
"""

from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection

from ferrum_jax.batch.input.formats import Row
from ferrum_jax.batch.input.parsing import Line, parser_errors

_MAX_AT_ONCE = 256  # lines that the process parses while as many rows are taken


class ReadAhead:
    """Rows that are parsed ahead, over a connection that `parsing.parser` opened."""

    def __init__(self, connection: Connection, line: Callable[[int], Line]) -> None:
        """line: gives the line of a row by its index; may raise."""
        self._connection, self._line = connection, line
        self._expected: deque[int] = deque()
        self._asked: list[int] = []
        self._ready: dict[int, Row] = {}

    def expect(self, indices: Iterable[int]) -> None:
        """Say which rows will be taken next, in about this order, after those that are expected already."""
        self._expected.extend(indices)
        if not self._asked:
            self._ask()

    def take(self, index: int) -> Row | None:
        """The row, or None if it is not among the next ones. Raises OSError if the process has ended."""
        if index not in self._ready and index in self._asked:
            with parser_errors():
                self._ready.update(zip(self._asked, map(Row._make, self._connection.recv()), strict=True))
            self._ask()
        return self._ready.pop(index, None)

    def _ask(self) -> None:
        count = min(_MAX_AT_ONCE, len(self._expected))
        self._asked = [self._expected.popleft() for _ in range(count)]
        lines = [self._line(index) for index in self._asked]
        if lines:
            with parser_errors():
                self._connection.send(lines)
