"""Time of the host's part of a step, with a device that computes nothing; one JSON line.

    python -m scripts.bench_host [--rows 256] [--blocks 4096 1000000] [--repeats 3]

A decode step is schedule + pack + commit (end and stop checks, publishing, table growth). Every block of
the pool is cached when it starts, so each block that a row grows by evicts one: the steady state of a
server.
"""

import argparse
import json
import platform
import random
import statistics
import time
from array import array

import numpy as np

from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.core.request import Request
from ferrum_jax.core.scheduler.scheduler import Scheduler
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes
from ferrum_jax.runtime.buckets import Bucket
from ferrum_jax.runtime.inputs import pack_forward, pack_sample
from scripts.git_state import git_state

_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 2048
_STOP_IDS = frozenset({50_000, 50_001})


def fill_with_cached_ids(pool: IdPool) -> None:
    """Every id free and keyed, as after a long service; of other content than the benchmark's."""
    ids = pool.acquire(pool.num_free) or []
    for id in ids:
        pool.publish(id, id.to_bytes(16, "little"))
    pool.release(ids)


def time_decode_steps(num_blocks: int, num_rows: int, seed: int) -> dict[str, list[float]]:
    """Seconds of each steady decode step of all rows, by part; the results are checked."""
    rng = random.Random(seed)
    cache = CacheManager(
        EngineSizes(
            block_size=_BLOCK_SIZE,
            group_blocks=(num_blocks,),
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(2048, num_rows),
            max_model_len=_MAX_MODEL_LEN,
        )
    )
    fill_with_cached_ids(cache.pools[0])
    scheduler = Scheduler([cache])
    longest = min(num_blocks // num_rows, 16) * _BLOCK_SIZE  # no row is preempted
    requests = []
    for id in range(num_rows):
        prompt = [rng.randrange(50_000) for _ in range(rng.randrange(longest // 4, longest // 4 + _BLOCK_SIZE))]
        requests.append(
            Request(
                id=id,
                token_ids=array("i", prompt),
                num_prompt_tokens=len(prompt),
                max_total_tokens=longest,
                stop_ids=_STOP_IDS,
            )
        )
        scheduler.add(requests[-1])
    bucket = Bucket(num_tokens=num_rows, num_rows=num_rows, table_width=_MAX_MODEL_LEN // _BLOCK_SIZE, decode_only=True)
    seconds = _run_to_the_end(scheduler, bucket, np.random.default_rng(seed))
    assert all(len(request.token_ids) == longest for request in requests), "a request ended early"
    assert cache.metrics().preemptions == 0 and cache.metrics().live == 0
    scheduler.check_invariants()
    return seconds


def _run_to_the_end(scheduler: Scheduler, bucket: Bucket, rng: np.random.Generator) -> dict[str, list[float]]:
    clock = time.perf_counter
    parts: dict[str, list[float]] = {"schedule": [], "pack": [], "commit": [], "step": []}
    in_flight = None
    while scheduler.has_unfinished or in_flight is not None:
        tokens = rng.integers(0, 50_000, bucket.num_rows).astype(np.int32)
        t0 = clock()
        plan = scheduler.schedule()
        t1 = clock()
        is_full = plan is not None and plan.shards[0].num_rows == plan.shards[0].num_tokens == bucket.num_rows
        t2 = clock()
        if plan is not None and is_full:
            pack_forward(plan.shards, bucket)
            pack_sample(plan.shards, bucket.num_rows)
        t3 = clock()
        if in_flight is not None:
            is_full = is_full and in_flight.shards[0].num_rows == bucket.num_rows
            scheduler.commit(in_flight, tokens[: in_flight.shards[0].num_rows])
        t4 = clock()
        if is_full and in_flight is not None:
            for part, value in zip(parts, (t1 - t0, t3 - t2, t4 - t3, t4 - t0), strict=True):
                parts[part].append(value)
        in_flight = plan
    return parts


def _spread_us(seconds: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(seconds, n=10)
    return {name: round(1e6 * value, 1) for name, value in zip(("p10", "p50", "p90"), tenths[::4], strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="that decode at once")
    parser.add_argument("--blocks", type=int, nargs="+", default=[4096, 1_000_000], help="sizes of the pool")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each size")
    arguments = parser.parse_args()
    decode = {}
    for num_blocks in arguments.blocks:
        runs = [time_decode_steps(num_blocks, arguments.rows, seed) for seed in range(arguments.repeats)]
        merged = {part: _spread_us([value for run in runs for value in run[part]]) for part in runs[0]}
        decode[num_blocks] = {**merged, "us_per_row": round(merged["step"]["p50"] / arguments.rows, 3)}
    result = {
        "benchmark": "host",
        "rows": arguments.rows,
        "block_size": _BLOCK_SIZE,
        "decode_step_us": decode,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        **git_state(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
