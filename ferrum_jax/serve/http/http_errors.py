"""Errors as OpenAI's clients read them: a status, a message, and the field that is wrong."""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ferrum_jax.core.outputs import ADAPTER_FAILED, NO_STRUCTURE, NOT_FINITE_REASON
from ferrum_jax.io.error_text import bounded
from ferrum_jax.io.files.whole_files import is_of_full_disk
from ferrum_jax.openai.errors import FieldError
from ferrum_jax.serve.http.gate import QueueFull
from ferrum_jax.serve.link.engine_client import EngineLost, ReaderTooSlow, RequestAborted, RequestRefused

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {408: "timeout_error", 413: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable"}


class HttpError(Exception):
    """A request that is answered with an error and nothing else, of a bounded length whatever was asked."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, bounded(message), param and bounded(param)
        self.code, self.headers = code, dict(headers)

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def http_error(error: Exception) -> HttpError | None:
    """What an error of a request's way through the server says to who asked; None of a fault of the server's own."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, FieldError):
        return HttpError(400, str(error), param=error.param)
    if isinstance(error, RequestRefused) and str(error) == NOT_FINITE_REASON:
        return HttpError(500, str(error), code="logits_not_finite")  # the request is right
    if isinstance(error, RequestRefused) and str(error).startswith(ADAPTER_FAILED):
        return HttpError(500, str(error), code="adapter_failed")
    if isinstance(error, RequestRefused) and str(error).startswith(NO_STRUCTURE):
        message = "this server has no structured output; leave it out, or have the extra structured installed there"
        return HttpError(501, message, code="not_installed")
    if isinstance(error, RequestRefused) and any(words in str(error) for words in _MODEL_CANNOT):
        return HttpError(400, str(error), param="model", code="model_not_supported")
    if isinstance(error, RequestRefused):
        code = "context_length_exceeded" if "max_model_len" in str(error) else None
        return HttpError(400, str(error), code=code)
    if isinstance(error, QueueFull):
        return HttpError(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_after_s)})
    if isinstance(error, RequestAborted):
        return HttpError(503, str(error), code="aborted", headers={"Retry-After": "1"})
    if isinstance(error, EngineLost):
        return HttpError(500, str(error), code="engine_failed")
    if isinstance(error, ReaderTooSlow):
        message = f"the server could not send as fast as the model generates: {error}; ask again in a moment"
        return HttpError(503, message, code="overloaded", headers={"Retry-After": "1"})
    if is_of_full_disk(error):
        return HttpError(507, "the server's disk is full; ask again when its owner has made room", code="disk_full")
    if isinstance(error, asyncio.TimeoutError):
        return HttpError(
            408, "the request's timeout is over; what ran for it has ended", param="timeout", code="timeout"
        )
    return None


_MODEL_CANNOT = ("generates nothing", "not read two texts together", "read as no classifier", "makes no vectors")
