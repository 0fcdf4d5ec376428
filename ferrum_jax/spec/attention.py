"""Attention: its heads, its norms, and how it weighs."""

from __future__ import annotations

import dataclasses

from ferrum_jax.spec.checks import check_above_zero, check_positive
from ferrum_jax.spec.positions import RopeSpec, Temperature


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
class AttentionSpec:
    """Attention: its heads, what is added to its projections, and how it turns and weighs them.

    bias: of q, k, v. output_bias: of o. qk_norm: None is no norms. gate: outputs are multiplied by
    the sigmoid of a projection that q brings along. sinks: each head has a logit that takes weight and has no value.
    query_pre_attn_scalar: logits are q k over its root; None is head_dim. attn_logit_softcapping: logits become
    cap * tanh(logits / cap). rope: None is no positions.

    Raises ValueError naming the field whose value cannot be.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    bias: bool = False
    output_bias: bool = False
    qk_norm: QkNorm | None = None
    gate: bool = False
    sinks: bool = False
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    rope: RopeSpec | None = dataclasses.field(default_factory=RopeSpec)
    temperature: Temperature | None = None

    def __post_init__(self) -> None:
        check_positive(self, "num_attention_heads", "num_key_value_heads", "head_dim")
        check_above_zero(self, "query_pre_attn_scalar", "attn_logit_softcapping")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, no multiple of num_key_value_heads, "
                f"{self.num_key_value_heads}"
            )
        if self.rope is not None:
            self.rope.check(self.head_dim)

    @property
    def scale(self) -> float:
        """What q k is multiplied by before the softmax."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def fitted(self, max_model_len: int) -> AttentionSpec:
        """The attention of an engine whose longest context is this."""
        return self if self.rope is None else dataclasses.replace(self, rope=self.rope.fitted(max_model_len))
