"""What bench_kernels times: our implementations of attention, and others that compute the same from the same numbers.

On a GPU: "mosaic_gpu" and "xla"; jax's `ops.gpu.paged_attention` for decoding, on a pool in its own form; cuDNN and
torch's scaled_dot_product_attention on contiguous K and V, which need not look for blocks. Steps that mix rows of
different lengths are for the first two alone.
"""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.paged_attention.run_case import choose_config, make_attend, make_inputs
from pallas_kernels.target import Target
from scripts.hopper_cases import gpu_cases

_decode = functools.partial(Case, decode_only=True, num_heads=32, num_kv_heads=8)
_prefill = functools.partial(Case, rows=((0, 4096),), num_tokens=4096, num_rows=1, num_heads=32, num_kv_heads=8)
GPU_CASES = (
    _decode(name="llama_8b_decode_64x4k_c16", rows=((4095, 1),) * 64, num_tokens=64, num_rows=64, block_size=16),
    _decode(name="llama_8b_decode_64x4k_c64", rows=((4095, 1),) * 64, num_tokens=64, num_rows=64, block_size=64),
    _decode(name="llama_8b_decode_1x128k", rows=((131071, 1),), num_tokens=1, num_rows=1),
    _decode(name="llama_8b_decode_256x1k", rows=((1023, 1),) * 256, num_tokens=256, num_rows=256),
    _prefill(name="llama_8b_prefill_4k_c16", block_size=16),
    _prefill(name="llama_8b_prefill_4k_c64", block_size=64),
    *gpu_cases(),
)
CPU_CASES = tuple(case for case in CASES if case.name in ("decode_gqa", "mixed_gqa"))
Call = Callable[[], Any]  # starts one call and returns its result, [T, N, H]


@dataclasses.dataclass(frozen=True)
class OfTorch:
    """A tensor on the GPU, as what times and compares calls takes a result of jax."""

    tensor: Any

    def block_until_ready(self) -> None:
        importlib.import_module("torch").cuda.synchronize()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.tensor.float().cpu().numpy()


def implementations(case: Case, target: Target) -> Iterator[tuple[str, Callable[[], Call] | None, str]]:
    """(name, a function that prepares calls or None, the reason for None), "xla" first."""
    yield "xla", functools.partial(_ours, case, "xla", target), ""
    if target.platform != "gpu":
        return
    yield "mosaic_gpu", functools.partial(_ours, case, "mosaic_gpu", target), ""
    for name, make in (("jax_paged", _jax_paged), ("cudnn", _cudnn), ("torch", _torch)):
        reason = _reason_against(name, case)
        yield name, None if reason else functools.partial(make, case), reason


def _ours(case: Case, implementation: str, target: Target) -> Call:
    arguments = make_inputs(case, implementation)
    config = choose_config(case, implementation, target, arguments.pool)
    return make_attend(case, arguments, config, implementation)


def _reason_against(name: str, case: Case) -> str:
    if len(set(case.rows)) > 1 or case.num_rows != len(case.rows):
        return "rows of different lengths"
    if case.window is not None or case.soft_cap is not None or case.has_sinks or case.kv_dtype != "bfloat16":
        return "a window, a soft cap, sinks or a pool of small numbers"
    if case.rope_dim is not None or case.v_head_dim is not None:
        return "values of another size than keys"
    start, count = case.rows[0]
    if count > 1 and start > 0 and case.causal:
        return "a chunk of a longer context"
    if name == "jax_paged" and count > 1:
        return "rows of several queries"
    modules = {"jax_paged": "jax.experimental.pallas.ops.gpu.paged_attention", "cudnn": "jax"}
    if importlib.util.find_spec(modules.get(name, name)) is None:
        return f"{name} is not installed"
    return ""


def contiguous(case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q: [R, Q, N, H]; k, v: [R, S, K, H], the contexts with the step's own tokens, as bfloat16."""
    R, (start, count), a = len(case.rows), case.rows[0], make_inputs(case, "mosaic_gpu")

    @jax.jit
    def gather(values: jax.Array, tables: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        S = start + count
        found = values[tables].reshape(R, -1, case.num_kv_heads, 2, case.head_dim)[:, :S]
        own = jnp.stack([k, v], axis=2).reshape(R, count, *found.shape[2:])
        found = jnp.concatenate([found[:, :start], own.astype(found.dtype)], axis=1)
        return found[:, :, :, 0], found[:, :, :, 1]

    k, v = gather(a.pool.values, a.batch.block_tables, a.k[: R * count], a.v[: R * count])
    return a.q[: R * count].reshape(R, count, case.num_heads, case.head_dim), k, v


def _cudnn(case: Case) -> Call:
    q, k, v = contiguous(case)
    is_causal = case.causal and q.shape[1] > 1
    attend = jax.jit(
        functools.partial(
            jax.nn.dot_product_attention, scale=case.softmax_scale, is_causal=is_causal, implementation="cudnn"
        )
    )
    return lambda: attend(q, k, v).reshape(-1, case.num_heads, case.head_dim)


def _jax_paged(case: Case) -> Call:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as theirs

    q, k, v = contiguous(case)
    C, width = case.block_size, case.max_blocks * case.block_size

    def pages(x: jax.Array) -> jax.Array:  # [K, P, C, H], the blocks of a row one after the other
        x = jnp.pad(x, ((0, 0), (0, width - x.shape[1]), (0, 0), (0, 0)))
        return x.transpose(2, 0, 1, 3).reshape(case.num_kv_heads, -1, C, case.head_dim)

    order = np.random.default_rng(1).permutation(len(case.rows) * case.max_blocks)
    tables = jnp.asarray(np.argsort(order).reshape(len(case.rows), -1), jnp.int32)
    k, v = (pages(x)[:, order] for x in (k, v))
    q = (q[:, 0] * case.softmax_scale).astype(q.dtype)  # theirs has no scale
    lengths = jnp.asarray([start + count for start, count in case.rows], jnp.int32)
    return lambda: theirs(q, k, v, tables, lengths)


def _torch(case: Case) -> Call:
    torch = importlib.import_module("torch")
    q, k, v = (torch.from_dlpack(x).transpose(1, 2).contiguous() for x in contiguous(case))
    is_causal = case.causal and q.shape[2] > 1
    attend = torch.nn.functional.scaled_dot_product_attention

    def one() -> OfTorch:
        out = attend(q, k, v, is_causal=is_causal, scale=case.softmax_scale, enable_gqa=True)
        return OfTorch(out.transpose(1, 2).reshape(-1, case.num_heads, case.head_dim))

    return one
