"""Speed of reuse, one JSON line: `python -m scripts.bench_reuse host`, `device` or `prefix`.

host: ids through an `IdPool` in calls of 16, at several pool sizes, whose ids are all cached when it starts; and
the key chain of a long sequence, beside bare blake2b calls over the same bytes. Best of many short repeats,
so that other work on the machine counts little.

device: an engine answers prompts that are cached up to a given part, with the cache on and off in turn; time to the
first token, time per token, tokens a second, and the share of the time that goes into `CacheManager`. A cold prompt is
one with the cache off.

prefix: 16 prompts that wait together, of 384 common tokens and 32 of their own, 8 generated each, with the cache on and
off in turn: seconds and computed tokens of each, and the factor between them. For recurrent models too (--model).
"""

import argparse
import dataclasses
import json
import os
import platform
import random
import time
from array import array
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ferrum_jax import LLM, EngineConfig, SamplingParams
from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.core.kv_cache.keys import KEY_BYTES, extend_keys
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine.engine import Engine
from ferrum_jax.engine.startup.build_engine import build_engine
from scripts.bench_host import fill_with_cached_ids
from scripts.git_state import git_state

_IDS_PER_CALL = 16
_CALLS = 1000
_TOKENS = 1 << 15

_HIT_PERCENT = (0, 25, 50, 75, 90, 99, 100)
_PROMPT_BLOCKS = 124  # with what is generated, 2,048 tokens: the most that the demo model takes
_BLOCK_SIZE = 16
_GENERATED = 64


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs."""
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
    tokens = array("i", (rng.randrange(150_000) for _ in range(_TOKENS)))
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


@dataclasses.dataclass(kw_only=True)
class _Times:
    """What the runs of one hit rate took, all of one engine."""

    first_s: list[float] = dataclasses.field(default_factory=list)  # from the request to its first token
    token_s: list[float] = dataclasses.field(default_factory=list)  # from one token to the next
    wall_s: float = 0.0
    cache_s: float = 0.0  # within CacheManager
    num_tokens: int = 0

    def record(self) -> dict[str, float]:
        p50, p99 = np.percentile(self.token_s, [50, 99])
        return {
            "first_token_ms": round(float(np.median(self.first_s)) * 1e3, 2),
            "token_p50_ms": round(float(p50) * 1e3, 3),
            "token_p99_ms": round(float(p99) * 1e3, 3),
            "output_tok_s": round(self.num_tokens / self.wall_s, 1),
            "cache_code_percent": round(100 * self.cache_s / self.wall_s, 3),
        }


class _Timed:
    """An engine whose calls into its CacheManager are timed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.cache_s = 0.0
        self._depth = 0
        (cache,) = engine.scheduler.caches
        for name in (n for n, member in vars(type(cache)).items() if callable(member) and not n.startswith("_")):
            setattr(cache, name, self._timed(getattr(cache, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if self._depth:
                return call(*arguments)
            self._depth = 1
            started = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.cache_s += time.perf_counter() - started
                self._depth = 0

        return timed

    def answer(self, prompt: list[int], num_tokens: int, times: _Times) -> tuple[tuple[int, ...], int]:
        """The tokens after a prompt, and how many of the prompt's were cached."""
        cache_s, started = self.cache_s, time.perf_counter()
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self.engine.add(prompt, params, RequestOptions(streams=True))
        at, deltas = [], []
        while self.engine.has_unfinished:
            for delta in self.engine.step():
                at.append(time.perf_counter())
                deltas.append(delta)
        token_ids = tuple(token for delta in deltas for token in delta.token_ids)
        assert len(at) == num_tokens == len(token_ids), "a token is late, or a request ended early"
        times.first_s.append(at[0] - started)
        times.token_s += np.diff(at).tolist()
        times.wall_s += at[-1] - started
        times.cache_s += self.cache_s - cache_s
        times.num_tokens += num_tokens
        self.engine.drain()
        return token_ids, deltas[-1].num_cached_tokens


def measure_device(model: str, repeats: int) -> dict[str, Any]:
    """By hit rate, with the cache on and off in turn; equal tokens are asserted."""
    config = EngineConfig(
        ready="all",
        max_num_seqs=4,
        max_num_batched_tokens=512,
        max_model_len=2048,
        block_size=_BLOCK_SIZE,
        num_blocks=1024,
    )
    llm = LLM(model, config)
    without = build_engine(llm.loaded, dataclasses.replace(config, enable_prefix_caching=False), None)
    on, off = _Timed(llm.engine), _Timed(without)
    rng = np.random.default_rng(0)
    times = {percent: (_Times(), _Times()) for percent in _HIT_PERCENT}
    for repeat in range(repeats + 1):  # the first does not count; who goes first alternates, for others use the machine
        for percent in _HIT_PERCENT:
            prompt = rng.integers(10, llm.spec.vocab_size, _PROMPT_BLOCKS * _BLOCK_SIZE).tolist()
            cached = _PROMPT_BLOCKS * percent // 100 * _BLOCK_SIZE
            if cached:
                on.answer(prompt[:cached], 1, _Times())
            pairs = list(zip((on, off), times[percent] if repeat else (_Times(), _Times()), strict=True))
            answers = {engine: engine.answer(prompt, _GENERATED, t) for engine, t in pairs[:: 1 if repeat % 2 else -1]}
            assert answers[on][1] == cached, f"{answers[on][1]} tokens were cached, not {cached}"
            assert (answers[on][0], 0) == answers[off], "the cache changed a token"
    assert llm.stats()["compiles_after_ready"] == 0
    rates = {
        percent: {"on": on.record(), "off": off.record(), "token_p99_ratio": _ratio(on, off)}
        for percent, (on, off) in times.items()
    }
    cold = float(np.median([s for _, off in times.values() for s in off.first_s]))
    return {
        "prompt_tokens": _PROMPT_BLOCKS * _BLOCK_SIZE,
        "generated_tokens": _GENERATED,
        "repeats": repeats,
        "by_hit_percent": rates,
        "cold_first_token_ms": round(cold * 1e3, 2),
        "repeat_percent_of_cold": round(100 * float(np.median(times[100][0].first_s)) / cold, 2),
    }


def measure_prefix(model: str, repeats: int) -> dict[str, Any]:
    """Seconds and tokens of prompts with a common prefix, cache on and off in turn; all but the first hit all of it."""
    config = EngineConfig(
        ready="all", max_num_seqs=16, max_num_batched_tokens=128, max_model_len=512, block_size=_BLOCK_SIZE
    )
    llm = LLM(model, dataclasses.replace(config, num_blocks=512))
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    rng = np.random.default_rng(3)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    computed: dict[bool, int] = {}
    for repeat in range(repeats + 1):  # the first does not count
        tokens = rng.integers(10, llm.spec.vocab_size, 384 + 16 * 32).tolist()
        prompts = [tokens[:384] + tokens[384 + 32 * i :][:32] for i in range(16)]
        for is_on in (True, False) if repeat % 2 else (False, True):
            engine = build_engine(llm.loaded, dataclasses.replace(llm.config, enable_prefix_caching=is_on), None)
            outputs, started = [], time.perf_counter()
            for prompt in prompts:
                engine.add(prompt, params)
            while engine.has_unfinished:
                outputs += engine.step()
            engine.drain()
            if repeat:
                seconds[is_on].append(time.perf_counter() - started)
            cached = sorted(output.num_cached_tokens for output in outputs)
            assert cached == ([0] + [384] * 15 if is_on else [0] * 16), f"cached tokens are {cached}"
            computed[is_on] = engine.runner.num_tokens
            engine.close()
    on, off = (float(np.median(seconds[is_on])) for is_on in (True, False))
    return {
        "model": Path(model).name,
        "repeats": repeats,
        "wall_s": [round(on, 3), round(off, 3)],
        "computed_tokens": [computed[True], computed[False]],
        "factor": round(off / on, 2),
        "factor_of_tokens": round(computed[False] / computed[True], 2),
    }


def _ratio(on: _Times, off: _Times) -> float:
    return round(float(np.percentile(on.token_s, 99) / np.percentile(off.token_s, 99)), 3)


PARTS: dict[str, tuple[Callable[[str, int], dict[str, Any]], int]] = {  # and how often each is repeated by default
    "host": (lambda _, repeats: measure_host(repeats), 100),
    "device": (measure_device, 5),
    "prefix": (measure_prefix, 5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--repeats", type=int, help="by default 100 of the host's part, 5 of the others")
    demo = Path(__file__).parent.parent / "checkpoints" / "demo"
    parser.add_argument(
        "--model", default=str(demo), metavar="DIR", help="of all parts but host; by default the demo's"
    )
    arguments = parser.parse_args()
    measure, repeats = PARTS[arguments.part]
    result = {
        "benchmark": f"reuse {arguments.part}",
        **measure(arguments.model, arguments.repeats or repeats),
        "device": jax.devices()[0].device_kind,
        "cpus": len(os.sched_getaffinity(0)),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        **git_state(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
