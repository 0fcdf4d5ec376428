"""Collectives: the bytes that one device of a mesh sends to the others, from shapes.

With n devices along "tp", a sum over them costs a device 2 (n - 1) / n of its array, by a ring or by any other way that
sends least: the parts that it sums for others, then its own sum to them. Each layer has one behind what mixes tokens,
and one behind its MLP or experts; the embedding has one, and logits change hands once.

With d data shards that have their experts together, every device gathers the tokens of all shards, and gives each
shard the sum of its experts over that shard's tokens: (d - 1) arrays of its own tokens each way.
"""

import dataclasses

from ferrum_jax.runtime.layout import Layout

_ROUTE_BYTES = 8  # of an expert that a token chose: its id and its weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that a device sends. layers: of sums and logits. experts: of tokens on their way to experts and back."""

    layers: float
    experts: float


def sent_by_token(layout: Layout) -> Sent:
    """Bytes sent for a token of each data shard whose logits nobody asks for."""
    spec, devices = layout.options.spec, layout.options.shards.size
    vector = spec.hidden_size * layout.dtype.itemsize
    num_sums = 1 + len(spec.mixing_layers) + len(spec.dense_layers) + len(spec.moe_layers)
    return Sent(layers=2 * (devices - 1) / devices * num_sums * vector, experts=_to_experts(layout, vector))


def sent_by_step(layout: Layout, rows: int) -> Sent:
    """Bytes sent by a step that decodes `rows` rows of each data shard."""
    token, devices = sent_by_token(layout), layout.options.shards.size
    logits = 4 * layout.options.spec.vocab_size / devices * (devices - 1) / devices
    return Sent(layers=rows * (token.layers + logits), experts=rows * token.experts)


def _to_experts(layout: Layout, vector: int) -> float:
    experts, others = layout.options.spec.experts, layout.options.expert_shards.size - 1
    if experts is None:
        return 0.0
    routes = experts.num_experts_per_tok * _ROUTE_BYTES
    return float(others * len(layout.options.spec.moe_layers) * (2 * vector + routes))
