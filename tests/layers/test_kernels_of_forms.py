"""Which weights in a form the kernels of a TPU multiply.

A weight with adapters beside it, dense or in a form, gives what it gives and what the rows' adapters add.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints.stored_weight import WeightForm, made_form
from ferrum_jax.models.layers.adapted_weight import put_adapters
from ferrum_jax.models.layers.formed_weight import give_kernels, put_forms
from ferrum_jax.models.layers.linear import Linear
from pallas_kernels.low_rank import LowRankSlots, oracle, pairs_of
from pallas_kernels.on_device import on_device
from pallas_kernels.target import Target

V6E = Target.named("tpu:v6e")
SHAPES = {"good": (128, 256), "narrow": (100, 256), "experts": (2, 128, 256)}
EXPERTS = {"gate": (2, 128, 256), "up": (2, 128, 256), "down": (2, 100, 256)}


class _Layer(nnx.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.zeros(shape)))


class _Model(nnx.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.layer = _Layer(shapes)


def given(dtype: str, cut: int = 1, shapes: dict[str, tuple[int, ...]] = SHAPES) -> tuple[_Model, dict[str, str]]:
    """A model whose weights are cut along the inputs among some devices, and what is refused."""
    model, form = _Model(shapes), WeightForm(kind="int4", group=128, scale_dtype="bfloat16")
    forms = [(f"layer.{name}", form) for name in shapes]
    put_forms(model, forms)
    local = {}
    for name, (*lead, inputs) in shapes.items():
        for leaf, (shape, kind) in form.leaves((*lead, inputs // cut)).items():
            local[f"layer.{name}.{leaf}"] = jax.ShapeDtypeStruct(shape, jnp.dtype(kind))
    return model, give_kernels(model, forms, local, jnp.dtype(dtype), V6E)


def test_kernels_multiply_the_weights_that_they_take_and_others_are_named() -> None:
    model, refused = given("bfloat16")
    assert model.layer.good[...].kernels == V6E and model.layer.narrow[...].kernels is None
    assert model.layer.experts[...].kernels == V6E
    assert refused == {"layer.narrow": "100 outputs of a device are no multiple of 128"}


def test_a_layers_experts_are_multiplied_by_kernels_together_or_not_at_all() -> None:
    model, refused = given("bfloat16", shapes=EXPERTS)
    assert refused == {
        "layer.down": "100 outputs of a device are no multiple of 64",
        "layer.gate": "experts are multiplied in XLA where down is",
        "layer.up": "experts are multiplied in XLA where down is",
    }
    assert model.layer.gate[...].kernels is None


def test_what_counts_is_one_devices_part_and_the_dtype_of_activations() -> None:
    assert "128 inputs of a device are no multiple of 256" in given("bfloat16", cut=2)[1]["layer.good"]
    assert "activations are float32" in given("float32")[1]["layer.good"]


def test_the_choice_is_part_of_the_models_structure() -> None:
    structures = [nnx.split(given(dtype)[0])[0] for dtype in ("bfloat16", "float32")]
    assert structures[0] != structures[1]


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
