"""Serving: one engine on a thread of its own, and OpenAI's HTTP before it in a process of its own.

`AsyncLLM` is the engine for tasks of asyncio, `make_app` an ASGI application before one, and `ferrum-jax serve` both of
them in two processes, so that Python's lock in the one never holds up a step of the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ferrum_jax.async_llm import AsyncLLM
    from ferrum_jax.serve.local_app import make_app

__all__ = ["AsyncLLM", "make_app"]


def __getattr__(name: str) -> object:
    """AsyncLLM, which brings jax, and make_app, which needs the extra `server`, on first use."""
    if name == "AsyncLLM":
        from ferrum_jax.async_llm import AsyncLLM

        return AsyncLLM
    if name == "make_app":
        from ferrum_jax.serve.local_app import make_app

        return make_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
