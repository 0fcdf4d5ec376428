"""Parsing: every line of an input becomes an entry in columns; several processes parse a large input.

    file  ->  chunks of whole lines  ->  the columns of each chunk  ->  the columns of the file

What a chunk becomes depends on its lines, their numbers and the job's seed alone, so it is the same wherever it is
parsed. A process parses what comes through its connection and ends when that closes, so none outlives this one. It
also parses single lines into rows, for `read_ahead`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import signal
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any, BinaryIO

from ferrum_jax.batch.input.formats import NO_DEFAULTS, BadRow, own_name, parse_line
from ferrum_jax.batch.input.ordering import Features
from ferrum_jax.io import child

_CHUNK_BYTES = 1 << 20
_MIN_BYTES = 16 << 20  # of input per process: starting one takes a third of a second, parsing this much a second
_MAX_PROCESSES = 16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Lines:
    """Lines that follow each other, the first at `offset` in the file."""

    offset: int
    number: int  # of the first, from 1
    lines: list[bytes]


Line = tuple[bytes, int, str]  # a line that was parsed as a good row before, its number, its digest


@dataclasses.dataclass(kw_only=True, slots=True)
class Columns:
    """The kept fields of all lines that are not blank, in their order."""

    offsets: array[int] = dataclasses.field(default_factory=lambda: array("Q"))
    numbers: array[int] = dataclasses.field(default_factory=lambda: array("I"))
    checksums: array[int] = dataclasses.field(default_factory=lambda: array("I"))  # of the lines as they are
    is_bad: bytearray = dataclasses.field(default_factory=bytearray)
    digests: bytearray = dataclasses.field(default_factory=bytearray)  # 16 bytes each
    names: bytearray = dataclasses.field(default_factory=bytearray)  # 8 bytes each, of custom_id; 0 where it has none
    models: bytearray = dataclasses.field(default_factory=bytearray)  # 8 bytes each, of the name; 0 where it has none
    adapters: bytearray = dataclasses.field(default_factory=bytearray)  # the same, of the field `adapter`
    features: Features = dataclasses.field(default_factory=Features)

    def extend(self, other: Columns) -> None:
        """Append the columns of the lines that follow."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).extend(getattr(other, field.name))


def parse_file(file: BinaryIO, seed: int, defaults: Mapping[str, Any] = NO_DEFAULTS) -> Columns:
    """The columns of a file, from its beginning. seed, defaults: the job's."""
    columns = Columns()
    num_processes = min(os.cpu_count() or 1, num_worthwhile(file), _MAX_PROCESSES)
    chunks = _chunks_of(file)
    parts = (_parse(chunk, seed, defaults) for chunk in chunks)
    for part in _parse_elsewhere(chunks, seed, defaults, num_processes) if num_processes > 1 else parts:
        columns.extend(part)
    return columns


def num_worthwhile(file: BinaryIO) -> int:
    """How many processes the input is large enough for. Leaves the file at its beginning."""
    count = file.seek(0, os.SEEK_END) // _MIN_BYTES
    file.seek(0)
    return count


def _chunks_of(file: BinaryIO) -> Iterator[_Lines]:
    offset, number = 0, 1
    while lines := file.readlines(_CHUNK_BYTES):
        yield _Lines(offset=offset, number=number, lines=lines)
        offset, number = offset + sum(map(len, lines)), number + len(lines)


def _parse(chunk: _Lines, seed: int, defaults: Mapping[str, Any]) -> Columns:
    columns, end = Columns(), chunk.offset
    for number, raw in enumerate(chunk.lines, chunk.number):
        offset, end = end, end + len(raw)
        if not raw.strip():
            continue
        row = parse_line(raw, number, seed=seed, defaults=defaults)
        columns.offsets.append(offset)
        columns.numbers.append(number)
        columns.checksums.append(zlib.crc32(raw))
        columns.is_bad.append(isinstance(row, BadRow))
        columns.digests += bytes.fromhex(row.id)
        columns.names += name_digest(own_name(row))
        columns.models += name_digest(None if isinstance(row, BadRow) else row.model)
        columns.adapters += name_digest(None if isinstance(row, BadRow) else row.adapter)
        columns.features.add(row)
    return columns


def name_digest(name: str | None) -> bytes:
    """8 bytes; zeros for None."""
    return bytes(8) if name is None else hashlib.blake2b(name.encode(), digest_size=8).digest()


def _parse_elsewhere(
    chunks: Iterator[_Lines], seed: int, defaults: Mapping[str, Any], num_processes: int
) -> Iterator[Columns]:
    """The columns of each chunk in turn. Raises OSError if a process ends before its time."""
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(parser(seed, defaults)) for _ in range(num_processes)]
        busy: deque[Connection] = deque()
        stack.enter_context(parser_errors())
        for chunk in chunks:
            if not idle:
                idle.append(busy.popleft())
                yield idle[0].recv()
            busy.append(idle.pop())
            busy[-1].send(chunk)
        while busy:
            yield busy.popleft().recv()


@contextlib.contextmanager
def parser_errors() -> Iterator[None]:
    """Raises OSError, which says what to do, if the connection to a process ends inside the block."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise OSError("a process that parses the input ended before its time; start the job again") from error


@contextlib.contextmanager
def parser(seed: int, defaults: Mapping[str, Any] = NO_DEFAULTS) -> Iterator[Connection]:
    """The connection to a new process that runs `serve`. seed, defaults: the job's."""
    own, its = Pipe()
    with own:
        with its:
            asked = its.fileno(), seed, dict(defaults)
            process = child.start("ferrum_jax.batch.input.parsing:serve", asked, pass_fds=[its.fileno()])
        with process:
            try:
                yield own
            finally:
                process.kill()


def serve(order: tuple[int, int, Mapping[str, Any]]) -> None:
    """Answers each chunk that comes through a connection with its columns, and lines with their rows as plain tuples.

    Plain tuples are less work to receive than rows. Returns when the other end is closed.
    """
    fd, seed, defaults = order
    for signals in (signal.SIGINT, signal.SIGTERM):  # they are for the process that asks, which then closes its end
        signal.signal(signals, signal.SIG_IGN)
    with Connection(fd) as connection, contextlib.suppress(EOFError, ConnectionError):
        while True:
            asked: _Lines | list[Line] = connection.recv()
            if isinstance(asked, _Lines):
                connection.send(_parse(asked, seed, defaults))
            else:
                connection.send([tuple(parse_line(*line, seed=seed, defaults=defaults)) for line in asked])
