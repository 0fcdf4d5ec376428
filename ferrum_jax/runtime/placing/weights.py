"""Weights on the devices of a layout, read while its executables are compiled; of engines and encoders alike."""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax

from checkpoints.fingerprints import Fingerprint, fingerprints
from checkpoints.memory import Copies
from ferrum_jax.runtime.compile.compile import beside
from ferrum_jax.runtime.layout import ModelLayout

Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedWeights:
    """arrays: in the order of the layout's targets. read_s: seconds of reading."""

    arrays: tuple[jax.Array, ...]
    fingerprint: Fingerprint
    read_s: float = 0.0


def read_beside(
    layout: ModelLayout,
    read: Callable[..., Mapping[str, jax.Array]],
    compile: Callable[[threading.Event], Made],
    on_fingerprint: Callable[[Fingerprint], None],
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


def replace_weights(layout: ModelLayout, old: Sequence[jax.Array], copies: Copies) -> PlacedWeights:
    """The old arrays with copies in the place of those that have one, made and freed one after the other.

    So at most one parameter is in memory twice. Should memory lack in the middle, the old weights are gone in part.
    """
    arrays = dict(zip(layout.targets, old, strict=True))
    for name, copy in copies.items():
        before, arrays[name] = arrays[name], copy().block_until_ready()
        before.delete()
    return _weights(layout, arrays)


def _weights(layout: ModelLayout, tensors: Mapping[str, jax.Array]) -> PlacedWeights:
    texts = (layout.spec.digest_text(), layout.spec.digest_text(once=True))
    found = fingerprints(texts, layout.dtype.name, tensors, layout.model.expansions)
    return PlacedWeights(arrays=tuple(tensors[name] for name in layout.targets), fingerprint=found)
