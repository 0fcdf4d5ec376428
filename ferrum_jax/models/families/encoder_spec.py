"""EncoderSpec: what every encoder says of itself, whatever its layers are."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ferrum_jax.models.families.labels import Labels
from ferrum_jax.models.spec.digest_text import encoder_text

SCORERS = ("sigmoid", "identity")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """What decides an encoder's vectors, or its scores.

    max_position_embeddings: most tokens of a text. labels: of one that classifies; None of one that makes vectors.
    scorer: of a cross-encoder, what is taken of its one logit, "sigmoid" or "identity"; "" of any other.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    dtype: str
    scorer: str = ""
    labels: Labels | None = None

    names_only: ClassVar[tuple[str, ...]] = ()  # fields that decide which tensors of a file are read, and no vector

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def digest_text(self, *, once: bool = False) -> str:
        """All that decides vectors, as text. once: as an earlier version wrote it."""
        labels = None if self.scorer and not once else self.labels  # their names change no score
        names = dict.fromkeys(self.names_only, "")
        return encoder_text(dataclasses.replace(self, dtype="", labels=labels, **names), once=once)
