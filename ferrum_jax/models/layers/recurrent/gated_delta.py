"""Gated DeltaNet, as in Qwen3-Next and Qwen3.5, and Kimi Delta Attention, as in Kimi Linear and Ling.

The latter has a projection for each of its parts, and decays each channel of a key by itself. Projections of the former
are one for each of q, k, v, z, b and a, or come in groups, one for each key head, with the value heads that belong to
it:

    qkvz   q [A], k [A], v [G * B], z [G * B]          ba   b [G], a [G]

so splitting rows into groups is splitting heads. The convolution runs over q, k and v of a group in that order; its
weight in a checkpoint has all q first, then all k, then all v.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.models.layers.attention import LayerContext
from ferrum_jax.models.layers.linear import Linear, random_weight
from ferrum_jax.models.layers.mlp import activation_of
from ferrum_jax.models.layers.norm import RMSNorm
from ferrum_jax.models.sharding import StateArray
from ferrum_jax.models.spec import GatedDeltaSpec, KimiDeltaSpec, ModelSpec
from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.state_rows import StateRows

_NORM_EPS = 1e-6  # of q's and k's lengths, whatever the spec says of the model's norms


def state_arrays(spec: ModelSpec, dtype: jnp.dtype) -> dict[str, StateArray]:
    """A layer's states of a row: the convolution's last inputs, and the matrix of each value head."""
    own = spec.recurrence
    assert isinstance(own, GatedDeltaSpec | KimiDeltaSpec), f"{spec.architecture} has no delta rule"
    conv = (own.conv_kernel_dim - 1, own.conv_channels)
    return {
        "conv": StateArray(shape=conv, dtype=dtype, axes=(None, "heads")),
        "delta": StateArray(shape=own.state_shape, dtype=jnp.float32, axes=("heads", None, None)),
    }


def delta_of_rows(
    mixed: jax.Array,  # [T, I]: q [A], k [A] and v [G * B] of each key head in turn
    weight: jax.Array,  # [I, W], of the convolution
    log_decay: jax.Array,  # [T, N] float32, or [T, N, A]
    beta: jax.Array,  # [T, N] float32
    *,
    key_dim: int,
    value_dim: int,
    act: Callable[[jax.Array], jax.Array],
    context: LayerContext,
) -> jax.Array:  # [T, N, B]
    """gated_delta(q / |q| / sqrt(A), k / |k|, v, log_decay, beta), where q, k and v are act(conv(mixed))."""
    dtype, N = mixed.dtype, beta.shape[1]

    def compute(pools: Any, rows: StateRows) -> tuple[jax.Array, Any]:
        convolved, conv = causal_conv(mixed, weight, pools["conv"], rows)
        q, k, v = unit_heads(act(convolved.astype(jnp.float32)), N, key_dim, value_dim)
        out, delta = gated_delta(
            q, k, v.astype(dtype), log_decay, beta, pools["delta"], rows, implementation=context.implementation
        )
        return out, {"conv": conv, "delta": delta}

    shapes = {
        "conv": jax.ShapeDtypeStruct((weight.shape[1] - 1, weight.shape[0]), dtype),
        "delta": jax.ShapeDtypeStruct((N, key_dim, value_dim), jnp.float32),
    }
    return context.recur(shapes, compute, len(mixed))


def unit_heads(
    mixed: jax.Array, num_values: int, key_dim: int, value_dim: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k [T, K, A] of unit length, q over sqrt(A) besides, and v [T, N, B]; from [T, I] float32."""
    T = len(mixed)
    num_keys = (mixed.shape[1] - num_values * value_dim) // (2 * key_dim)
    q, k, v = jnp.split(mixed.reshape(T, num_keys, -1), [key_dim, 2 * key_dim], axis=-1)
    q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _NORM_EPS) for x in (q, k))
    return q * key_dim**-0.5, k, v.reshape(T, num_values, value_dim)


class GatedDeltaNet(nnx.Module):
    """K key heads of A, N value heads of B, G = N / K.

        q, k, v = silu(conv(q, k, v));  log_decay = -exp(a_log) softplus(a + dt_bias);  beta = sigmoid(b)
        y = o(norm(gated_delta(q / |q| / sqrt(A), k / |k|, v, log_decay, beta)) * silu(z))

    On a mesh a device has some of the key heads, with their value heads, and the convolution's weight whole.
    Source: Yang, Kautz, Hatamizadeh 2024 (Gated Delta Networks); details as in Qwen3-Next's reference implementation.
    """

    def __init__(self, spec: ModelSpec, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        own, D = spec.recurrence, spec.hidden_size
        assert isinstance(own, GatedDeltaSpec), f"{spec.architecture} has no Gated DeltaNets"
        K, N, A, B = own.num_key_heads, own.num_value_heads, own.key_head_dim, own.value_head_dim
        self.key_dim, self.value_dim, self.group = A, B, N // K
        self.grouped = own.grouped
        if own.grouped:
            self.qkvz = Linear(D, 2 * K * A + 2 * N * B, dtype=dtype, rngs=rngs)
            self.ba = Linear(D, 2 * N, dtype=dtype, rngs=rngs)
        else:
            self.q_heads, self.k_heads = (Linear(D, K * A, dtype=dtype, rngs=rngs) for _ in range(2))
            self.v_heads, self.z_heads = (Linear(D, N * B, dtype=dtype, rngs=rngs) for _ in range(2))
            self.b_heads, self.a_heads = (Linear(D, N, dtype=dtype, rngs=rngs) for _ in range(2))
        self.conv = random_weight((own.conv_channels, 1, own.conv_kernel_dim), dtype, rngs)
        self.a_log = nnx.Param(jnp.zeros((N,), jnp.float32))  # checkpoints keep it wider than their weights
        self.dt_bias = nnx.Param(jnp.ones((N,), dtype))
        self.norm = RMSNorm(B, eps=spec.norm.eps, dtype=dtype)
        self.o = Linear(N * B, D, dtype=dtype, rngs=rngs)
        self.act = activation_of(spec.mlp.hidden_act)

    def __call__(self, x: jax.Array, rotation: object, context: LayerContext) -> jax.Array:  # [T, D] -> [T, D]
        T = x.shape[0]
        mixed, z, b, a = self._by_group(x) if self.grouped else self._one_by_one(x)
        wide = a.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)[None]
        log_decay = -jnp.exp(self.a_log[...])[None] * jax.nn.softplus(wide)
        beta = jax.nn.sigmoid(b.astype(jnp.float32))
        weight = self._conv_by_head(context)
        sizes = {"key_dim": self.key_dim, "value_dim": self.value_dim}
        out = delta_of_rows(mixed.reshape(T, -1), weight, log_decay, beta, **sizes, act=self.act, context=context)
        gate = self.act(z.reshape(out.shape).astype(jnp.float32))
        gated = (self.norm(out).astype(jnp.float32) * gate).astype(x.dtype)
        return self.o(gated.reshape(T, -1), context.shards)

    def _by_group(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """q, k and v [T, K, 2A + GB], z [T, K, GB], b and a [T, N]; from [T, D]."""
        A, size, G = self.key_dim, self.group * self.value_dim, self.group
        mixed, z = jnp.split(self.qkvz(x).reshape(len(x), -1, 2 * A + 2 * size), [2 * A + size], axis=-1)
        b, a = jnp.split(self.ba(x).reshape(len(x), -1, 2 * G), 2, axis=-1)
        return mixed, z, b.reshape(len(x), -1), a.reshape(len(x), -1)

    def _one_by_one(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """q, k and v side by side, z, b and a, of projections that stand alone."""
        q, k = (part(x).reshape(len(x), -1, self.key_dim) for part in (self.q_heads, self.k_heads))
        v = self.v_heads(x).reshape(*q.shape[:2], -1)
        return jnp.concatenate([q, k, v], axis=-1), self.z_heads(x), self.b_heads(x), self.a_heads(x)

    def _conv_by_head(self, context: LayerContext) -> jax.Array:
        """[I, W]: the weights of this device's key heads, group by group."""
        A, W = self.key_dim, self.conv.shape[-1]
        keys = self.conv.shape[0] // (2 * A + self.group * self.value_dim) * A
        parts = jnp.split(self.conv[...][:, 0], [keys, 2 * keys])
        by_head = jnp.concatenate([part.reshape(keys // A, -1, W) for part in parts], axis=1)  # [K, 2A + GB, W]
        return context.shards.own(by_head).reshape(-1, W)


class KimiDelta(nnx.Module):
    """N heads of A values. f and g are projections, or two with A values between.

        q, k, v = silu(conv(q, k, v));  beta = sigmoid(b)
        log_decay = -exp(a_log) softplus(f + dt_bias), or bound * sigmoid(exp(a_log) (f + dt_bias));  [N, A]
        y = o(norm(gated_delta(q / |q| / sqrt(A), k / |k|, v, log_decay, beta)) * sigmoid(g))

    On a mesh a device has some of the heads, and the A values between two projections whole.
    Source: Kimi Team 2025 (Kimi Linear, section 3); details as in the reference implementations of Kimi Linear and of
    Ling 3.0, whose decays have a bound.
    """

    def __init__(self, spec: ModelSpec, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        own, D = spec.recurrence, spec.hidden_size
        assert isinstance(own, KimiDeltaSpec), f"{spec.architecture} has no Kimi Delta Attention"
        N, A = own.num_heads, own.head_dim
        self.head_dim, self.bound = A, own.decay_bound
        self.q_heads, self.k_heads, self.v_heads = (Linear(D, N * A, dtype=dtype, rngs=rngs) for _ in range(3))
        self.q_conv, self.k_conv, self.v_conv = (
            random_weight((N * A, 1, own.conv_kernel_dim), dtype, rngs) for _ in range(3)
        )
        self.b_heads = Linear(D, N, dtype=dtype, rngs=rngs)
        self.is_low_rank = own.low_rank
        if own.low_rank:
            self.f_a, self.g_a = (Linear(D, A, dtype=dtype, rngs=rngs) for _ in range(2))
            self.f_b, self.g_b = (Linear(A, N * A, dtype=dtype, rngs=rngs) for _ in range(2))
        else:
            self.f_heads, self.g_heads = (Linear(D, N * A, dtype=dtype, rngs=rngs) for _ in range(2))
        # float32 in every dtype, as in checkpoints
        self.a_log = nnx.Param(jnp.zeros((N,), jnp.float32)) if own.flat_rates else None
        self.a_log_by_head = None if own.flat_rates else nnx.Param(jnp.zeros((1, 1, N, 1), jnp.float32))
        self.dt_bias = nnx.Param(jnp.zeros((N * A,), jnp.float32))
        self.norm = RMSNorm(A, eps=spec.norm.eps, rounds_once=True, dtype=dtype)
        self.o = Linear(N * A, D, dtype=dtype, rngs=rngs)
        self.act = activation_of(spec.mlp.hidden_act)

    def __call__(self, x: jax.Array, rotation: object, context: LayerContext) -> jax.Array:  # [T, D] -> [T, D]
        T, A = len(x), self.head_dim
        parts = [part(x).reshape(T, -1, A) for part in (self.q_heads, self.k_heads, self.v_heads)]
        convs = [conv[...].reshape(-1, A, conv.shape[-1]) for conv in (self.q_conv, self.k_conv, self.v_conv)]
        out = delta_of_rows(
            jnp.concatenate(parts, axis=-1).reshape(T, -1),
            jnp.concatenate(convs, axis=1).reshape(-1, convs[0].shape[-1]),
            self._log_decay(self.f_b(self.f_a(x)) if self.is_low_rank else self.f_heads(x)),
            jax.nn.sigmoid(self.b_heads(x).astype(jnp.float32)),
            key_dim=A,
            value_dim=A,
            act=self.act,
            context=context,
        )  # [T, N, A]
        gate = self.g_b(self.g_a(x)) if self.is_low_rank else self.g_heads(x)
        gate = jax.nn.sigmoid(gate.reshape(out.shape).astype(jnp.float32))
        gated = (self.norm(out.astype(jnp.float32)) * gate).astype(x.dtype)
        return self.o(gated.reshape(T, -1), context.shards)

    def _log_decay(self, forget: jax.Array) -> jax.Array:  # [T, N * A] -> [T, N, A] float32
        wide = (forget.astype(jnp.float32) + self.dt_bias[...][None]).reshape(len(forget), -1, self.head_dim)
        a_log = self.a_log if self.a_log_by_head is None else self.a_log_by_head
        assert a_log is not None, "one of them is there"
        rates = jnp.exp(a_log[...]).reshape(1, -1, 1)
        return -rates * jax.nn.softplus(wide) if self.bound is None else self.bound * jax.nn.sigmoid(rates * wide)
