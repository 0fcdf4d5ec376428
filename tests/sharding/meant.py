"""Which collectives a part of a step is meant to have: no others, so none on the pools and none that moves a weight."""

from __future__ import annotations

from ferrum_jax.runtime.buckets import Bucket, RowBucket
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.programs import Part
from ferrum_jax.sharding import crosses_processes


def meant_collectives(layout: Layout, part: Part) -> dict[str, int]:
    """How many of each kind a compiled part has.

    A forward has two sums over "tp" in each layer, one of a parallel block, and the embedding's; norms over all heads
    of q and of k share one. Where data shards have experts together, tokens and routes are gathered before those of a
    layer, and their sums scattered after them. What samples exchanges logits once and gathers what it drew, and so do
    prompt log-probabilities. Where data shards are of several hosts, results of the latter two are gathered too.
    """
    spec, sizes = layout.options.spec, layout.mesh.shape
    if isinstance(part, Bucket):
        exchanges = len(spec.moe_layers) if layout.options.expert_shards.size > 1 else 0
        counts = {"all-gather": 2 * exchanges, "reduce-scatter": exchanges}
        own = spec.attention.qk_norm
        of_layer = (1 if spec.parallel else 2) + (own is not None and own.over_all_heads)
        return counts | ({"all-reduce": of_layer * spec.num_hidden_layers + 1} if sizes["tp"] > 1 else {})
    if part == "write_masks":
        return {}
    num_results = 2 if isinstance(part, RowBucket) else 1
    divided = sizes["tp"] > 1
    return {"all-gather": divided + num_results * crosses_processes(layout.mesh), "all-to-all": int(divided)}
