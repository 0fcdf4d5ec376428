"""ModelSpec: what a model is, in integers and floats; read from its config.json, free of any array.

Names are Hugging Face's where they have one. `CacheGroup` names the layers that share one kind of cache;
every model has at least one group, and together they hold every layer once. `digest_text()` is the part
of the spec that decides the keys and values of a token: two specs with equal text may share a prefix cache.
"""

from __future__ import annotations

import dataclasses
import json

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers whose cache is kept alike, under one block table.

    kind: "full" (all tokens), "window", or "state" (recurrent layers: a state for each row, no blocks). window:
    positions that a token attends to, its own the last; None for all.
    """

    kind: str
    layers: tuple[int, ...]
    window: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary positions. Fields beyond the first three are read by the types in brackets.

    partial_rotary_factor: of a head's dimensions, how many turn: the first ones.
    factor [linear, llama3, yarn]: how many times longer contexts may be than in training.
    original_max_position_embeddings [llama3, yarn, longrope]. low_freq_factor, high_freq_factor [llama3].
    beta_fast, beta_slow, truncate [yarn]: which frequencies are interpolated.
    attention_factor [yarn, longrope]: scales cos and sin, complete here (inferred where it was not given).
    short_factor, long_factor [longrope]: what each frequency is divided by; the long ones hold where is_long.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
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
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(f"partial_rotary_factor is {self.partial_rotary_factor}; it must be in (0, 1]")

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's dimensions turn."""
        return int(head_dim * self.partial_rotary_factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One decoder model.

    attention_bias: of q, k, v. attention_output_bias: of o. qk_norm: RMSNorm over H of each q and k head.
    zero_centred_norms: every norm multiplies by 1 + weight. sandwich_norms: attention's and the MLP's outputs have
    norms of their own. embedding_scale: embeddings are multiplied by it. query_pre_attn_scalar: logits of attention
    are q k over its root; None is head_dim. attn_logit_softcapping, final_logit_softcapping: logits of attention and
    of tokens become cap * tanh(logits / cap). attention_sinks: each head has a logit that takes weight and has no
    value. local_rope: of layers with a window; None is rope.
    attention_gate: outputs of attention are multiplied by sigmoid of a projection that q brings along.
    moe_layers: layers with experts; the others have an MLP of intermediate_size. shared_expert_intermediate_size: of
    one more that all tokens go to, 0 for none. expert_bias: of routers and experts. swiglu_limit: MLPs are gated by
    clamped SwiGLU with swiglu_alpha; None is hidden_act(gate) * up.
    linear_*: heads of recurrent layers and taps of their convolution.
    cache_groups: empty takes one group "full" of all layers.
    dtype: of the checkpoint's weights. eos_token_ids: from config.json alone.

    Raises ValueError naming the field whose value cannot be.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_gate: bool = False
    zero_centred_norms: bool = False
    sandwich_norms: bool = False
    embedding_scale: float = 1.0
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    attention_sinks: bool = False
    rope: RopeSpec = RopeSpec()
    local_rope: RopeSpec | None = None
    moe_layers: tuple[int, ...] = ()
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    shared_expert_intermediate_size: int = 0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    expert_bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    cache_groups: tuple[CacheGroup, ...] = ()
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.cache_groups:
            group = CacheGroup(kind="full", layers=tuple(range(self.num_hidden_layers)))
            object.__setattr__(self, "cache_groups", (group,))
        for field in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
        ):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, no multiple of num_key_value_heads, "
                f"{self.num_key_value_heads}"
            )
        if self.rope.rotary_dim(self.head_dim) % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}, of which {self.rope.rotary_dim(self.head_dim)} dimensions turn; rotary "
                "positions need an even number"
            )
        for field in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(self, field) is not None and getattr(self, field) <= 0:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be above 0, or null for none")
        if self.linear_num_value_heads % max(self.linear_num_key_heads, 1):
            raise ValueError(
                f"linear_num_value_heads is {self.linear_num_value_heads}, no multiple of linear_num_key_heads, "
                f"{self.linear_num_key_heads}"
            )
        wanted, rope = self.rope.rotary_dim(self.head_dim) // 2, self.rope
        if rope.rope_type == "longrope" and {len(rope.short_factor), len(rope.long_factor)} != {wanted}:
            raise ValueError(
                f"longrope has {len(rope.short_factor)} short and {len(rope.long_factor)} long factors; half of the "
                f"dimensions that turn are {wanted}"
            )
        self._check_groups()
        self._check_experts()

    def _check_groups(self) -> None:
        layers = sorted(layer for group in self.cache_groups for layer in group.layers)
        if layers != list(range(self.num_hidden_layers)):
            raise ValueError(f"cache_groups hold layers {layers}; they must hold each of {self.num_hidden_layers} once")
        for group in self.cache_groups:
            if (group.window or 0) < 1 if group.kind == "window" else group.window is not None:
                raise ValueError(f"a cache group of kind {group.kind!r} has window {group.window}")
        kinds = [group.kind for group in self.cache_groups]
        if "state" in kinds[:-1] or kinds == ["state"]:
            raise ValueError(f"cache_groups are {kinds}; 'state' must come once at most, last, and not alone")

    def fitted(self, max_model_len: int) -> ModelSpec:
        """The spec of an engine whose longest context is this: longrope takes one list of factors for all of them."""
        if self.rope.rope_type != "longrope":
            return self
        is_long = max_model_len > self.rope.original_max_position_embeddings
        return dataclasses.replace(self, rope=dataclasses.replace(self.rope, is_long=is_long))

    @property
    def kv_groups(self) -> tuple[CacheGroup, ...]:
        """The groups that have blocks; at least one."""
        return tuple(group for group in self.cache_groups if group.kind != "state")

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The recurrent layers."""
        return tuple(layer for group in self.cache_groups if group.kind == "state" for layer in group.layers)

    def window_of(self, layer: int) -> int | None:
        """How many positions a token of this layer attends to; None is all."""
        return next(group.window for group in self.cache_groups if layer in group.layers)

    def rope_of(self, layer: int) -> RopeSpec:
        """The rotary positions of a layer."""
        return self.rope if self.local_rope is None or self.window_of(layer) is None else self.local_rope

    @property
    def attention_scale(self) -> float:
        """What q k is multiplied by before the softmax."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def _check_experts(self) -> None:
        if not self.moe_layers:
            return
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok} of {self.num_experts} experts")
        if self.moe_intermediate_size < 1:
            raise ValueError(f"moe_intermediate_size is {self.moe_intermediate_size}; it must be at least 1")

    def digest_text(self) -> str:
        """Canonical JSON of all fields that decide a token's keys and values (not dtype, not end tokens)."""
        fields = dataclasses.asdict(self)
        del fields["dtype"], fields["eos_token_ids"]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))
