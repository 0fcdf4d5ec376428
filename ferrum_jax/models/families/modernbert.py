"""ModernBERT: an encoder with rotary positions, norms before its blocks and a gated MLP, all without biases.

    x = norm(word[id]);  per layer:  x += attention(norm(x));  x += down(act(gate(norm(x))) * up(norm(x)));  norm(x)

The first layer's attention has no norm of its own. One layer in three attends to the whole text, the others to
local_attention / 2 tokens on either side; the two kinds turn their heads at frequencies of their own.
Source: Warner et al. 2024, section 2.1; keys and defaults as in Hugging Face's config.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from checkpoints.rules import Rule, TensorSlice
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.bert import ACTIVATIONS
from ferrum_jax.models.families.config_reader import ConfigReader, cache_groups, stored_dtype
from ferrum_jax.models.families.encoder_spec import EncoderSpec
from ferrum_jax.models.families.family import EncoderFamily
from ferrum_jax.models.families.rope_reader import ropes_by_kind
from ferrum_jax.models.layers.embedding import Embedding
from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.layers.norm import LayerNorm
from ferrum_jax.models.layers.rope import Rotation, rotations
from ferrum_jax.models.layers.text_rows import TextRows
from ferrum_jax.models.sharding.shards import WHOLE, Shards
from ferrum_jax.models.spec import RopeSpec

# Keys that change no vector: dropout, heads, and how training ran.
_UNREAD = (
    *("attention_dropout", "embedding_dropout", "mlp_dropout", "classifier_dropout", "initializer_cutoff_factor"),
    *("classifier_activation", "classifier_bias", "classifier_pooling", "decoder_bias", "tie_word_embeddings"),
    *("deterministic_flash_attn", "gradient_checkpointing", "reference_compile", "repad_logits_with_grad"),
    *("sparse_pred_ignore_index", "sparse_prediction", "cls_token_id", "layer_norm_eps", "position_embedding_type"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBertSpec(EncoderSpec):
    """near: layers that see at most `reach` tokens on either side. prefix: before names of a checkpoint with a head."""

    norm_eps: float
    hidden_act: str
    near: tuple[int, ...]
    reach: int
    rope: RopeSpec
    near_rope: RopeSpec
    prefix: str

    names_only: ClassVar[tuple[str, ...]] = ("prefix",)


class ModernBertLayer(nnx.Module):
    """Attention and MLP behind a norm each. On a mesh a device has some heads and columns."""

    def __init__(self, spec: ModernBertSpec, layer: int, *, dtype: jnp.dtype) -> None:
        D, F = spec.hidden_size, spec.intermediate_size
        self.head_dim, self.activation = spec.head_dim, ACTIVATIONS[spec.hidden_act]
        self.reach = spec.reach if layer in spec.near else None
        self.attention_norm = LayerNorm(D, eps=spec.norm_eps, bias=False, dtype=dtype) if layer else None
        self.q, self.k, self.v, self.o = (Linear(D, D, dtype=dtype, rngs=None) for _ in range(4))
        self.mlp_norm = LayerNorm(D, eps=spec.norm_eps, bias=False, dtype=dtype)
        self.gate = Linear(D, F, dtype=dtype, rngs=None)
        self.up = Linear(D, F, dtype=dtype, rngs=None)
        self.down = Linear(F, D, dtype=dtype, rngs=None)

    def __call__(
        self,
        x: jax.Array,  # [T, D]
        rotation: Rotation,
        rows: TextRows,
        shards: Shards,
    ) -> jax.Array:  # [T, D]
        normed = x if self.attention_norm is None else self.attention_norm(x)
        q, k, v = (project(normed).reshape(len(x), -1, self.head_dim) for project in (self.q, self.k, self.v))
        q, k = rotation.of_keys(q), rotation.of_keys(k)
        attended = rows.attend(q, k, v, scale=self.head_dim**-0.5, reach=self.reach)
        x = x + self.o(attended.reshape(len(x), -1), shards)
        normed = self.mlp_norm(x)
        return x + self.down(self.activation(self.gate(normed)) * self.up(normed), shards)


class ModernBert(nnx.Module):
    """A whole encoder; its weights are zeros until others are bound."""

    def __init__(self, spec: ModernBertSpec, *, dtype: jnp.dtype | str = jnp.float32) -> None:
        dtype = jnp.dtype(dtype)
        self.spec = spec
        self.words = Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype, rngs=None)
        self.norm = LayerNorm(spec.hidden_size, eps=spec.norm_eps, bias=False, dtype=dtype)
        self.layers = nnx.List([ModernBertLayer(spec, layer, dtype=dtype) for layer in range(spec.num_hidden_layers)])
        self.final_norm = LayerNorm(spec.hidden_size, eps=spec.norm_eps, bias=False, dtype=dtype)

    def __call__(
        self,
        token_ids: jax.Array,  # [T] int32
        rows: TextRows,
        shards: Shards = WHOLE,
    ) -> jax.Array:  # [T, D]
        spec = self.spec
        x = self.norm(self.words(token_ids, shards))
        far, near = (Rotation(*rotations(rows.positions, rope, spec.head_dim)) for rope in (spec.rope, spec.near_rope))
        for index, layer in enumerate(self.layers):
            x = layer(x, near if index in spec.near else far, rows, shards)
        return self.final_norm(x)


def _spec(config: Mapping[str, Any]) -> ModernBertSpec:
    """Raises ValueError when a key is missing, or changes the vectors and is not understood."""
    reader = ConfigReader(config, {"max_position_embeddings": 8192})
    architecture = str(config["architectures"][0])
    reader.leave(*_UNREAD)
    reader.only(attention_bias=False, mlp_bias=False, norm_bias=False)
    num_layers, every = reader.get("num_hidden_layers", 22), reader.get("global_attn_every_n_layers", 3)
    kinds = ["sliding_attention" if layer % every else "full_attention" for layer in range(num_layers)]
    reach = reader.get("local_attention", 128) // 2
    groups = cache_groups(reader.get("layer_types", kinds), num_layers, reach)
    rope, near_rope = ropes_by_kind(
        reader,
        default_theta=reader.get("global_rope_theta", 160000.0),
        local_theta=reader.get("local_rope_theta", 10000.0),
    )
    spec = ModernBertSpec(
        architecture=architecture,
        vocab_size=reader.get("vocab_size", 50368),
        hidden_size=reader.get("hidden_size", 768),
        num_hidden_layers=num_layers,
        num_attention_heads=reader.get("num_attention_heads", 12),
        intermediate_size=reader.get("intermediate_size", 1152),
        max_position_embeddings=reader.require("max_position_embeddings"),
        norm_eps=reader.get("norm_eps", 1e-5),
        hidden_act=reader.get("hidden_activation", "gelu"),
        near=tuple(layer for group in groups if group.window for layer in group.layers),
        reach=reach,
        rope=rope,
        near_rope=near_rope,
        dtype=stored_dtype(reader),
        prefix="model." if architecture.endswith("ForMaskedLM") else "",
    )
    if spec.hidden_act not in ACTIVATIONS:
        raise ValueError(f"hidden_activation is {spec.hidden_act!r}; supported are {sorted(ACTIVATIONS)}")
    if spec.hidden_size % (2 * spec.num_attention_heads):
        raise ValueError(f"hidden_size is {spec.hidden_size}; it must be a multiple of 2 * {spec.num_attention_heads}")
    reader.finish()
    return spec


def _rules(spec: ModernBertSpec) -> tuple[Rule, ...]:
    """Every parameter of a ModernBert of this spec, and the Hugging Face tensor it comes from."""
    D, F, layers = spec.hidden_size, spec.intermediate_size, tuple(range(spec.num_hidden_layers))

    def of_layers(theirs: str, ours: str, part: TensorSlice | None = None, first: int = 0) -> Rule:
        source, target = f"{spec.prefix}layers.{{i}}.{theirs}.weight", f"layers.{{i}}.{ours}.weight"
        return Rule(source=source, target=target, layers=layers[first:], part=part)

    outside = {"embeddings.tok_embeddings": "words", "embeddings.norm": "norm", "final_norm": "final_norm"}
    return (
        *(Rule(source=f"{spec.prefix}{theirs}.weight", target=f"{ours}.weight") for theirs, ours in outside.items()),
        *(of_layers("attn.Wqkv", ours, part) for ours, part in tensors.in_turn(dict.fromkeys("qkv", D)).items()),
        of_layers("attn.Wo", "o"),
        *(of_layers("mlp.Wi", ours, part) for ours, part in tensors.halves(F).items()),
        of_layers("mlp.Wo", "down"),
        of_layers("mlp_norm", "mlp_norm"),
        *((of_layers("attn_norm", "attention_norm", first=1),) if layers[1:] else ()),
    )


_FAMILY = EncoderFamily(
    spec_from_config=_spec,
    model=ModernBert,
    weight_rules=_rules,
    harmless=lambda spec: ("head.*", "decoder.*") if spec.prefix else (),  # of a masked model
    models="ModernBERT, GTE-ModernBERT and others",
    notes="embeddings alone; sentence-transformers folders",
)
ENCODERS = {"ModernBertForMaskedLM": _FAMILY, "ModernBertModel": _FAMILY}
