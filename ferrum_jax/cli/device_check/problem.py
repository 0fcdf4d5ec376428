"""A problem of a check: a case of an op, what computes it, its oracle and what it asks for."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pallas_kernels.fast_compile import FAST_COMPILE
from pallas_kernels.target import Target

INTERPRETED_AS = "tpu:v5e"  # off a chip
_ON_BOTH = ("paged_attention", "quantized_matmul", "grouped_matmul")
_ON_TPUS = ("kv_write", "gated_delta", "state_space")
# Off a chip: of each op the cases that show most in least time. On a chip these tiny ones before the real sizes.
FEW = {
    "paged_attention": ("decode_gqa", "mixed_int8_h64_window"),
    "kv_write": ("decode", "int8"),
    "quantized_matmul": ("w4a16",),
    "grouped_matmul": ("uneven", "bfloat16"),
    "gated_delta": ("mixed", "tpu_some"),
    "state_space": ("mixed", "tpu_mixed"),
    "causal_conv": ("mixed",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A case of an op.

    shape: its class, as verdicts name it. implementations: "xla" first. begin: of an implementation, what starts a call
    and returns its result. take: from a result, as an array, what the oracle gives. axes: names of a result's axes.
    num_bytes, flops: None where the case is too small for a time to say anything.
    """

    op: str
    name: str
    dtype: str
    shape: str
    tolerance: Mapping[str, float]
    implementations: tuple[str, ...]
    begin: Callable[[str], Callable[[], Any]]
    oracle: Callable[[], np.ndarray]
    take: Callable[[np.ndarray], np.ndarray] = lambda result: result
    real: Callable[[Any, str], np.ndarray] = lambda result, _: np.asarray(result)  # what real tokens have
    axes: tuple[str, ...] = ()
    num_bytes: int | None = None
    flops: int | None = None


def kernel_of(op: str, target: Target | None, platform: str) -> str | None:
    """The kernel that an op has beside "xla"; on the CPU the TPU's, which is interpreted."""
    if op not in (*_ON_BOTH, *_ON_TPUS):
        return None
    if platform == "cpu" or (target is not None and target.runs_tpu_kernels):
        return "mosaic_tpu"
    is_hopper = target is not None and target.num_cores is not None
    return "mosaic_gpu" if op in _ON_BOTH and is_hopper else None


def options_of(platform: str) -> Any:
    """Compiler options that make a program compile soon on the CPU."""
    return FAST_COMPILE if platform == "cpu" else None


def interpreter() -> Any:
    """How the TPU's kernels are interpreted, with NaN in memory that nothing wrote."""
    from jax.experimental.pallas import tpu as pltpu  # Pallas, which no chip's check waits for twice

    return pltpu.InterpretParams(uninitialized_memory="nan")


def chosen(cases: Any, op: str, platform: str, full: bool) -> list[Any]:
    """The cases of an op that run on this platform."""
    return [case for case in cases if full or platform != "cpu" or case.name in FEW[op]]
