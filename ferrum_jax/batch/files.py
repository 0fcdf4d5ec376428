"""Files of rows: JSON lines as they are, compressed, and columns. Inside a job everything is JSON lines.

By the last parts of a name: `.gz` and `.zst` are compressed, `.csv` and `.parquet` are columns, all else is JSON lines.
Input columns are the fields of the short form (or `method`, `url` and `body`); a cell that is empty or null is a field
that was not given. A CSV cell of a field that is no text is read as JSON. Output columns are `id` and `custom_id`, and
`response` and `error` as JSON text. Parquet and `.zst` need pyarrow (`pip install 'ferrum-jax[columns]'`).
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, BinaryIO

_TEXT_FIELDS = frozenset({"custom_id", "prompt", "method", "url", "cache_salt", "model", "user"})
_OUTPUT_COLUMNS = ("id", "custom_id", "response", "error")
_ROWS_IN_BATCH = 4096
_COPY_BYTES = 1 << 20


@contextlib.contextmanager
def reading_rows(file: BinaryIO, name: str) -> Iterator[BinaryIO]:
    """JSON lines, to read and to seek in, of a file of this name.

    Raises ValueError, naming the file, for one that is not what its name says, and if pyarrow is needed and missing.
    """
    compression, kind = _kinds(name)
    if not compression and not kind:
        yield file
        return
    with contextlib.ExitStack() as stack:
        try:
            plain = stack.enter_context(_decompressed(file, compression))
            if kind:
                lines = _csv_lines(plain) if kind == ".csv" else _parquet_lines(plain)
                plain = stack.enter_context(tempfile.TemporaryFile())  # type: ignore[assignment]
                plain.writelines(lines)
        except (OSError, EOFError, csv.Error, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"{name} cannot be read as {kind or 'JSON lines'}{compression}: {error}") from error
        plain.seek(0)
        yield plain


@contextlib.contextmanager
def writing_rows(file: BinaryIO, name: str) -> Iterator[BinaryIO]:
    """A file for JSON lines, to write and to seek in; `file` has them in the form of its name when the block ends."""
    compression, kind = _kinds(name)
    if not compression and not kind:
        yield file
        return
    with tempfile.TemporaryFile() as lines:
        yield lines  # type: ignore[misc]
        lines.seek(0)
        with _compressing(file, compression) as target:
            if kind == ".csv":
                _write_csv(lines, target)
            elif kind == ".parquet":
                _write_parquet(lines, target)
            else:
                shutil.copyfileobj(lines, target, _COPY_BYTES)


def check_name(name: str) -> None:
    """Raises ValueError if a file of this name needs a library that is not here."""
    compression, kind = _kinds(name)
    if compression == ".zst" or kind == ".parquet":
        _pyarrow()


def _kinds(name: str) -> tuple[str, str]:
    """Compression and kind of a file, each "" where its name says none."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in (".gz", ".zst") else ""
    return compression, suffixes[-1] if suffixes and suffixes[-1] in (".csv", ".parquet") else ""


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("needs pyarrow; pip install 'ferrum-jax[columns]'") from error
    return pyarrow


@contextlib.contextmanager
def _decompressed(file: BinaryIO, compression: str) -> Iterator[BinaryIO]:
    if not compression:
        yield file
        return
    with tempfile.TemporaryFile() as plain:
        if compression == ".gz":
            shutil.copyfileobj(gzip.GzipFile(fileobj=file), plain, _COPY_BYTES)  # type: ignore[arg-type]
        else:
            arrow = _pyarrow()
            shutil.copyfileobj(arrow.CompressedInputStream(arrow.PythonFile(file, "r"), "zstd"), plain, _COPY_BYTES)
        plain.seek(0)
        yield plain  # type: ignore[misc]


@contextlib.contextmanager
def _compressing(file: BinaryIO, compression: str) -> Iterator[BinaryIO]:
    """Bytes that depend on the content alone: no name and no time is in them."""
    if not compression:
        yield file
    elif compression == ".gz":
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as target:
            yield target  # type: ignore[misc]
    else:
        with io.BufferedWriter(_Zstd(file), _COPY_BYTES) as target:
            yield target  # type: ignore[misc]


class _Zstd(io.RawIOBase):
    """Each write becomes a frame of its own; frames one after the other are a file. Closing leaves the file open."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._codec = file, _pyarrow().Codec("zstd")

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._file.write(self._codec.compress(bytes(content), asbytes=True))
        return len(content)


def _csv_lines(file: BinaryIO) -> Iterator[bytes]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.DictReader(text, strict=True)
    for cells in reader:
        if None in cells or None in cells.values():
            raise ValueError(f"line {reader.line_num} has not as many cells as there are columns")
        yield _line({name: _cell(name, cell) for name, cell in cells.items() if cell != ""})
    text.detach()


def _cell(name: str, cell: str) -> object:
    if name in _TEXT_FIELDS:
        return cell
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def _parquet_lines(file: BinaryIO) -> Iterator[bytes]:
    for batch in _pyarrow().parquet.ParquetFile(file).iter_batches(_ROWS_IN_BATCH):
        for row in batch.to_pylist():
            if isinstance(row.get("body"), str):
                row["body"] = _cell("body", row["body"])
            yield _line({name: _without_nulls(value) for name, value in row.items() if value is not None})


def _without_nulls(value: object) -> object:
    """A struct has all fields of its type, null where the row does not give them; here those are gone."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _line(row: Mapping[str, object]) -> bytes:
    return json.dumps(row, default=str).encode() + b"\n"


def _output_rows(lines: Iterable[bytes]) -> Iterator[dict[str, str | None]]:
    for line in lines:
        found = json.loads(line)
        yield {
            name: value if value is None or isinstance(value, str) else json.dumps(value)
            for name, value in ((name, found[name]) for name in _OUTPUT_COLUMNS)
        }


def _write_csv(lines: Iterable[bytes], file: BinaryIO) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer: csv.DictWriter[str] = csv.DictWriter(text, _OUTPUT_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_output_rows(lines))
    text.detach()


def _write_parquet(lines: Iterable[bytes], file: BinaryIO) -> None:
    arrow = _pyarrow()
    schema = arrow.schema([(name, arrow.string()) for name in _OUTPUT_COLUMNS])
    rows = _output_rows(lines)
    with arrow.parquet.ParquetWriter(file, schema) as writer:
        while batch := list(itertools.islice(rows, _ROWS_IN_BATCH)):
            writer.write_table(arrow.Table.from_pylist(batch, schema))
