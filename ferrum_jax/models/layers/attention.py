"""Attention with grouped heads, and the context in which a model and each of its layers run.

A layer never sees a pool, a batch, or its own place in the model: it asks its `LayerContext` to attend. In the engine's
step that writes K and V to the pool and reads paged blocks; in training and in tests it is `causal_attention`. So
layers with equal sizes are equal programs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.layers.norm import RMSNorm, rms_norm_of, unit_rms
from ferrum_jax.models.layers.rope import Rotation
from ferrum_jax.models.sharding.shards import WHOLE, Shards
from ferrum_jax.models.spec import ModelSpec
from pallas_kernels.chosen_keys import Chosen, ChosenKeys
from pallas_kernels.state_rows import StateRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageTokens:
    """Embeddings of the tokens of a step that are of images, and what deepstack adds to the first layers' outputs.

    Source: Meng et al. 2024 (DeepStack).
    """

    are_here: jax.Array  # [T] bool
    embeddings: jax.Array  # [T, (1 + deepstack) * D], zeros where a token is of no image

    def in_place_of(self, x: jax.Array) -> jax.Array:  # [T, D] -> the same
        """Embeddings of a step's tokens, with those of images where tokens are of one."""
        return jnp.where(self.are_here[:, None], self._part(0, x), x)

    def added(self, x: jax.Array, layer: int) -> jax.Array | None:  # [T, D]
        """Deepstack's addend of a layer's output, in the shape of x, or None."""
        is_there = (layer + 2) * x.shape[1] <= self.embeddings.shape[1]
        return self._part(1 + layer, x) if is_there else None

    def _part(self, index: int, x: jax.Array) -> jax.Array:
        D = x.shape[1]
        return self.embeddings[:, index * D : (index + 1) * D].astype(x.dtype)


class Attend(Protocol):
    """Attention of one layer over the tokens of a step and what came before them, as `paged_attention` defines it."""

    def __call__(
        self,
        layer: int,
        q: jax.Array,  # [T, N, H]
        k: jax.Array,  # [T, K, H]
        v: jax.Array,  # [T, K, V]
        *,
        scale: float,
        window: int | None = None,
        chunked: bool = False,  # of the window those of a token's own stretch, which begin at its multiples
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,  # [N]
        is_latent: bool = False,  # k is V, and k and v together are K
        chosen: Chosen | None = None,  # the keys that each token attends to
    ) -> jax.Array: ...  # [T, N, V]


class Choose(Protocol):
    """The keys that an indexer chooses for the tokens of a step, as `choose_keys` defines it; None chooses all."""

    def __call__(
        self,
        layer: int,
        q: jax.Array,  # [T, J, I]
        weights: jax.Array | None,  # [T, J] float32; None where each head chooses for one KV head
        key: jax.Array,  # [T, I]
        *,
        top_k: int,
        group: int = 1,
        local: int = 0,
    ) -> Chosen | None: ...


def choose_alone(
    layer: int,
    q: jax.Array,
    weights: jax.Array | None,
    key: jax.Array,
    *,
    top_k: int,
    group: int = 1,
    local: int = 0,
) -> Chosen | None:
    """All tokens are one sequence that starts here, in blocks 1, 2, .. of one token each."""
    T = len(q)
    if top_k >= T:
        return None
    scores = jnp.einsum("tji,si->tjs", q.astype(jnp.float32), key.astype(jnp.float32))
    if weights is not None:
        scores = jnp.einsum("tjs,tj->ts", jax.nn.relu(scores), weights)[:, None]
    t = jnp.arange(T)[:, None, None]
    scores = jnp.where(jnp.arange(T)[None, None] <= t, scores, -jnp.inf)
    scores = jnp.pad(scores, ((0, 0), (0, 0), (0, -T % group)), constant_values=-jnp.inf)
    scores = scores.reshape(T, scores.shape[1], -1, group).max(axis=-1)
    at = jnp.arange(scores.shape[2])[None, None]
    is_local = (at > t // group - local) & (at <= t // group)
    _, best = jax.lax.top_k(jnp.where(is_local, jnp.inf, scores), top_k // group)
    best = (best[..., None] * group + jnp.arange(group)[None, None, None]).reshape(T, scores.shape[1], top_k)
    return ChosenKeys(places=jnp.where(best <= t, best + 1, 0), top_k=top_k)


def causal_attention(
    layer: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    is_latent: bool = False,
    chosen: Chosen | None = None,
    seen_ends: jax.Array | None = None,  # [T]
) -> jax.Array:
    """Token t attends to tokens 0 .. t, or to the last `window` of them; all are one sequence that starts here.

    chosen: of `choose_alone`. seen_ends: it attends to tokens after it too, those before seen_ends[t].

    Softmax in float32. mask of T = 3:   1 . .     window 2:   1 . .     chunks of 2:   1 . .
                                         1 1 .                 1 1 .                    1 1 .
                                         1 1 1                 . 1 1                    . . 1
    """
    if is_latent:
        k, v = jnp.concatenate([k, v], axis=-1), k
    T, N, H = q.shape
    K = k.shape[1]
    heads = q.reshape(T, K, N // K, H)
    scores = jnp.einsum("tkgh,skh->kgts", heads, k, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    mask = jnp.tril(jnp.ones((T, T), bool))
    if seen_ends is not None:
        mask |= jnp.arange(T)[None, :] < seen_ends[:, None]
    if window is not None and chunked:
        mask &= jnp.arange(T)[:, None] // window == jnp.arange(T)[None, :] // window
    elif window is not None:
        mask &= ~jnp.tril(jnp.ones((T, T), bool), -window)
    mask = mask[None, None]
    if chosen is not None:
        assert isinstance(chosen, ChosenKeys), "limits are of the schedule of a kernel"
        t, s = jnp.arange(T)[:, None, None], jnp.arange(chosen.places.shape[1])[:, None]
        mask &= jnp.zeros((len(s), 1, T, T + 1), bool).at[s, 0, t, chosen.places].set(True)[..., 1:]
    scores = jnp.where(mask, scores, -jnp.inf)
    if sinks is not None:  # one more logit per head, which takes weight and has no value
        column = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(K, -1, 1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate((scores, column), axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :T].astype(v.dtype)
    return jnp.einsum("kgts,skh->tkgh", weights, v).reshape(T, N, v.shape[-1])


class AttendAcross(Protocol):
    """Attention of one layer over the clip of each token's row, whose keys and values the model's encoder made."""

    def __call__(self, layer: int, q: jax.Array, *, scale: float) -> jax.Array: ...  # [T, N, H] -> [T, N, V]


def attend_to_nothing(layer: int, q: jax.Array, *, scale: float) -> jax.Array:
    """No token has a clip."""
    raise AssertionError(f"layer {layer} attends to a clip, and the context has none")


class Recur(Protocol):
    """Recurrence of one layer over the tokens of a step, each row from the state in which its last step left it.

    shapes: of one row's state on this device, a tree. compute(pools, rows) gives (out [T, ...], pools after the step):
    pools is the same tree, of arrays [slots, ...].
    """

    def __call__(
        self, layer: int, shapes: Any, compute: Callable[[Any, StateRows], tuple[jax.Array, Any]], num_tokens: int
    ) -> jax.Array: ...  # [T, ...]


def recur_from_empty(
    layer: int, shapes: Any, compute: Callable[[Any, StateRows], tuple[jax.Array, Any]], num_tokens: int
) -> jax.Array:
    """All tokens are one sequence that starts here."""
    zero, one = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    rows = StateRows(slots=one, starts=zero, counts=one * num_tokens, offsets=zero)
    return compute(jax.tree.map(lambda state: jnp.zeros((2, *state.shape), state.dtype), shapes), rows)[0]


KeysAndValues = tuple[jax.Array, jax.Array]  # [T, K, H], [T, K, V]


_attend_alone, _recur_alone = functools.partial(causal_attention, 0), functools.partial(recur_from_empty, 0)
_choose_alone = functools.partial(choose_alone, 0)
_across_alone = functools.partial(attend_to_nothing, 0)


@dataclasses.dataclass(kw_only=True)
class LayerContext:
    """The surroundings of one layer in one forward pass.

    attend, across, choose, recur: see `Attend`, `AttendAcross`, `Choose` and `Recur`, of this layer. expert_tile: rows
    of a tile of one expert, None for the kernel's own choice. implementation: of recurrences. shards: the devices that
    share the layer's work. expert_shards: the data shards whose tokens go to the experts together. is_token: [T], False
    for padding, which goes to no expert; None where there is none. borrowed: the keys and values of the layer that
    lends to this one. chosen: the keys that the last indexer before this layer chose.
    The layer leaves here what it gives beside its output: lent, what it lends to later ones; chosen, what its own
    indexer chose; routed, the experts that each token goes to, [T, X] int32.
    """

    attend: Callable[..., jax.Array] = _attend_alone
    across: Callable[..., jax.Array] = _across_alone
    choose: Callable[..., Chosen | None] = _choose_alone
    recur: Callable[..., jax.Array] = _recur_alone
    expert_tile: int | None = None
    implementation: str = "xla"
    shards: Shards = WHOLE
    expert_shards: Shards = WHOLE
    is_token: jax.Array | None = None
    borrowed: KeysAndValues | None = None
    lent: KeysAndValues | None = None
    chosen: Chosen | None = None
    routed: jax.Array | None = None


class RunLayer(Protocol):
    """Runs the layer of an index in its `LayerContext`; beside: what it takes beside the residual."""

    def __call__(self, index: int, layer: Any, x: jax.Array, beside: LayerArguments) -> jax.Array: ...  # [T, D] -> same


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerArguments:
    """Arguments of a layer beside the residual: the rotation of its heads, its own input, and deepstack's addend."""

    rotation: Rotation
    own_input: jax.Array | None = None  # [T, P]
    added: jax.Array | None = None  # [T, D]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """The surroundings of one forward pass.

    attend, across, choose, recur: see `Attend`, `AttendAcross`, `Choose` and `Recur`. shards: the devices that share
    each layer's work. images: what tokens of images have in place of embeddings; None where no token is of one.
    observe: called with the name and value of the embedding, of every layer's output and of the final norm, for tests
    that compare them. run: of each layer; None calls them here, one after the other, with `attend`, `across`, `choose`
    and `recur`.
    """

    attend: Attend = causal_attention
    across: AttendAcross = attend_to_nothing
    choose: Choose = choose_alone
    recur: Recur = recur_from_empty
    shards: Shards = WHOLE
    images: ImageTokens | None = None
    observe: Callable[[str, jax.Array], None] | None = None
    run: RunLayer | None = None

    def show(self, name: str, value: jax.Array) -> None:
        """Hands a value to the observer, if there is one."""
        if self.observe is not None:
            self.observe(name, value)


class Attention(nnx.Module):
    """q, k, v from the same tokens, optional norms, rotary positions, optional gate, output projection.

    A layer that borrows has no k and v: it attends to those of its lender. Without v alone, V is what k gives. With a
    gate, each head of q brings as many more values as V has, its own. On a mesh a device has some of the heads; a norm
    over all of them asks the others for their mean square.
    Source: Ainslie et al. 2023 (grouped queries); norms per head as in Qwen3, over all heads as in OLMo 2, after rotary
    positions as in HunYuan, without a weight as in Llama 4; the gate as in Qwen3-Next.
    """

    def __init__(self, spec: ModelSpec, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        own, D = spec.attention_of(layer), spec.hidden_size
        N, K, H, V = own.num_attention_heads, own.num_key_value_heads, own.head_dim, own.value_dim
        assert not own.learned_temperature, "no layer computes this"
        assert not own.gate or H == V, "q brings the gates along, one for each of its values"
        self.lends = layer in dict(spec.borrowed).values()
        borrows = spec.lender_of(layer) != layer
        self.head_dim, self.value_dim = H, V
        self.scale, self.window, self.soft_cap = own.scale, spec.window_of(layer), own.attn_logit_softcapping
        self.chunked = spec.is_chunked(layer)
        self.chooses = own.indexer is not None
        self.has_gate, self.output_multiplier = own.gate, own.output_multiplier
        self.q = Linear(D, N * H * (1 + self.has_gate), bias=own.bias, dtype=dtype, rngs=rngs)
        self.k = None if borrows else Linear(D, K * H, bias=own.bias and own.key_bias, dtype=dtype, rngs=rngs)
        has_v = not borrows and not own.value_of_key
        self.v = Linear(D, K * V, bias=own.bias, dtype=dtype, rngs=rngs) if has_v else None
        self.norms_v = own.v_norm
        self.o = Linear(N * V, D, bias=own.output_bias, dtype=dtype, rngs=rngs)
        self.sinks = nnx.Param(jnp.zeros((N,), dtype)) if own.sinks else None
        self.norm = own.qk_norm
        self.eps = spec.norm.eps
        all_heads = self.norm is not None and self.norm.over_all_heads
        per_head = self.norm is not None and self.norm.has_weight and not all_heads
        self.q_norm = rms_norm_of(spec.norm, H, dtype=dtype) if per_head else None
        self.k_norm = rms_norm_of(spec.norm, H, dtype=dtype) if per_head and not borrows else None
        self.q_heads_norm = rms_norm_of(spec.norm, N * H, dtype=dtype) if all_heads else None
        self.k_heads_norm = rms_norm_of(spec.norm, K * H, dtype=dtype) if all_heads and not borrows else None

    def __call__(
        self,
        x: jax.Array,  # [T, D]
        rotation: Rotation,
        context: LayerContext,
    ) -> jax.Array:  # [T, D]
        T = x.shape[0]
        q = self.q(x)
        q = q if self.q_heads_norm is None else self.q_heads_norm(q, context.shards)
        q = q.reshape(T, -1, self.head_dim)
        q, gate = (q[:, ::2], q[:, 1::2]) if self.has_gate else (q, None)
        q = self._placed(q, self.q_norm, rotation.of_queries)
        k, v = self._keys_and_values(x, rotation, context)
        attended = context.attend(
            q,
            k,
            v,
            scale=self.scale,
            window=self.window,
            chunked=self.chunked,
            soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
            chosen=context.chosen if self.chooses else None,
        )
        attended = attended if gate is None else attended * jax.nn.sigmoid(gate)
        if self.output_multiplier != 1:
            attended = attended * jnp.asarray(self.output_multiplier, attended.dtype)
        return self.o(attended.reshape(T, -1), context.shards)

    def _keys_and_values(self, x: jax.Array, rotation: Rotation, context: LayerContext) -> KeysAndValues:
        if self.k is None:
            assert context.borrowed is not None, "the layer borrows, and nothing was lent to it"
            return context.borrowed
        k = self.k(x)
        v = (k if self.v is None else self.v(x)).reshape(len(x), -1, self.value_dim)
        v = unit_rms(v, self.eps) if self.norms_v else v
        k = k if self.k_heads_norm is None else self.k_heads_norm(k, context.shards)
        k = self._placed(k.reshape(len(x), -1, self.head_dim), self.k_norm, rotation.of_keys)
        if self.lends:
            context.lent = k, v
        return k, v

    def _placed(
        self, x: jax.Array, norm: RMSNorm | None, turned: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:  # [T, heads, H] -> the same
        """q or k with the norm of its heads and its positions, in the order that the model has."""
        if self.norm is not None and self.norm.after_rope:
            return self._normed(turned(x), norm)
        return turned(self._normed(x, norm))

    def _normed(self, x: jax.Array, norm: RMSNorm | None) -> jax.Array:
        if norm is not None:
            return norm(x)
        return x if self.norm is None or self.norm.has_weight else unit_rms(x, self.eps)
