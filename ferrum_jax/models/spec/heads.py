"""Attention: its heads, its norms, and how it weighs."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ferrum_jax.models.spec.checks import check_above_zero, check_positive
from ferrum_jax.models.spec.positions import RopeSpec, Temperature


@dataclasses.dataclass(frozen=True, kw_only=True)
class QkNorm:
    """RMSNorms of q and of k. over_all_heads: one over the values of all heads, not one over H of each.

    after_rope: they come after rotary positions, not before. has_weight: the quotient is multiplied by a weight.
    """

    over_all_heads: bool = False
    after_rope: bool = False
    has_weight: bool = True

    def __post_init__(self) -> None:
        assert not (self.over_all_heads and (self.after_rope or not self.has_weight)), "no layer computes this"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Latent attention: the keys and values of all heads are made of one vector of each token, which the cache keeps.

    kv_lora_rank: size of that vector. qk_nope_head_dim: the part of each head's query and key that does not rotate;
    head_dim is the part that does, and all heads share its key. q_lora_rank: size of the vector that queries are made
    of; None is the token's. raw_queries: they are made of it as it is before its norm, too. norm_eps: of the norms of
    both vectors. shared_key: False of heads whose keys are all their own; what is kept of the shared one is 0.
    shared_norm: it is normed before it turns. rooted: behind their norms both vectors are multiplied by the root of
    the model's width over their size.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    q_lora_rank: int | None = None
    raw_queries: bool = False
    norm_eps: float = 1e-6
    shared_key: bool = True
    shared_norm: bool = False
    rooted: bool = False

    def __post_init__(self) -> None:
        check_positive(self, "kv_lora_rank", "qk_nope_head_dim")
        assert self.q_lora_rank or not self.raw_queries, "no layer computes this"
        if self.q_lora_rank is not None:
            check_positive(self, "q_lora_rank")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """A small attention that chooses which keys a query sees: the top_k positions with the highest scores.

    A score is a weighted sum over num_heads of relu(q k); all heads share a key of head_dim values, which the cache
    keeps. The earlier position wins where scores are equal. interleaved: pairs that turn are neighbours, not halves.
    turns_last: the last values of a head turn, not the first. key_norm_eps: of the norm of keys.
    shared: the layer has no indexer of its own and takes what the last one before it chose. own_queries: they are made
    of the token, normed, and weighed by a learned temperature.
    by_head: each head chooses for one KV head instead, by its own q k. group_size: keys of a stretch that begins at a
    multiple of it are chosen together, by the best score. local_groups: that always are, a query's own the last.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool = False
    turns_last: bool = False
    key_norm_eps: float = 1e-6
    shared: bool = False
    own_queries: bool = False
    by_head: bool = False
    group_size: int = 1
    local_groups: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "num_heads", "head_dim", "top_k", "group_size")
        if self.top_k % self.group_size or not 0 <= self.local_groups * self.group_size <= self.top_k:
            raise ValueError(
                f"an indexer chooses {self.top_k} keys in groups of {self.group_size}, {self.local_groups} of them "
                "always; these must fit into what it chooses"
            )


class Kept(NamedTuple):
    """Sizes of a token in a cache: two vectors of each KV head, K and V.

    is_latent: a latent, which is V and the first part of K, and the rest of K. index_dim: of an indexer's key, or 0.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    is_latent: bool = False
    index_dim: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention: its heads, what is added to its projections, and how it turns and weighs them.

    bias: of q, k, v; without key_bias of q and v alone. output_bias: of o. qk_norm: None is no norms. gate: outputs are
    multiplied by the sigmoid of a projection that q brings along. head_gate: those of a latent's head by the sigmoid of
    one number, value_gate: each by one of its own.
    value_of_key: V is what K is before its norm and positions.
    v_norm: the heads of V are normed, without a weight. sinks: each head has a logit that takes weight and no value.
    v_head_dim: of V, None is head_dim. latent: None is keys and values of each head; else there is one KV head.
    indexer: None is all keys before a query, or in its window.
    query_pre_attn_scalar: logits are q k over its root; None is head_dim. attn_logit_softcapping: logits become
    cap * tanh(logits / cap). rope: None is no positions. output_multiplier: of what attention
    gives. learned_temperature: q is multiplied by a ln(1 + position) + b, two weights of each head.

    Raises ValueError naming the field whose value cannot be.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int | None = None
    bias: bool = False
    key_bias: bool = True
    output_bias: bool = False
    qk_norm: QkNorm | None = None
    gate: bool = False
    head_gate: bool = False
    value_gate: bool = False
    value_of_key: bool = False
    v_norm: bool = False
    sinks: bool = False
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    rope: RopeSpec | None = dataclasses.field(default_factory=RopeSpec)
    temperature: Temperature | None = None
    learned_temperature: bool = False
    latent: LatentSpec | None = None
    indexer: IndexerSpec | None = None
    output_multiplier: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, "num_attention_heads", "num_key_value_heads", "head_dim")
        check_above_zero(self, "query_pre_attn_scalar", "attn_logit_softcapping")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, no multiple of num_key_value_heads, "
                f"{self.num_key_value_heads}"
            )
        if self.v_head_dim is not None:
            check_positive(self, "v_head_dim")
        assert not self.value_of_key or self.value_dim == self.head_dim, "V is K, and has its size"
        assert self.latent is None or self.num_key_value_heads == 1, "all heads share the latent"
        assert self.latent is not None or not (self.head_gate or self.value_gate), "no layer computes this"
        assert not (self.head_gate and self.value_gate), "no layer computes this"
        own = self.indexer
        if own is not None and not own.own_queries and self.latent is not None and self.latent.q_lora_rank is None:
            raise ValueError("q_lora_rank is null; the queries of an indexer are made of the latent of queries")
        if self.rope is not None:
            self.rope.check(self.head_dim)

    @property
    def value_dim(self) -> int:
        """Values that attention gives for each head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def kept(self) -> Kept:
        """Sizes of a token in a cache."""
        own = self.indexer
        index_dim = 0 if own is None or own.shared else own.head_dim
        if self.latent is not None:
            return Kept(1, self.latent.kv_lora_rank, self.head_dim, is_latent=True, index_dim=index_dim)
        return Kept(self.num_key_value_heads, self.head_dim, self.value_dim, index_dim=index_dim)

    @property
    def dot_sizes(self) -> tuple[int, int]:
        """Sizes of the vectors of a head that a query is multiplied with, and that attention sums."""
        kept = self.kept
        return (kept.head_dim + kept.v_head_dim, kept.head_dim) if kept.is_latent else (kept.head_dim, kept.v_head_dim)

    @property
    def scale(self) -> float:
        """The factor of q k before the softmax."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def fitted(self, max_model_len: int) -> AttentionSpec:
        """The attention of an engine whose longest context is this."""
        return self if self.rope is None else dataclasses.replace(self, rope=self.rope.fitted(max_model_len))
