"""The launches whose ceilings are counted, and the work of each: a kernel more is an entry more.

Every case of paged attention in sizes that models have, two that were measured on an H200, products with weights in a
form, and two of jax's own kernels to hold the ruler against.
"""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

from scripts import gpu_static  # isort: skip  # before jax: it sets what the compilers read

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention_mgpu, hopper_matmul_mgpu

from pallas_kernels.kv_pool import KV_DTYPES
from pallas_kernels.paged_attention.cases import Case, Work
from pallas_kernels.paged_attention.gpu.ceilings import MULTIPROCESSORS
from pallas_kernels.paged_attention.gpu.config import LANES, Divided, Form
from scripts.gpu_launch import Launch, Part
from scripts.gpu_product_launches import product_launches
from scripts.gpu_static import Compiled
from scripts.hopper_cases import gpu_cases

MEASURED_CASES = (
    Case(
        name="llama_8b_decode_4k",
        rows=((4095, 1),) * 64,
        num_tokens=64,
        num_rows=64,
        num_heads=32,
        num_kv_heads=8,
        decode_only=True,
    ),
    Case(name="llama_8b_prefill_4k", rows=((0, 4096),), num_tokens=4096, num_rows=1, num_heads=32, num_kv_heads=8),
)

_MEASURED_US = {"llama_8b_decode_4k": 294, "llama_8b_prefill_4k": 489.6}


def launches() -> list[Launch]:
    """All of them."""
    attention = map(_attention, [*gpu_cases(), *MEASURED_CASES])
    return [*attention, *product_launches(), _jax_attention(), _jax_matmul()]


def _attention(case: Case) -> Launch:
    """Paged attention: decoding rows, and where there may be others, those."""
    config = gpu_static.config_of(case)
    parts = [_decode(case, config.decode)]
    if config.prefill is not None:
        parts.append(_prefill(case, config.prefill))
    return Launch(
        name=case.name,
        compile=functools.partial(gpu_static.compile_case, case),
        parts=tuple(parts),
        has_roles=KV_DTYPES[case.kv_dtype].itemsize == 1,  # converting K and V
        measured_us=_MEASURED_US.get(case.name),
    )


def _decode(case: Case, form: Form) -> Part:
    """Every token of a KV head is multiplied by the queries of its heads."""
    work = _work(case, tuple(row for row in case.rows if row[1] == 1))
    group = case.num_heads // case.num_kv_heads
    return Part(
        name="decode",
        consumers=form.consumers,
        operations=work.flops * _multiplied(case, form) / (case.key_dim + case.value_dim),
        lanes=group,
        fetched_bytes=work.kv_bytes,
        hbm_bytes=work.kv_bytes,
    )


def _prefill(case: Case, form: Form) -> Part:
    """Each tile of queries fetches the tokens that its queries see; HBM gives K and V once and the queries."""
    rows = tuple(row for row in case.rows if row[1] > 1)
    work = _work(case, rows)
    width = case.key_dim + case.value_dim
    tokens = work.flops / (2 * case.num_heads * width) * case.num_kv_heads / form.tile_q  # of all tiles and KV heads
    per_token = work.kv_bytes / max(1, work.kv_tokens) / case.num_kv_heads
    queries = sum(count for _, count in rows) * case.num_heads * width * 2
    return Part(
        name="prefill",
        consumers=form.consumers,
        operations=2 * tokens * form.lane_groups * LANES * _multiplied(case, form),
        fetched_bytes=tokens * per_token,
        hbm_bytes=work.kv_bytes + queries,
    )


def _multiplied(case: Case, form: Form) -> int:
    """Lanes of a token that each query is multiplied with; where consumers divide V, each has the scores for itself."""
    return case.value_dim + case.key_dim * (form.consumers if form.divided is Divided.VALUES else 1)


def _work(case: Case, rows: tuple[tuple[int, int], ...]) -> Work:
    """The work of these rows of the case."""
    if not rows:
        return Work(kv_tokens=0, flops=0, kv_bytes=0)
    return Work.of(dataclasses.replace(case, rows=rows), "mosaic_gpu")


def _jax_attention() -> Launch:
    """jax's own attention: 32 heads, 4,096 tokens, and every token sees all the others."""
    S, N, H, tile_q = 4096, 32, 128, 128
    config = attention_mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2)
    operand = jax.ShapeDtypeStruct((1, S, N, H), jnp.float16)

    def compiled() -> Compiled:
        with mock.patch.object(attention_mgpu, "cuda_versions"):  # it asks a CUDA that is not here for its version
            return gpu_static.compile_for_h200(lambda *a: attention_mgpu.attention(*a, config), *[operand] * 3)

    each = S * N * H * 2
    part = Part(
        name="attention",
        consumers=2,
        operations=4 * N * S * S * H,
        fetched_bytes=2 * each * S / tile_q,
        hbm_bytes=4 * each,
    )
    return Launch(name="jax_attention_4k", compile=compiled, parts=(part,))


def _jax_matmul() -> Launch:
    """jax's own product of matrices of 8,192 by 8,192, in tiles of 128 by 256, half of one for each consumer."""
    size = 8192
    config = hopper_matmul_mgpu.TuningConfig(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4)
    operand = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)

    def compiled() -> Compiled:
        with mock.patch.object(hopper_matmul_mgpu, "get_num_sms", lambda: MULTIPROCESSORS):
            return gpu_static.compile_for_h200(
                lambda a, b: hopper_matmul_mgpu.matmul(a, b, None, config), *[operand] * 2
            )

    each = size * size * 2
    part = Part(
        name="matmul",
        consumers=2,
        operations=2 * size**3,
        fetched_bytes=each * (size / 256 + size / 128),
        hbm_bytes=3 * each,
    )
    return Launch(name="jax_matmul_8192", compile=compiled, parts=(part,))
