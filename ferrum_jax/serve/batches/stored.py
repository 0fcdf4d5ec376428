"""What a folder of batches has on record: files, batches as they were asked for, and how far each is.

Each record is one small file, written whole, and has one writer: whoever asks makes files, batches and the marks that
cancel them; the clerk alone writes how far a batch is. So nothing is locked, and a kill leaves every record as it was
or as it is to be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

VALIDATING, IN_PROGRESS, FINALIZING = "validating", "in_progress", "finalizing"
FAILED, COMPLETED, EXPIRED, CANCELLED = "failed", "completed", "expired", "cancelled"
FINAL = (FAILED, COMPLETED, EXPIRED, CANCELLED)
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

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    def entered(self, status: str, now: int, **more: Any) -> BatchState:
        """The same in a state that it enters now."""
        return dataclasses.replace(self, status=status, times={**self.times, status: now}, **more)


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
