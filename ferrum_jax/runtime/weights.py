"""Weights on the devices of a layout, read while its executables are compiled; of engines and encoders alike."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from checkpoints.fingerprint import fingerprint
from checkpoints.memory import take
from ferrum_jax.runtime.compile import beside
from ferrum_jax.runtime.layout import ModelLayout

Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedWeights:
    """arrays: in the order of the layout's targets. read_s: what reading them took."""

    arrays: tuple[jax.Array, ...]
    fingerprint: bytes
    read_s: float = 0.0


def read_beside(
    layout: ModelLayout,
    read: Callable[..., Mapping[str, jax.Array]],
    compile: Callable[[threading.Event], Made],
    on_fingerprint: Callable[[bytes], None],
) -> tuple[PlacedWeights, Made]:
    """The weights that read(targets, expansions) gives, and what compile(abandoned) makes in a thread meanwhile.

    on_fingerprint: called as soon as the weights are known; what it raises ends the compiling too.
    """
    started = time.perf_counter()
    with beside(compile) as compiling:
        weights = _weights(layout, read(layout.targets, layout.model.expansions))
        on_fingerprint(weights.fingerprint)
        weights = dataclasses.replace(weights, read_s=time.perf_counter() - started)
        return weights, compiling.result()


def copy_weights(layout: ModelLayout, arrays: Mapping[str, Any]) -> PlacedWeights:
    """Copies of arrays in memory, as the layout has them. Raises one ValueError for all that does not fit."""
    return _weights(layout, take(arrays, layout.targets, layout.model.expansions))


def _weights(layout: ModelLayout, tensors: Mapping[str, jax.Array]) -> PlacedWeights:
    digest = fingerprint(layout.spec.digest_text(), layout.dtype.name, tensors, layout.model.expansions)
    return PlacedWeights(arrays=tuple(tensors[name] for name in layout.targets), fingerprint=bytes.fromhex(digest))
