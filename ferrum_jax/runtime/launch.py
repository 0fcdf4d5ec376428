"""A whole decode step as one executable: the forward of a bucket, and what samples its rows.

`launch`, one for each `LaunchBucket`: (weights, kv, slots, packed input) to (kv, slots, rows and, where they are asked
for, experts), as `step.py` and `sample.py` name them. Hidden states stay inside: no row is scored, embedded or has to
do with cached prompts, and none asks for more than the bucket's draw. A step that does takes the halves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ferrum_jax.models.sharding import on_mesh
from ferrum_jax.runtime import sampling
from ferrum_jax.runtime.buckets import LaunchBucket
from ferrum_jax.runtime.handed_back import results_of, trace_part
from ferrum_jax.runtime.inputs import launch_words, unpack_forward
from ferrum_jax.runtime.pools.pools import Pools
from ferrum_jax.runtime.sample import Head
from ferrum_jax.runtime.step import make_layers


def make_launch(head: Head, bucket: LaunchBucket, pools: Pools) -> Callable[..., tuple[Any, ...]]:
    """The step in a bucket; kv and slots are to be donated."""
    forward, options, names = bucket.forward, head.options, tuple(head.weights)
    layers = make_layers(head.graph, names, forward, pools, options)
    head = dataclasses.replace(head, adapters=None)  # no row of such a step names one

    def launch(
        weights: tuple[jax.Array, ...], kv: tuple[jax.Array, ...], slots: jax.Array, blob: jax.Array
    ) -> tuple[Any, ...]:
        inputs = unpack_forward(blob, forward, len(options.spec.kv_groups))
        final, kv, *experts = layers(weights, kv, slots, inputs)
        last = final[jnp.maximum(jnp.cumsum(inputs.counts) - 1, 0)]
        positions, active = inputs.starts + inputs.counts, blob[-forward.num_rows :] > 0

        def draw(logits: jax.Array, *rows: jax.Array) -> jax.Array:
            return sampling.drawn(logits, slots, *rows, draw=bucket.draw)

        by_row = head.by_row(head.pick(weights), slots)
        rows = by_row(last, draw, inputs.slots, positions, active)
        slots = sampling.append_tokens(slots, inputs.slots, positions, jnp.maximum(rows[:, 0], 0), active)
        return kv, slots, rows, *experts

    return launch


def trace_launch(head: Head, pools: Pools, bucket: LaunchBucket, mesh: Mesh) -> jax.stages.Traced:
    """The step in a bucket on a mesh, ready to be lowered. kv and slots are donated."""
    kv, options = pools.flat_caches(), head.options
    words = on_mesh(mesh, (launch_words(bucket.forward, len(options.spec.kv_groups)),), jnp.int32, "words")
    arguments = (tuple(head.weights.values()), kv, pools.slots, words)
    results = results_of(bucket, pools, options, mesh)
    return trace_part(make_launch(head, bucket, pools), arguments, results, pools=(1, 2), mesh=mesh, options=options)
