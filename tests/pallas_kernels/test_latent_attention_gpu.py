"""Hopper's kernel for latents, interpreted with race detection over memory that starts as NaN, against the oracle."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_pool import KV_DTYPES, pool_shape
from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention import GpuConfig, make_schedule, oracle
from pallas_kernels.paged_attention.cases import LATENT_CASES, REAL_CASES, Arguments, Case, make_arguments, make_shapes
from pallas_kernels.paged_attention.gpu import mosaic_gpu as gpu
from pallas_kernels.paged_attention.run_case import choose_config
from pallas_kernels.paged_attention.support import refusals, serving
from pallas_kernels.target import Target
from pallas_kernels.tolerance import TOLERANCE
from tests.fast_compile import FAST_COMPILE
from tests.pallas_kernels.alone import alone_of
from tests.pallas_kernels.gpu_interpreter import fetches, interpreted

H200 = Target.named("gpu:h200")
_on_gpu = functools.partial(dataclasses.replace, dtype="bfloat16", kv_dtype="bfloat16", rope_dim=64)
DECODES = {case.name: _on_gpu(case) for case in LATENT_CASES if case.decode_only and case.kv_dtype != "fp8_e4m3"}
FEW = dataclasses.replace(DECODES["decode_latent"], name="two_rows", rows=((5, 1), (130, 1)), num_tokens=2, num_rows=2)
CASES = (
    FEW,
    *DECODES.values(),
    dataclasses.replace(FEW, name="wide", head_dim=512, block_size=64),
    dataclasses.replace(FEW, name="window_sinks", window=70, has_sinks=True, head_dim=256, rope_dim=32, block_size=32),
    dataclasses.replace(FEW, name="many_heads", num_heads=72),  # in two groups, neither full
    dataclasses.replace(DECODES["decode_latent"], name="many_heads_wide", num_heads=40, head_dim=512),
    dataclasses.replace(DECODES["decode_latent_f32_soft_cap"], name="many_heads_soft_cap", num_heads=64),
    dataclasses.replace(
        FEW, name="many_heads_window", num_heads=40, window=70, has_sinks=True, head_dim=256, rope_dim=32, block_size=32
    ),
)
QUICK = ("two_rows", "many_heads")


def _config(case: Case, a: Arguments, programs: int = 1) -> GpuConfig:
    """The chosen one with splits so short that rows have several, and few programs, which run one after the other."""
    config = choose_config(case, "mosaic_gpu", H200, a.pool)
    assert isinstance(config, GpuConfig)
    decode = dataclasses.replace(config.decode, split=config.decode.tile_kv)
    return dataclasses.replace(config, programs=programs, decode=decode)


def _run(case: Case, a: Arguments, config: GpuConfig, interpret: Any) -> np.ndarray:
    def step(q: Any, k: Any, v: Any, pool: Any, batch: Any, sinks: Any) -> jax.Array:
        schedule: Any = make_schedule(batch, **case.step, config=config, implementation="mosaic_gpu")
        logits = Logits(**case.attention, sinks=sinks)
        return gpu.paged_attention(q, k, v, pool, schedule, logits, interpret=interpret)[0]

    options = FAST_COMPILE if interpret else None
    return np.asarray(jax.jit(step, compiler_options=options)(a.q, a.k, a.v, a.pool, a.batch, a.sinks), np.float64)


def _attend(case: Case, a: Arguments, programs: int = 1) -> np.ndarray:
    with interpreted() as interpret:
        return _run(case, a, _config(case, a, programs), interpret)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_every_decode_equals_the_float64_oracle(case: Case) -> None:
    a = make_arguments(case, implementation="mosaic_gpu")
    np.testing.assert_allclose(_attend(case, a), oracle.of_case(case, a), **TOLERANCE["bfloat16"])


@pytest.mark.gpu
@pytest.mark.parametrize("splits", ["short", "chosen"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_decode_equals_the_float64_oracle_on_a_gpu(case: Case, splits: str) -> None:
    a = make_arguments(case, implementation="mosaic_gpu")
    config = choose_config(case, "mosaic_gpu", H200, a.pool) if splits == "chosen" else _config(case, a, programs=132)
    assert isinstance(config, GpuConfig)
    out = _run(case, a, config, interpret=False)
    np.testing.assert_allclose(out, oracle.of_case(case, a), **TOLERANCE["bfloat16"])


@pytest.mark.slow
def test_a_row_has_the_same_bits_with_other_rows_beside_it_and_on_more_programs() -> None:
    a = make_arguments(FEW, implementation="mosaic_gpu")
    together = _attend(FEW, a, programs=3)
    np.testing.assert_array_equal(_attend(*alone_of(FEW, a, 1))[0], together[1])
