"""Hopper's kernel for latents, interpreted with race detection over memory that starts as NaN, against the oracle."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention import GpuConfig, make_schedule, oracle
from pallas_kernels.paged_attention.cases import LATENT_CASES, REAL_CASES, Arguments, Case, make_arguments, make_shapes
from pallas_kernels.paged_attention.gpu.latent.latent_decode import latent_attention
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
        return latent_attention(q, k, v, pool, schedule, logits, interpret=interpret)[0]

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


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 128])
def test_a_row_on_a_gpu_has_the_same_bits_in_any_company(num_heads: int) -> None:
    rows = ((5, 1), (20_000, 1), (700, 1), (9_000, 1))
    case = dataclasses.replace(DECODES["decode_latent"], rows=rows, num_heads=num_heads, head_dim=512)
    a = make_arguments(case, implementation="mosaic_gpu")
    together = _run(case, a, _config(case, a, programs=132), interpret=False)
    for r, programs in ((0, 2), (1, 6), (3, 130)):
        alone, one = alone_of(case, a, r)
        np.testing.assert_array_equal(_run(alone, one, _config(alone, one, programs), interpret=False)[0], together[r])


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize(("value_dim", "rope_dim", "block_size"), [(512, 64, 16), (512, 64, 256), (128, 32, 32)])
def test_every_transfer_begins_where_shared_memory_takes_one(
    num_heads: int, value_dim: int, rope_dim: int, block_size: int
) -> None:
    """The hardware faults otherwise; the compiler and the interpreter say nothing."""
    case = dataclasses.replace(FEW, num_heads=num_heads, head_dim=value_dim, rope_dim=rope_dim, block_size=block_size)
    a, config = make_shapes(case, "mosaic_gpu"), _config(case, make_shapes(case, "mosaic_gpu"))

    def step(q: Any, k: Any, v: Any, pool: Any, batch: Any) -> Any:
        schedule: Any = make_schedule(batch, **case.step, config=config, implementation="mosaic_gpu")
        return latent_attention(q, k, v, pool, schedule, Logits(scale=1.0))

    found = list(fetches(jax.make_jaxpr(step)(a.q, a.k, a.v, a.pool, a.batch).jaxpr))
    assert found
    assert all(place % wanted == 0 for place, wanted in found), found


def test_published_sizes_fit_shared_memory_and_fill_the_chip() -> None:
    cases = [case for case in REAL_CASES if case.rope_dim is not None and case.decode_only]
    assert len(cases) == 3
    for case in cases:
        config = choose_config(case, "mosaic_gpu", H200, make_shapes(case, "mosaic_gpu").pool)
        assert isinstance(config, GpuConfig) and config.prefill is None
        assert config.decode.smem_bytes <= (H200.smem_bytes or 0)
        groups = -(-case.num_heads // config.decode.loaded)
        items = 64 * groups * -(-4096 // (config.decode.split or 1))  # 64 rows of 4,096 tokens
        assert items / (-(-items // config.programs) * config.programs) > 0.95


def test_what_the_kernel_has_not_is_said_with_what_to_take() -> None:
    latent = {"target": H200, "is_latent": True, "block_size": None}
    for lora_rank, rope_dim in ((512, 64), (256, 64), (128, 32)):
        assert not refusals("mosaic_gpu", **latent, head_dim=lora_rank, v_head_dim=rope_dim, kv_dtype="bfloat16")
    reasons = refusals("mosaic_gpu", **latent, head_dim=1024, v_head_dim=64, kv_dtype="fp8_e4m3")
    for reason, told in zip(reasons, ("kv_lora_rank is 1024", "latents in 'bfloat16'"), strict=True):
        assert told in reason and "'xla'" in reason
    case = dataclasses.replace(FEW, decode_only=False)
    with pytest.raises(ValueError, match="rows have several queries, and the cache latents; take implementation 'xla'"):
        choose_config(case, "mosaic_gpu", H200, make_shapes(case, "mosaic_gpu").pool)


def test_steps_that_mix_and_those_that_choose_keys_are_xla_s() -> None:
    latent = {"is_latent": True, "index_dim": 128}
    assert serving("mosaic_gpu", **latent, decode_only=True) == "mosaic_gpu"
    assert serving("mosaic_gpu", **latent, decode_only=True, sinks=True) == "mosaic_gpu"
    assert serving("mosaic_gpu", **latent, decode_only=True, chooses=True) == "xla"
    assert serving("mosaic_gpu", **latent, decode_only=False) == "xla"
    assert serving("mosaic_gpu", is_latent=False, decode_only=False) == "mosaic_gpu"
