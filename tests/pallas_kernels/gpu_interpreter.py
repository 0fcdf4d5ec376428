"""Mosaic GPU's interpreter, whose place in jax is private, and what makes it affordable; what a kernel fetches."""

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax import core
from jax._src import core as private_core
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from tests.fast_compile import FAST_COMPILE


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
                compiled[id(jaxpr)] = jaxpr, function.trace(consts, *args).lower().compile(FAST_COMPILE)
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


def fetches(jaxpr: Any) -> Iterator[tuple[int, int]]:
    """For each transfer to shared memory, the alignment of its place there in bytes, and the one that it needs.

    128 for a transfer of an array; a swizzle repeats after 8 of its rows, and begins where they do.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "copy_gmem_to_smem":
            skipped = 3 + eqn.params["src_transforms_treedef"].num_leaves
            tree = eqn.params["dst_transforms_treedef"]
            *layout, indexer = jax.tree.unflatten(tree, eqn.invars[skipped : skipped + tree.num_leaves])
            swizzle = next((t.swizzle for t in layout if hasattr(t, "swizzle")), 0)
            yield _alignment(indexer, eqn.invars[1].aval.dtype.itemsize), max(128, 8 * swizzle)
        for inner in private_core.jaxprs_in_params(eqn.params):
            yield from fetches(inner)


def _alignment(indexer: Any, itemsize: int) -> int:
    stride, bytes_ = itemsize, 0
    for index, size in reversed(list(zip(indexer.indices, indexer.shape, strict=True))):
        start = getattr(index, "start", index)
        known = getattr(start, "val", start)
        bytes_ = math.gcd(bytes_, stride * (int(known) if isinstance(known, int) else 1))
        stride *= size
    return bytes_ or stride
