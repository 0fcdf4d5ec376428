"""Kimi Delta Attention against its definition in float64."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ferrum_jax.models.layers.attention import LayerContext
from ferrum_jax.models.layers.recurrent.gated_delta import KimiDelta
from ferrum_jax.models.spec import CacheGroup, KimiDeltaSpec
from tests.layers.test_layers import SPEC, assert_close, draw, fill, jitted
from tests.oracles import layers as oracle

LOW_RANK = KimiDeltaSpec(num_heads=3, head_dim=8, conv_kernel_dim=4, flat_rates=False)
BOUNDED = KimiDeltaSpec(num_heads=2, head_dim=12, conv_kernel_dim=3, low_rank=False, decay_bound=-5.0)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.mark.parametrize("own", [LOW_RANK, BOUNDED], ids=["low rank", "bounded"])
def test_the_layer_is_its_definition_token_by_token(own: KimiDeltaSpec):
    """70 tokens: more than a tile."""
    spec = dataclasses.replace(
        SPEC,
        num_hidden_layers=2,
        recurrence=own,
        cache_groups=(CacheGroup(kind="full", layers=(0,)), CacheGroup(kind="state", layers=(1,))),
    )
    layer = KimiDelta(spec, 1, dtype=jnp.dtype("float32"), rngs=None)
    w = fill(layer, "float32")
    x, wide = draw(1, (70, spec.hidden_size), "float32")
    found = jitted(lambda x: layer(x, None, LayerContext()))(x)
    assert_close(found, oracle.kimi_delta(wide, w, own.decay_bound, spec.norm.eps), "float32")


def test_rates_and_biases_of_decays_are_float32_beside_weights_in_bfloat16():
    spec = dataclasses.replace(SPEC, recurrence=BOUNDED)
    layer = KimiDelta(spec, 0, dtype=jnp.dtype("bfloat16"), rngs=None)
    assert layer.a_log is not None and layer.a_log[...].dtype == layer.dt_bias[...].dtype == jnp.float32
    x, _ = draw(1, (5, spec.hidden_size), "bfloat16")
    assert jitted(lambda x: layer(x, None, LayerContext()))(x).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_heads", 0, "num_heads is 0"),
        ("conv_kernel_dim", 1, "short_conv_kernel_size is 1; it must be at least 2"),
        ("decay_bound", 0.0, "the lower bound of decays is 0.0; it must be below 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(field: str, value: float, said: str):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(LOW_RANK, **{field: value})
