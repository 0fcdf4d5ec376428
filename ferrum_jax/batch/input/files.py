"""Files of rows: JSON lines as they are, compressed, and columns. Inside a job everything is JSON lines.

A name's suffixes tell the form: `.gz` and `.zst` are compressed, `.csv` and `.parquet` are columns, suffixes of other
known forms are refused, and everything else is JSON lines.
Input columns are the fields of the short form (or `method`, `url` and `body`); a cell that is empty or null is a field
that was not given. A CSV cell of a field that is not text is read as JSON. A row that cannot be read becomes a line
that says why (`lines.unreadable_line`). Output columns are those of `ANSWERS` or `VECTORS`.
Parquet and `.zst` need pyarrow (the extra `columns`).
"""

import contextlib
import csv
import gzip
import io
import itertools
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, BinaryIO

from ferrum_jax.batch.input.lines import unreadable_line
from ferrum_jax.io import system
from ferrum_jax.io.paths import install_command
from ferrum_jax.openai.json_text import JsonError, NestedTooDeeply, decoded

_COMPRESSIONS = (".gz", ".zst")
_COLUMNS = (".csv", ".parquet")
ARRAY = ".npy"  # of vectors, which `ferrum-jax embed` writes
_OTHERS = (ARRAY, ".npz", ".tsv", ".pq", ".arrow", ".feather", ".orc", ".xls", ".xlsx", ".h5", ".safetensors")
_OTHERS += (".bz2", ".xz", ".zip", ".lz4", ".tar", ".tgz")  # neither read nor written here
_TEXT_FIELDS = frozenset(
    {"custom_id", "prompt", "method", "url", "cache_salt", "model", "user", "query", "instruction", "file", "language"}
)
_TEXTS_FIELDS = frozenset({"input", "text_1", "text_2", "documents"})  # a text, or a list
_ROWS_IN_BATCH = 4096
_COPY_BYTES = 1 << 20

Columns = Mapping[str, str]  # name -> kind of its cells; "text" holds other values as JSON
ANSWERS: Columns = MappingProxyType({"id": "text", "custom_id": "text", "response": "text", "error": "text"})
VECTORS: Columns = MappingProxyType(
    {"custom_id": "text", "embedding": "vector", "num_tokens": "count", "error": "text"}
)


@contextlib.contextmanager
def reading_rows(file: BinaryIO, name: str) -> Iterator[BinaryIO]:
    """The file's rows as JSON lines, to read and to seek in, whatever form its name says.

    Raises ValueError, naming the file, for one that is not what its name says, and if pyarrow is needed and missing.
    """
    check_name(name)
    compression, kind = _kinds(name)
    if not compression and not kind:
        yield file
        return
    with contextlib.ExitStack() as stack:
        try:
            plain = stack.enter_context(_decompressed(file, compression))
            if kind:
                lines = _csv_lines(plain) if kind == ".csv" else _parquet_lines(plain)
                plain = stack.enter_context(system.TemporaryFile())  # type: ignore[assignment]
                plain.writelines(lines)
        except Exception as error:  # for a damaged file each library raises what it likes
            raise ValueError(f"{name} cannot be read as {kind or 'JSON lines'}{compression}: {error}") from error
        plain.seek(0)
        yield plain


@contextlib.contextmanager
def writing_rows(file: BinaryIO, name: str, columns: Columns = ANSWERS) -> Iterator[BinaryIO]:
    """A file for JSON lines, to write and to seek in; `file` has them in the form of its name when the block ends.

    columns: all fields that the lines have, for a form with columns.
    """
    compression, kind = _kinds(name)
    if not compression and not kind:
        yield file
        return
    with system.TemporaryFile() as lines:
        yield lines  # type: ignore[misc]
        lines.seek(0)
        with _compressing(file, compression) as target:
            if kind == ".csv":
                _write_csv(lines, target, columns)
            elif kind == ".parquet":
                _write_parquet(lines, target, columns)
            else:
                shutil.copyfileobj(lines, target, _COPY_BYTES)


def check_name(name: str, *, allowed: Sequence[str] = ()) -> None:
    """Raises ValueError if the name is of a kind that is not supported, or needs a library that is not installed.

    allowed: kinds that the caller writes by itself.
    """
    compression, kind = _kinds(name)
    last = PurePosixPath(name.removesuffix(compression) if compression else name).suffix.lower()
    if last in _OTHERS and (compression or last not in allowed):
        known = "".join(f", or {kind}" for kind in allowed)
        raise ValueError(
            f"{name}: {last}{compression} is not supported; name .jsonl, .csv or .parquet, also with .gz or .zst{known}"
        )
    if compression == ".zst" or kind == ".parquet":
        _pyarrow()


def is_array(name: str) -> bool:
    """Whether the name asks for an array of vectors."""
    return PurePosixPath(name).suffix.lower() == ARRAY


def _kinds(name: str) -> tuple[str, str]:
    """Compression and kind of a file, each "" where its name says none."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in _COMPRESSIONS else ""
    return compression, suffixes[-1] if suffixes and suffixes[-1] in _COLUMNS else ""


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"needs pyarrow; {install_command('columns')}") from error
    return pyarrow


@contextlib.contextmanager
def _decompressed(file: BinaryIO, compression: str) -> Iterator[BinaryIO]:
    if not compression:
        yield file
        return
    with system.TemporaryFile() as plain:
        if compression == ".gz":
            shutil.copyfileobj(gzip.GzipFile(fileobj=file), plain, _COPY_BYTES)  # type: ignore[arg-type]
        else:
            arrow = _pyarrow()
            shutil.copyfileobj(arrow.CompressedInputStream(arrow.PythonFile(file, "r"), "zstd"), plain, _COPY_BYTES)
        plain.seek(0)
        yield plain  # type: ignore[misc]


@contextlib.contextmanager
def _compressing(file: BinaryIO, compression: str) -> Iterator[BinaryIO]:
    """A file that compresses what is written to it. Its bytes depend on the content alone: no name, no time."""
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
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    most_characters = csv.field_size_limit(sys.maxsize)
    try:
        rows = csv.reader(text, strict=True)
        names = _checked(next(rows, []))
        while True:
            try:
                cells = next(rows, None)
            except csv.Error as error:
                yield unreadable_line(None, f"line {rows.line_num} of the CSV: {error}")
                continue
            if cells is None:
                return
            if cells:
                yield _csv_line(names, cells, f"line {rows.line_num} of the CSV")
    finally:
        csv.field_size_limit(most_characters)
        text.detach()


def _checked(names: Sequence[str]) -> Sequence[str]:
    """The names of columns. Raises ValueError for a name that two of them have."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"columns are given twice: {twice}")
    "".join(names).encode()  # raises for what is not UTF-8
    return names


def _csv_line(names: Sequence[str], cells: Sequence[str], where: str) -> bytes:
    custom_id = dict(zip(names, cells, strict=False)).get("custom_id")
    if len(cells) != len(names):
        return unreadable_line(custom_id, f"{where} has {len(cells)} cells, and there are {len(names)} columns")
    try:
        "".join(cells).encode()
        return _line({name: _cell(name, cell) for name, cell in zip(names, cells, strict=True) if cell != ""})
    except UnicodeEncodeError:
        return unreadable_line(None, f"{where} is not UTF-8; write the file as UTF-8")
    except ValueError as error:
        return unreadable_line(custom_id, f"{where}: {error}")


def _cell(name: str, cell: str) -> object:
    if name in _TEXT_FIELDS:
        return cell
    try:
        value = decoded(cell)
    except NestedTooDeeply:
        raise
    except JsonError:
        return cell
    return cell if name in _TEXTS_FIELDS and not isinstance(value, list) else value  # a text may look like a number


def _parquet_lines(file: BinaryIO) -> Iterator[bytes]:
    parquet = _pyarrow().parquet.ParquetFile(file)
    _checked(parquet.schema_arrow.names)
    for batch in parquet.iter_batches(_ROWS_IN_BATCH):
        yield from _lines_of_batch(batch)


def _lines_of_batch(batch: Any) -> list[bytes]:
    try:
        return [_parquet_line(row) for row in batch.to_pylist()]
    except Exception as error:  # which kind depends on the type of the cell that is wrong
        if batch.num_rows > 1:
            return [line for row in range(batch.num_rows) for line in _lines_of_batch(batch.slice(row, 1))]
        return [unreadable_line(_custom_id_of(batch), f"the row cannot be read: {error}")]


def _custom_id_of(batch: Any) -> object:
    """The custom_id of a batch of one row; None where it cannot be read either."""
    with contextlib.suppress(Exception):
        return batch.select(["custom_id"]).to_pylist()[0]["custom_id"]
    return None


def _parquet_line(row: dict[str, Any]) -> bytes:
    if isinstance(row.get("body"), str):
        row["body"] = _cell("body", row["body"])
    return _line({name: _without_nulls(value) for name, value in row.items() if value is not None})


def _without_nulls(value: object) -> object:
    """The value without its null fields: a struct has all fields of its type, null where the row gives none."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _line(row: Mapping[str, object]) -> bytes:
    try:
        text = json.dumps(row, default=_text_of, allow_nan=False)
    except ValueError:
        text = json.dumps(row, default=_text_of)
        decoded(text)  # accepts minus infinity, which a logit_bias may be; raises for NaN and infinity
    return text.encode() + b"\n"


def _text_of(value: object) -> str:
    """A text for what JSON has no form for: bytes are decoded, dates written out."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _output_rows(lines: Iterable[bytes], columns: Columns) -> Iterator[dict[str, Any]]:
    for line in lines:
        found = json.loads(line)
        yield {name: _text(found.get(name)) if kind == "text" else found.get(name) for name, kind in columns.items()}


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _write_csv(lines: Iterable[bytes], file: BinaryIO, columns: Columns) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer: csv.DictWriter[str] = csv.DictWriter(text, tuple(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_output_rows(lines, dict.fromkeys(columns, "text")))
    text.detach()


def _write_parquet(lines: Iterable[bytes], file: BinaryIO, columns: Columns) -> None:
    arrow = _pyarrow()
    kinds = {"text": arrow.string(), "count": arrow.int64(), "vector": arrow.list_(arrow.float32())}
    schema = arrow.schema([(name, kinds[kind]) for name, kind in columns.items()])
    rows = _output_rows(lines, columns)
    with arrow.parquet.ParquetWriter(file, schema) as writer:
        while batch := list(itertools.islice(rows, _ROWS_IN_BATCH)):
            writer.write_table(arrow.Table.from_pylist(batch, schema))
