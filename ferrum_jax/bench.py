"""Offline throughput of an engine: named workloads, and what they cost in time, padding and bytes.

Prompts are random token ids, so what a workload measures does not depend on what a model knows. Compile,
first and steady times are apart.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import resource
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.kv_error import measure_kv_error
from ferrum_jax.llm import LLM
from ferrum_jax.request import SamplingParams

Request = tuple[list[int], int]  # token ids, tokens to generate
WORKLOADS = ("decode", "single", "shared_prefix", "ragged")
KV_ERROR = "kv_error"  # measures no time: what kv_dtype does to logits


def make_workload(name: str, vocab_size: int, seed: int) -> list[Request]:
    """The requests of a workload; the same for the same seed."""
    rng = np.random.default_rng(seed)

    def tokens(n: int) -> list[int]:
        return rng.integers(10, vocab_size, n).tolist()

    if name == "decode":
        return [(tokens(128), 128) for _ in range(16)]
    if name == "single":
        return [(tokens(128), 128)]
    if name == "shared_prefix":
        shared = tokens(1024)
        return [(shared + tokens(64), 32) for _ in range(32)]
    return [(tokens(int(rng.integers(16, 1025))), int(rng.integers(8, 129))) for _ in range(48)]


def run_workload(llm: LLM, requests: list[Request]) -> dict[str, float]:
    """Runs the requests to their end; seconds, tokens and what the engine counted meanwhile."""
    before = llm.stats()
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for _, n in requests]
    started = time.perf_counter()
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
        **delta,
    }


def measured_bandwidth() -> float:
    """Bytes a second that this machine reads: the best of several sums over an array larger than any cache."""
    x = jnp.ones((64, 1 << 21), jnp.float32)  # 512 MiB
    add = jax.jit(lambda x: x.sum(axis=1))
    add(x).block_until_ready()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        add(x).block_until_ready()
        times.append(time.perf_counter() - started)
    return x.nbytes / min(times)


def bytes_per_decode_step(llm: LLM, requests: list[Request]) -> float:
    """Weights once, and the KV of all rows half-way through their generation."""
    live_tokens = sum(len(ids) + n / 2 for ids, n in requests[: llm.config.max_num_seqs])
    return llm.ledger.weights_bytes + live_tokens * llm.ledger.block_bytes / llm.ledger.block_size


def measure(llm: LLM, workload: str) -> dict[str, Any]:
    """One JSON-ready record of a workload: it runs twice with different prompts and the second run counts."""
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
        **{key: round(value, 4) for key, value in steady.items()},
        "first_wall_s": round(first["wall_s"], 4),
        "startup_s": round(llm.startup_s, 2),
        "executables": stats["executables"],
        "compiles_after_ready": stats["compiles_after_ready"],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "bytes_per_decode_step": round(moved),
        "measured_bandwidth_bytes_per_s": round(bandwidth),
        "decode_step_floor_s": round(moved / bandwidth, 4),
        **_environment(llm),
    }


def _environment(llm: LLM) -> dict[str, Any]:
    return {
        "config": {k: v for k, v in dataclasses.asdict(llm.config).items() if k != "compilation_cache_dir"},
        "device": jax.devices()[0].device_kind,
        "cpus": len(os.sched_getaffinity(0)),
        "jax": jax.__version__,
        "flax": importlib.metadata.version("flax"),
        "python": platform.python_version(),
    }
