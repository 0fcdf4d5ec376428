"""Mamba2, in Granite 4, Falcon-H1 and Nemotron-H, and the short convolution of LFM2: instead of attention or beside it.

What belongs to a head is split over a mesh with the heads. What writes and reads states belongs to a group of heads: it
is whole on every device, which takes its heads' groups of it (decision 0062).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.models.layers.attention import LayerContext
from ferrum_jax.models.layers.linear import Linear, random_weight
from ferrum_jax.models.layers.norm import GroupedNorm
from ferrum_jax.models.sharding import StateArray
from ferrum_jax.models.sharding.shards import Shards
from ferrum_jax.models.spec import Mamba2Spec, ModelSpec, ShortConvSpec
from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.state_rows import StateRows
from pallas_kernels.state_space import state_space


def mamba2_arrays(spec: ModelSpec, dtype: jnp.dtype) -> dict[str, StateArray]:
    """A layer's states of a row: the convolutions' last inputs, and the matrix of each head."""
    own = _sizes(spec)
    kept = own.conv_kernel_dim - 1
    return {
        "conv_heads": StateArray(shape=(kept, own.output_size), dtype=dtype, axes=(None, "heads")),
        "conv_whole": StateArray(shape=(kept, 2 * own.group_size), dtype=dtype, axes=(None, None)),
        "state": StateArray(shape=own.state_shape, dtype=jnp.float32, axes=("heads", None, None)),
    }


def _sizes(spec: ModelSpec) -> Mamba2Spec:
    assert isinstance(spec.recurrence, Mamba2Spec), f"{spec.architecture} has no Mamba2"
    return spec.recurrence


class Mamba2(nnx.Module):
    """N heads of B, G groups of A, steps of time s of each head.

        v, [b, c] = silu(conv(v)), silu(conv([b, c]));  s = clip(softplus(s + dt_bias));  log_decay = -exp(a_log) s
        y = o(norm((state_space(c, b, s v, log_decay) + skip v) * silu(z)))

    a_log, dt_bias and skip are float32 whatever the dtype.
    Source: Dao, Gu 2024 (Transformers are SSMs), section 7; details as in the reference implementations.
    """

    def __init__(self, spec: ModelSpec, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        own, D, W = _sizes(spec), spec.hidden_size, _sizes(spec).conv_kernel_dim
        N, size, whole = own.num_heads, own.output_size, 2 * own.group_size
        self.spec = own
        self.z_heads, self.v_heads = (Linear(D, size, dtype=dtype, rngs=rngs) for _ in range(2))
        self.bc_whole = Linear(D, whole, dtype=dtype, rngs=rngs)
        self.s_heads = Linear(D, N, dtype=dtype, rngs=rngs)
        self.conv_heads = random_weight((size, 1, W), dtype, rngs)
        self.conv_whole = random_weight((whole, 1, W), dtype, rngs)
        self.conv_heads_bias = nnx.Param(jnp.zeros((size,), dtype)) if own.conv_bias else None
        self.conv_whole_bias = nnx.Param(jnp.zeros((whole,), dtype)) if own.conv_bias else None
        self.a_log = nnx.Param(jnp.zeros((N,), jnp.float32))
        self.dt_bias = nnx.Param(jnp.ones((N,), jnp.float32))
        self.skip = nnx.Param(jnp.ones((N,), jnp.float32))
        self.heads_norm = GroupedNorm(size, own.num_groups, eps=spec.norm.eps, dtype=dtype) if own.norm else None
        self.o = Linear(size, D, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rotation: object, context: LayerContext) -> jax.Array:  # [T, D] -> [T, D]
        by_z, by_v, by_b, by_c, by_s = self.spec.multipliers
        z, v, bc = _times(self.z_heads(x), by_z), _times(self.v_heads(x), by_v), self.bc_whole(x)
        if (by_b, by_c) != (1, 1):
            bc = bc * jnp.repeat(jnp.array([by_b, by_c], bc.dtype), self.spec.group_size)[None]
        wide = _times(self.s_heads(x), by_s).astype(jnp.float32) + self.dt_bias[...][None]
        steps = jnp.clip(jax.nn.softplus(wide), *self.spec.step_limit)  # [T, N]

        def compute(pools: Any, rows: StateRows) -> tuple[jax.Array, Any]:
            heads, conv_heads = self._convolved(v, self.conv_heads, self.conv_heads_bias, pools["conv_heads"], rows)
            whole, conv_whole = self._convolved(bc, self.conv_whole, self.conv_whole_bias, pools["conv_whole"], rows)
            heads = heads.reshape(len(x), -1, self.spec.head_dim)
            b, c = (_own_groups(part, self.spec.num_groups, context.shards) for part in jnp.split(whole, 2, axis=1))
            log_decay = -jnp.exp(self.a_log[...])[None] * steps
            out, state = state_space(
                *(c, b, heads * steps[..., None], log_decay, pools["state"], rows),
                implementation=context.implementation,
            )
            out += self.skip[...][None, :, None] * heads
            return out, {"conv_heads": conv_heads, "conv_whole": conv_whole, "state": state}

        out = context.recur(self._state_shapes(v, bc, steps), compute, len(x))  # [T, N, B] float32
        gated = out.reshape(z.shape) * jax.nn.silu(z.astype(jnp.float32))
        if self.heads_norm is not None:
            gated = self.heads_norm(gated, x.dtype, context.shards)
        return _times(self.o(gated.astype(x.dtype), context.shards), self.spec.output_multiplier)

    def _convolved(
        self, x: jax.Array, weight: nnx.Param, bias: nnx.Param | None, pool: jax.Array, rows: StateRows
    ) -> tuple[jax.Array, jax.Array]:  # [T, I] float32, the pool
        out, pool = causal_conv(x, weight[...][:, 0], pool, rows)
        wide = out.astype(jnp.float32)
        return jax.nn.silu(wide if bias is None else wide + bias[...].astype(jnp.float32)[None]), pool

    def _state_shapes(self, v: jax.Array, bc: jax.Array, steps: jax.Array) -> dict[str, jax.ShapeDtypeStruct]:
        kept, state = self.spec.conv_kernel_dim - 1, (steps.shape[1], self.spec.head_dim, self.spec.state_dim)
        return {
            "conv_heads": jax.ShapeDtypeStruct((kept, v.shape[1]), v.dtype),
            "conv_whole": jax.ShapeDtypeStruct((kept, bc.shape[1]), bc.dtype),
            "state": jax.ShapeDtypeStruct(state, jnp.float32),
        }


def _times(x: jax.Array, multiplier: float) -> jax.Array:
    return x if multiplier == 1 else x * jnp.asarray(multiplier, x.dtype)


def _own_groups(x: jax.Array, num_groups: int, shards: Shards) -> jax.Array:  # [T, G * A] -> [T, own G, A]
    """The groups of this device's heads, which may be part of one group."""
    x = x.reshape(len(x), num_groups, -1)
    first = shards.index() * num_groups // shards.size
    return x if shards.size == 1 else jax.lax.dynamic_slice_in_dim(x, first, max(num_groups // shards.size, 1), axis=1)


def short_conv_arrays(spec: ModelSpec, dtype: jnp.dtype) -> StateArray:
    """A layer's state of a row: the convolution's last inputs."""
    own = _conv_sizes(spec)
    return StateArray(shape=(own.conv_kernel_dim - 1, own.conv_channels), dtype=dtype, axes=(None, "heads"))


def _conv_sizes(spec: ModelSpec) -> ShortConvSpec:
    assert isinstance(spec.recurrence, ShortConvSpec), f"{spec.architecture} has no short convolutions"
    return spec.recurrence


class ShortConv(nnx.Module):
    """y = o(c(x) * conv(b(x) * v(x))). On a mesh a device has some of the channels.

    Source: the model card of LFM2 (Liquid AI, 2025); details as in its reference implementation.
    """

    def __init__(self, spec: ModelSpec, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        own, D = _conv_sizes(spec), spec.hidden_size
        size = own.conv_channels
        self.b_heads, self.c_heads, self.v_heads = (Linear(D, size, dtype=dtype, rngs=rngs) for _ in range(3))
        self.conv_heads = random_weight((size, 1, own.conv_kernel_dim), dtype, rngs)
        self.o = Linear(size, D, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rotation: object, context: LayerContext) -> jax.Array:  # [T, D] -> [T, D]
        given, weight = self.b_heads(x) * self.v_heads(x), self.conv_heads[...][:, 0]

        def compute(pool: Any, rows: StateRows) -> tuple[jax.Array, Any]:
            return causal_conv(given, weight, pool, rows)

        state = jax.ShapeDtypeStruct((weight.shape[1] - 1, weight.shape[0]), x.dtype)
        convolved = context.recur(state, compute, len(x))
        return self.o(self.c_heads(x) * convolved, context.shards)
