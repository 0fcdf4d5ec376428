"""Which collectives a step is meant to have: no others, so none on the pools and none that moves a weight."""

from __future__ import annotations

from ferrum_jax.runtime.layout import Layout
from ferrum_jax.sharding import crosses_processes


def meant_collectives(layout: Layout) -> dict[str, int]:
    """How many of each kind a compiled step has.

    Two sums over "tp" in each layer, and the embedding's. Logits are exchanged twice, for sampled rows and for prompt
    log-probabilities; their results are gathered. Where data shards are of several hosts, the step's three results are
    gathered too. Where they have experts together, tokens and routes are gathered before those of a layer, and their
    sums scattered after them.
    """
    spec, sizes = layout.options.spec, layout.mesh.shape
    exchanges = len(spec.moe_layers) if layout.options.expert_shards.size > 1 else 0
    counts = {"all-gather": 2 * exchanges + 3 * crosses_processes(layout.mesh), "reduce-scatter": exchanges}
    if sizes["tp"] > 1:
        counts |= {"all-reduce": 2 * spec.num_hidden_layers + 1, "all-to-all": 2}
        counts["all-gather"] += 2
    return counts
