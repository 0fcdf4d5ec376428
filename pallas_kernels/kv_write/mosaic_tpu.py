"""kv_write for Mosaic TPU: transfers within HBM, one for each run of neighbouring tokens of a block.

A step's runs (`runs.py`) are found once and shared by its layers. Scales of int8 stand with tokens
side by side, so that a block's scales are read, changed and written back, a few blocks at a time.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_pool import KVPool, encode, pack
from pallas_kernels.kv_write.runs import GROUP, Runs

_LANES = 128
_FRONT = 256  # lanes before the first token's scale: a block's first place may be so far before its run


def kv_write(pool: KVPool, k: jax.Array, v: jax.Array, runs: Runs, *, interpret: Any = False) -> KVPool:
    """The pool with k, [T, K, H], and v, [T, K, V], written where the runs say; in place where it is donated."""
    vectors, scales = encode_tokens(pool, k, v)
    pool = write_vectors(pool, vectors, runs, interpret=interpret)
    return pool if scales is None else write_scales(pool, scales, runs, interpret=interpret)


def write_vectors(pool: KVPool, vectors: jax.Array, runs: Runs, *, interpret: Any = False) -> KVPool:
    """The pool with vectors of `encode_tokens` written where the runs say."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    scalars = (runs.num_runs, runs.tokens, runs.blocks, runs.offsets, runs.lengths)  # in the order of _RunRefs
    values = pl.pallas_call(
        _write_values,
        out_shape=jax.ShapeDtypeStruct(pool.values.shape, pool.values.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=pltpu.CompilerParams(has_side_effects=True, disable_bounds_checks=True),
        interpret=interpret,
        name="kv_write",
    )(*scalars, vectors, pool.values)
    return dataclasses.replace(pool, values=values)


def encode_tokens(pool: KVPool, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """A token's vectors, [T, vectors, lanes], and scales, [T, 2K], as the pool keeps them."""
    (T, K, H), lanes = k.shape, pool.values.shape[3]
    if v.shape[2] != H:
        (k, k_scales), (v, v_scales) = encode(k, pool.dtype), encode(v, pool.dtype)
        values = pack(k, v, pool)
        scales = None if k_scales is None or v_scales is None else jnp.stack([k_scales, v_scales], axis=2)
    else:
        values, scales = encode(jnp.stack([k, v], axis=2), pool.dtype)  # [T, K, 2, H], [T, K, 2]
        if not pool.is_packed:
            values = jnp.pad(values, ((0, 0), (0, 0), (0, 0), (0, lanes - H)))
    return values.reshape(T, -1, lanes), None if scales is None else scales.reshape(T, 2 * K)


class _RunRefs(NamedTuple):
    """The prefetched arrays of `Runs`; slots: of the kernel of scales alone."""

    num_runs: Any
    tokens: Any
    blocks: Any
    offsets: Any
    lengths: Any
    slots: Any = None


def _write_values(*refs) -> None:
    """All transfers are under way before the first is waited for."""
    runs = _RunRefs(*refs[:5])
    vectors, _, pool, semaphore = refs[5:]  # [T, vectors, lanes]; the pool's values in and out, in HBM

    def copy(run):
        length = runs.lengths[run]
        there = pool.at[runs.blocks[run], pl.ds(runs.offsets[run], length)]
        return pltpu.make_async_copy(vectors.at[pl.ds(runs.tokens[run], length)], there, semaphore)

    @pl.loop(0, runs.num_runs[0])
    def _(run):
        copy(run).start()

    @pl.loop(0, runs.num_runs[0])
    def _(run):
        copy(run).wait()


def write_scales(pool: KVPool, scales: jax.Array, runs: Runs, *, interpret: Any = False) -> KVPool:
    """The pool with scales of `encode_tokens` written where the runs say."""
    _, pairs, C = pool.scales.shape
    T = scales.shape[0]
    back = -T % _LANES + 2 * _LANES
    in_lanes = jnp.pad(scales.T, ((0, 0), (_FRONT, back)))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    scalars = (runs.num_runs, runs.tokens, runs.blocks, runs.offsets, runs.lengths, runs.slots)
    written = pl.pallas_call(
        _write_scales,
        out_shape=jax.ShapeDtypeStruct(pool.scales.shape, pool.scales.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM), anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.VMEM((GROUP, pairs, C), jnp.float32), pltpu.SemaphoreType.DMA(())],
        ),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=pltpu.CompilerParams(has_side_effects=True, disable_bounds_checks=True),
        interpret=interpret,
        name="kv_write_scales",
    )(*scalars, in_lanes, pool.scales)
    return dataclasses.replace(pool, scales=written)


def _write_scales(*refs) -> None:
    """Groups one after the other; runs of one block in a group change one copy of it."""
    runs = _RunRefs(*refs[:6])
    scales, _, pool, buffer, semaphore = refs[6:]  # [2K, lanes] in VMEM; the pool's in and out, in HBM; scratch
    C = buffer.shape[2]

    @pl.loop(0, pl.cdiv(runs.num_runs[0], GROUP))
    def _(group):
        def for_runs(act) -> None:
            @pl.loop(0, jnp.minimum(runs.num_runs[0] - group * GROUP, GROUP))
            def _(i):
                act(i, group * GROUP + i)

        def for_blocks(act) -> None:
            for_runs(lambda i, run: pl.when(runs.slots[run] == i)(lambda: act(i, run)))

        def read(i, run):
            return pltpu.make_async_copy(pool.at[runs.blocks[run]], buffer.at[i], semaphore)

        def write(i, run):
            return pltpu.make_async_copy(buffer.at[i], pool.at[runs.blocks[run]], semaphore)

        def change(i, run) -> None:
            slot, offset = runs.slots[run], runs.offsets[run]
            for first in range(0, C, _LANES):
                lanes = min(_LANES, C - first)
                there = buffer.at[slot, :, pl.ds(first, lanes)]
                place = first + jax.lax.broadcasted_iota(jnp.int32, there.shape, 1)
                is_new = (place >= offset) & (place < offset + runs.lengths[run])
                moved = _shifted(scales, _FRONT + runs.tokens[run] - offset + first)
                there[...] = jnp.where(is_new, moved[:, :lanes], there[...])

        for_blocks(lambda i, run: read(i, run).start())
        for_blocks(lambda i, run: read(i, run).wait())
        for_runs(change)
        for_blocks(lambda i, run: write(i, run).start())
        for_blocks(lambda i, run: write(i, run).wait())


def _shifted(ref, first) -> jax.Array:  # [2K, 128]
    """Lanes first .. first + 127 of the ref; lanes can be loaded from multiples of 128 only."""
    base, lead = first // _LANES * _LANES, first % _LANES
    near, far = (
        pltpu.roll(ref[:, pl.ds(pl.multiple_of(base + step, _LANES), _LANES)], (_LANES - lead) % _LANES, 1)
        for step in (0, _LANES)
    )
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, near.shape, 1) < _LANES - lead, near, far)
