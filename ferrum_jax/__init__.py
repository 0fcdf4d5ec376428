"""ferrum_jax: LLM inference in JAX over a paged KV pool with prefix reuse.

from ferrum_jax import LLM, SamplingParams, EngineConfig
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrum_jax.config import EngineConfig
from ferrum_jax.request import RequestOutput, SamplingParams
from ferrum_jax.structured.asked.params import StructuredOutputsParams

if TYPE_CHECKING:
    from ferrum_jax.device_check.run_check import check_device
    from ferrum_jax.llm import LLM
    from ferrum_jax.serve.async_llm import AsyncLLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "check_device",
]


def __getattr__(name: str) -> object:
    """LLM, AsyncLLM and check_device on first use: they bring jax, which command lines and batch formats do without."""
    if name == "LLM":
        from ferrum_jax.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from ferrum_jax.serve.async_llm import AsyncLLM

        return AsyncLLM
    if name == "check_device":
        from ferrum_jax.device_check.run_check import check_device

        return check_device
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
