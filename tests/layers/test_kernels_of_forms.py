"""Which weights in a form the kernels of a TPU multiply."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.layers.formed_weight import give_kernels, put_forms
from ferrum_jax.spec.stored_weight import WeightForm
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
