"""Hyper-connections against their definition in float64, one token and stream at a time."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ferrum_jax.models.layers.hyper_connections import HyperConnection, StreamSum
from ferrum_jax.models.spec import NormSpec, StreamsSpec

SPEC, NORM, D = StreamsSpec(num_streams=3, magnitude=1.5, eps=0.01), NormSpec(eps=1e-3), 5


def _drawn(kind: type[StreamSum]) -> StreamSum:
    rng = np.random.default_rng(7)
    layer = kind(SPEC, D, NORM, rngs=nnx.Rngs(0))
    for name in ("mix", "base", "scale"):
        old = getattr(layer, name)
        setattr(layer, name, nnx.Param(jnp.asarray(rng.normal(0, 0.7, old.shape), jnp.float32)))
    return layer


def _shares(layer: StreamSum, x: np.ndarray) -> np.ndarray:  # [S, D] -> [kinds, S]
    mix, base, scale = (np.asarray(part[...], np.float64) for part in (layer.mix, layer.base, layer.scale))
    flat = x.reshape(-1)
    logits = (mix @ flat / np.sqrt(np.mean(flat**2) + NORM.eps)).reshape(len(scale), -1)
    return 1 / (1 + np.exp(-(logits * scale[:, None] + base.reshape(len(scale), -1))))


@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_a_half_is_given_a_sum_of_streams_and_adds_to_each_by_its_own_weight(tokens):
    layer, rng = _drawn(HyperConnection), np.random.default_rng(1)
    assert isinstance(layer, HyperConnection)
    x, out = rng.normal(0, 2, (tokens, 3, D)).astype(np.float32), rng.normal(0, 1, (tokens, D)).astype(np.float32)
    given, weights = layer.given(jnp.asarray(x))
    after = layer.added(jnp.asarray(x), jnp.asarray(out), weights)
    for t, streams in enumerate(x.astype(np.float64)):
        read, write = _shares(layer, streams)
        np.testing.assert_allclose(given[t], (read + 0.01) @ streams, rtol=2e-5, atol=2e-5)
        expected = streams + (1.5 * write + 0.01)[:, None] * out[t]
        np.testing.assert_allclose(after[t], expected, rtol=2e-5, atol=2e-5)


def test_behind_the_last_layer_the_streams_are_summed():
    layer, x = _drawn(StreamSum), np.random.default_rng(2).normal(0, 2, (6, 3, D)).astype(np.float32)
    got = np.asarray(layer(jnp.asarray(x)))
    for t, streams in enumerate(x.astype(np.float64)):
        np.testing.assert_allclose(got[t], (_shares(layer, streams)[0] + 0.01) @ streams, rtol=2e-5, atol=2e-5)


def test_weights_and_sums_are_float32_where_streams_are_bfloat16():
    layer = _drawn(HyperConnection)
    assert isinstance(layer, HyperConnection)
    x = jnp.asarray(np.random.default_rng(3).normal(0, 2, (4, 3, D)), jnp.bfloat16)
    given, weights = layer.given(x)
    wide, same = layer.given(x.astype(jnp.float32))
    assert (given.dtype, weights.dtype, layer.mix[...].dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    np.testing.assert_array_equal(weights, same)
    np.testing.assert_array_equal(given, wide.astype(jnp.bfloat16))
