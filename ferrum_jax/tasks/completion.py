"""A prompt that goes on, as a task of one request."""

from __future__ import annotations

from collections.abc import Sequence

from ferrum_jax.core.outputs import RequestOutput
from ferrum_jax.tasks.task import EngineRequest, Task, succeeded


def completion(request: EngineRequest, *, fails: bool = False) -> Task[RequestOutput]:
    """fails: a choice that could not go on refuses the task; else its output has the finish_reason "error"."""
    finish = _succeeded if fails else _output
    return Task([request], finish, finish)


def _output(outputs: Sequence[RequestOutput]) -> RequestOutput:
    return outputs[0]


def _succeeded(outputs: Sequence[RequestOutput]) -> RequestOutput:
    return succeeded(outputs[0])
