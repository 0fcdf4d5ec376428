"""Mosaic TPU's interpreter over memory that starts as NaN, which must see no race."""

from collections.abc import Callable
from typing import Any

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # where the interpreter keeps the races it saw
from jax.experimental.pallas import tpu as pltpu

from tests.fast_compile import FAST_COMPILE

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def without_races(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives that calls kernels with INTERPRET."""
    found = jax.block_until_ready(jax.jit(function, compiler_options=FAST_COMPILE)(*arguments))
    assert interpret_pallas_call.races is not None and not interpret_pallas_call.races.races_found
    return found
