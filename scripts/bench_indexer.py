"""Times a decode step's attention with an indexer beside attention to all keys, in turns, on this machine.

    python -m scripts.bench_indexer [--contexts 4096 32768 131072] [--heads 16] [--rounds 5]

One row of one layer with DeepSeek-V3.2's sizes: latents of 512 + 64, 64 index heads of 128, 2,048 keys chosen; float32.
"scores" is what choosing takes, "attends" what reading the chosen takes, "dense" attention to all keys. --heads: of one
device; 128 are all, 16 those of one of eight.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.indexer import choose_keys, make_indexer_schedule
from pallas_kernels.kv_pool import make_pool, pool_shape, with_index_keys
from pallas_kernels.paged_attention import AttentionConfig, RaggedBatch, make_schedule, paged_attention
from pallas_kernels.paged_attention.schedule import Schedule

BLOCK, LATENT, ROPE, INDEX_HEADS, INDEX_DIM, TOP_K = 16, 512, 64, 64, 128, 2048


def times(context: int, num_heads: int, rounds: int) -> dict[str, float]:
    """Median seconds of each part, of a row whose last position is context - 1."""
    num_blocks = context // BLOCK
    shape = pool_shape(
        num_blocks=num_blocks + 1,
        block_size=BLOCK,
        num_kv_heads=1,
        head_dim=LATENT,
        v_head_dim=ROPE,
        is_latent=True,
        dtype=jnp.dtype(jnp.float32),
        implementation="xla",
    )
    pool = make_pool(with_index_keys(shape, INDEX_DIM), fill=0.0)
    keys = jax.random.split(jax.random.key(0), 8)
    random = [
        jax.random.normal(key, like.shape) for key, like in zip(keys, (pool.values, pool.index_keys), strict=False)
    ]
    pool = jax.tree.unflatten(jax.tree.structure(pool), random)
    ints = [jnp.array([value], jnp.int32) for value in (context - 1, 1, 0)]
    tables = jnp.asarray(np.random.default_rng(0).permutation(num_blocks)[None] + 1, jnp.int32)
    batch = RaggedBatch(block_tables=tables, starts=ints[0], counts=ints[1], query_offsets=ints[2])
    config = AttentionConfig.choose(num_tokens=1, block_size=BLOCK, decode_only=True, invariant=False)
    schedule = make_schedule(batch, num_tokens=1, block_size=BLOCK, config=config)
    assert isinstance(schedule, Schedule)
    reads = make_indexer_schedule(batch, num_tokens=1, block_size=BLOCK, top_k=TOP_K, attention=schedule)
    q, w, key = (
        jax.random.normal(k, s)
        for k, s in zip(keys[2:], ((1, INDEX_HEADS, INDEX_DIM), (1, INDEX_HEADS), (1, INDEX_DIM)), strict=False)
    )
    heads = jax.random.normal(keys[5], (1, num_heads, LATENT + ROPE)) / 24
    k, v = jax.random.normal(keys[6], (1, 1, LATENT)), jax.random.normal(keys[7], (1, 1, ROPE))
    choose = jax.jit(choose_keys, donate_argnums=(3,))
    attend = jax.jit(paged_attention, static_argnames="scale", donate_argnums=(3,))
    found: dict[str, list[float]] = {"scores": [], "attends": [], "dense": []}

    def timed(what: str, call: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = jax.block_until_ready(call())
        found[what].append(time.perf_counter() - begun)
        return result

    for _ in range(rounds + 1):
        held = pool
        chosen, held = timed("scores", lambda held=held: choose(q, w, key, held, reads))
        _, held = timed("attends", lambda held=held, c=chosen: attend(heads, k, v, held, schedule, scale=0.1, chosen=c))
        _, pool = timed("dense", lambda held=held: attend(heads, k, v, held, schedule, scale=0.1))
    return {what: float(np.median(each[1:])) for what, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    print(f"{'context':>8} {'scores':>9} {'attends':>9} {'both':>9} {'dense':>9}  dense over both")
    for context in asked.contexts:
        took = times(context, asked.heads, asked.rounds)
        both = took["scores"] + took["attends"]
        cells = (f"{1e3 * each:6.2f} ms" for each in (took["scores"], took["attends"], both, took["dense"]))
        print(f"{context:8} {' '.join(cells)}  {took['dense'] / both:.2f}")


if __name__ == "__main__":
    main()
