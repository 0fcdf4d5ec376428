"""The spec that all encoders share, and the labels of classifiers."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ferrum_jax.models.spec.digest_text import encoder_text

MAX_LABELS = 1 << 16
ACTIVATIONS = ("softmax", "sigmoid", "identity")
_BY_PROBLEM = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "identity",
}
SCORERS = ("sigmoid", "identity")


@dataclasses.dataclass(frozen=True)
class Labels:
    """names: of the classes, in the order of the logits. activation: what makes of these logits probabilities."""

    names: tuple[str, ...]
    activation: str

    def probabilities(self, logits: np.ndarray) -> np.ndarray:  # [n] -> [n] float32
        wide = logits.astype(np.float64)
        if self.activation == "sigmoid":
            wide = 0.5 * (1 + np.tanh(0.5 * wide))
        elif self.activation == "softmax":
            powers = np.exp(wide - wide.max())
            wide = powers / powers.sum()
        return wide.astype(np.float32)


def labels_of(config: Mapping[str, Any]) -> Labels:
    """The labels of a config.json, which are LABEL_0, LABEL_1 and so on where it does not name them.

    Probabilities are by its problem_type; without one, of several labels together, and of a single one by itself.
    Raises ValueError for what is none.
    """
    named, count = config.get("id2label"), config.get("num_labels", 2)
    if named is None:
        if type(count) is not int or not 1 <= count <= MAX_LABELS:
            raise ValueError(f"num_labels is {str(count)[:100]}; it must be between 1 and {MAX_LABELS:,}")
        names = tuple(f"LABEL_{index}" for index in range(count))
    else:
        names = _names(named)
    problem = config.get("problem_type")
    if problem is not None and problem not in _BY_PROBLEM:
        raise ValueError(f"problem_type is {str(problem)[:100]!r}; supported are {sorted(_BY_PROBLEM)}")
    activation = _BY_PROBLEM[problem] if problem else "softmax"
    return Labels(names, "sigmoid" if activation == "softmax" and len(names) == 1 else activation)


def _names(named: object) -> tuple[str, ...]:
    if not isinstance(named, Mapping) or not 1 <= len(named) <= MAX_LABELS:
        raise ValueError(f"id2label is {str(named)[:100]}; it must name 1 to {MAX_LABELS:,} labels by their number")
    by_number = {str(number): name for number, name in named.items()}
    names = [by_number.get(str(index)) for index in range(len(named))]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"id2label is {str(named)[:100]}; it must have a text for each of 0 to {len(named) - 1}")
    return tuple(map(str, names))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """The facts that decide an encoder's vectors or scores.

    max_position_embeddings: most tokens of a text. labels: of a classifier; None where vectors are made. scorer: a
    cross-encoder's activation of its one logit, "sigmoid" or "identity"; else "".
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
