"""Decode attention for Mosaic TPU: rows of one query, their K and V written to the pool in the same launch.

An item is one KV tile of one row. Items stand in the order of rows and positions; a step takes `items` of them,
of whichever rows, and runs three stages that hide each other's latency:

    step t     scores of its items (QK), the rows' highest so far, while blocks of step t + 2 are fetched
               and what scalar memory needs to fetch those of step t + 4 (see `records.py`)
    step t-1   softmax, then the weighted sum of values (PV)
    step t-2   merge into the row's running sums, in ascending position; the last item's result stays

The vectors of a token are not taken apart by head: all heads' keys are columns of one matrix, (token, head) in
order, and a column of another head is hidden from a query by the mask that also hides what is not visible. What
a row computes depends on its own items alone. Loads of a 32-bit word bring K and V of a head together. Scales of
int8 multiply columns: K's the scores, V's the weights.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.paged_attention.tpu.decode.columns import number_columns
from pallas_kernels.paged_attention.tpu.decode.config import Specialisation
from pallas_kernels.paged_attention.tpu.decode.movement import Movement
from pallas_kernels.paged_attention.tpu.decode.records import LOW_BITS
from pallas_kernels.paged_attention.tpu.decode.ring import Stream
from pallas_kernels.paged_attention.tpu.decode.schedule import DecodeSchedule
from pallas_kernels.paged_attention.tpu.decode.scratch import (
    ScaleScratch,
    Scratch,
    named,
    scale_scratch_shapes,
    scratch_shapes,
)
from pallas_kernels.paged_attention.tpu.decode.stages import Stages


def decode(
    q: jax.Array,  # [T, N, lanes of a key]
    slabs: jax.Array,  # [T, vectors, Hp], the tokens' K and V as the pool keeps them
    pool: KVPool,  # its scales, of int8, have those of the tokens already
    schedule: DecodeSchedule,
    sinks: jax.Array | None,  # [N, 128] float32, lanes alike
    static: Specialisation,
) -> tuple[jax.Array, jax.Array]:  # [T, N, Vp], zero where no decoding row has its token; the pool's values
    """Attention of all rows of one query, whose slabs are written to the pool."""
    T, values, scales, shape, config = len(q), pool.values, pool.scales, static.shape, static.config
    inputs = [q, slabs, *([] if sinks is None else [sinks])]
    whole = [pl.BlockSpec(a.shape, lambda *_, d=a.ndim: (0,) * d) for a in inputs]
    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
    pools = [values, *([] if scales is None else [scales])]
    prefetched, in_hbm = (schedule.sizes, schedule.ring), schedule.in_hbm()
    assert values.shape[1] == shape.block_size, "the pool has other blocks than the kernel was made for"
    return pl.pallas_call(
        functools.partial(_kernel, static=static, has_sinks=sinks is not None, has_scales=scales is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(1,),
            in_specs=[*[anywhere] * len(in_hbm), *whole, *[anywhere] * len(pools)],
            out_specs=[anywhere, anywhere],
            scratch_shapes=[
                *scratch_shapes(T, q.dtype, values.dtype, shape, config),
                *(() if scales is None else scale_scratch_shapes(shape, config)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*q.shape[:2], shape.value_lanes), q.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
        ],
        input_output_aliases={len(prefetched) + len(in_hbm) + len(inputs): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=config.vmem_limit_bytes, disable_bounds_checks=True
        ),
        interpret=static.interpret,
        name="paged_attention_decode",
    )(*prefetched, *in_hbm, *inputs, *pools)


def _kernel(*refs, static: Specialisation, has_sinks: bool, has_scales: bool):
    """refs: the schedule's, inputs, outputs, scratch."""
    sizes, ring, *refs = refs  # of `DecodeSchedule`
    stream, refs = Stream.of(static.config.records(static.shape.block_size), ring, refs)
    q_ref, slabs_ref, *refs = refs  # [T, N, lanes of a key], [T, vectors, Hp]
    sinks_ref = refs.pop(0) if has_sinks else None  # [N, 128]
    scales_ref = refs.pop(1) if has_scales else None  # [P, 2K, C] in HBM
    _, out_ref, pool_ref, *refs = refs  # [T, N, Vp] and [P, C, vectors, Hp] in HBM
    xs = named(ScaleScratch, refs[-len(dataclasses.fields(ScaleScratch)) :]) if has_scales else None
    x = named(Scratch, refs[: len(dataclasses.fields(Scratch))])
    T = q_ref.shape[0]
    moves = Movement(
        stream=dataclasses.replace(stream, fetched=x.scalars, low_bits=LOW_BITS if static.chunked else 1),
        slabs=slabs_ref,
        pool=pool_ref,
        scale_pool=scales_ref,
        scratch=x,
        scales=xs,
        shape=static.shape,
        config=static.config,
        window=static.window,
        chunked=static.chunked,
    )
    stages = Stages(
        q=q_ref,
        sinks=sinks_ref,
        moves=moves,
        scratch=x,
        scales=xs,
        shape=static.shape,
        config=static.config,
        scale=static.scale,
        soft_cap=static.soft_cap,
        interpret=bool(static.interpret),
    )

    @pl.when(sizes[1] < T)
    def _():
        x.outs[...] = jnp.zeros(x.outs.shape, x.outs.dtype)

    pl.when(sizes[0] > 0)(functools.partial(_run, sizes[0], moves, stages))

    result = pltpu.make_async_copy(x.outs.at[pl.ds(0, T)], out_ref, x.stored)
    result.start()

    moves.settle(sizes[1])
    result.wait()


def _run(steps, moves: Movement, stages: Stages):
    """Runs all steps, at least one: each stage works on a step of its own."""

    stream, ahead = moves.stream, stages.config.ahead

    def step(t, _):
        info = stream.info(t)
        moves.arrive(t, info >> 1)
        stream.arrive(t)
        pl.when((info & 1) == 1)(functools.partial(moves.clear, t))
        moves.insert(t)
        stages.softmax(t - 1)
        stages.merge(t - 2)
        stages.score(t, moves.fetch(t + ahead))
        moves.write(t)
        stream.fetch(t + ahead)
        stages.weigh(t - 1)
        return 0

    stream.begin(moves.fetch, ahead)
    number_columns(stages.scratch.columns, stages.shape)
    jax.lax.fori_loop(0, steps, step, 0)
    stages.merge(steps - 2)
    stages.softmax(steps - 1)
    stages.weigh(steps - 1)
    stages.merge(steps - 1)
    stream.end(steps, ahead)
