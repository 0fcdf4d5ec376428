"""Offline throughput of an engine: named workloads, and what they cost in time, padding and bytes.

Prompts are random token ids, so what a workload measures does not depend on what a model knows. Compile,
first and steady times are apart.
"""

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import platform
import resource
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.cli.benchmarks.kv_error import measure_kv_error
from ferrum_jax.cli.benchmarks.weights_error import measure_weights_error
from ferrum_jax.llm import LLM
from ferrum_jax.sampling_params import SamplingParams

Request = tuple[list[int], int]  # token ids, tokens to generate
WORKLOADS = ("decode", "single", "shared_prefix", "ragged", "streams")
KV_ERROR, WEIGHTS_ERROR = "kv_error", "weights_error"  # no time: what kv_dtype and forms of weights do to logits


def make_workload(name: str, vocab_size: int, seed: int) -> list[Request]:
    """The requests of a workload; the same for the same seed."""
    rng = np.random.default_rng(seed)

    def tokens(n: int) -> list[int]:
        return rng.integers(10, vocab_size, n).tolist()

    if name == "decode":
        return [(tokens(128), 128) for _ in range(16)]
    if name == "streams":
        return [(tokens(512), 512) for _ in range(64)]
    if name == "single":
        return [(tokens(128), 128)]
    if name == "shared_prefix":
        shared = tokens(1024)
        return [(shared + tokens(64), 32) for _ in range(32)]
    return [(tokens(int(rng.integers(16, 1025))), int(rng.integers(8, 129))) for _ in range(48)]


@contextlib.contextmanager
def step_times(llm: LLM) -> Iterator[list[float]]:
    """Seconds from each decode step's dispatch to that of the next one of as many rows, meanwhile.

    That is what a step takes where the device is never without one.
    """
    runner, seconds = llm.engine.runner, list[float]()
    dispatch, last, dispatched_s = runner.dispatch, None, 0.0

    def timed(plan: Any) -> Any:
        nonlocal last, dispatched_s
        step = dispatch(plan)
        before_s, dispatched_s = dispatched_s, time.perf_counter()
        turns = plan.num_tokens / max(sum(shard.num_rows for shard in plan.shards), 1)
        if last is not None and plan.num_tokens == last.num_tokens and (turns == 1 or plan.shards[0].horizon > 1):
            seconds.append((dispatched_s - before_s) / turns)
        last = plan
        return step

    vars(runner)["dispatch"] = timed
    try:
        yield seconds
    finally:
        del vars(runner)["dispatch"]


def run_workload(llm: LLM, requests: list[Request]) -> dict[str, float]:
    """Runs the requests to their end; seconds, tokens and what the engine counted meanwhile."""
    before = llm.stats()
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for _, n in requests]
    started = time.perf_counter()
    with step_times(llm) as times:
        outputs = llm.generate([ids for ids, _ in requests], params, progress=False)
    wall_s = time.perf_counter() - started
    after = llm.stats()
    generated = sum(len(o.token_ids) for o in outputs)
    assert generated == sum(n for _, n in requests), "a request ended early"
    delta = {key: after[key] - before[key] for key in ("steps", "computed_tokens", "padded_tokens", "hit_tokens")}
    return {
        "wall_s": wall_s,
        "output_tok_s": generated / wall_s,
        "total_tok_s": (generated + sum(len(ids) for ids, _ in requests)) / wall_s,
        "padding_waste": 1 - delta["computed_tokens"] / delta["padded_tokens"],
        "preemptions": after["preemptions"] - before["preemptions"],
        **(
            {"decode_step_s": float(np.median(times)), "decode_step_p99_s": float(np.quantile(times, 0.99))}
            if times
            else {}
        ),
        **delta,
    }


def measured_bandwidth() -> float:
    """Bytes a second that this device moves: the best of several sums and copies of an array larger than any cache.

    CPUs are fastest at the one, GPUs at the other. An accelerator moves the array in less time than a launch and a wait
    take, so it is given several at once.
    """
    x = jnp.ones((64, 1 << 21), jnp.float32)  # 512 MiB
    best, at_once = 0.0, 1 if jax.devices()[0].platform == "cpu" else 16
    for function, moved in ((lambda x: x.sum(axis=1), x.nbytes), (lambda x: x + 1, 2 * x.nbytes)):
        run = jax.jit(function)
        result = run(x).block_until_ready()
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(at_once):  # each result goes when the next comes
                result = run(x)
            result.block_until_ready()
            best = max(best, at_once * moved / (time.perf_counter() - started))
    return best


def bytes_per_decode_step(llm: LLM, requests: list[Request]) -> float:
    """Weights once, but not the rows of an embedding that makes no logits, and the KV of all rows half-way through."""
    live_tokens = sum(len(ids) + n / 2 for ids, n in requests[: llm.config.num_rows])
    weights, layout = llm.ledger.weights_bytes, llm.loaded.layout
    if not layout.options.spec.tie_word_embeddings:
        embedding = layout.targets["embed.weight"]
        weights -= math.prod(embedding.sharding.shard_shape(embedding.shape)) * embedding.dtype.itemsize
    return weights + live_tokens * llm.ledger.block_bytes / llm.ledger.block_size


def measure(llm: LLM, workload: str, text: str | None = None) -> dict[str, Any]:
    """One JSON-ready record of a workload: it runs twice with different prompts and the second run counts.

    text: for weights_error alone.
    """
    if workload == WEIGHTS_ERROR:
        return {"workload": workload, **measure_weights_error(llm, text), **_environment(llm)}
    if workload == KV_ERROR:
        return {"workload": workload, **measure_kv_error(llm), **_environment(llm)}
    vocab_size = llm.spec.vocab_size
    first = run_workload(llm, make_workload(workload, vocab_size, seed=1))
    requests = make_workload(workload, vocab_size, seed=2)
    steady = run_workload(llm, requests)
    stats = llm.stats()  # before this function compiles something of its own
    bandwidth, moved = measured_bandwidth(), bytes_per_decode_step(llm, requests)
    return {
        "workload": workload,
        **{key: round(value, 6) for key, value in steady.items()},
        "first_wall_s": round(first["wall_s"], 4),
        "startup_s": round(llm.startup_s, 2),
        "executables": stats["executables"],
        "compiles_after_ready": stats["compiles_after_ready"],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "bytes_per_decode_step": round(moved),
        "measured_bandwidth_bytes_per_s": round(bandwidth),
        "decode_step_floor_s": round(moved / bandwidth, 4),
        **_of_roofline(steady, moved, bandwidth),
        **_environment(llm),
    }


def _of_roofline(steady: dict[str, float], moved: float, bandwidth: float) -> dict[str, Any]:
    """Bytes that a decode step must move over what could be moved meanwhile; nothing where none was timed.

    A share above 1 is no measurement, because the bandwidth was then disturbed: it is refused, as None with the reason.
    """
    step_s = steady.get("decode_step_s")
    if step_s is None:
        return {}
    share = moved / bandwidth / step_s
    if share > 1:
        why = (
            f"{share:.2f} of the bandwidth is more than there is: something else ran; measure again on an idle machine"
        )
        return {"of_bandwidth_roofline": None, "refused": why}
    return {"of_bandwidth_roofline": round(share, 4)}


def _environment(llm: LLM) -> dict[str, Any]:
    return {
        "config": {k: v for k, v in dataclasses.asdict(llm.config).items() if k != "compilation_cache_dir"},
        "device": jax.devices()[0].device_kind,
        "cpus": len(os.sched_getaffinity(0)),
        "jax": jax.__version__,
        "flax": importlib.metadata.version("flax"),
        "python": platform.python_version(),
    }
