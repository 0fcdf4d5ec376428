"""Mixture of experts: a router picks X of E small MLPs for every token; cost follows the routed tokens.

Source: Shazeer et al. 2017 (routing); Qwen3-MoE's reference implementation (softmax before top-k).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.layers.attention import ForwardContext
from ferrum_jax.layers.linear import Linear, project, random_weight
from ferrum_jax.layers.mlp import MLP, activation_of
from ferrum_jax.spec import ModelSpec
from pallas_kernels.grouped_matmul import expert_mlp


class Experts(nnx.Module):
    """The experts' weights, stacked: gate, up [E, F, D]; down [E, D, F]."""

    def __init__(self, spec: ModelSpec, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        E, F, D = spec.num_experts, spec.moe_intermediate_size, spec.hidden_size
        self.gate = random_weight((E, F, D), dtype, rngs)
        self.up = random_weight((E, F, D), dtype, rngs)
        self.down = random_weight((E, D, F), dtype, rngs)


class MoE(nnx.Module):
    """router [E, D] and experts. The weights of a token's X experts sum to one if norm_topk_prob.

    shared: one more expert that all tokens go to, times sigmoid of shared_gate [1, D]; None where there is none.
    On a mesh a device has some of the experts and some columns of the shared one, and router and gate whole.
    """

    def __init__(self, spec: ModelSpec, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        self.router = Linear(spec.hidden_size, spec.num_experts, dtype=dtype, rngs=rngs)
        self.experts = Experts(spec, dtype=dtype, rngs=rngs)
        width = spec.shared_expert_intermediate_size
        self.shared = MLP(spec, width=width, dtype=dtype, rngs=rngs) if width else None
        self.shared_gate = Linear(spec.hidden_size, 1, dtype=dtype, rngs=rngs) if width else None
        self.num_experts_per_tok = spec.num_experts_per_tok
        self.norm_topk_prob = spec.norm_topk_prob
        self.act = activation_of(spec.hidden_act)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[T, D] -> (expert ids [T, X] int32, weights [T, X] float32), best first, lower id first on a tie."""
        logits = project(x, self.router.weight[...], out_dtype=jnp.float32)
        weights, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.num_experts_per_tok)
        if self.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return ids, weights

    def __call__(self, x: jax.Array, context: ForwardContext) -> jax.Array:  # [T, D] -> [T, D]
        expert_ids, expert_weights = self.route(x)
        gate, up, down = (weight[...] for weight in (self.experts.gate, self.experts.up, self.experts.down))
        out = expert_mlp(
            x,
            expert_ids,
            expert_weights,
            gate,
            up,
            down,
            first_expert=context.shards.index() * gate.shape[0],
            num_experts=self.router.weight.shape[0],
            tile=context.expert_tile,
            activation=self.act,
            implementation=context.implementation,
        )
        if self.shared is not None and self.shared_gate is not None:
            out += jax.nn.sigmoid(self.shared_gate(x)) * self.shared.down(self.shared.hidden(x))
        return context.shards.sum(out)
