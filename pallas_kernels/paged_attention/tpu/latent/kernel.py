"""Decode attention over latents for Mosaic TPU: rows of one query, their latents written to the pool as they come.

An item is one tile of one row's context. Items stand in the order of rows and positions, and a step takes `items` of
them; three stages on different steps hide each other's latency:

    step t     scores of its items (QK), the rows' highest so far, while blocks of step t + 2 are fetched
               and what scalar memory needs to fetch those of step t + 4 (see `decode/records.py`)
    step t-1   softmax, then the weighted sum of values (PV)
    step t-2   merge into the row's running sums, in ascending position; a row that ends stores its result

One vector of a token is the key of every head, and its first lanes are every head's value: a tile is fetched once and
multiplied twice. Queries and results of 128 heads are large, so they come and go by row.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chosen_keys import TileLimits
from pallas_kernels.kv_pool import KVPool, encode
from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention.tpu.decode.ring import Stream
from pallas_kernels.paged_attention.tpu.decode.scratch import named
from pallas_kernels.paged_attention.tpu.latent.config import LatentConfig
from pallas_kernels.paged_attention.tpu.latent.latent_movement import LatentMovement
from pallas_kernels.paged_attention.tpu.latent.latent_scratch import (
    LatentScratch,
    LimitScratch,
    latent_scratch_shapes,
    limit_scratch_shapes,
)
from pallas_kernels.paged_attention.tpu.latent.schedule import LatentSchedule
from pallas_kernels.paged_attention.tpu.latent.stages import LatentStages


def latent_attention(
    q: jax.Array,  # [T, N, L]
    k: jax.Array,  # [T, 1, V]
    v: jax.Array,  # [T, 1, L - V]
    pool: KVPool,
    schedule: LatentSchedule,
    logits: Logits,
    chosen: TileLimits | None = None,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, KVPool]:  # [T, N, V]; the pool with k and v
    """See the package's paged_attention. interpret: for tests, pltpu.InterpretParams. Raises ValueError for sinks."""
    if logits.sinks is not None:
        raise ValueError("attention has sinks, which the latents' kernel for TPUs does not compute; take 'xla'")
    (T, N, _), config, values = q.shape, schedule.config, pool.values
    P, C, _, L = values.shape
    padded = jnp.pad(q, ((0, 0), (0, config.num_heads - N), (0, 0)))
    step = schedule.decode
    prefetched, in_hbm = (step.sizes, step.ring), step.in_hbm()
    limits, more_scratch = ((), ()) if chosen is None else ((chosen.limits,), limit_scratch_shapes(config))
    new, _ = encode(jnp.concatenate([k, v], axis=-1)[:, 0], pool.dtype)
    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
    out, kept = pl.pallas_call(
        functools.partial(_kernel, config=config, logits=logits, is_limited=chosen is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(1,),
            in_specs=[
                *[anywhere] * (len(in_hbm) + len(limits)),
                pl.BlockSpec((T, L), lambda *_: (0, 0)),
                anywhere,
                anywhere,
            ],
            out_specs=[anywhere, anywhere],
            scratch_shapes=latent_scratch_shapes(q.dtype, values.dtype, config) + more_scratch,
        ),
        out_shape=[
            jax.ShapeDtypeStruct((T, config.num_heads, config.value_dim), q.dtype),
            jax.ShapeDtypeStruct((P, C, L), values.dtype),
        ],
        input_output_aliases={len(prefetched) + len(in_hbm) + len(limits) + 2: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=config.decode.vmem_limit_bytes,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="latent_attention_decode",
    )(*prefetched, *in_hbm, *limits, new.astype(jnp.float32), padded, values.reshape(P, C, L))
    is_served = jnp.arange(T) < step.sizes[1]
    out = jnp.where(is_served[:, None, None], out[:, :N], 0)
    return out, dataclasses.replace(pool, values=kept.reshape(values.shape))


def _kernel(sizes, ring, *refs, config: LatentConfig, logits: Logits, is_limited: bool):
    """sizes, ring: of `DecodeSchedule`. refs: the rest of it, inputs, outputs, scratch."""
    stream, refs = Stream.of(config.decode.records(config.block_size), ring, [*refs])
    limits, *refs = refs if is_limited else (None, *refs)
    new, q, _, out, pool, *refs = refs
    num_own = len(dataclasses.fields(LatentScratch))
    scratch = named(LatentScratch, refs[:num_own])
    moves = LatentMovement(
        stream=dataclasses.replace(stream, fetched=scratch.scalars),
        new=new,
        q=q,
        out=out,
        pool=pool,
        scratch=scratch,
        config=config,
        limits=limits,
        limited=named(LimitScratch, refs[num_own:]) if is_limited else None,
    )
    stages = LatentStages(moves=moves, scratch=scratch, config=config, scale=logits.scale, soft_cap=logits.soft_cap)
    pl.when(sizes[0] > 0)(functools.partial(_run, sizes[0], moves, stages))
    moves.settle(sizes[1])


def _run(steps, moves: LatentMovement, stages: LatentStages):
    """Runs all steps, at least one: each stage works on a step of its own."""
    ahead, stream = moves.config.decode.ahead, moves.stream

    def step(t, _):
        moves.arrive(t, stream.info(t) >> 1)
        stream.arrive(t)
        moves.insert(t)
        moves.release(t - 2)
        stages.softmax(t - 1)
        stages.merge(t - 2)
        stages.score(t, moves.fetch(t + ahead))
        stream.fetch(t + ahead)
        stages.weigh(t - 1)
        stages.finish(t - 2)
        return 0

    def begin(t, _):
        stream.fetch(t)
        for start in moves.fetch(t):
            start()
        return 0

    jax.lax.fori_loop(0, ahead, begin, 0)
    jax.lax.fori_loop(0, steps, step, 0)
    stages.merge(steps - 2)
    stages.finish(steps - 2)
    stages.softmax(steps - 1)
    stages.weigh(steps - 1)
    stages.merge(steps - 1)
    stages.finish(steps - 1)
    moves.release(steps - 2)
    moves.release(steps - 1)
    for t in range(ahead):
        stream.arrive(steps + t)
