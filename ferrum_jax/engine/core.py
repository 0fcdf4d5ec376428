"""EngineCore: what every engine does, whether it generates (`Engine`) or makes a vector of each text (`EncoderEngine`).

`engine/startup/open.py` chooses the engine when a model is opened; whoever holds one need not know which it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from ferrum_jax.core.delta import Delta
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine.stats import StepCounts
from ferrum_jax.sampling_params import SamplingParams


class EngineCore(Protocol):
    """Runs requests to their end. One engine serves one thread."""

    @property
    def runner(self) -> StepCounts: ...

    @property
    def has_unfinished(self) -> bool: ...

    def add(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, options: RequestOptions, /) -> int:
        """Queues a request and returns its id. Raises ValueError, with nothing left behind, if it cannot be served."""
        ...

    def require_grammar(self, submission_id: int) -> None:
        """Waits for a request's grammar, if it has one. Raises ValueError with what is wrong with it."""
        ...

    def step(self) -> list[Delta]:
        """Dispatches the next step and commits the one before it; gives what that brought."""
        ...

    def peek(self, submission_id: int) -> list[Delta]:
        """What is new of an unfinished request as far as its tokens are known."""
        ...

    def abort(self, submission_id: int) -> None:
        """Ends a request, whose output is dropped. An id that has ended is ignored."""
        ...

    def settle(self) -> list[Delta]:
        """Commits what is in flight, so that the host knows all that the device has done."""
        ...

    def drain(self) -> None:
        """Commits what is in flight when no request is left."""
        ...

    def abort_all(self) -> list[Delta]:
        """Ends all requests with finish_reason "abort"; their last deltas."""
        ...

    def renew(self, weights: tuple[jax.Array, ...], fingerprint: bytes, version: int) -> None:
        """Goes on with other weights. Nothing may be in flight."""
        ...

    def learn(self, token_ids: Sequence[int], num_prompt_tokens: int, cache_salt: str) -> None:
        """Takes a text from which tokens may be drafted; nothing happens where none are."""
        ...

    def progress(self) -> dict[str, tuple[float, float, float]]:
        """See `LLM.progress`."""
        ...

    def counts(self) -> dict[str, Any]:
        """What it has counted beside its runner's steps."""
        ...

    def live(self) -> dict[str, Any]:
        """`num_running` rows, `num_waiting` requests and the `recent_steps` of this moment."""
        ...

    def close(self) -> None:
        """Frees what it holds on the devices; it serves no more."""
        ...


def generates_nothing(name: str, why: str) -> str:
    """The refusal of a request for text by a model that has none. name: of its architecture."""
    return (
        f"{name} {why} and generates nothing; ask it for vectors: LLM.embed, `ferrum-jax embed`, "
        "or rows of a batch with `input`"
    )
