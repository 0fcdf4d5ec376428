"""A weight with adapters beside it, dense or in a form, gives what it gives and what the rows' adapters add."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ferrum_jax.layers.adapted_weight import put_adapters
from ferrum_jax.layers.formed_weight import put_forms
from ferrum_jax.layers.linear import Linear
from ferrum_jax.spec.stored_weight import made_form
from pallas_kernels.low_rank import LowRankSlots, oracle, pairs_of
from pallas_kernels.on_device import on_device

T, I, O, S, R = 6, 32, 48, 4, 2


@pytest.mark.parametrize("weights", ["auto", "int8", "int8-a16"])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_get_the_weight_s_product_and_what_their_adapter_adds(weights, bias):
    rng = np.random.default_rng(0)
    model = nnx.Dict(linear=Linear(I, O, bias=bias, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    form = made_form(weights)
    if form is not None:
        put_forms(model, [("linear.weight", form)])
        formed = model.linear.weight
        formed.codes[...] = on_device(rng.integers(-127, 128, formed.codes.shape), formed.codes.dtype)
        formed.scales[...] = on_device(rng.uniform(0.001, 0.01, formed.scales.shape), formed.scales.dtype)
    x = rng.standard_normal((T, I)).astype(np.float32)
    run = nnx.jit(lambda model, x: model.linear(x))
    without = np.asarray(run(model, x))
    a, b = rng.standard_normal((S, R, I)).astype(np.float32), rng.standard_normal((S, R, O)).astype(np.float32)
    scales, slots = np.array([0.5, 1, 2, 3], np.float32), np.array([0, 4, 1, 1, 0, 3], np.int32)
    per_tile = (a.reshape(2, 2 * R, I), b.reshape(2, 2 * R, O), np.repeat(scales, R).reshape(2, -1))
    kept = LowRankSlots(**dict(zip(("a", "b", "scales"), jax.device_put(per_tile), strict=True)), rank=R)
    pairs = jax.jit(functools.partial(pairs_of, num_tiles=2, slots_per_tile=2))(slots)
    put_adapters(model, {"linear.weight": kept}, pairs)
    expected = oracle.add_low_rank(without, x, a, b, scales, slots)
    np.testing.assert_allclose(np.asarray(run(model, x)), expected, rtol=2e-5, atol=2e-5)
