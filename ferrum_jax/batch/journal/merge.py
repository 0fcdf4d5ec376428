"""The merge: all lines of a finished job, from its segments into one file in the order of the input.

Each segment is read once, from front to back; the place of every line follows from the lengths of those before it.
"""

from typing import BinaryIO

import numpy as np

from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.journal.journal import Journal
from ferrum_jax.batch.journal.line_record import OutputDigest
from ferrum_jax.batch.journal.responses import failed_line


def merge(rows: Rows, journal: Journal, output: BinaryIO) -> str:
    """Writes one line for each row and returns the digest of them all. Raises OSError if a segment is not there."""
    lengths, digest = journal.lengths(), OutputDigest()
    for index, bad in rows.bad_rows():
        lengths[index] = len(failed_line(bad))
    starts = np.cumsum(lengths) - lengths

    def write(index: int, line: bytes) -> None:
        digest.add(index, line)
        start = int(starts[index])
        if output.tell() != start:
            output.seek(start)
        output.write(line)

    for index, bad in rows.bad_rows():
        write(index, failed_line(bad))
    for name, indices, offsets, sizes in journal.lines():
        content = journal.read(name)
        for index, offset, size in zip(indices, offsets.tolist(), sizes.tolist(), strict=True):
            write(index, content[offset : offset + size])
    return digest.text
