"""The operands of each Pallas call of a function that are known, where its arguments are partly values."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

NAMELESS = "kernel"  # the name of a call that has none
_UNKNOWN = object()  # depends on an argument that is known only by its shape


def known_operands(fn: Callable[..., Any], args: Sequence[Any]) -> list[tuple[str, list[np.ndarray | None]]]:
    """Name and operands of every Pallas call, in the order of the program; None for those that are only shapes.

    args: pytrees of arrays and ShapeDtypeStructs. Raises ValueError where a scalar-prefetch operand depends on the
    latter.
    """
    leaves = jax.tree.leaves(list(args))
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), list(args))
    found: list[tuple[str, list[np.ndarray | None]]] = []
    closed = jax.make_jaxpr(fn)(*shapes)
    known = [_UNKNOWN if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
    _walk(closed.jaxpr, closed.consts, known, found)
    return found


def _walk(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], found: list) -> list:
    """Values of the results, evaluated as far as they are known."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    for equation in jaxpr.eqns:
        operands = [v.val if isinstance(v, core.Literal) else values[v] for v in equation.invars]
        inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        if equation.primitive.name == "pallas_call":
            scalars = operands[: equation.params["grid_mapping"].num_index_operands]
            name = equation.params["name"] or NAMELESS
            if any(value is _UNKNOWN for value in scalars):
                raise ValueError(f"{name}: a scalar-prefetch operand depends on an argument without a value")
            found.append((name, [None if value is _UNKNOWN else np.asarray(value) for value in operands]))
            results: list[Any] = [_UNKNOWN] * len(equation.outvars)
        elif isinstance(inner, core.ClosedJaxpr):
            results = _walk(inner.jaxpr, inner.consts, operands, found)
        elif any(value is _UNKNOWN for value in operands):
            results = [_UNKNOWN] * len(equation.outvars)
        else:
            result = equation.primitive.bind(*operands, **equation.params)
            results = result if equation.primitive.multiple_results else [result]
        values.update(zip(equation.outvars, results, strict=True))
    return [v.val if isinstance(v, core.Literal) else values[v] for v in jaxpr.outvars]
