"""Attention over latents for Mosaic TPU. Rows of one query have their latents written to the pool as they come.

The same kernel serves rows of several queries in a launch of its own, in which XLA has written their latents before:
tile_q neighbouring tokens of a row stand in place of a row's one, with all of their heads, and a mask between them.

An item is one tile of one row's context. Items stand in the order of rows and positions, and a step takes `items` of
them; three stages on different steps hide each other's latency:

    step t     scores of its items (QK), the rows' highest so far, while blocks of step t + 2 are fetched
               and what scalar memory needs to fetch those of step t + 4 (see `decode/records.py`)
    step t-1   softmax, then the weighted sum of values (PV)
    step t-2   merge into the row's running sums, in ascending position; a row that ends stores its result

One vector of a token is the key of every head, and its first lanes are every head's value: a tile is fetched once and
multiplied twice. Queries and results of 128 heads are large, so they come and go by row.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chosen_keys import TileLimits
from pallas_kernels.kv_pool import KVPool, encode
from pallas_kernels.kv_write import xla as kv_write
from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention.tpu.decode.ring import Stream
from pallas_kernels.paged_attention.tpu.decode.scratch import named
from pallas_kernels.paged_attention.tpu.latent.config import LatentConfig
from pallas_kernels.paged_attention.tpu.latent.latent_movement import (
    LatentMovement,
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
    """See the package's paged_attention. interpret: for tests, pltpu.InterpretParams.

    Raises ValueError for sinks, and for chosen keys of rows of several queries.
    """
    if logits.sinks is not None:
        raise ValueError("attention has sinks, which the latents' kernel for TPUs does not compute; take 'xla'")
    several = schedule.several
    new, _ = encode(jnp.concatenate([k, v], axis=-1)[:, 0], pool.dtype)
    new = new.astype(jnp.float32)
    if several is None:
        out, pool = _launch(q, new, pool, schedule, logits, chosen, interpret)
        return _real(jnp.arange(len(q)) < schedule.decode.sizes[1], out), pool
    if chosen is not None:
        raise ValueError("rows of several queries attend to chosen keys in 'xla' alone; take it for such a step")
    q1, new1 = (x.at[several.singles].get(mode="clip") for x in (q, new))
    singles, pool = _launch(q1, new1, pool, schedule, logits, None, interpret)
    pool = kv_write.kv_write(pool, k, v, several.write_blocks, several.write_offsets)
    out, pool = _launch(q, None, pool, schedule, logits, None, interpret)
    return _real(several.is_served, out).at[several.singles].set(singles, mode="drop"), pool


def _real(is_real: jax.Array, out: jax.Array) -> jax.Array:
    """Results of these tokens, and zero of the others."""
    return jnp.where(is_real[:, None, None], out, 0)


def _launch(
    q: jax.Array,  # [T, N, L]
    new: jax.Array | None,  # [T, L] float32
    pool: KVPool,
    schedule: LatentSchedule,
    logits: Logits,
    chosen: TileLimits | None,
    interpret: Any,
) -> tuple[jax.Array, KVPool]:
    """The launch for rows of one query, which writes these new latents; None is the one for rows of several."""
    step, config, listed = schedule.decode, schedule.config, ()
    if new is None:
        several = schedule.several
        assert several is not None and config.several is not None, "the step has no such rows"
        step, config, listed = several.items, config.several, (several.tiles,)
    (T, N, _), values = q.shape, pool.values
    P, C, _, L = values.shape
    padded = jnp.pad(q, ((0, 0), (0, config.num_heads - N), (0, 0)))
    prefetched, in_hbm = (step.sizes, step.ring, *listed), step.in_hbm()
    limits, more_scratch = ((), ()) if chosen is None else ((chosen.limits,), limit_scratch_shapes(config))
    written = () if new is None else (new,)
    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
    out, *kept = pl.pallas_call(
        functools.partial(
            _kernel,
            config=config,
            logits=logits,
            writes=new is not None,
            is_limited=chosen is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(1,),
            in_specs=[
                *[anywhere] * (len(in_hbm) + len(limits)),
                *[pl.BlockSpec((T, L), lambda *_: (0, 0))] * len(written),
                anywhere,
                anywhere,
            ],
            out_specs=[anywhere] * (1 + len(written)),
            scratch_shapes=latent_scratch_shapes(q.dtype, values.dtype, config) + more_scratch,
        ),
        out_shape=[
            jax.ShapeDtypeStruct((T, config.num_heads, config.value_dim), q.dtype),
            *[jax.ShapeDtypeStruct((P, C, L), values.dtype)] * len(written),
        ],
        input_output_aliases={len(prefetched) + len(in_hbm) + len(limits) + 2: 1} if written else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=config.decode.vmem_limit_bytes,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="latent_attention_several" if new is None else "latent_attention_decode",
    )(*prefetched, *in_hbm, *limits, *written, padded, values.reshape(P, C, L))
    if kept:
        pool = dataclasses.replace(pool, values=kept[0].reshape(values.shape))
    return out[:, :N], pool


def _kernel(sizes, ring, *refs, config: LatentConfig, logits: Logits, writes: bool, is_limited: bool):
    """sizes, ring: of `DecodeSchedule`. refs: query tiles, the rest of it, inputs, outputs, scratch."""
    query_tiles, *refs = (None, *refs) if writes else refs
    stream, refs = Stream.of(config.decode.records(config.block_size), ring, [*refs])
    limits, *refs = refs if is_limited else (None, *refs)
    if writes:
        new, q, _, out, pool, *refs = refs
    else:
        new, (q, pool, out, *refs) = None, refs
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
        query_tiles=query_tiles,
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

    stream.begin(moves.fetch, ahead)
    jax.lax.fori_loop(0, steps, step, 0)
    stages.merge(steps - 2)
    stages.finish(steps - 2)
    stages.softmax(steps - 1)
    stages.weigh(steps - 1)
    stages.merge(steps - 1)
    stages.finish(steps - 1)
    moves.release(steps - 2)
    moves.release(steps - 1)
    stream.end(steps, ahead)
