"""EngineCore: what every engine does, whether it generates (`Engine`) or makes a vector of each text (`EncoderEngine`).

`engine/startup/open.py` chooses the engine when a model is opened; whoever holds one need not know which it is.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from ferrum_jax.core.delta import Delta
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.sampling_params import SamplingParams


class EngineCore(Protocol):
    """Runs requests to their end; one engine serves one thread. `Engine` says what its methods do.

    The methods with a body do what an engine of whole texts does. runner: counts its steps.
    """

    runner: Any

    @property
    def has_unfinished(self) -> bool: ...
    def add(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, options: RequestOptions, /) -> int: ...
    def step(self) -> list[Delta]: ...
    def abort(self, submission_id: int) -> None: ...
    def abort_all(self) -> list[Delta]: ...
    def settle(self) -> list[Delta]: ...
    def renew(self, weights: tuple[jax.Array, ...], fingerprint: bytes, version: int) -> None: ...
    def counts(self) -> dict[str, Any]: ...
    def live(self) -> dict[str, Any]: ...
    def close(self) -> None: ...

    def drain(self) -> None:
        self.settle()

    def require_grammar(self, submission_id: int) -> None:
        return None

    def peek(self, submission_id: int) -> list[Delta]:
        return []

    def progress(self) -> dict[str, tuple[float, float, float]]:
        return {}

    def learn(self, token_ids: Sequence[int], num_prompt_tokens: int, cache_salt: str = "") -> None:
        return None
