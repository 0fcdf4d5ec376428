"""Task: what a user asks for, as requests to an engine and the answer that their outputs become.

    task = Task(requests, finish)         made by `TaskMaker`, which knows the model; nothing has run
    outputs                               one RequestOutput for each request, whatever ran beside it
    answer = task.finish(outputs)         the same answer at every door: LLM, AsyncLLM, HTTP, rows of a job

A door has one verb, `run(tasks)`. `RunningTasks` is the one place that gathers the outputs of several requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ferrum_jax.core.outputs import ABORTED, RequestOutput
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.text.output_processor.collect import failure_of

Answer = TypeVar("Answer")
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)  # computes a prompt: its last state is a text's vector


class EngineRequest(NamedTuple):
    """One prompt as an engine takes it."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    options: RequestOptions


@dataclass(frozen=True)
class Task(Generic[Answer]):
    """Requests that run side by side, and one answer.

    finish: the answer, from the finished outputs in the order of `requests`; raises ValueError if there is none.
    partial: the answer so far, for streams and journals; a request that has not begun has an output without choices.

    A request that a task shares with the task before it, as the same object, runs once for both.
    """

    requests: Sequence[EngineRequest]
    finish: Callable[[Sequence[RequestOutput]], Answer]
    partial: Callable[[Sequence[RequestOutput]], Answer] | None = None


MakeTask = Callable[[], Task[Answer]]  # raises ValueError for what cannot be served


def succeeded(output: RequestOutput) -> RequestOutput:
    """The output. Raises ValueError if one of its choices could not go on."""
    if (failure := failure_of(output)) is not None:
        raise failure
    return output


def vector_in(output: RequestOutput) -> np.ndarray:
    """[D] float32: the pooled state, or an encoder's logits. Raises ValueError if the request failed or was aborted."""
    if succeeded(output).embedding is None:
        raise ValueError(ABORTED)
    return output.embedding  # type: ignore[return-value]
