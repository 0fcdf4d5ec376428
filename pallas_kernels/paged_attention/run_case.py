"""Running a case with an implementation: what the check of a device and the check at an engine's start have in common.

Sizes that models have are made on the device, and the oracle computes some of their tokens; the small cases of the
tests are made on the host, with NaN in everything that no row owns, and the oracle computes them whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_pool import KV_DTYPES, as_bits, encode, pack, pool_shape
from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention import (
    AttentionConfig,
    GpuConfig,
    LatentConfig,
    TpuConfig,
    make_schedule,
    oracle,
    paged_attention,
)
from pallas_kernels.paged_attention.cases import Arguments, Case, make_arguments, make_batch
from pallas_kernels.paged_attention.tpu.prefill.config import PrefillConfig
from pallas_kernels.target import Target

Config = AttentionConfig | TpuConfig | LatentConfig | GpuConfig
Tiled = TypeVar("Tiled", bound=TpuConfig | LatentConfig)
Attend = Callable[[], jax.Array]  # starts one call and returns its result, [T, N, H]
_TINY_PREFILL = PrefillConfig(tile_q=16, chunk_q=16, part_q=16, tile_kv=128, step_kv=128)


def choose_config(case: Case, implementation: str, target: Target, pool: Any) -> Config:
    """The tiles that an engine's step of these shapes would have. pool: in the implementation's form, or its shapes."""
    if implementation == "mosaic_tpu" and pool.is_latent:
        return LatentConfig.choose(
            num_rows=case.num_rows,
            max_blocks=case.max_blocks,
            num_heads=case.num_heads,
            dtype=jnp.dtype(case.dtype),
            pool=pool,
            target=target,
            mixed_tokens=None if case.decode_only else case.num_tokens,
        )
    if implementation == "mosaic_tpu":
        return TpuConfig.choose(
            num_tokens=case.num_tokens,
            num_rows=case.num_rows,
            max_blocks=case.max_blocks,
            num_heads=case.num_heads,
            dtype=jnp.dtype(case.dtype),
            pool=pool,
            decode_only=case.decode_only,
            target=target,
        )
    if implementation == "mosaic_gpu":
        return GpuConfig.choose(
            num_heads=case.num_heads,
            pool=pool,
            decode_only=case.decode_only,
            target=target,
            dtype=jnp.dtype(case.dtype),
        )
    return AttentionConfig.choose(
        num_tokens=case.num_tokens,
        block_size=case.block_size,
        decode_only=case.decode_only,
        invariant=case.invariant,
        gpu_heads=(case.num_heads, pool) if target.platform == "gpu" else None,
    )


def smallest_tiles(config: Tiled, block_size: int) -> Tiled:
    """The config with tiles as small as they can be, for each operation costs the interpreter milliseconds."""
    if isinstance(config, LatentConfig):
        tile = max(128, block_size)
        decode = dataclasses.replace(config.decode, tile_kv=tile, items=1, chunk=tile)
        several = config.several and smallest_tiles(config.several, block_size)
        tile_q = min(config.tile_q, 4)
        return dataclasses.replace(config, decode=decode, several=several, tile_q=tile_q)
    decode = dataclasses.replace(config.decode, tile_kv=max(256 // config.shape.words, block_size), items=1, chunk=128)
    tiny = dataclasses.replace(_TINY_PREFILL, tile_kv=max(128, block_size), step_kv=max(128, block_size))
    return dataclasses.replace(config, decode=decode, prefill=None if config.prefill is None else tiny)


def make_attend(
    case: Case,
    arguments: Arguments,
    config: Config,
    implementation: str,
    *,
    interpret: Any = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> Attend:
    """One layer's attention, compiled by the first call; the schedule is made once, the pool goes from call to call.

    interpret: of "mosaic_tpu", pltpu.InterpretParams. The arguments' pool is copied first.
    """
    a = arguments
    options: dict[str, Any] = None if compiler_options is None else dict(compiler_options)  # pyright: ignore
    step_of_batch = jax.jit(
        lambda batch: make_schedule(batch, **case.step, config=config, implementation=implementation),
        compiler_options=options,
    )
    schedule, pool = step_of_batch(a.batch), jax.tree.map(jnp.copy, a.pool)

    def layer(q: Any, k: Any, v: Any, pool: Any, schedule: Any, sinks: Any) -> Any:
        how: dict[str, Any] = case.attention | {"sinks": sinks}
        if interpret:
            # Pallas, which no others should wait for
            from pallas_kernels.paged_attention.tpu import mosaic_tpu as tpu
            from pallas_kernels.paged_attention.tpu.latent.kernel import latent_attention

            if pool.is_latent:
                return latent_attention(q, k, v, pool, schedule, Logits(**how), interpret=interpret)
            return tpu.paged_attention(q, k, v, pool, schedule, Logits(**how), interpret=interpret)
        return paged_attention(q, k, v, pool, schedule, **how, implementation=implementation)

    run = jax.jit(layer, donate_argnums=(3,), compiler_options=options)

    def attend() -> jax.Array:
        nonlocal pool
        out, pool = run(a.q, a.k, a.v, pool, schedule, a.sinks)
        return out

    return attend


def make_inputs(case: Case, implementation: str) -> Arguments:
    """The case's arguments: equal numbers for every implementation, in the form that it reads."""
    return make_arguments(case, implementation=implementation) if case.tiny else _make_on_device(case, implementation)


def _make_on_device(case: Case, implementation: str) -> Arguments:
    """Random numbers; the blocks of a row lie anywhere, and block 0 is nobody's."""
    widths = [-(-(start + count) // case.block_size) for start, count in case.rows]
    ids = 1 + np.random.default_rng(0).permutation(sum(widths))
    tables = np.zeros((case.num_rows, case.max_blocks), np.int32)
    for r, end in enumerate(np.cumsum(widths)):
        tables[r, : widths[r]] = ids[end - widths[r] : end]
    form = pool_shape(
        num_blocks=len(ids) + 1,
        block_size=case.block_size,
        num_kv_heads=case.num_kv_heads,
        **case.kept,
        dtype=KV_DTYPES[case.kv_dtype],
        implementation=implementation,
    )
    keys = jax.random.split(jax.random.key(0), 5)

    @jax.jit
    def make(key: jax.Array) -> tuple[jax.Array, Any]:
        if form.is_latent:
            return as_bits(encode(jax.random.normal(key, form.values.shape, jnp.bfloat16), form.dtype)[0], form), None
        shape = (form.values.shape[0], case.block_size, 2 * case.num_kv_heads, case.head_dim)
        values, scales = encode(jax.random.normal(key, shape, jnp.bfloat16), form.dtype)
        if form.is_packed:
            values = pack(values[:, :, 0::2], values[:, :, 1::2, : case.value_dim], form)
        else:
            values = jnp.pad(values, ((0, 0), (0, 0), (0, 0), (0, form.values.shape[3] - case.head_dim)))
        return as_bits(values, form), None if scales is None else scales.transpose(0, 2, 1)

    values, scales = make(keys[0])
    heads = (case.num_tokens, case.num_kv_heads)
    return Arguments(
        q=jax.random.normal(keys[1], (case.num_tokens, case.num_heads, case.key_dim), case.dtype),
        k=jax.random.normal(keys[2], (*heads, case.head_dim), case.dtype),
        v=jax.random.normal(keys[3], (*heads, case.kept["v_head_dim"]), case.dtype),
        pool=dataclasses.replace(form, values=values, scales=scales),
        batch=make_batch(case, tables),
        sinks=jax.random.normal(keys[4], (case.num_heads,)) if case.has_sinks else None,
    )


def judged_tokens(case: Case) -> list[int]:
    """The tokens that the oracle computes: all real ones of a small case, else the first, a middle and the last."""
    num_real = sum(count for _, count in case.rows)
    return list(range(num_real)) if case.tiny else sorted({0, num_real // 2, num_real - 1})


def expected(case: Case, logical: Arguments, tokens: Sequence[int]) -> np.ndarray:  # [len(tokens), N, H] float64
    """The oracle's result for these tokens. logical: of `make_inputs` for "xla"."""
    if case.tiny:
        return oracle.of_case(case, logical)[list(tokens)]
    ends = np.cumsum([count for _, count in case.rows])
    found = []
    for token in tokens:
        row = int(np.searchsorted(ends, token, side="right"))
        found.append(_of_one_query(case, logical, row, int(token - (ends[row] - case.rows[row][1]))))
    return np.stack(found)


def _of_one_query(case: Case, logical: Arguments, row: int, query: int) -> np.ndarray:
    """The result of a row's query, from the row's own blocks."""
    (start, count), C = case.rows[row], case.block_size
    first = sum(n for _, n in case.rows[:row])
    blocks = logical.batch.block_tables[row, : -(-(start + count) // C)]
    own = jax.tree.map(lambda array: array[blocks], logical.pool)
    q, k, v = (np.asarray(x[first : first + count]) for x in (logical.q, logical.k, logical.v))
    return oracle.paged_attention(
        q,
        *oracle.of_heads(case, k, v, own),
        np.arange(len(blocks))[None],
        np.array([start]),
        np.array([count]),
        **case.attention,
        window=case.window,
        chunked=case.chunked,
        sinks=None if logical.sinks is None else np.asarray(logical.sinks),
        causal=case.causal,
        seen_ends=None if case.seen_ends is None else case.seen_ends[first : first + count],
        queries=[query],
    )[query][:, : case.value_dim]
