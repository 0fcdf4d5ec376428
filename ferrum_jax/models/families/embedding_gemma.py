"""EmbeddingGemma: Gemma 3's decoder whose tokens see both ways, so an encoder.

The layers, their norms and ropes are those of `gemma.py`. A windowed layer sees half of the window on either side of a
token.
Source: Vera et al. 2025; keys and defaults as in Hugging Face's Gemma3TextConfig.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ferrum_jax.models.families import decoder, tensors
from ferrum_jax.models.families.encoder_spec import EncoderSpec
from ferrum_jax.models.families.family import EncoderFamily
from ferrum_jax.models.families.gemma import GEMMA3
from ferrum_jax.models.layers.attention import ForwardContext
from ferrum_jax.models.layers.text_rows import TextRows
from ferrum_jax.models.sharding.shards import WHOLE, Shards
from ferrum_jax.models.spec import AttentionSpec, ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingGemmaSpec(EncoderSpec):
    """decoder: the layers. EncoderSpec's fields repeat what it says."""

    decoder: ModelSpec

    @property
    def num_key_value_heads(self) -> int:
        return self.decoder.attention.num_key_value_heads

    @property
    def head_dim(self) -> int:
        return self.decoder.attention.head_dim

    def attention_of(self, layer: int) -> AttentionSpec:
        """The attention of a layer."""
        return self.decoder.attention_of(layer)

    def lender_of(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to: its own."""
        return self.decoder.lender_of(layer)

    def digest_text(self, *, once: bool = False) -> str:
        """All that decides vectors, as text. once: as an earlier version wrote it."""
        return f"{self.architecture} {self.decoder.digest_text(once=once)}"


class EmbeddingGemma(decoder.Decoder):
    """A whole encoder; its weights are zeros until others are bound. It makes no logits."""

    def __init__(self, spec: EmbeddingGemmaSpec, *, dtype: jnp.dtype | str = jnp.float32) -> None:
        super().__init__(spec.decoder, dtype=dtype, rngs=None)
        self.spec: Any = spec

    def __call__(  # type: ignore[override]
        self,
        token_ids: jax.Array,  # [T] int32
        rows: TextRows,
        shards: Shards = WHOLE,
    ) -> jax.Array:  # [T, D]
        def attend(
            layer: int, q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, window: int | None = None, **_: Any
        ) -> jax.Array:
            return rows.attend(q, k, v, scale=scale, reach=None if window is None else window // 2)

        return super().__call__(token_ids, rows.positions, ForwardContext(attend=attend, shards=shards))


def _spec(config: Mapping[str, Any]) -> EmbeddingGemmaSpec:
    """Raises ValueError when a key is missing, or changes the vectors and is not understood."""
    if config.get("use_bidirectional_attention") is not True:
        raise ValueError(
            "use_bidirectional_attention is not true; a Gemma 3 without its head is served where tokens see both ways"
        )
    own = {key: value for key, value in config.items() if key != "use_bidirectional_attention"}
    found = GEMMA3.spec_from_config(own, "Gemma3ForCausalLM")
    return EmbeddingGemmaSpec(
        architecture=str(config["architectures"][0]),
        vocab_size=found.vocab_size,
        hidden_size=found.hidden_size,
        num_hidden_layers=found.num_hidden_layers,
        num_attention_heads=found.attention.num_attention_heads,
        intermediate_size=found.mlp.intermediate_size,
        max_position_embeddings=found.max_position_embeddings,
        dtype=found.dtype,
        decoder=found,
    )


ENCODERS = {
    "Gemma3TextModel": EncoderFamily(
        spec_from_config=_spec,
        model=EmbeddingGemma,
        weight_rules=lambda spec: tensors.weight_rules(spec.decoder),
        harmless=lambda spec: tensors.harmless_tensors(spec.decoder),
        models="EmbeddingGemma, whose tokens see both ways",
        notes="embeddings alone, with the Dense layers behind its pooling; sentence-transformers folders",
    )
}
