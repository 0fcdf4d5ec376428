"""Parsing: every line of an input becomes an entry in columns; of a large input in several processes.

    file  ->  chunks of whole lines  ->  the columns of each chunk  ->  the columns of the file

What a chunk becomes depends on its lines, their numbers and the job's seed alone, so it is the same wherever it is
parsed. A process parses what comes through its connection and ends when that does, so none outlives this one. It takes
single lines too, of rows that are to run, whose columns are there already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import zlib
from array import array
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from typing import BinaryIO

from ferrum_jax.batch.formats import BadRow, parse_line
from ferrum_jax.batch.ordering import Features

_CHUNK_BYTES = 1 << 20
_LEAST_BYTES = 16 << 20  # of input for each process: it takes a third of a second to start, this a second to parse
_MOST_PROCESSES = 16
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; from ferrum_jax.batch import parsing; "
    "parsing.serve(int(sys.argv[1]), int(sys.argv[2]))"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """Lines that follow each other, the first at `offset` in the file."""

    offset: int
    number: int  # of the first, from 1
    lines: list[bytes]


Line = tuple[bytes, int, str]  # one that was a good row before, its number and its digest


@dataclasses.dataclass(kw_only=True, slots=True)
class Columns:
    """What is kept of the lines that are not blank, in their order."""

    offsets: array[int] = dataclasses.field(default_factory=lambda: array("Q"))
    numbers: array[int] = dataclasses.field(default_factory=lambda: array("I"))
    checksums: array[int] = dataclasses.field(default_factory=lambda: array("I"))  # of the lines as they are
    is_bad: bytearray = dataclasses.field(default_factory=bytearray)
    digests: bytearray = dataclasses.field(default_factory=bytearray)  # 16 bytes each
    names: bytearray = dataclasses.field(default_factory=bytearray)  # 8 bytes each, of custom_id; 0 where it has none
    features: Features = dataclasses.field(default_factory=Features)

    def extend(self, other: Columns) -> None:
        """Append those of the following lines."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).extend(getattr(other, field.name))


def parse_file(file: BinaryIO, seed: int) -> Columns:
    """The columns of a file, from its beginning. seed: the job's."""
    columns = Columns()
    num_processes = min(os.cpu_count() or 1, num_worthwhile(file), _MOST_PROCESSES)
    chunks = _chunks_of(file)
    parts = (_parse(chunk, seed) for chunk in chunks)
    for part in _parse_elsewhere(chunks, seed, num_processes) if num_processes > 1 else parts:
        columns.extend(part)
    return columns


def num_worthwhile(file: BinaryIO) -> int:
    """How many processes the input is large enough for; the file is at its beginning after it."""
    count = file.seek(0, os.SEEK_END) // _LEAST_BYTES
    file.seek(0)
    return count


def _chunks_of(file: BinaryIO) -> Iterator[_Chunk]:
    offset, number = 0, 1
    while lines := file.readlines(_CHUNK_BYTES):
        yield _Chunk(offset=offset, number=number, lines=lines)
        offset, number = offset + sum(map(len, lines)), number + len(lines)


def _parse(chunk: _Chunk, seed: int) -> Columns:
    columns, end = Columns(), chunk.offset
    for number, raw in enumerate(chunk.lines, chunk.number):
        offset, end = end, end + len(raw)
        if not raw.strip():
            continue
        row = parse_line(raw, number, seed=seed)
        columns.offsets.append(offset)
        columns.numbers.append(number)
        columns.checksums.append(zlib.crc32(raw))
        columns.is_bad.append(isinstance(row, BadRow))
        columns.digests += bytes.fromhex(row.id)
        columns.names += bytes(8) if row.custom_id is None else _name(row.custom_id)
        columns.features.add(row)
    return columns


def _name(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode(), digest_size=8).digest()


def _parse_elsewhere(chunks: Iterator[_Chunk], seed: int, num_processes: int) -> Iterator[Columns]:
    """The columns of each chunk in turn. Raises OSError if a process ends before its time."""
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(parser(seed)) for _ in range(num_processes)]
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
    """Raises OSError, which says what to do, where the connection to a process ends inside."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise OSError("a process that parses the input ended before its time; start the job again") from error


@contextlib.contextmanager
def parser(seed: int) -> Iterator[Connection]:
    """The connection to a process that serves it. seed: the job's."""
    own, its = Pipe()
    with own:
        with its:
            arguments = [sys.executable, "-c", _PROGRAM, str(its.fileno()), str(seed), *sys.path]
            process = subprocess.Popen(arguments, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
        try:
            yield own
        finally:
            process.kill()
            process.wait()


def serve(fd: int, seed: int) -> None:
    """Answers each chunk that comes through a connection with its columns, and lines with their rows as plain tuples.

    These are less work to receive than rows. It ends when the other end is closed.
    """
    for signals in (signal.SIGINT, signal.SIGTERM):  # they are for the process that asks, which then closes its end
        signal.signal(signals, signal.SIG_IGN)
    with Connection(fd) as connection, contextlib.suppress(EOFError, ConnectionError):
        while True:
            asked: _Chunk | list[Line] = connection.recv()
            if isinstance(asked, _Chunk):
                connection.send(_parse(asked, seed))
            else:
                connection.send([tuple(parse_line(*line, seed=seed)) for line in asked])
