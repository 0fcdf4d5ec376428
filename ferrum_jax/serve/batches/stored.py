"""What a folder of batches has on record: files, batches as they were asked for, and how far each is.

Each record is one small file, written whole, and has one writer: whoever asks makes files, batches and the marks that
cancel them; the clerk alone writes how far a batch is. So nothing is locked, and a kill leaves every record as it was
or as it is to be.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from ferrum_jax.io.files.json_files import parse_json

VALIDATING, IN_PROGRESS, FINALIZING = "validating", "in_progress", "finalizing"
FAILED, COMPLETED, EXPIRED, CANCELLED = "failed", "completed", "expired", "cancelled"
FINAL = (FAILED, COMPLETED, EXPIRED, CANCELLED)
_STATUSES = (VALIDATING, IN_PROGRESS, FINALIZING, *FINAL)
_MOMENTS = (IN_PROGRESS, FINALIZING, COMPLETED, FAILED, EXPIRED, CANCELLED)  # whose times a batch tells


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile:
    """owner: of the key that may see it, "" of a server without keys. created: seconds since 1970, as all times."""

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created: int

    @property
    def form(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedBatch:
    """A batch as it was asked for."""

    id: str
    owner: str
    input_file: str
    endpoint: str
    window: str
    created: int
    expires: int
    metadata: Mapping[str, str] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchState:
    """How far a batch is. times: at which it entered its states. errors: why it failed, as OpenAI has them."""

    status: str = VALIDATING
    times: Mapping[str, int] = dataclasses.field(default_factory=dict)
    num_rows: int = 0
    num_ok: int = 0
    num_failed: int = 0
    output_file: str | None = None
    error_file: str | None = None
    errors: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.status not in _STATUSES:
            raise ValueError(f"status is {self.status!r}; it must be one of {', '.join(_STATUSES)}")

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    @property
    def has_told_all(self) -> bool:
        """Whether its files have all that was answered: not of answers that could not be read."""
        return self.is_final and (self.status != FAILED or bool(self.output_file or self.error_file))

    def entered(self, status: str, now: int, **more: Any) -> BatchState:
        """The same in a state that it enters now."""
        return dataclasses.replace(self, status=status, times={**self.times, status: now}, **more)


@dataclasses.dataclass(frozen=True)
class CancelMark:
    """at: when a batch was asked to end."""

    at: int


Record = TypeVar("Record", StoredFile, AskedBatch, BatchState, CancelMark)


def read_record(kind: type[Record], content: bytes) -> Record:
    """The record that a file holds. Raises ValueError for one that is damaged, or of another version."""
    found, hints = parse_json(content), typing.get_type_hints(kind)
    if not isinstance(found, dict):
        raise ValueError(f"it holds a JSON {type(found).__name__}; it must be an object")
    for name, value in found.items():
        if name not in hints or not _fits(value, hints[name]):
            raise ValueError(f"its {name} is {value!r}, which this version does not know")
    fields: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in found.items()}
    try:
        return kind(**fields)
    except TypeError as error:  # it lacks a field
        raise ValueError(str(error)) from error


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of a type that a record's field has."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return any(_fits(value, each) for each in inner)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(each, inner[0]) for each in value)
    if origin is Mapping:
        return isinstance(value, dict) and all(_fits(each, inner[1]) for each in value.values())
    return hint is Any or type(value) is hint or (value is None and hint is types.NoneType)


def batch_form(asked: AskedBatch, state: BatchState, cancelled_at: int | None) -> dict[str, Any]:
    """A batch as OpenAI's clients read it. cancelled_at: when that was asked for."""
    is_cancelling = cancelled_at is not None and not state.is_final
    counts = {"total": state.num_rows, "completed": state.num_ok, "failed": state.num_failed}
    return {
        "id": asked.id,
        "object": "batch",
        "endpoint": asked.endpoint,
        "errors": {"object": "list", "data": list(state.errors)} if state.errors else None,
        "input_file_id": asked.input_file,
        "completion_window": asked.window,
        "status": "cancelling" if is_cancelling else state.status,
        "output_file_id": state.output_file,
        "error_file_id": state.error_file,
        "created_at": asked.created,
        "expires_at": asked.expires,
        **{f"{name}_at": state.times.get(name) for name in _MOMENTS},
        "cancelling_at": cancelled_at,
        "request_counts": counts,
        "metadata": asked.metadata,
    }
