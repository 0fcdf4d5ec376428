"""A parameter that is kept in a form: its leaves are parameters of their own."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from checkpoints.stored_weight import LEAVES, WeightForm
from pallas_kernels.quantized_matmul import QuantizedWeight, refusals
from pallas_kernels.target import Target


class FormedWeight(nnx.Module):
    """A weight [.., out, in]; `weight[...]` is what products take, as that of a parameter is. Codes start as zeros."""

    def __init__(self, shape: tuple[int, ...], form: WeightForm) -> None:
        leaves = {leaf: nnx.Param(jnp.zeros(size, dtype)) for leaf, (size, dtype) in form.leaves(shape).items()}
        self.codes, self.scales = leaves["codes"], leaves["scales"]
        self.zeros, self.order = leaves.get("zeros"), leaves.get("order")
        self.input_scale = leaves.get("input_scale")
        self.form = form
        self.kernels: Target | None = None

    def __getitem__(self, index: object) -> QuantizedWeight:
        assert index is Ellipsis, f"index is {index}; a weight in a form is taken whole, as weight[...]"
        zeros, order, input_scale = (_array(leaf) for leaf in (self.zeros, self.order, self.input_scale))
        return QuantizedWeight(
            codes=self.codes[...],
            scales=self.scales[...],
            zeros=zeros,
            order=order,
            input_scale=input_scale,
            kind=self.form.kind,
            activations=self.form.activations,
            activation_group=self.form.activation_group,
            has_power_scales=self.form.has_power_scales,
            kernels=self.kernels,
        )


def _array(leaf: nnx.Param | None) -> jax.Array | None:
    return None if leaf is None else leaf[...]


def put_forms(model: nnx.Module, forms: Iterable[tuple[str, WeightForm]]) -> None:
    """Gives the named parameters of a model their forms. Raises ValueError for names and shapes that do not fit."""
    problems = []
    for name, form in forms:
        path, _, last = name.rpartition(".")
        holder = functools.reduce(step_into, path.split("."), model)
        shape = getattr(getattr(holder, last, None), "shape", None)
        wrong = "the model has no such parameter" if shape is None else form.problem(shape)
        if shape is None or wrong is not None:
            problems.append(f"{name}: {wrong}")
        else:
            setattr(holder, last, FormedWeight(shape, form))
    if problems:
        raise ValueError("forms of weights do not fit the model:\n  " + "\n  ".join(problems))


def give_kernels(
    model: nnx.Module,
    forms: Iterable[tuple[str, WeightForm]],
    local: Mapping[str, Any],
    dtype: jnp.dtype,
    target: Target,
) -> dict[str, str]:
    """Lets the kernels of a target multiply the model's weights in a form; {weight: why not} of those that they do not.

    The matrices of a layer's experts are multiplied together, all by kernels or all in XLA. local: the shapes of
    parameters on one device, by name. dtype: of activations.
    """
    found, experts, weights = {}, dict[str, str](), {}
    for name, _ in forms:
        path, _, last = name.rpartition(".")
        weights[name] = weight = getattr(functools.reduce(step_into, path.split("."), model), last)
        leaves: dict[str, Any] = {leaf: local.get(f"{name}.{leaf}") for leaf in LEAVES}
        shapes = QuantizedWeight(kind=weight.form.kind, activations=weight.form.activations, **leaves)
        if reasons := refusals(shapes, dtype, target):
            found[name] = "; ".join(reasons)
            experts |= {path: name} if shapes.ndim > 2 else {}
    for name, weight in weights.items():
        if name in found:
            continue
        if (refused := experts.get(name.rpartition(".")[0])) is not None:
            found[name] = f"experts are multiplied in XLA where {refused.rpartition('.')[2]} is"
        else:
            weight.kernels = target
    return found


def step_into(holder: Any, name: str) -> Any:
    """A part of a model by its name, or by its place in a list; None where there is none."""
    return holder[int(name)] if name.isdecimal() else getattr(holder, name, None)
