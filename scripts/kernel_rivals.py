"""What bench_kernels times: our implementations of attention, and others that compute the same from the same numbers.

On a GPU: "mosaic_gpu" and "xla"; jax's `ops.gpu.paged_attention` for decoding, on a pool in its own form; cuDNN and
torch's scaled_dot_product_attention on contiguous K and V, which need not look for blocks; FlashInfer on the same
blocks. Steps that mix rows of different lengths are for the first two alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_pool import KV_DTYPES, encode, pool_shape
from pallas_kernels.paged_attention import AttentionConfig, GpuConfig, make_schedule, paged_attention
from pallas_kernels.paged_attention.cases import CASES, Arguments, Case, make_batch
from pallas_kernels.paged_attention.gpu.config import HEAD_DIMS
from pallas_kernels.target import Target
from scripts.hopper_cases import HOPPER_CASES

_REPEATS = 20
_CALLS = 8  # in one sample, one after the other
_decode = functools.partial(Case, decode_only=True, num_heads=32, num_kv_heads=8)
_prefill = functools.partial(Case, rows=((0, 4096),), num_tokens=4096, num_rows=1, num_heads=32, num_kv_heads=8)
GPU_CASES = (
    _decode(name="llama_8b_decode_64x4k_c16", rows=((4095, 1),) * 64, num_tokens=64, num_rows=64, block_size=16),
    _decode(name="llama_8b_decode_64x4k_c64", rows=((4095, 1),) * 64, num_tokens=64, num_rows=64, block_size=64),
    _decode(name="llama_8b_decode_1x128k", rows=((131071, 1),), num_tokens=1, num_rows=1),
    _decode(name="llama_8b_decode_256x1k", rows=((1023, 1),) * 256, num_tokens=256, num_rows=256),
    _prefill(name="llama_8b_prefill_4k_c16", block_size=16),
    _prefill(name="llama_8b_prefill_4k_c64", block_size=64),
    *(case for case in CASES + HOPPER_CASES if not case.tiny and case.head_dim in HEAD_DIMS),
)
CPU_CASES = tuple(case for case in CASES if case.name in ("decode_gqa", "mixed_gqa"))
Attend = Callable[[], Any]  # starts one call and returns its result, [T, N, H]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A case with arrays on the device. The pool has the logical form and the dtype that it is named after."""

    case: Case
    arguments: Arguments
    lengths: np.ndarray  # [R], tokens of each context with the step's own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one call. compile_and_first_s: the first call, with its compile. result: float32."""

    compile_and_first_s: float
    median_s: float
    p10_s: float
    p90_s: float
    result: np.ndarray


def measure(attend: Attend) -> Timing:
    """Times calls that are all started before the last is waited for."""
    start = time.perf_counter()
    result = jax.block_until_ready(attend())
    first = time.perf_counter() - start
    samples = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        results = [attend() for _ in range(_CALLS)]
        _wait(results)
        samples.append((time.perf_counter() - start) / _CALLS)
    tenths = statistics.quantiles(samples, n=10)
    return Timing(
        compile_and_first_s=first,
        median_s=statistics.median(samples),
        p10_s=tenths[0],
        p90_s=tenths[-1],
        result=_as_numpy(result),
    )


def _wait(results: list[Any]) -> None:
    if isinstance(results[-1], jax.Array):
        jax.block_until_ready(results)
    else:
        importlib.import_module("torch").cuda.synchronize()


def _as_numpy(result: Any) -> np.ndarray:
    if not isinstance(result, jax.Array):
        result = result.float().cpu().numpy()
    return np.asarray(result).astype(np.float32)


def copy_bytes_per_s(num_bytes: int) -> float:
    """Bytes read and written a second by a copy on the device."""
    there = jnp.zeros(num_bytes // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * num_bytes / measure(lambda: copy(there)[:1]).median_s


def work_of(case: Case) -> tuple[int, int]:
    """Bytes of the K and V that the rows' queries see, and multiply-adds counted as two."""
    seen = pairs = 0
    for start, count in case.rows:
        oldest = 0 if case.window is None else max(0, start - case.window + 1)
        seen += start + count - oldest
        for position in range(start, start + count):
            pairs += min(position + 1 if case.causal else start + count, case.window or position + 1 + count)
    width = KV_DTYPES[case.kv_dtype].itemsize
    return 2 * seen * case.num_kv_heads * case.head_dim * width, 4 * pairs * case.num_heads * case.head_dim


def make_problem(case: Case, *, on_gpu: bool) -> Problem:
    """Random arrays, made on the device; the blocks of a row lie anywhere."""
    widths = [-(-(start + count) // case.block_size) for start, count in case.rows]
    ids = 1 + np.random.default_rng(0).permutation(sum(widths))
    tables = np.zeros((case.num_rows, case.max_blocks), np.int32)
    for r, end in enumerate(np.cumsum(widths)):
        tables[r, : widths[r]] = ids[end - widths[r] : end]
    shape = pool_shape(
        num_blocks=len(ids) + 1,
        block_size=case.block_size,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=KV_DTYPES[case.kv_dtype],
        implementation="mosaic_gpu",
    )
    keys = jax.random.split(jax.random.key(0), 5)
    dtype = case.dtype if on_gpu else "float32"

    @jax.jit
    def make(key: jax.Array) -> tuple[jax.Array, Any]:
        values = jax.random.normal(key, shape.values.shape, jnp.bfloat16)
        values, scales = encode(values, shape.dtype)
        return values, None if scales is None else scales.transpose(0, 2, 1)

    values, scales = make(keys[0])
    heads = (case.num_tokens, case.num_kv_heads, case.head_dim)
    arguments = Arguments(
        q=jax.random.normal(keys[1], (case.num_tokens, case.num_heads, case.head_dim), dtype),
        k=jax.random.normal(keys[2], heads, dtype),
        v=jax.random.normal(keys[3], heads, dtype),
        pool=dataclasses.replace(shape, values=values, scales=scales),
        batch=make_batch(case, tables),
        sinks=jax.random.normal(keys[4], (case.num_heads,)) if case.has_sinks else None,
    )
    lengths = np.array([start + count for start, count in case.rows])
    return Problem(case=case, arguments=arguments, lengths=lengths)


def implementations(problem: Problem, *, on_gpu: bool) -> Iterator[tuple[str, Callable[[], Attend] | None, str]]:
    """(name, a function that prepares calls or None, the reason for None), "xla" first."""
    yield "xla", functools.partial(_ours, problem, "xla"), ""
    if not on_gpu:
        return
    yield "mosaic_gpu", functools.partial(_ours, problem, "mosaic_gpu"), ""
    for name, make in (("jax_paged", _jax_paged), ("cudnn", _cudnn), ("torch", _torch), ("flashinfer", _flashinfer)):
        reason = _reason_against(name, problem)
        yield name, None if reason else functools.partial(make, problem), reason


def _reason_against(name: str, problem: Problem) -> str:
    case = problem.case
    if len(set(case.rows)) > 1 or case.num_rows != len(case.rows):
        return "rows of different lengths"
    if case.window is not None or case.soft_cap is not None or case.has_sinks or case.kv_dtype != "bfloat16":
        return "a window, a soft cap, sinks or a pool of small numbers"
    start, count = case.rows[0]
    if name != "flashinfer" and count > 1 and start > 0 and case.causal:
        return "a chunk of a longer context"
    if name in ("jax_paged", "flashinfer") and count > 1:
        return "rows of several queries"
    modules = {"jax_paged": "jax.experimental.pallas.ops.gpu.paged_attention", "cudnn": "jax"}
    if importlib.util.find_spec(modules.get(name, name)) is None:
        return f"{name} is not installed"
    return ""


def _ours(problem: Problem, implementation: str) -> Attend:
    case, a = problem.case, problem.arguments
    if implementation == "xla":
        config = AttentionConfig.choose(
            num_tokens=case.num_tokens,
            block_size=case.block_size,
            decode_only=case.decode_only,
            invariant=False,
            gpu_heads=(case.num_heads, a.pool) if jax.devices()[0].platform == "gpu" else None,
        )
        form = pool_shape(
            num_blocks=a.pool.values.shape[0],
            block_size=case.block_size,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            dtype=a.pool.dtype,
            implementation="xla",
        )
        values = jnp.copy(a.pool.values)  # each implementation writes its own
        if form.bits_of is not None:
            values = jax.lax.bitcast_convert_type(values, form.values.dtype)
        pool = dataclasses.replace(form, values=values, scales=jax.tree.map(jnp.copy, a.pool.scales))
    else:
        config = GpuConfig.choose(
            num_heads=case.num_heads,
            pool=a.pool,
            decode_only=case.decode_only,
            target=Target.of_device(jax.devices()[0]),
            dtype=a.q.dtype,
        )
        pool = jax.tree.map(jnp.copy, a.pool)
    schedule = jax.jit(lambda batch: make_schedule(batch, **case.step, config=config, implementation=implementation))(
        a.batch
    )

    @functools.partial(jax.jit, donate_argnums=3)
    def step(q: jax.Array, k: jax.Array, v: jax.Array, pool: Any, schedule: Any, sinks: Any) -> Any:
        return paged_attention(
            q,
            k,
            v,
            pool,
            schedule,
            **case.attention,
            sinks=sinks,
            implementation=implementation,
        )

    def attend() -> jax.Array:
        nonlocal pool
        out, pool = step(a.q, a.k, a.v, pool, schedule, a.sinks)
        return out

    return attend


def contiguous(problem: Problem) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q: [R, Q, N, H]; k, v: [R, S, K, H], the contexts with the step's own tokens, as bfloat16."""
    case, a = problem.case, problem.arguments
    R, (start, count) = len(case.rows), case.rows[0]

    @jax.jit
    def gather(values: jax.Array, tables: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        S = start + count
        found = values[tables].reshape(R, -1, case.num_kv_heads, 2, case.head_dim)[:, :S]
        own = jnp.stack([k, v], axis=2).reshape(R, count, *found.shape[2:])
        found = jnp.concatenate([found[:, :start], own.astype(found.dtype)], axis=1)
        return found[:, :, :, 0], found[:, :, :, 1]

    k, v = gather(a.pool.values, a.batch.block_tables, a.k[: R * count], a.v[: R * count])
    return a.q[: R * count].reshape(R, count, case.num_heads, case.head_dim), k, v


def _cudnn(problem: Problem) -> Attend:
    case, (q, k, v) = problem.case, contiguous(problem)
    is_causal = case.causal and q.shape[1] > 1
    attend = jax.jit(
        functools.partial(
            jax.nn.dot_product_attention, scale=case.softmax_scale, is_causal=is_causal, implementation="cudnn"
        )
    )
    return lambda: attend(q, k, v).reshape(-1, case.num_heads, case.head_dim)


def _jax_paged(problem: Problem) -> Attend:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as theirs

    case, a = problem.case, problem.arguments
    _, k, v = contiguous(problem)
    C, width = case.block_size, case.max_blocks * case.block_size

    def pages(x: jax.Array) -> jax.Array:  # [K, P, C, H], the blocks of a row one after the other
        x = jnp.pad(x, ((0, 0), (0, width - x.shape[1]), (0, 0), (0, 0)))
        return x.transpose(2, 0, 1, 3).reshape(case.num_kv_heads, -1, C, case.head_dim)

    order = np.random.default_rng(1).permutation(len(case.rows) * case.max_blocks)
    tables = jnp.asarray(np.argsort(order).reshape(len(case.rows), -1), jnp.int32)
    k, v = (pages(x)[:, order] for x in (k, v))
    q = (a.q * case.softmax_scale).astype(a.q.dtype)  # theirs has no scale
    lengths = jnp.asarray(problem.lengths, jnp.int32)
    return lambda: theirs(q, k, v, tables, lengths)


def _torch_tensors(problem: Problem) -> list[Any]:
    torch = importlib.import_module("torch")
    return [torch.from_dlpack(x) for x in contiguous(problem)]


def _torch(problem: Problem) -> Attend:
    torch, case = importlib.import_module("torch"), problem.case
    q, k, v = (x.transpose(1, 2).contiguous() for x in _torch_tensors(problem))
    is_causal = case.causal and q.shape[2] > 1
    attend = torch.nn.functional.scaled_dot_product_attention

    def one() -> Any:
        out = attend(q, k, v, is_causal=is_causal, scale=case.softmax_scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(-1, case.num_heads, case.head_dim)

    return one


def _flashinfer(problem: Problem) -> Attend:
    torch, flashinfer = importlib.import_module("torch"), importlib.import_module("flashinfer")
    case = problem.case
    q, k, v = _torch_tensors(problem)
    R, C = len(case.rows), case.block_size
    pad = case.max_blocks * C - k.shape[1]
    paged = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad)).reshape(-1, C, *x.shape[2:]) for x in (k, v)]
    order = torch.randperm(R * case.max_blocks, device=q.device)
    pool = torch.stack(paged, dim=1)[order].contiguous()
    workspace = torch.empty(2**28, dtype=torch.uint8, device=q.device)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    starts = torch.arange(R + 1, dtype=torch.int32, device=q.device) * case.max_blocks
    last = torch.full((R,), C - pad, dtype=torch.int32, device=q.device)
    decode.plan(
        starts,
        torch.argsort(order).to(torch.int32),
        last,
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        C,
        sm_scale=case.softmax_scale,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    return lambda: decode.run(q[:, 0], pool)
