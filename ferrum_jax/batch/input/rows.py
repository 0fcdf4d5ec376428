"""Rows: the lines of a job's input as arrays, one entry a row, and the order in which they are best run.

One pass parses every line; what stays is 32 hex digits of digest, a place in the file and a few numbers, so a
million rows take well under 200 MB with their books. A row is parsed again when it is run; of a large input by a
process that reads ahead.
"""

import contextlib
import gc
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NoReturn

import numpy as np

from ferrum_jax.batch.input.formats import NO_DEFAULTS, BadRow, Row, duplicate_row, foreign_row, parse_line
from ferrum_jax.batch.input.ordering import by_priority
from ferrum_jax.batch.input.parsing import Line, name_digest, num_worthwhile, parse_file, parser
from ferrum_jax.batch.input.read_ahead import ReadAhead
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.openai.asked import GENERATES

_MAX_NAMED = 5
_MAX_ROWS_IN_PART, _MIN_ROWS_IN_PART, _PARTS = 1024, 8, 64
_OBJECTS_BETWEEN_LOOKS = 50_000  # Python's default is 700, which would collect every third row


@contextlib.contextmanager
def seldom_looking_for_cycles() -> Iterator[None]:
    """Collects garbage rarely: a row is hundreds of objects without cycles, and looking for some costs 5 % of time."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BETWEEN_LOOKS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Rows:
    """All lines of `file` that are not blank, by index in their order.

    file: JSONL, open for reading and seeking; it must not change while the job runs. seed, defaults: the job's, as
    `parse_line` takes them. names: of the model, the one that answers carry first; None takes rows that ask for any.
    adapters: names that a row may give as its model or as its adapter. in_turn: parts come in the order of the
    input. Raises ValueError if all ask for others.

    generation: the model's own defaults, which rows that are read take from then on; None before they are known.
    layout: names these rows. part_layout: names their parts. tokens: [rows, 2] that each reads and may write, about.
    """

    def __init__(
        self,
        file: BinaryIO,
        seed: int = 0,
        names: Sequence[str] | None = None,
        *,
        defaults: Mapping[str, Any] = NO_DEFAULTS,
        adapters: Sequence[str] = (),
        in_turn: bool = False,
    ) -> None:
        self._file, self._seed, self.names, self._defaults = file, seed, names, defaults
        self._adapters = tuple(adapters)
        self._first_lines: dict[int, int] = {}  # of a duplicate: the line that has the custom_id first
        self._ahead: ReadAhead | None = None
        self.generation: Mapping[str, Any] | None = None
        columns = parse_file(file, seed, defaults)
        self._offsets, self._numbers = columns.offsets, columns.numbers
        self._checksums = columns.checksums  # to see that the lines stay as they are
        self.is_bad = np.frombuffer(columns.is_bad, np.bool_)
        self._digests = columns.digests
        self._refuse_duplicates(np.frombuffer(columns.names, np.uint64))
        self.kinds = columns.features.kinds
        models, own = (np.frombuffer(each, np.uint64) for each in (columns.models, columns.adapters))
        by_model = np.isin(models, _digests(self._adapters))
        asked = np.where(by_model, models, own)  # [rows]: the adapter of each, 0 for none
        if names is not None:
            known = np.isin(models, _digests((None, *names))) & np.isin(own, _digests((None, *self._adapters)))
            known |= by_model & (self.kinds == GENERATES) & ((own == 0) | (own == models))
            self._refuse_others(~known, np.where(own == 0, models, own), names)
        self.num_bad = int(self.is_bad.sum())
        heads = np.frombuffer(self._digests, ">u8")[::2].astype(np.uint64)
        self._by_digest = np.argsort(heads, kind="stable").astype(np.uint32)
        self._heads = heads[self._by_digest]  # sorted
        self.tokens = columns.features.tokens
        self.layout = self.part_layout = hashlib.blake2b(self._digests, digest_size=8).hexdigest()
        order = columns.features.order(asked)
        self.order = order[~self.is_bad[order]]  # rows to run, in the order in which they should
        priorities = columns.features.priorities
        if in_turn or priorities.any():
            self.order = by_priority(self.order, priorities, self.part_size, in_turn=in_turn)
            self.part_layout = hashlib.blake2b(self._digests + self.order.tobytes(), digest_size=8).hexdigest()

    def __len__(self) -> int:
        return len(self._offsets)

    def parts(self) -> list[np.ndarray]:
        """The rows to run in parts that workers take: a function of the input alone, near rows together."""
        return [self.order[start : start + self.part_size] for start in range(0, len(self.order), self.part_size)]

    @property
    def part_size(self) -> int:
        """Most rows of a part."""
        return max(_MIN_ROWS_IN_PART, min(_MAX_ROWS_IN_PART, ceil_div(len(self.order), _PARTS)))

    @contextlib.contextmanager
    def reading_ahead(self) -> Iterator[None]:
        """Meanwhile a process parses the rows that are expected, if the input is large."""
        if not num_worthwhile(self._file):
            yield
            return
        with parser(self._seed, self._defaults) as connection:
            self._ahead = ReadAhead(connection, self._line_to_parse)
            try:
                yield
            finally:
                self._ahead = None

    def expect(self, indices: Iterable[int]) -> None:
        """These rows, none of them bad, will be read next, in about this order."""
        if self._ahead is not None:
            self._ahead.expect(indices)

    def read(self, index: int) -> Row | BadRow:
        """The row, parsed again. Raises OSError if its line is not what it was."""
        row = None if self._ahead is None else self._ahead.take(index)
        if row is None and not self.is_bad[index]:
            row = parse_line(*self._line_to_parse(index), seed=self._seed, defaults=self._defaults)
        if isinstance(row, BadRow):
            return row
        if row is not None:
            row = row if row.model not in self._adapters else row.with_adapter(row.model)
            return row if self.generation is None else row.over(self.generation)
        raw, number = self._checked_line(index)
        found = parse_line(raw, number, seed=self._seed, defaults=self._defaults)
        first_line = self._first_lines.get(index)
        if first_line is None:
            if isinstance(found, BadRow):
                return found
            return foreign_row(raw, number, found, self.names or (), self._adapters)
        assert found.custom_id is not None, "a duplicate has a name"
        return duplicate_row(raw, number, found.custom_id, first_line)

    def _line_to_parse(self, index: int) -> Line:
        return *self._checked_line(index), self.digest(index)

    def _checked_line(self, index: int) -> tuple[bytes, int]:
        raw, number = self._line(index)
        if zlib.crc32(raw) != self._checksums[index]:
            raise OSError(f"line {number} of the input changed while the job ran; start the job again")
        return raw, number

    def line(self, index: int) -> bytes:
        """The line as it stands in the input. Raises OSError if it is not what it was."""
        return self._checked_line(index)[0]

    def digest(self, index: int) -> str:
        return self._digests[16 * index : 16 * index + 16].hex()

    def find(self, digest: str) -> int | None:
        """The index of the row with this digest."""
        head = np.uint64(int(digest[:16], 16))
        place = int(np.searchsorted(self._heads, head))
        while place < len(self) and self._heads[place] == head:
            index = int(self._by_digest[place])
            if self.digest(index) == digest:
                return index
            place += 1
        return None

    def number(self, index: int) -> int:
        """The line of the file in which the row stands, from 1."""
        return self._numbers[index]

    def bad_rows(self) -> Iterator[tuple[int, BadRow]]:
        for index in np.flatnonzero(self.is_bad).tolist():
            row = self.read(index)
            assert isinstance(row, BadRow), f"row {index} was bad and is not"
            yield index, row

    def _parse(self, index: int) -> Row | BadRow:
        """The line alone, with the job's seed and defaults as at the first pass."""
        return parse_line(*self._line(index), seed=self._seed, defaults=self._defaults)

    def _line(self, index: int) -> tuple[bytes, int]:
        self._file.seek(self._offsets[index])
        return self._file.readline(), self._numbers[index]

    def _refuse_duplicates(self, names: np.ndarray) -> None:
        """Keeps the first row of each custom_id; the others become bad rows with digests of their own."""
        by_name = np.argsort(names, kind="stable")
        same = np.flatnonzero((np.diff(names[by_name]) == 0) & (names[by_name[1:]] != 0))
        suspects = sorted({int(by_name[i + step]) for i in same.tolist() for step in (0, 1)})
        first: dict[str, int] = {}
        for index in suspects:
            raw, number = self._line(index)
            custom_id = self._parse(index).custom_id
            assert custom_id is not None
            if first.setdefault(custom_id, number) != number:
                self._first_lines[index] = first[custom_id]
                self._set_bad(index, duplicate_row(raw, number, custom_id, first[custom_id]))

    def _refuse_others(self, asks_others: np.ndarray, asked: np.ndarray, names: Sequence[str]) -> None:
        """Rows that ask for another model or adapter become bad rows, with digests of their own."""
        others = np.flatnonzero(asks_others & ~self.is_bad)
        if len(others) and len(others) == np.count_nonzero(~self.is_bad):
            self._refuse_all(others, asked[others], names)
        for index in others.tolist():
            row = self._parse(index)
            assert isinstance(row, Row), f"row {index} was good and is not"
            self._set_bad(index, foreign_row(*self._line(index), row, names, self._adapters))

    def _refuse_all(self, others: np.ndarray, digests: np.ndarray, names: Sequence[str]) -> NoReturn:
        _, first, counts = np.unique(digests, return_index=True, return_counts=True)
        rows = [self._parse(int(others[i])) for i in first[:_MAX_NAMED].tolist()]
        asked = [row.adapter or row.model for row in rows if isinstance(row, Row)]
        named = ", ".join(f"{model!r} ({n:,} rows)" for model, n in zip(asked, counts.tolist(), strict=False))
        raise ValueError(
            f"every row asks for another model: {named}{', ...' * (len(first) > _MAX_NAMED)}; this one is "
            f"{', '.join(map(repr, (*names, *self._adapters)))}. Name the model that the rows ask for, give this one "
            "their name too with --served-model-name, or --adapter NAME=DIR"
        )

    def _set_bad(self, index: int, row: BadRow) -> None:
        self.is_bad[index] = True
        self._digests[16 * index : 16 * index + 16] = bytes.fromhex(row.id)


def _digests(names: Sequence[str | None]) -> np.ndarray:
    """[names] uint64."""
    return np.frombuffer(b"".join(map(name_digest, names)), np.uint64)
