"""Layers behind the last that each predict one token more, for drafts: what they have beside a decoder layer.

    x_i = join [norm(embed(t_{i+1})) ; norm(h_i)];  logits of t_{i+2} = head(norm(layer(x_i)))

The norms are the layer's own. h is the model's final hidden state, after its norm, or what the layer before gave.
Embeddings and head are the model's.
Source: DeepSeek-AI 2024 (DeepSeek-V3, section 2.2).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from checkpoints.rules import Rule
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.layers.norm import norm_of
from ferrum_jax.models.spec import ModelSpec

# What such a layer has in checkpoints beside a decoder layer, ours by theirs: beside its tensors, and above them.
_IN_LAYER = {
    "enorm.weight": "embed_norm.weight",
    "hnorm.weight": "hidden_norm.weight",
    "eh_proj.weight": "join.weight",
    "shared_head.norm.weight": "norm.weight",
}
_ABOVE = {
    "pre_fc_norm_embedding.weight": "embed_norm.weight",
    "pre_fc_norm_hidden.weight": "hidden_norm.weight",
    "fc.weight": "join.weight",
    "norm.weight": "norm.weight",
}


class MtpEnds(nnx.Module):
    """Norms and the join around a layer that predicts one token more. join [D, 2 D], whole on every device."""

    def __init__(self, spec: ModelSpec, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        D = spec.hidden_size
        self.embed_norm = norm_of(spec.norm, D, dtype=dtype)
        self.hidden_norm = norm_of(spec.norm, D, dtype=dtype)
        self.join = Linear(2 * D, D, dtype=dtype, rngs=rngs)
        self.norm = norm_of(spec.norm, D, dtype=dtype)

    def __call__(self, embedded: jax.Array, hidden: jax.Array) -> jax.Array:  # [T, D], [T, D] -> [T, D]
        """The layer's input."""
        return self.join(jnp.concatenate((self.embed_norm(embedded), self.hidden_norm(hidden)), axis=-1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpLayers:
    """How a family's config.json counts the layers that predict one token more.

    keys: the first that is there counts. default: where none is. most: that checkpoints of the family have.
    """

    keys: Sequence[str] = ("num_nextn_predict_layers", "num_mtp_layers")
    default: int = 0
    most: int = 4

    def count(self, config: Mapping[str, Any], architecture: str) -> int:
        """How many layers a config.json has. Raises ValueError where it has none, or more than are served."""
        own = config.get("text_config") or config
        reader = ConfigReader(own if isinstance(own, Mapping) else {})
        key = next((key for key in self.keys if key in reader.config), self.keys[0])
        count = reader.get(key, self.default)
        if not 1 <= count <= self.most:
            raise ValueError(
                f"{architecture}: {key} is {count}, and drafts need 1 to {self.most} layers that predict one token "
                "more; choose another method of drafting"
            )
        return count


def layers_of(spec: ModelSpec) -> tuple[int, ...]:
    """The layers that predict one token more."""
    return tuple(range(spec.num_hidden_layers, spec.num_layers))


def rules_in_layers(spec: ModelSpec) -> tuple[Rule, ...]:
    """The ends of such layers, of checkpoints that have them beside the layer's own tensors, behind the last layer."""
    first, count = spec.num_hidden_layers, spec.num_mtp_layers
    return tuple(
        Rule(source=f"model.layers.{first + i}.{theirs}", target=f"mtp.{i}.{ours}")
        for i in range(count)
        for theirs, ours in _IN_LAYER.items()
    )


def rules_above(rules: Sequence[Rule], spec: ModelSpec) -> tuple[Rule, ...]:
    """The rules of a checkpoint that has its only such layer, and above it its ends, under "mtp."."""
    behind = layers_of(spec)
    if not behind:
        return tuple(rules)
    found = [Rule(source=f"mtp.{theirs}", target=f"mtp.0.{ours}") for theirs, ours in _ABOVE.items()]
    for rule in rules:
        kept, apart = (tuple(i for i in rule.layers if (i in behind) == is_apart) for is_apart in (False, True))
        if kept or not rule.layers:
            found.append(dataclasses.replace(rule, layers=kept))
        if apart:
            own = dataclasses.replace(rule, layers=apart, shift=spec.num_hidden_layers)
            found.append(own.renamed(lambda name: name.replace("model.layers.", "mtp.layers.", 1)))
    return tuple(found)


def copies_in_layers(spec: ModelSpec) -> tuple[str, ...]:
    """Tensors of such layers that repeat the model's embeddings and head, which checkpoints carry."""
    names = ("embed_tokens.weight", "shared_head.head.weight")
    return tuple(f"model.layers.{layer}.{name}" for layer in layers_of(spec) for name in names)
