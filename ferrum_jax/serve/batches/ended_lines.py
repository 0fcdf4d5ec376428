"""Lines of a batch that has ended: answers in one file and errors in another, as OpenAI's batches have them."""

import json
from collections.abc import Iterable
from typing import BinaryIO, NamedTuple

from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.journal.journal import Journal
from ferrum_jax.batch.journal.line_record import json_of, line_of

_EXPIRED = {
    "code": "batch_expired",
    "message": "the completion window was over before this row was answered; ask for it in another batch",
}


class Counts(NamedTuple):
    """Lines of both files, and their bytes."""

    num_ok: int
    num_failed: int
    ok_bytes: int
    failed_bytes: int


def parted(lines: Iterable[bytes], answers: BinaryIO, errors: BinaryIO) -> Counts:
    """Writes each line to the file that it belongs to."""
    num_ok = num_failed = 0
    for line in lines:
        if json.loads(line)["error"] is None:
            num_ok += 1
            answers.write(line)
        else:
            num_failed += 1
            errors.write(line)
    return Counts(num_ok, num_failed, answers.tell(), errors.tell())


def write_expired(rows: Rows, journal: Journal, errors: BinaryIO) -> int:
    """Writes a line for each row that was not answered in time; how many there were."""
    unfinished = sorted(journal.unfinished(rows.order).tolist())
    said = json_of(_EXPIRED)
    for index in unfinished:
        row = rows.read(index)
        errors.write(line_of(row.id, row.custom_id, "null", said))
    return len(unfinished)
