"""Attention for Hopper, of latents too, interpreted with race detection over memory that starts as NaN."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_pool import KV_DTYPES, KVPool, pool_shape
from pallas_kernels.kv_write import kv_write
from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention import GpuConfig, GpuSchedule, RaggedBatch, make_schedule, oracle
from pallas_kernels.paged_attention import cases as paged
from pallas_kernels.paged_attention.gpu import mosaic_gpu as gpu
from pallas_kernels.paged_attention.gpu.config import HEAD_DIMS
from pallas_kernels.paged_attention.gpu.latent.latent_decode import latent_attention
from pallas_kernels.paged_attention.gpu.schedule import Field, WorkItems
from pallas_kernels.paged_attention.run_case import choose_config
from pallas_kernels.paged_attention.support import refusals, serving
from pallas_kernels.target import Target
from pallas_kernels.tolerance import TOLERANCE
from tests.fast_compile import FAST_COMPILE
from tests.marks import few
from tests.pallas_kernels.alone import alone_of
from tests.pallas_kernels.gpu_interpreter import fetches, interpreted
from tests.rows import rows_beside

ROWS = rows_beside(__file__)
H200 = Target.named("gpu:h200")


def _on_gpu(case: paged.Case) -> paged.Case:
    """The case in the dtypes that the matrix unit has, and H = 128 where the kernels have no such H."""
    kv_dtype = "bfloat16" if case.kv_dtype == "float32" else case.kv_dtype
    case = dataclasses.replace(case, dtype="bfloat16", kv_dtype=kv_dtype)
    if case.head_dim in HEAD_DIMS:
        return case
    return dataclasses.replace(case, name=case.name.replace(f"h{case.head_dim}_", ""), head_dim=128)


_STAGES = paged.Case(name="prefill_of_several_stages", rows=((300, 20), (260, 1), (0, 200)), num_tokens=256, num_rows=4)
_ONE_QUERY = paged.Case(
    name="prefill_of_one_query_a_tile",
    rows=((40, 5), (3, 1), (0, 3)),
    num_tokens=16,
    num_rows=4,
    num_heads=40,
    num_kv_heads=1,
    head_dim=512,
)
_OTHERS = (
    dataclasses.replace(_STAGES, tiny=True),
    _ONE_QUERY,
    *paged.SPAN_CASES,
    *paged.CHUNKED_CASES,
    *paged.WIDE_HEAD_CASES,
)
_of_latents = functools.partial(dataclasses.replace, dtype="bfloat16", kv_dtype="bfloat16", rope_dim=64)
_LATENTS = {
    case.name: _of_latents(case) for case in paged.LATENT_CASES if case.decode_only and case.kv_dtype != "fp8_e4m3"
}
FEW = dataclasses.replace(_LATENTS["decode_latent"], name="two_rows", rows=((5, 1), (130, 1)), num_tokens=2, num_rows=2)
_WINDOW: Any = {"window": 70, "has_sinks": True, "head_dim": 256, "rope_dim": 32, "block_size": 32}
LATENTS = (
    FEW,
    *_LATENTS.values(),
    dataclasses.replace(FEW, name="wide", head_dim=512, block_size=64),
    dataclasses.replace(FEW, name="window_sinks", **_WINDOW),
    dataclasses.replace(FEW, name="many_heads", num_heads=72),  # in two groups, neither full
    dataclasses.replace(_LATENTS["decode_latent"], name="many_heads_wide", num_heads=40, head_dim=512),
    dataclasses.replace(_LATENTS["decode_latent_f32_soft_cap"], name="many_heads_soft_cap", num_heads=64),
    dataclasses.replace(FEW, name="many_heads_window", num_heads=40, **_WINDOW),
)
ATTENTION = [_on_gpu(case) for case in (*paged.TINY_CASES, *_OTHERS)]
CASES = [*ATTENTION, *LATENTS]
BY_NAME = {case.name: case for case in CASES}
QUICK = ("decode_gqa", "two_rows", "many_heads")
# Each feature in one of them at least.
SLOW = [
    *ROWS["slow"],
    *(case.name for case in (*paged.WIDE_HEAD_CASES, *LATENTS)),
]
QUICK_SCHEDULES = ROWS["quick schedules"]


def _config(case: paged.Case, arguments: paged.Arguments, programs: int = 1, split: int | None = None) -> GpuConfig:
    """The chosen one with splits so short that rows have several, and few programs, which run one after the other."""
    config = choose_config(case, "mosaic_gpu", H200, arguments.pool)
    assert isinstance(config, GpuConfig)
    split = split or (config.decode.tile_kv if case.rope_dim else 64)
    return dataclasses.replace(config, programs=programs, decode=dataclasses.replace(config.decode, split=split))


def _make_schedule(case: paged.Case, batch: RaggedBatch, config: GpuConfig) -> GpuSchedule:
    schedule = make_schedule(batch, **case.step, config=config, implementation="mosaic_gpu")
    assert isinstance(schedule, GpuSchedule)
    return schedule


def _schedule(case: paged.Case, batch: RaggedBatch, config: GpuConfig) -> GpuSchedule:
    return jax.jit(lambda batch: _make_schedule(case, batch, config), compiler_options=FAST_COMPILE)(batch)


def _attend(case: paged.Case, arguments: paged.Arguments, programs: int = 1, split: int | None = None) -> np.ndarray:
    with interpreted() as interpret:
        return _run(case, arguments, _config(case, arguments, programs, split), interpret)


def _run(case: paged.Case, arguments: paged.Arguments, config: GpuConfig, interpret: Any) -> np.ndarray:
    def attend(q, k, v, pool, schedule, sinks) -> tuple[jax.Array, KVPool]:
        logits = Logits(**case.attention, sinks=sinks)
        kernel = latent_attention if case.rope_dim else gpu.paged_attention
        return kernel(q, k, v, pool, schedule, logits, interpret=interpret)

    a, options = arguments, FAST_COMPILE if interpret else None
    schedule = _schedule(case, a.batch, config)
    out, pool = jax.jit(attend, compiler_options=options)(a.q, a.k, a.v, a.pool, schedule, a.sinks)
    write = jax.jit(functools.partial(kv_write, implementation="mosaic_gpu"), compiler_options=options)
    written = write(a.pool, a.k, a.v, schedule.write_blocks, schedule.write_offsets)
    for kept, expected in zip(jax.tree.leaves(pool), jax.tree.leaves(written), strict=True):  # block 0 may be anything
        assert np.asarray(kept)[1:].tobytes() == np.asarray(expected)[1:].tobytes()
    return np.asarray(out, np.float64)


def _expected(case: paged.Case) -> np.ndarray:
    return oracle.of_case(case, paged.make_arguments(case))


def _cases(cases: list[paged.Case], quick: tuple[str, ...]) -> Any:
    """All of them; those that are not quick are slow, most of them long."""
    slow = {c.name: [pytest.mark.slow, *([] if c.name in SLOW else [pytest.mark.long])] for c in cases}
    marked = [pytest.param(c, id=c.name, marks=[] if c.name in quick else slow[c.name]) for c in cases]
    return pytest.mark.parametrize("case", marked)


@_cases(CASES, QUICK)
def test_every_case_equals_the_float64_oracle(case: paged.Case) -> None:
    out = _attend(case, paged.make_arguments(case, implementation="mosaic_gpu"))
    np.testing.assert_allclose(out, _expected(case), **TOLERANCE["bfloat16"])


@pytest.mark.gpu
@pytest.mark.parametrize("splits", ["short", "chosen"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_equals_the_float64_oracle_on_a_gpu(case: paged.Case, splits: str) -> None:
    a = paged.make_arguments(case, implementation="mosaic_gpu")
    config = _config(case, a, Target.of_device(jax.devices()[0]).num_cores or 1, 1024 if splits == "chosen" else None)
    out = _run(case, a, config, interpret=False)
    np.testing.assert_allclose(out, _expected(case), **TOLERANCE["bfloat16"])


@pytest.mark.gpu
def test_a_long_context_on_a_gpu_equals_the_float64_oracle() -> None:
    rows = ((40_000, 1), (3, 1), (5000, 300))
    case = paged.Case(name="long", rows=rows, num_tokens=512, num_rows=4, num_heads=8, num_kv_heads=2)
    a = paged.make_arguments(case, implementation="mosaic_gpu")
    config = GpuConfig.choose(num_heads=8, pool=a.pool, decode_only=False, target=H200, dtype=jnp.dtype("bfloat16"))
    np.testing.assert_allclose(_run(case, a, config, interpret=False), _expected(case), **TOLERANCE["bfloat16"])


@pytest.mark.parametrize("name", few(["decode_gqa", "mixed_h96_window_sinks"]))
def test_a_context_of_one_split_is_merged_with_its_sink_alone(name: str) -> None:
    a = paged.make_arguments(case := BY_NAME[name], implementation="mosaic_gpu")
    np.testing.assert_allclose(_attend(case, a, split=1024), _expected(case), **TOLERANCE["bfloat16"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode_int8", "decode_fp8_e4m3_window", "decode_h512"])
def test_consumers_that_share_the_tiles_of_a_split_equal_the_float64_oracle(name: str) -> None:
    """An odd and an even number of tiles, and one, which leaves a consumer without any; stages are used again."""
    rows = ((5, 1), (700, 1), (130, 1), (64, 1))
    case = dataclasses.replace(BY_NAME[name], rows=rows, window=BY_NAME[name].window and 200)
    a = paged.make_arguments(case, implementation="mosaic_gpu")
    np.testing.assert_allclose(_attend(case, a, split=512), _expected(case), **TOLERANCE["bfloat16"])


@pytest.mark.slow
@pytest.mark.parametrize("case", [BY_NAME["decode_gqa"], FEW], ids=["attention", "latents"])
def test_a_row_has_the_same_bits_with_other_rows_beside_it_and_on_more_programs(case: paged.Case) -> None:
    a = paged.make_arguments(case, implementation="mosaic_gpu")
    together = _attend(case, a, programs=3)
    np.testing.assert_array_equal(_attend(*alone_of(case, a, 1))[0], together[1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("decode_gqa", {}), *(("decode_latent", {"num_heads": heads, "head_dim": 512}) for heads in (16, 128))],
)
def test_a_row_on_a_gpu_has_the_same_bits_in_any_company(name: str, sizes: dict[str, int]) -> None:
    rows = ((5, 1), (20_000, 1), (700, 1), (9_000, 1))
    case = dataclasses.replace(BY_NAME[name], rows=rows, **sizes)
    a = paged.make_arguments(case, implementation="mosaic_gpu")
    together = _run(case, a, _config(case, a, programs=132), interpret=False)
    for r, programs in ((0, 2), (1, 7), (3, 131)):
        alone, one = alone_of(case, a, r)
        np.testing.assert_array_equal(_run(alone, one, _config(alone, one, programs), interpret=False)[0], together[r])


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *(
            ("mixed_gqa", {"head_dim": head_dim, "block_size": block_size, "kv_dtype": kv_dtype})
            for head_dim, block_size in ((96, 16), (128, 16), (64, 256), (512, 16))
            for kv_dtype in ("bfloat16", "int8", "fp8_e5m2")
        ),
        *(
            ("two_rows", {"num_heads": heads, "head_dim": head_dim, "rope_dim": rope_dim, "block_size": block_size})
            for head_dim, rope_dim, block_size in ((512, 64, 16), (512, 64, 256), (128, 32, 32))
            for heads in (16, 128)
        ),
    ],
    ids=str,
)
def test_every_transfer_begins_where_shared_memory_takes_one(name: str, sizes: dict[str, Any]) -> None:
    """The hardware faults otherwise; the compiler and the interpreter say nothing."""
    case = dataclasses.replace(BY_NAME[name], **sizes)
    a = paged.make_shapes(case, "mosaic_gpu")
    schedule = jax.eval_shape(lambda batch: _make_schedule(case, batch, _config(case, a)), a.batch)
    kernel = latent_attention if case.rope_dim else gpu.paged_attention
    attend = functools.partial(kernel, logits=Logits(scale=1.0))
    found = list(fetches(jax.make_jaxpr(attend)(a.q, a.k, a.v, a.pool, schedule).jaxpr))
    assert len(found) > (0 if case.rope_dim else 4)
    assert all(place % wanted == 0 for place, wanted in found), found


@_cases(ATTENTION, QUICK_SCHEDULES)
def test_each_token_attends_to_each_visible_position_in_one_item_and_no_item_is_idle(case: paged.Case) -> None:
    a = paged.make_arguments(case, implementation="mosaic_gpu")
    schedule = _schedule(case, a.batch, config := _config(case, a))
    seen: dict[int, list[int]] = {t: [] for t in range(sum(count for _, count in case.rows))}
    for work, form in ((schedule.decode, config.decode), (schedule.prefill, config.prefill)):
        for token, item in _served(work):
            assert form is not None
            tile_kv, row, tiles = form.tile_kv, item[Field.ROW], range(item[Field.FIRST_KV], item[Field.END_KV])
            assert len(tiles) > 0
            position = case.rows[row][0] + token - sum(count for _, count in case.rows[:row])
            seen[token] += [p for p in _visible(case, row, position) if p // tile_kv in tiles]
    offset = 0
    for row, (start, count) in enumerate(case.rows):
        for i in range(count):
            assert seen[offset + i] == list(_visible(case, row, start + i))
        offset += count


def _served(work: WorkItems | None) -> list[tuple[int, np.ndarray]]:
    """Tokens of this kernel, each with each of its items."""
    if work is None:
        return []
    items, tiles, is_mine = (np.asarray(x) for x in (work.items, work.tiles, work.is_mine))
    assert work.num_items[0] <= len(items)
    items = items[: int(work.num_items[0])]
    return [(int(t), item) for t in np.flatnonzero(is_mine) for item in items if item[Field.TILE] == tiles[t]]


def _visible(case: paged.Case, row: int, position: int) -> range:
    ends = [end for r, first, end in case.spans if r == row and first <= position < end]
    return range(case.oldest(position), max([position + 1, *ends]) if case.causal else sum(case.rows[row]))


def test_one_long_row_and_many_short_ones_both_fill_the_chip() -> None:
    for rows, context in ((1, 128 * 1024), (256, 1024)):
        pool = _pool(num_kv_heads=8)
        config = GpuConfig.choose(num_heads=32, pool=pool, decode_only=True, target=H200, dtype=jnp.bfloat16)
        case = paged.Case(name="", rows=((context - 1, 1),) * rows, num_tokens=rows, num_rows=rows, decode_only=True)
        batch = paged.make_batch(case, np.zeros((rows, case.max_blocks), np.int32))
        items = int(_schedule(case, batch, config).decode.num_items[0]) * 8
        rounds = -(-items // config.programs)
        assert items / (rounds * config.programs) > 0.95


def _pool(**sizes: int):
    sizes = {"num_blocks": 2, "block_size": 16, "num_kv_heads": 8, "head_dim": 128} | sizes
    return pool_shape(**sizes, dtype=KV_DTYPES["bfloat16"], implementation="mosaic_gpu")


def test_what_the_kernels_cannot_do_is_refused_with_what_to_take_instead() -> None:
    reasons = refusals("mosaic_gpu", target=Target.named("gpu:a100"), head_dim=80, block_size=8, kv_dtype="float32")
    for reason, part in zip(
        reasons, ("a100, which is no Hopper", "head_dim is 80", "size is 8", "float32"), strict=True
    ):
        assert part in reason
    assert not refusals("mosaic_gpu", target=H200, head_dim=96, block_size=None, kv_dtype="int8")
    wide = {"target": H200, "block_size": None, "kv_dtype": "fp8_e4m3"}
    assert not refusals("mosaic_gpu", head_dim=192, v_head_dim=128, **wide) + refusals(
        "mosaic_gpu", head_dim=512, **wide
    )
    assert "head_dim is 128 and that of V 192" in refusals("mosaic_gpu", head_dim=128, v_head_dim=192, **wide)[0]
    with pytest.raises(ValueError, match="80 query heads share a KV head; 'mosaic_gpu' has at most 64"):
        GpuConfig.choose(num_heads=80, pool=_pool(num_kv_heads=1), decode_only=True, target=H200, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="activations are float32; 'mosaic_gpu' multiplies bfloat16"):
        GpuConfig.choose(num_heads=8, pool=_pool(), decode_only=True, target=H200, dtype=jnp.float32)


def test_published_latents_fit_shared_memory_and_fill_the_chip() -> None:
    cases = [case for case in paged.REAL_CASES if case.rope_dim is not None and case.decode_only]
    assert len(cases) == 3
    for case in cases:
        config = choose_config(case, "mosaic_gpu", H200, paged.make_shapes(case, "mosaic_gpu").pool)
        assert isinstance(config, GpuConfig) and config.prefill is None
        assert config.decode.smem_bytes <= (H200.smem_bytes or 0)
        groups = -(-case.num_heads // config.decode.loaded)
        items = 64 * groups * -(-4096 // (config.decode.split or 1))  # 64 rows of 4,096 tokens
        assert items / (-(-items // config.programs) * config.programs) > 0.95


def test_what_the_kernel_of_latents_has_not_is_said_with_what_to_take() -> None:
    latent = {"target": H200, "is_latent": True, "block_size": None}
    for lora_rank, rope_dim in ((512, 64), (256, 64), (128, 32)):
        assert not refusals("mosaic_gpu", **latent, head_dim=lora_rank, v_head_dim=rope_dim, kv_dtype="bfloat16")
    reasons = refusals("mosaic_gpu", **latent, head_dim=1024, v_head_dim=64, kv_dtype="fp8_e4m3")
    for reason, told in zip(reasons, ("kv_lora_rank is 1024", "latents in 'bfloat16'"), strict=True):
        assert told in reason and "'xla'" in reason
    case = dataclasses.replace(FEW, decode_only=False)
    with pytest.raises(ValueError, match="rows have several queries, and the cache latents; take implementation 'xla'"):
        choose_config(case, "mosaic_gpu", H200, paged.make_shapes(case, "mosaic_gpu").pool)


def test_steps_that_mix_and_those_that_choose_keys_are_xla_s() -> None:
    latent = {"is_latent": True, "index_dim": 128}
    assert serving("mosaic_gpu", **latent, decode_only=True) == "mosaic_gpu"
    assert serving("mosaic_gpu", **latent, decode_only=True, sinks=True) == "mosaic_gpu"
    assert serving("mosaic_gpu", **latent, decode_only=True, chooses=True) == "xla"
    assert serving("mosaic_gpu", **latent, decode_only=False) == "xla"
    assert serving("mosaic_gpu", is_latent=False, decode_only=False) == "mosaic_gpu"
