"""Linear: y = x Wᵀ + b, with W as the checkpoint has it, [out, in]. The only file that knows the dots' order."""

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.models.layers.adapted_weight import Adapted
from ferrum_jax.models.layers.formed_weight import FormedWeight
from ferrum_jax.models.sharding.shards import WHOLE, Shards
from pallas_kernels.quantized_matmul import QuantizedWeight, quantized_matmul, token_scales

INIT_SCALE = 0.02
# XLA:CPU computes W xᵀ faster than x Wᵀ for a few rows. x-first time over W-first time, float32, [3072, 1024] and
# [1024, 3072], two cores, jax 0.10.2: 1 row 1.0 and 0.9, 2 rows 1.7 and 1.9, 4 rows 1.9 and 1.9, 8 rows 1.8 and 1.9,
# 16 rows 1.8 and 1.6, 32 rows 1.4 and 1.6, 64 rows 1.1 and 1.0, 128 rows 1.05 and 1.1, 512 rows 1.0 and 1.0.
_WEIGHT_FIRST_ROWS = range(2, 33)


def project(
    x: jax.Array,  # [T, I]
    weight: jax.Array | QuantizedWeight | Adapted,  # [O, I], dtype of x or codes
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:  # [T, O] out_dtype, x's when None
    """x Wᵀ, accumulated in float32 or better, and what adapters add to it."""
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if isinstance(weight, Adapted):
        return weight.add(project(x, weight.base, out_dtype=out_dtype), x)
    if isinstance(weight, QuantizedWeight):
        return quantized_matmul(x, weight, out_dtype=out_dtype)
    if x.shape[0] in _WEIGHT_FIRST_ROWS:
        return _project_few(x, weight, out_dtype)
    return _rows_first(x, weight, out_dtype)


def _rows_first(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)


def _weight_first(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    y = jax.lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)  # [O, T]
    # Without the barrier XLA folds the transposition back into the dot and the order is lost.
    return jax.lax.optimization_barrier(y).T


def _project_few(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    return jax.lax.platform_dependent(
        x,
        weight,
        cpu=lambda x, weight: _weight_first(x, weight, out_dtype),
        default=lambda x, weight: _rows_first(x, weight, out_dtype),
    )


def random_weight(shape: tuple[int, ...], dtype: jnp.dtype, rngs: nnx.Rngs | None) -> nnx.Param:
    """A parameter drawn from N(0, 0.02²), or zeros without rngs, for a model that only lends its shapes."""
    if rngs is None:
        return nnx.Param(jnp.zeros(shape, dtype))
    return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * INIT_SCALE)


class Linear(nnx.Module):
    """weight [O, I], dense or in a form; bias [O] or None. On a mesh I or O is a device's part, and x or y with it."""

    def __init__(
        self, num_in: int, num_out: int, *, bias: bool = False, dtype: jnp.dtype, rngs: nnx.Rngs | None
    ) -> None:
        self.weight: nnx.Param | FormedWeight = random_weight((num_out, num_in), dtype, rngs)
        self.bias = nnx.Param(jnp.zeros((num_out,), dtype)) if bias else None

    def __call__(self, x: jax.Array, inputs: Shards = WHOLE) -> jax.Array:  # [T, I] -> [T, O]
        """x Wᵀ + b. inputs: the devices that each have a part of I, whose products are summed."""
        if self.bias is None:
            return inputs.sum(self._product(x, inputs, None))
        # float32 until the bias is there, so that the sum is rounded once; devices exchange the dtype of x
        y = self._product(x, inputs, jnp.float32 if inputs.size == 1 else None)
        return (inputs.sum(y).astype(jnp.float32) + self.bias[...].astype(jnp.float32)[None, :]).astype(x.dtype)

    def _product(self, x: jax.Array, inputs: Shards, out_dtype: jax.typing.DTypeLike | None) -> jax.Array:
        """x Wᵀ of the inputs that are here, before the sum over devices."""
        weight = self.weight[...]
        if isinstance(weight, Adapted):
            return weight.add(self._base_product(x, weight.base, inputs, out_dtype), x)
        return self._base_product(x, weight, inputs, out_dtype)

    @staticmethod
    def _base_product(
        x: jax.Array,
        weight: jax.Array | QuantizedWeight,
        inputs: Shards,
        out_dtype: jax.typing.DTypeLike | None,
    ) -> jax.Array:
        if not isinstance(weight, QuantizedWeight) or inputs.size == 1:
            return project(x, weight, out_dtype=out_dtype)
        if weight.order is not None:
            x = inputs.gather_columns(x)  # an order of inputs goes across devices
        scales = None
        if weight.activations is not None and weight.activation_group is None and weight.input_scale is None:
            scales = inputs.max(token_scales(x, weight))  # of the whole token, so that a mesh rounds as one device does
        return quantized_matmul(x, weight, out_dtype=out_dtype, activation_scales=scales)
