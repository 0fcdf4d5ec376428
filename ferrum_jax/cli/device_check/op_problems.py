"""The ops that a check runs, each as problems: a named case, what computes it, its oracle and what it asks for.

The cases are those of `pallas_kernels/*/cases.py`. Off a chip few tiny ones run, the TPU's kernels interpreted.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.cli.device_check.problem import FEW, INTERPRETED_AS, Problem, chosen, interpreter, kernel_of, options_of
from ferrum_jax.cli.device_check.product_problems import experts_of_kernels, products
from pallas_kernels.causal_conv import cases as conv_cases
from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.causal_conv import oracle as conv_oracle
from pallas_kernels.gated_delta import ON_TPU as delta_on_tpu
from pallas_kernels.gated_delta import cases as delta_cases
from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.gated_delta import oracle as delta_oracle
from pallas_kernels.grouped_matmul import cases as expert_cases
from pallas_kernels.grouped_matmul import expert_mlp
from pallas_kernels.grouped_matmul import oracle as expert_oracle
from pallas_kernels.kv_pool import KVPool
from pallas_kernels.kv_write import cases as write_cases
from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write import oracle as write_oracle
from pallas_kernels.kv_write.runs import find_runs
from pallas_kernels.paged_attention import LatentConfig, TpuConfig, run_case
from pallas_kernels.paged_attention import cases as attention_cases
from pallas_kernels.paged_attention.cases import Work
from pallas_kernels.paged_attention.support import refusals
from pallas_kernels.row_recurrence import RowRecurrence
from pallas_kernels.row_recurrence.tpu_support import state_class
from pallas_kernels.state_space import ON_TPU as space_on_tpu
from pallas_kernels.state_space import cases as space_cases
from pallas_kernels.state_space import oracle as space_oracle
from pallas_kernels.state_space import state_space
from pallas_kernels.target import Target
from pallas_kernels.tolerance import tolerance_of

OPS = ("paged_attention", "kv_write", "quantized_matmul", "grouped_matmul", "gated_delta", "state_space", "causal_conv")
_EXACT = {"rtol": 0.0, "atol": 0.0}
_TINY_ON_CHIP = (
    *("decode_gqa", "decode_mqa_padding", "decode_mha_h64", "decode_h96_window_sinks", "decode_h256_scale"),
    *("decode_int8", "decode_fp8_e4m3_window", "mixed_gqa", "mixed_mha_h64", "mixed_h192_soft_cap", "mixed_int8"),
    *("mixed_fp8_e4m3", "encoder"),
)


def problems(op: str, target: Target | None, platform: str, *, full: bool) -> Iterator[Problem]:
    """The problems of an op on a platform. target: of the chip; None on the CPU."""
    if op in _PLAIN:
        yield from _PLAIN[op].problems(op, platform, full)
    if op in _WITH_KERNELS:
        yield from _WITH_KERNELS[op](target, platform, full)


def _attention(target: Target | None, platform: str, full: bool) -> Iterator[Problem]:
    kernel = kernel_of("paged_attention", target, platform)
    known = target or Target.named(INTERPRETED_AS)
    few = FEW["paged_attention"] if platform == "cpu" else _TINY_ON_CHIP
    tiny = [case for case in attention_cases.TINY_CASES if full or case.name in few]
    real = () if platform == "cpu" else attention_cases.REAL_CASES
    for case in (*tiny[: 2 if platform != "cpu" else None], *real, *(tiny[2:] if platform != "cpu" else ())):
        refused = kernel is None or bool(
            refusals(kernel, target=known, **case.kept, block_size=case.block_size, kv_dtype=case.kv_dtype)
        )
        refused = refused or (kernel == "mosaic_gpu" and case.dtype != "bfloat16")
        names = ("xla",) if refused or kernel is None else ("xla", kernel)
        yield _attention_problem(case, names, known, platform)


def _attention_problem(case: attention_cases.Case, names: tuple[str, ...], target: Target, platform: str) -> Problem:
    tokens, num_real = run_case.judged_tokens(case), sum(count for _, count in case.rows)
    work = None if case.tiny else Work.of(case, names[-1])

    def begin(implementation: str) -> Callable[[], Any]:
        arguments = run_case.make_inputs(case, implementation)
        config, interpret = run_case.choose_config(case, implementation, target, arguments.pool), False
        if isinstance(config, TpuConfig | LatentConfig) and platform == "cpu":
            config, interpret = run_case.smallest_tiles(config, case.block_size), interpreter()
        return run_case.make_attend(
            case, arguments, config, implementation, interpret=interpret, compiler_options=options_of(platform)
        )

    return Problem(
        op="paged_attention",
        name=case.name,
        dtype=f"{case.dtype}/{case.kv_dtype}",
        shape=case.shape_class,
        tolerance=tolerance_of(case.dtype, platform),
        implementations=names,
        begin=begin,
        oracle=lambda: run_case.expected(case, run_case.make_inputs(case, "xla"), tokens),
        take=lambda result: result[tokens],
        real=lambda result, _: np.asarray(result)[:num_real],
        axes=("token", "head", "lane"),
        num_bytes=None if work is None else work.kv_bytes,
        flops=None if work is None else work.flops,
    )


def _kv_write(target: Target | None, platform: str, full: bool) -> Iterator[Problem]:
    kernel = kernel_of("kv_write", target, platform)
    known = target or Target.named(INTERPRETED_AS)
    tiny = [c for c in write_cases.TINY_CASES if full or platform != "cpu" or c.name in FEW["kv_write"]]
    for case in (*tiny, *(() if platform == "cpu" else write_cases.REAL_CASES)):
        has_fp8 = known.has_fp8 or not case.kv_dtype.startswith("fp8")
        yield _write_problem(case, ("xla", kernel) if kernel and has_fp8 else ("xla",), platform)


def _write_problem(case: write_cases.Case, names: tuple[str, ...], platform: str) -> Problem:
    @functools.cache
    def logical() -> Any:
        return write_cases.make_arguments(case)

    def begin(implementation: str) -> Callable[[], Any]:
        pool, k, v, block_ids, offsets = write_cases.make_arguments(case, implementation=implementation)

        def write(pool: KVPool, k: Any, v: Any, block_ids: Any, offsets: Any) -> KVPool:
            if implementation == "mosaic_tpu" and platform == "cpu":
                from pallas_kernels.kv_write import mosaic_tpu

                return mosaic_tpu.kv_write(pool, k, v, find_runs(block_ids, offsets), interpret=interpreter())
            return kv_write(pool, k, v, block_ids, offsets, implementation=implementation)

        run = jax.jit(write, donate_argnums=0, compiler_options=options_of(platform))

        def call() -> KVPool:
            nonlocal pool
            pool = run(pool, k, v, block_ids, offsets)
            return pool  # until the next call, which takes it

        return call

    def real(result: KVPool, implementation: str) -> np.ndarray:  # [P - 1, C, 2K, H], without the null block
        values = np.asarray(result.values)[1:].view(result.dtype)
        values = values.reshape(*values.shape[:2], 2 * case.num_kv_heads, -1)[..., : case.head_dim]
        scales = None if result.scales is None else np.asarray(result.scales)[1:]
        return write_oracle.decode(values, scales)

    def oracle() -> np.ndarray:
        pool, k, v, block_ids, offsets = logical()
        places = list(zip(block_ids.tolist(), offsets.tolist(), strict=True))[: case.num_real]
        values, scales = write_oracle.write(*write_oracle.arrays(pool), np.asarray(k), np.asarray(v), places)
        return write_oracle.decode(values[1:], None if scales is None else scales[1:])

    token_bytes = 2 * case.num_kv_heads * case.head_dim * jnp.dtype(case.dtype).itemsize
    return Problem(
        op="kv_write",
        name=case.name,
        dtype=f"{case.dtype}/{case.kv_dtype}",
        shape=f"K={case.num_kv_heads} H={case.head_dim} C={case.block_size}",
        tolerance=_EXACT if platform == "cpu" else {"rtol": 1e-6, "atol": 0.0},  # a chip may divide otherwise
        implementations=names,
        begin=begin,
        oracle=oracle,
        real=real,
        axes=("block", "token", "vector", "lane"),
        num_bytes=None if case.tiny else 2 * case.num_real * token_bytes,
        flops=None if case.tiny else 0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PlainOp:
    """An op by "xla" alone. given: its keywords in a case. shape: the case's class. has_rows: of states."""

    run: Callable[..., Any]
    cases: Any
    oracle: Callable[..., Any]
    shape: str
    given: tuple[str, ...] = ("tile",)
    has_rows: bool = True

    def problems(self, op: str, platform: str, full: bool) -> Iterator[Problem]:
        for case in chosen(self.cases.CASES, op, platform, full):
            yield self._problem(op, case, platform)

    def _problem(self, op: str, case: Any, platform: str) -> Problem:
        arguments = functools.partial(self.cases.make_arguments, case)
        real = slice(case.num_real) if self.has_rows else slice(None)
        keywords = {name: getattr(case, name) for name in self.given}

        def run(*given: Any) -> Any:
            found = self.run(*given, **keywords)
            return found[0] if self.has_rows else found

        def begin(_: str) -> Callable[[], Any]:
            compiled, given = jax.jit(run, compiler_options=options_of(platform)), arguments()
            return lambda: compiled(*given)

        def oracle() -> np.ndarray:
            *given, last = arguments()
            if self.has_rows:
                return self.oracle(*map(np.asarray, given), last)[0][real]
            return self.oracle(*map(np.asarray, (*given, last.gate, last.up, last.down)))

        return Problem(
            op=op,
            name=case.name,
            dtype=case.dtype,
            shape=self.shape.format(**dataclasses.asdict(case)),
            tolerance=tolerance_of(case.dtype, platform),
            implementations=("xla",),
            begin=begin,
            oracle=oracle,
            real=lambda result, _: np.asarray(result)[real],
            axes=("token",),
        )


_PLAIN = {
    "grouped_matmul": _PlainOp(
        run=expert_mlp,
        cases=expert_cases,
        oracle=expert_oracle.expert_mlp,
        shape="E={num_experts} X={num_experts_per_token} D={width} F={hidden}",
        has_rows=False,
    ),
    "gated_delta": _PlainOp(
        run=gated_delta,
        cases=delta_cases,
        oracle=delta_oracle.gated_delta,
        shape="K={num_key_heads} N={num_value_heads} A={key_dim} B={value_dim}",
    ),
    "state_space": _PlainOp(
        run=state_space,
        cases=space_cases,
        oracle=space_oracle.state_space,
        shape="K={num_groups} N={num_heads} A={state_dim} B={head_dim}",
    ),
    "causal_conv": _PlainOp(
        run=causal_conv, cases=conv_cases, oracle=conv_oracle.causal_conv, shape="I={width} taps={taps}", given=()
    ),
}


def _recurrences(
    op: str, target: Target | None, platform: str, full: bool, *, on_tpu: RowRecurrence
) -> Iterator[Problem]:
    """Rows of one token by the kernel: on a chip also in the sizes of models, for a verdict on each class of states."""
    kernel, cases = kernel_of(op, target, platform), _PLAIN[op].cases
    if kernel is None:
        return
    real = () if platform == "cpu" else cases.REAL_TPU_CASES
    for case in (*real, *chosen(cases.TPU_CASES, op, platform, full)):
        yield _recurrence(op, case, on_tpu, kernel, platform, is_real=case in real)


def _recurrence(op: str, case: Any, on_tpu: RowRecurrence, kernel: str, platform: str, *, is_real: bool) -> Problem:
    arguments = functools.partial(_PLAIN[op].cases.make_arguments, case)

    def begin(implementation: str) -> Callable[[], Any]:
        def run(first: jax.Array, second: jax.Array, v: jax.Array, *rest: Any) -> tuple[jax.Array, jax.Array]:
            if implementation == "xla" or platform != "cpu":
                return _PLAIN[op].run(first, second, v, *rest, tile=case.tile, implementation=implementation)
            *of_heads, pool, rows = rest
            interpreted = dataclasses.replace(on_tpu, interpret=interpreter())
            return interpreted((first, second), v, tuple(of_heads), pool, rows, tile=case.tile)

        *given, pool, rows = arguments()
        compiled = jax.jit(run, donate_argnums=len(given), compiler_options=options_of(platform))

        def call() -> tuple[jax.Array, jax.Array]:
            nonlocal pool
            out, pool = compiled(*given, pool, rows)
            return out, pool  # until the next call, which takes the pool

        return call

    def real(result: tuple[Any, Any], _: str) -> np.ndarray:
        """The outputs of real tokens, then the states of their rows, in one array."""
        out, pool = (np.asarray(x).astype(np.float64) for x in result)
        slots = np.asarray(arguments()[-1].slots)[: len(case.rows)]
        return np.concatenate([out[: case.num_real].ravel(), pool[slots].ravel()])

    def oracle() -> np.ndarray:
        *given, rows = arguments()
        return real(_PLAIN[op].oracle(*map(np.asarray, given), rows), "")

    *given, pool, _ = arguments()
    state_bytes, num_read = 4 * pool[0].size, sum(x.nbytes for x in (*given, given[2]))
    return Problem(
        op=op,
        name=case.name,
        dtype=case.dtype,
        shape=state_class(pool.shape[1:], by_channel=given[3].ndim == 3),
        tolerance=tolerance_of(case.dtype, platform),
        implementations=("xla", kernel),
        begin=begin,
        oracle=oracle,
        real=real,
        axes=("value",),
        num_bytes=num_read + 2 * case.num_real * state_bytes if is_real else None,
        flops=6 * case.num_real * state_bytes // 4 if is_real else None,
    )


_WITH_KERNELS = {
    "paged_attention": _attention,
    "kv_write": _kv_write,
    "quantized_matmul": products,
    "grouped_matmul": experts_of_kernels,
    "gated_delta": functools.partial(_recurrences, "gated_delta", on_tpu=delta_on_tpu),
    "state_space": functools.partial(_recurrences, "state_space", on_tpu=space_on_tpu),
}
