"""ferrum_jax: LLM inference in JAX over a paged KV pool with prefix reuse.

from ferrum_jax import LLM, SamplingParams, EngineConfig
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrum_jax.config import EngineConfig
from ferrum_jax.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from ferrum_jax.llm import LLM

__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> object:
    """LLM on first use: it brings jax, which the command line's help and the batch formats do without."""
    if name == "LLM":
        from ferrum_jax.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
