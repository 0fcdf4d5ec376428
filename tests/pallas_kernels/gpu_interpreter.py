"""Mosaic GPU's interpreter, whose place in jax is private, and what makes it affordable."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax import core
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams


@contextlib.contextmanager
def interpreted() -> Iterator[InterpretGPUParams]:
    """What `interpret=` takes: memory begins as NaN, and a race between warpgroups is an error at the end.

    The interpreter compiles a kernel's body for each warpgroup of each program; here they share one executable.
    """
    lock, compiled, raced = threading.Lock(), {}, []
    clean_up = gpu_callbacks._clean_up_shared_memory

    def run(jaxpr: Any, consts: Any, *args: Any) -> None:
        with lock:
            if id(jaxpr) not in compiled:
                function = jax.jit(lambda *values: core.eval_jaxpr(jaxpr, *values))
                compiled[id(jaxpr)] = jaxpr, function.trace(consts, *args).lower().compile()
        compiled[id(jaxpr)][1](consts, *args)

    def end(token: Any) -> Any:
        raced.append(gpu_callbacks.get_races().races_found)
        return clean_up(token)

    gpu_callbacks.reset_gpu_interpret_mode_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thread_map, "_run_jaxpr", run)
        patch.setattr(gpu_callbacks, "_clean_up_shared_memory", end)
        yield InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    assert raced and not any(raced)
