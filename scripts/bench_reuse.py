"""Speed of reuse, one JSON line: `python -m scripts.bench_reuse host`.

host: ids through an `IdPool` in calls of 16, at several pool sizes, whose ids are all cached when it starts; and
the key chain of a long sequence, beside bare blake2b calls over the same bytes. Best of many short repeats,
so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from ferrum_jax.scheduling.id_pool import IdPool
from ferrum_jax.scheduling.prefix import KEY_BYTES, extend_keys
from scripts.bench_host import fill_with_cached_ids, git

_IDS_PER_CALL = 16
_CALLS = 1000
_TOKENS = 1 << 15


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    """The shortest of so many runs."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def ids_per_second(num_ids: int, repeats: int, *, publishes: bool) -> float:
    """Ids acquired, published or not, and released in calls of 16; published ones evict others all the time."""
    pool = IdPool(num_ids + 1)
    fill_with_cached_ids(pool)
    names = iter(range(1 << 64, 1 << 65))
    keys: list[bytes] = []

    def run() -> None:
        for call in range(_CALLS):
            ids = pool.take(_IDS_PER_CALL)
            if publishes:
                for id, key in zip(ids, keys[call * _IDS_PER_CALL :], strict=False):
                    pool.publish(id, key)
            pool.release(ids)

    seconds = []
    for _ in range(repeats):
        keys = [next(names).to_bytes(KEY_BYTES, "little") for _ in range(_IDS_PER_CALL * _CALLS if publishes else 0)]
        seconds.append(best_seconds(run, 1))
    pool.check_invariants({})
    assert pool.evictions == (_IDS_PER_CALL * _CALLS * repeats if publishes else _IDS_PER_CALL)
    return _IDS_PER_CALL * _CALLS / min(seconds)


def key_tokens_per_second(block_size: int, repeats: int) -> tuple[float, float]:
    """Tokens a second through the key chain, and through bare blake2b calls over blocks of as many bytes."""
    rng = random.Random(0)
    tokens = [rng.randrange(150_000) for _ in range(_TOKENS)]
    data, size = bytes(4 * _TOKENS), 4 * block_size

    def chain() -> None:
        extend_keys([], bytes(KEY_BYTES), tokens, _TOKENS // block_size, block_size)

    def bare() -> None:
        for start in range(0, len(data), size):
            blake2b(data[start : start + size], digest_size=KEY_BYTES).digest()

    return _TOKENS / best_seconds(chain, repeats), _TOKENS / best_seconds(bare, repeats)


def measure_host(repeats: int) -> dict[str, Any]:
    """Ids and key tokens a second, in millions."""
    ids = {
        name: {
            size: _millions(ids_per_second(size, repeats, publishes=publishes)) for size in (4096, 65_536, 1_000_000)
        }
        for name, publishes in (("ids", False), ("evicted_and_published_ids", True))
    }
    keys = {
        size: dict(zip(("chain", "bare_blake2b"), map(_millions, key_tokens_per_second(size, repeats)), strict=True))
        for size in (16, 32, 64, 128)
    }
    return {"million_per_s": ids, "million_key_tokens_per_s": keys}


def _millions(value: float) -> float:
    return round(value / 1e6, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("part", choices=("host",))
    parser.add_argument("--repeats", type=int, default=100)
    arguments = parser.parse_args()
    result = {
        "benchmark": f"reuse {arguments.part}",
        **measure_host(arguments.repeats),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "git_sha": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
    }
    json.dump(result, sys.stdout)
    print()


if __name__ == "__main__":
    main()
