"""ModelSpec: what a model is, in integers and floats; read from its config.json, free of any array.

Fields stand in groups, one for each kind of layer. Names are Hugging Face's where they have one, less what the name of
the group says already: attention_bias is `attention.bias`. Errors name the key of config.json.
`CacheGroup` names the layers that share one kind of cache; every model has at least one cache group, and together they
hold every layer once. `digest_text()` is the part of the spec that decides the keys and values of a token: two specs
with equal text may share a prefix cache.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from ferrum_jax.forms import WeightForm

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
NORM_KINDS = ("rms", "layer")
SCORINGS = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers whose cache is kept alike, under one block table.

    kind: "full" (all tokens), "window", or "state" (recurrent layers: a state for each row, no blocks). window:
    positions that a token attends to, its own the last; None for all.
    """

    kind: str
    layers: tuple[int, ...]
    window: int | None = None

    def __post_init__(self) -> None:
        if (self.window or 0) < 1 if self.kind == "window" else self.window is not None:
            raise ValueError(f"a cache group of kind {self.kind!r} has window {self.window}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary positions. Fields beyond the first three are read by the types in brackets.

    partial_rotary_factor: of a head's dimensions, how many turn: the first ones. interleaved: neighbours turn together,
    not the first half with the second.
    factor [linear, llama3, yarn]: how many times longer contexts may be than in training.
    original_max_position_embeddings [llama3, yarn, longrope]. low_freq_factor, high_freq_factor [llama3].
    beta_fast, beta_slow, truncate [yarn]: which frequencies are interpolated.
    attention_factor [yarn, longrope]: scales cos and sin, complete here (inferred where it was not given).
    short_factor, long_factor [longrope]: what each frequency is divided by; the long ones hold where is_long.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    is_long: bool = False

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type is {self.rope_type!r}; supported are {ROPE_TYPES}")
        if self.rope_theta <= 1 or self.factor < 1:
            raise ValueError(f"rope_theta is {self.rope_theta} and factor {self.factor}; they must be > 1 and >= 1")
        if self.rope_type == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor is {self.low_freq_factor}, not less than high_freq_factor, {self.high_freq_factor}"
            )
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(f"partial_rotary_factor is {self.partial_rotary_factor}; it must be in (0, 1]")

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's dimensions turn."""
        return int(head_dim * self.partial_rotary_factor)

    def check(self, head_dim: int) -> None:
        """Raises ValueError where heads of this size cannot be turned so."""
        dim = self.rotary_dim(head_dim)
        if dim % 2 or not dim:
            raise ValueError(
                f"head_dim is {head_dim}, and {dim} of its dimensions turn; rotary positions need an even number"
            )
        if self.rope_type == "longrope" and {len(self.short_factor), len(self.long_factor)} != {dim // 2}:
            raise ValueError(
                f"longrope has {len(self.short_factor)} short and {len(self.long_factor)} long factors; half of the "
                f"dimensions that turn are {dim // 2}"
            )

    def fitted(self, max_model_len: int) -> RopeSpec:
        """Longrope with the one list of factors that an engine whose longest context is this takes."""
        if self.rope_type != "longrope":
            return self
        return dataclasses.replace(self, is_long=max_model_len > self.original_max_position_embeddings)


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
class Temperature:
    """Queries far from the start weigh sharper: q times 1 + scale * ln(1 + floor((position + offset) / length))."""

    scale: float
    length: int
    offset: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, "length")


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
    rope: RopeSpec | None = RopeSpec()
    temperature: Temperature | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "num_attention_heads", "num_key_value_heads", "head_dim")
        _check_above_zero(self, "query_pre_attn_scalar", "attn_logit_softcapping")
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """MLPs, and how experts join gate and up.

    gated: down is given hidden_act(gate) * up, else hidden_act(up); experts are always gated. swiglu_limit: gated by
    clamped SwiGLU with swiglu_alpha; None is hidden_act(gate) * up.
    """

    intermediate_size: int
    hidden_act: str = "silu"
    bias: bool = False
    gated: bool = True
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702

    def __post_init__(self) -> None:
        _check_positive(self, "intermediate_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """Experts in place of the MLP of some layers.

    layers: those that have experts, at least one; the others have an MLP. intermediate_size: of an expert.
    scoring: what makes an expert's score of its logit. corrected: experts are chosen by score plus a correction, and
    weighed by score alone. num_groups, num_chosen_groups: only experts of the groups whose two best scores sum highest
    are chosen. norm_topk_prob: the weights of a token's experts sum to one, before they are multiplied by
    routed_scaling_factor. weighs_inputs: what an expert is given is multiplied by its weight, not what it gives.
    shared_intermediate_size: of one more expert that all tokens go to, 0 for none; shared_gate: behind a gate.
    bias: of routers and experts.

    Raises ValueError naming the field whose value cannot be.
    """

    layers: tuple[int, ...]
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    scoring: str = "softmax"
    corrected: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    weighs_inputs: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        assert self.layers, "a model whose layers are all dense has no ExpertsSpec"
        assert self.scoring in SCORINGS, f"scoring is {self.scoring!r}; known are {SCORINGS}"
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok} of {self.num_experts} experts")
        if self.intermediate_size < 1:
            raise ValueError(f"moe_intermediate_size is {self.intermediate_size}; it must be at least 1")
        if self.num_experts % self.num_groups or not 1 <= self.num_chosen_groups <= self.num_groups:
            raise ValueError(
                f"topk_group is {self.num_chosen_groups} of n_group, {self.num_groups}, groups of {self.num_experts} "
                "experts; they must divide the experts"
            )
        in_chosen = self.num_experts // self.num_groups * self.num_chosen_groups
        if self.num_experts_per_tok > in_chosen:
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok} of {in_chosen} in the chosen groups")
        if self.weighs_inputs and self.num_experts_per_tok != 1:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}; where inputs are weighed it must be 1"
            )

    @property
    def chosen_share(self) -> float:
        """The share of a layer's experts that a token goes to."""
        return self.num_experts_per_tok / self.num_experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """Gated DeltaNets, in the layers of the cache group "state". conv_kernel_dim: taps of the convolution.

    Raises ValueError naming the field whose value cannot be.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads is {self.num_value_heads}, no multiple of linear_num_key_heads, "
                f"{self.num_key_heads}"
            )

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: all q, k and v."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Every norm of a model, but for those of heads, which are RMSNorms.

    kind: "rms" or "layer", which takes the mean off first. bias: of LayerNorms. zero_centred: they multiply by
    1 + weight. before, after: what attention and MLP are given is normed, what they give.
    """

    kind: str = "rms"
    eps: float = 1e-6
    bias: bool = False
    zero_centred: bool = False
    before: bool = True
    after: bool = False

    def __post_init__(self) -> None:
        assert self.kind in NORM_KINDS, f"kind is {self.kind!r}; known are {NORM_KINDS}"
        assert self.before or self.after, "layers without norms"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One decoder model.

    attention: of all layers but those of other_attention, which are pairs (layers, their attention).
    experts: None where every layer has an MLP. recurrence: None where no layer has a Gated DeltaNet.
    parallel: attention and MLP are given the same norm's output. embedding_scale, residual_multiplier, logit_scale:
    embeddings, what a layer's halves add, and logits of tokens are multiplied by it. final_logit_softcapping: logits of
    tokens become cap * tanh(logits / cap).
    cache_groups: empty takes one group "full" of all layers.
    forms: of the parameters that are not dense, by their dotted path, in its order.
    dtype: of the checkpoint's weights. eos_token_ids: from config.json alone.

    Raises ValueError naming the field whose value cannot be.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    attention: AttentionSpec
    other_attention: tuple[tuple[tuple[int, ...], AttentionSpec], ...] = ()
    mlp: MlpSpec
    experts: ExpertsSpec | None = None
    recurrence: GatedDeltaSpec | None = None
    norm: NormSpec = NormSpec()
    parallel: bool = False
    embedding_scale: float = 1.0
    residual_multiplier: float = 1.0
    logit_scale: float = 1.0
    tie_word_embeddings: bool = False
    final_logit_softcapping: float | None = None
    cache_groups: tuple[CacheGroup, ...] = ()
    forms: tuple[tuple[str, WeightForm], ...] = ()
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.cache_groups:
            group = CacheGroup(kind="full", layers=tuple(range(self.num_hidden_layers)))
            object.__setattr__(self, "cache_groups", (group,))
        _check_positive(self, "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
        _check_above_zero(self, "final_logit_softcapping")
        layers = sorted(layer for group in self.cache_groups for layer in group.layers)
        if layers != list(range(self.num_hidden_layers)):
            raise ValueError(f"cache_groups hold layers {layers}; they must hold each of {self.num_hidden_layers} once")
        kinds = [group.kind for group in self.cache_groups]
        if "state" in kinds[:-1] or kinds == ["state"]:
            raise ValueError(f"cache_groups are {kinds}; 'state' must come once at most, last, and not alone")

    def fitted(self, max_model_len: int) -> ModelSpec:
        """The spec of an engine whose longest context is this: longrope takes one list of factors for all of them."""
        return self.with_attention(lambda own: own.fitted(max_model_len))

    def with_attention(self, change: Callable[[AttentionSpec], AttentionSpec]) -> ModelSpec:
        """The spec with the attention of every layer changed."""
        others = tuple((layers, change(own)) for layers, own in self.other_attention)
        return dataclasses.replace(self, attention=change(self.attention), other_attention=others)

    @property
    def kv_groups(self) -> tuple[CacheGroup, ...]:
        """The groups that have blocks; at least one."""
        return tuple(group for group in self.cache_groups if group.kind != "state")

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The recurrent layers."""
        return tuple(layer for group in self.cache_groups if group.kind == "state" for layer in group.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers with experts."""
        return () if self.experts is None else self.experts.layers

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers with an MLP."""
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in self.moe_layers)

    def window_of(self, layer: int) -> int | None:
        """How many positions a token of this layer attends to; None is all."""
        return next(group.window for group in self.cache_groups if layer in group.layers)

    def attention_of(self, layer: int) -> AttentionSpec:
        """The attention of a layer."""
        return next((own for layers, own in self.other_attention if layer in layers), self.attention)

    def digest_text(self) -> str:
        """Canonical JSON of all fields that decide a token's keys and values (not dtype, not end tokens)."""
        fields = dataclasses.asdict(self)
        del fields["dtype"], fields["eos_token_ids"]
        if not self.forms:
            del fields["forms"]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _check_positive(spec: Any, *fields: str) -> None:
    for field in fields:
        if getattr(spec, field) < 1:
            raise ValueError(f"{field} is {getattr(spec, field)}; it must be at least 1")


def _check_above_zero(spec: Any, *fields: str) -> None:
    for field in fields:
        value = getattr(spec, field)
        if value is not None and value <= 0:
            raise ValueError(f"{field} is {value}; it must be above 0, or null for none")
