"""The bytes of a form, as multipart/form-data has it, as the fields that they are."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from ferrum_jax.io.error_text import quoted
from ferrum_jax.io.paths import install_command
from ferrum_jax.openai.body_fields import BodyField
from ferrum_jax.openai.errors import FieldError

MAX_PARTS = 64
MOST_HEADER_BYTES = 4096  # of one part
MAX_FIELD_BYTES = 64 << 10  # of what is no file
_LISTS = "[]"  # at the end of a name that may come several times


class FormRefused(FieldError):
    """A form that cannot be read."""

    def __init__(self, message: str) -> None:
        super().__init__(message, None)


def read_form(content: bytes, content_type: str, files: frozenset[str]) -> dict[str, Any]:
    """The fields of a form: bytes of `files`, lists of texts for names that end in [], and texts of all others.

    Raises FieldError for what is no form, for one with too many parts, and for a field that comes twice.
    """
    reader = FormReader(content_type, files)
    reader.feed(content)
    return reader.end()


class FormReader:
    """A form whose bytes come part by part. filenames: that its files were given, by their fields."""

    def __init__(self, content_type: str, files: frozenset[str], sink: BinaryIO | None = None) -> None:
        """sink: takes the bytes of its only file, in place of the fields. Raises FieldError for what is no form."""
        self._parts = _Parts(files, sink)
        self.filenames = self._parts.filenames
        library = _library()
        with _naming_errors():
            _, options = library.parse_options_header(content_type)
            boundary = options.get(b"boundary")
            if not boundary:
                raise FormRefused("Content-Type has no boundary; let the client's library write it")
            self._parser = library.MultipartParser(boundary, self._parts.callbacks())

    def feed(self, content: bytes) -> None:
        """Raises FieldError as `read_form`."""
        with _naming_errors():
            self._parser.write(content)

    def end(self) -> dict[str, Any]:
        """The fields, once all bytes have come."""
        with _naming_errors():
            self._parser.finalize()
        if not self._parts.has_ended:
            raise FormRefused("the body ends in the middle of its form")
        return self._parts.found


@contextlib.contextmanager
def _naming_errors() -> Iterator[None]:
    """Makes the library's own errors, and those of headers that it cannot read, FieldErrors."""
    try:
        yield
    except (FieldError, OSError):
        raise
    except Exception as error:
        raise FormRefused(f"the body is no form that can be read: {error}") from error


def typed(found: dict[str, Any], fields: dict[str, BodyField]) -> dict[str, Any]:
    """The fields of a form with the values that their schemas have. Raises FieldError for a text that is none."""
    return {name: _value(name, text, fields[name]) if name in fields else text for name, text in found.items()}


def _value(name: str, text: Any, field: BodyField) -> Any:
    kind = field.schema.get("type")
    if not isinstance(text, str) or kind not in ("number", "integer", "boolean"):
        return text
    if kind == "boolean":
        if text.lower() not in ("true", "false"):
            raise FieldError(f"{name} is {quoted(text)}; it must be true or false", name)
        return text.lower() == "true"
    try:
        return int(text) if kind == "integer" else float(text)
    except ValueError:
        raise FieldError(f"{name} is {quoted(text)}; it must be a number", name) from None


def _library() -> Any:
    try:
        return importlib.import_module("python_multipart.multipart")
    except ImportError as error:
        raise FormRefused(f"forms need python-multipart; {install_command('server')}") from error


class _Parts:
    """Takes what the parser finds."""

    def __init__(self, files: frozenset[str], sink: BinaryIO | None = None) -> None:
        self.found: dict[str, Any] = {}
        self.filenames: dict[str, str] = {}
        self._sink = sink
        self.has_ended = False
        self._files = files
        self._count = 0
        self._header: list[bytes] = [b"", b""]
        self._headers: dict[bytes, bytes] = {}
        self._content = bytearray()
        self._name = ""

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._of_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._of_header(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._named,
            "on_part_data": self._add,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._count += 1
        if self._count > MAX_PARTS:
            raise FormRefused(f"the form has more than {MAX_PARTS} parts")
        self._header, self._headers, self._content = [b"", b""], {}, bytearray()

    def _of_header(self, place: int, new: bytes) -> None:
        self._header[place] += new
        if sum(map(len, self._header)) > MOST_HEADER_BYTES:
            raise FormRefused(f"a part of the form has a header of more than {MOST_HEADER_BYTES:,} bytes")

    def _end_header(self) -> None:
        self._headers[self._header[0].lower()] = self._header[1]
        self._header = [b"", b""]

    def _named(self) -> None:
        _, options = _library().parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if not self._name:
            raise FormRefused("a part of the form has no name")
        if self._name in self._files:
            self.filenames[self._name] = options.get(b"filename", b"").decode("utf-8", "replace")
            if self._sink is not None and self._name in self.found:
                raise FieldError(f"{self._name} is given twice; give it once", self._name)

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._name not in self._files and len(self._content) + end - start > MAX_FIELD_BYTES:
            raise FieldError(f"{self._name[:80]} has more than {MAX_FIELD_BYTES:,} bytes", self._name[:80])
        if self._name in self._files and self._sink is not None:
            self._sink.write(data[start:end])
        else:
            self._content += data[start:end]

    def _end(self) -> None:
        name = self._name.removesuffix(_LISTS)
        if name in self._files:
            value: Any = bytes(self._content)
        else:
            try:
                value = self._content.decode()
            except UnicodeDecodeError as error:
                raise FieldError(f"{name[:80]} is not UTF-8 at byte {error.start + 1}", name[:80]) from error
        if self._name.endswith(_LISTS):
            self.found.setdefault(name, []).append(value)
        elif name in self.found:
            raise FieldError(f"{name[:80]} is given twice; give it once", name[:80])
        else:
            self.found[name] = value

    def _finish(self) -> None:
        self.has_ended = True
