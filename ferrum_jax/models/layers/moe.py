"""Mixture of experts: a router picks X of E small MLPs for every token; cost follows the routed tokens.

Source: Shazeer et al. 2017 (routing); Qwen3-MoE's reference implementation (softmax before top-k; with the
weights of the chosen made to sum to one, that is softmax over the top-k, as in Mixtral and gpt-oss); DeepSeek-AI 2024
(DeepSeek-V3, section 2.1: sigmoid scores, groups, a correction that chooses and does not weigh); Liu et al. 2024
(GRIN, SparseMixer-v2: weights among rivals, without the noise of training).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.models.layers.adapted_weight import Adapted
from ferrum_jax.models.layers.attention import LayerContext
from ferrum_jax.models.layers.formed_weight import FormedWeight, step_into
from ferrum_jax.models.layers.linear import Linear, project, random_weight
from ferrum_jax.models.layers.mlp import MLP, LimitedGated, activation_of, gating_of
from ferrum_jax.models.layers.norm import norm_of, unit_rms
from ferrum_jax.models.spec import ExpertsSpec, MlpSpec, NormSpec
from pallas_kernels.grouped_matmul import ExpertAdapters, ExpertStack, expert_mlp
from pallas_kernels.grouped_matmul.dense_support import dense_refusals
from pallas_kernels.target import Target


class Experts(nnx.Module):
    """The experts' weights, stacked, dense or in a form: gate, up [E, F, D]; down [E, D, F].

    Biases are [E, F], [E, F], [E, D], or None. gate is None of experts without one. kernels: whose kernels multiply
    them where they are dense, None for XLA.
    """

    def __init__(self, hidden_size: int, spec: ExpertsSpec, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        E, F, D = spec.num_experts, spec.intermediate_size, hidden_size
        self.gate: nnx.Param | FormedWeight | None = random_weight((E, F, D), dtype, rngs) if spec.has_gates else None
        self.up: nnx.Param | FormedWeight = random_weight((E, F, D), dtype, rngs)
        self.down: nnx.Param | FormedWeight = random_weight((E, D, F), dtype, rngs)
        self.gate_bias = nnx.Param(jnp.zeros((E, F), dtype)) if spec.bias else None
        self.up_bias = nnx.Param(jnp.zeros((E, F), dtype)) if spec.bias else None
        self.down_bias = nnx.Param(jnp.zeros((E, D), dtype)) if spec.bias else None
        self.kernels: Target | None = None

    @property
    def biases(self) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        """The biases of gate, up and down, where there are any."""
        if self.gate_bias is None or self.up_bias is None or self.down_bias is None:
            return None
        return self.gate_bias[...], self.up_bias[...], self.down_bias[...]

    @property
    def row_slots(self) -> jax.Array | None:
        """[T]: the adapter slot of each token, where adapters may add to the experts."""
        up: Any = self.up[...]
        return up.pairs.slots if isinstance(up, Adapted) else None

    def stack(self, device: jax.Array, num_experts: int, row_slots: jax.Array | None = None) -> ExpertStack:
        """Experts as the kernel takes them.

        device: this device's number among those that the num_experts are spread over. row_slots: the adapter slot of
        each given token, where adapters may add to them.
        """
        parts: list[Any] = [None if weight is None else weight[...] for weight in (self.gate, self.up, self.down)]
        adapters = None
        if row_slots is not None:
            slots: list[Any] = [None if part is None else part.slots for part in parts]
            adapters = ExpertAdapters(gate=slots[0], up=slots[1], down=slots[2], slots=row_slots)
        gate, up, down = (part.base if isinstance(part, Adapted) else part for part in parts)
        return ExpertStack(
            gate=gate,
            up=up,
            down=down,
            biases=self.biases,
            adapters=adapters,
            first_expert=device * up.shape[0],
            num_experts=num_experts,
            kernels=self.kernels,
        )


def give_kernels_to_experts(
    model: nnx.Module, local: Mapping[str, jax.ShapeDtypeStruct], dtype: jnp.dtype, target: Target
) -> dict[str, str]:
    """Lets the kernels of a TPU multiply the model's dense experts; {weight: why not} of those that they do not.

    local: the shapes of parameters on one device, by name. dtype: of activations.
    """
    found = {}
    for path in (name.rpartition(".")[0] for name in local if name.endswith(".experts.up")):
        reasons = {
            f"{path}.{part}": dense_refusals(local[f"{path}.{part}"], dtype, target)
            for part in ("gate", "up", "down")
            if f"{path}.{part}" in local
        }
        refused = {name: "; ".join(each) for name, each in reasons.items() if each}
        if len(reasons) == 3 and not refused:
            functools.reduce(step_into, path.split("."), model).kernels = target
        found |= refused
    return found


class MoE(nnx.Module):
    """router [E, D], bias [E] or None, and experts; `ExpertsSpec` says how scores become a token's X experts.

    mlp: how an expert joins gate and up. limits: of the experts, and of the shared one, as `MlpSpec.gated_limit`.
    correction: [E], float32 in every dtype, for it tells experts apart whose scores differ by less than bfloat16 can
    say. shared: one more expert that all tokens go to, None where there is none; times sigmoid of shared_gate [1, D]
    where it has one.
    On a mesh a device has some of the experts and some columns of the shared one, and router and gate whole. Where the
    experts are spread over data shards, the tokens of all shards are gathered, each device adds what its experts say of
    any of them, and the sums go back to the shards that the tokens came from (decision 0018).
    """

    def __init__(
        self,
        hidden_size: int,
        spec: ExpertsSpec,
        mlp: MlpSpec,
        *,
        limits: tuple[float, float] = (0.0, 0.0),
        dtype: jnp.dtype,
        rngs: nnx.Rngs | None,
    ) -> None:
        self.spec = spec
        routed, whole = (dataclasses.replace(mlp, gated_limit=limit) for limit in limits)
        self.router = Linear(hidden_size, spec.num_experts, bias=spec.bias, dtype=dtype, rngs=rngs)
        self.correction = nnx.Param(jnp.zeros((spec.num_experts,), jnp.float32)) if spec.corrected else None
        self.experts = Experts(hidden_size, spec, dtype=dtype, rngs=rngs)
        width = spec.shared_intermediate_size
        shared = dataclasses.replace(whole, intermediate_size=width) if width else None
        self.shared = None if shared is None else MLP(hidden_size, shared, dtype=dtype, rngs=rngs)
        has_gate = shared is not None and spec.shared_gate
        self.shared_gate = Linear(hidden_size, 1, dtype=dtype, rngs=rngs) if has_gate else None
        self.gating = gating_of(routed) if spec.has_gates else activation_of(mlp.hidden_act)
        if spec.gate_limit is not None:
            self.gating = LimitedGated(activation_of(mlp.hidden_act), spec.gate_limit, before=True)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[T, D] -> (expert ids [T, X] int32, weights [T, X] float32), best first, lower id first on a tie."""
        logits = project(x, self.router.weight[...], out_dtype=jnp.float32)
        if self.router.bias is not None:
            logits += self.router.bias[...].astype(jnp.float32)[None, :]
        if self.spec.rivals_within is not None:
            return _among_rivals(logits, self.spec.num_experts_per_tok, self.spec.rivals_within)
        scores = jax.nn.softmax(logits, axis=-1) if self.spec.scoring == "softmax" else jax.nn.sigmoid(logits)
        weights, ids = self._choose(scores)
        if self.spec.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return ids, weights if self.spec.routed_scaling_factor == 1 else weights * self.spec.routed_scaling_factor

    def _choose(self, scores: jax.Array) -> tuple[jax.Array, jax.Array]:  # [T, E] -> [T, X] each
        """Scores and ids of the experts that are chosen."""
        X = self.spec.num_experts_per_tok
        if self.correction is None and self.spec.num_chosen_groups == self.spec.num_groups:
            return jax.lax.top_k(scores, X)
        chosen_by = scores if self.correction is None else scores + self.correction[...].astype(jnp.float32)[None, :]
        _, ids = jax.lax.top_k(self._in_chosen_groups(chosen_by), X)
        return jnp.take_along_axis(scores, ids, axis=1), ids

    def _in_chosen_groups(self, scores: jax.Array) -> jax.Array:  # [T, E] -> the same
        """Scores; minus infinity, or 0, for experts outside the groups whose best scores sum highest."""
        groups, chosen = self.spec.num_groups, self.spec.num_chosen_groups
        if chosen == groups:
            return scores
        by_group = scores.reshape(len(scores), groups, -1)
        sums = jnp.sum(jax.lax.top_k(by_group, min(self.spec.num_best, by_group.shape[-1]))[0], axis=-1)
        _, best = jax.lax.top_k(sums, chosen)
        is_chosen = jnp.any(best[:, :, None] == jnp.arange(groups)[None, None, :], axis=1)
        outside = 0.0 if self.spec.zero_outside else -jnp.inf
        return jnp.where(is_chosen[:, :, None], by_group, outside).reshape(scores.shape)

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:  # [T, D] -> [T, D]
        expert_ids, expert_weights = self._routes(x, context)
        given = x
        if self.spec.weighs_inputs:  # a token has one expert
            given, expert_weights = x * expert_weights.astype(x.dtype), jnp.ones_like(expert_weights)
        out = self._sum_of_experts(given, expert_ids, expert_weights, context)
        if self.shared is not None:
            shared = self.shared.down(self.shared.hidden(x))
            out += shared if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * shared
        return context.shards.sum(out)

    def _routes(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, jax.Array]:  # [T, X] each
        """`route`, noted in the context where that is asked for, and with padding sent to no expert."""
        expert_ids, expert_weights = self.route(x)
        context.routed = expert_ids
        if context.is_token is not None:
            expert_ids = jnp.where(context.is_token[:, None], expert_ids, self.spec.num_experts)
        return expert_ids, expert_weights

    def _sum_of_experts(
        self,
        x: jax.Array,  # [T, D]
        expert_ids: jax.Array,  # [T, X], num_experts for none
        expert_weights: jax.Array,  # [T, X]
        context: LayerContext,
    ) -> jax.Array:  # [T, D], a summand on every device of `context.shards`
        data = context.expert_shards
        row_slots, X = self.experts.row_slots, expert_ids.shape[1]
        sent = [expert_ids, _bits(expert_weights, jnp.int32), *([] if row_slots is None else [row_slots[:, None]])]
        routes = data.gather(jnp.concatenate(sent, axis=1))
        expert_ids, weight_bits = routes[:, :X], routes[:, X : 2 * X]
        device = data.index() * context.shards.size + context.shards.index()
        out = expert_mlp(
            data.gather(x),
            expert_ids,
            _bits(weight_bits, jnp.float32),
            self.experts.stack(device, self.spec.num_experts, None if row_slots is None else routes[:, -1]),
            tile=context.expert_tile,
            activation=self.gating,
        )
        return data.sum_own(out)


class NormedMoE(MoE):
    """norm(shared(norm(x))) + norm(sum of experts(norm(x))), all norms with weights of their own.

    The router is given x / rms(x) * scale / sqrt(D), and each expert's weight is multiplied by one number of its own.
    Source: Gemma Team 2026 (Gemma 4 26B-A4B).
    """

    def __init__(
        self,
        hidden_size: int,
        spec: ExpertsSpec,
        mlp: MlpSpec,
        norm: NormSpec,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs | None,
    ) -> None:
        super().__init__(hidden_size, spec, mlp, dtype=dtype, rngs=rngs)
        self.router_scale = nnx.Param(jnp.ones((hidden_size,), dtype))
        self.expert_scales = nnx.Param(jnp.ones((spec.num_experts,), dtype))
        self.experts_norm, self.experts_out_norm, self.shared_norm, self.shared_out_norm = (
            norm_of(norm, hidden_size, dtype=dtype) for _ in range(4)
        )
        self.eps = norm.eps

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Like MoE's, but x is normed and scaled, and the weights are scaled."""
        scale = self.router_scale[...].astype(jnp.float32) * x.shape[-1] ** -0.5
        given = (unit_rms(x, self.eps).astype(jnp.float32) * scale[None]).astype(x.dtype)
        expert_ids, weights = super().route(given)
        return expert_ids, weights * self.expert_scales[...].astype(jnp.float32)[expert_ids]

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:  # [T, D] -> [T, D]
        assert self.shared is not None, "the spec has a shared expert"
        routed = self._sum_of_experts(self.experts_norm(x), *self._routes(x, context), context)
        shared = self.shared.down(self.shared.hidden(self.shared_norm(x)))
        shards = context.shards
        return self.shared_out_norm(shards.sum(shared)) + self.experts_out_norm(shards.sum(routed))


def _among_rivals(
    logits: jax.Array,  # [T, E] float32
    num_chosen: int,
    within: float,
) -> tuple[jax.Array, jax.Array]:  # ids [T, X] int32, weights [T, X] float32
    """The experts of the best logits, each with its softmax over those that are near it and not chosen before it.

    Near is what is behind by at most `within` times the larger of the best logit and its own size.
    """
    best, ids = jax.lax.top_k(logits, num_chosen)
    is_left, weights = jnp.ones(logits.shape, bool), []
    for i in range(num_chosen):
        top = best[:, i : i + 1]
        is_rival = is_left & (top - logits <= within * jnp.maximum(jnp.abs(logits), top))
        weights.append(1 / jnp.sum(jnp.where(is_rival, jnp.exp(logits - top), 0), axis=-1))
        is_left &= jnp.arange(logits.shape[1])[None, :] != ids[:, i : i + 1]
    return ids, jnp.stack(weights, axis=-1)


_bits = jax.lax.bitcast_convert_type
