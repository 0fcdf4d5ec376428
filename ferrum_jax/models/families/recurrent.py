"""Layers with a recurrent state, by what the spec says of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.models.layers.recurrent import gated_delta
from ferrum_jax.models.layers.recurrent.mamba2_and_short_conv import Mamba2, ShortConv, mamba2_arrays, short_conv_arrays
from ferrum_jax.models.spec import GatedDeltaSpec, KimiDeltaSpec, Mamba2Spec, ModelSpec, ShortConvSpec

Mixer = Callable[..., jax.Array]  # (x [T, D], rotation, context) -> [T, D]


class _Kind(NamedTuple):
    layer: Callable[..., Mixer]
    state_arrays: Callable[[ModelSpec, jnp.dtype], Any]


_KINDS: dict[type, _Kind] = {
    GatedDeltaSpec: _Kind(gated_delta.GatedDeltaNet, gated_delta.state_arrays),
    KimiDeltaSpec: _Kind(gated_delta.KimiDelta, gated_delta.state_arrays),
    ShortConvSpec: _Kind(ShortConv, short_conv_arrays),
    Mamba2Spec: _Kind(Mamba2, mamba2_arrays),
}


def recurrent_layer(spec: ModelSpec, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> Mixer:
    """The recurrent layer of a spec that has a recurrence."""
    return _KINDS[type(spec.recurrence)].layer(spec, layer, dtype=dtype, rngs=rngs)


def state_arrays(spec: ModelSpec, dtype: jnp.dtype) -> Any:
    """The state of one row in a recurrent layer, a tree of `StateArray`. dtype: of activations."""
    return _KINDS[type(spec.recurrence)].state_arrays(spec, dtype)
