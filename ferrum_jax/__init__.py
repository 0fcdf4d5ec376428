"""ferrum_jax: LLM inference in JAX over a paged KV pool with prefix reuse.

from ferrum_jax import LLM, SamplingParams, EngineConfig
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING

from ferrum_jax.io.old_names import take_old_modules

if TYPE_CHECKING:
    from ferrum_jax.async_llm import AsyncLLM
    from ferrum_jax.cli.device_check.run_check import check_device
    from ferrum_jax.config import EngineConfig
    from ferrum_jax.core.outputs import RequestOutput
    from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
    from ferrum_jax.inputs.sizes.speculative import SpeculativeConfig
    from ferrum_jax.llm import LLM
    from ferrum_jax.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "check_device",
]


def _require_own_packages() -> None:
    """Raises ImportError where a folder or file of the user's stands in for a package beside this one."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in ("checkpoints", "pallas_kernels"):
        own, spec = os.path.join(root, name, "__init__.py"), importlib.util.find_spec(name)
        found = None if spec is None else spec.origin
        if os.path.exists(own) and (found is None or os.path.realpath(found) != os.path.realpath(own)):
            raise ImportError(
                f"`import {name}` finds {found or 'nothing'} in place of ferrum_jax's own {os.path.dirname(own)}; "
                f"rename the other one, run from another folder, or put the right one first: PYTHONPATH={root}"
            )


_require_own_packages()
take_old_modules()


_MODULES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "EngineConfig": "config",
    "RequestOutput": "core.outputs",
    "SamplingParams": "sampling_params",
    "SpeculativeConfig": "inputs.sizes.speculative",
    "StructuredOutputsParams": "inputs.params.structured_outputs",
    "check_device": "cli.device_check.run_check",
}


def __getattr__(name: str) -> object:
    """Public names on first use: some bring jax, and the command must see Ctrl-C before it imports anything."""
    if name == "distributed":
        return importlib.import_module("ferrum_jax.integrations.distributed")
    if name in _MODULES:
        return getattr(importlib.import_module(f"ferrum_jax.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
