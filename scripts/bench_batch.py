"""Measures a batch job without a model: rows a second through parsing, scheduling, journal and output, bytes a row.

    python -m scripts.bench_batch --rows 1000000
    python -m scripts.bench_batch --rows 1000000 --no-scheduler     the job's own part alone

The engine is the real scheduler and cache manager with recorded tokens in place of a device. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import datetime
import io
import itertools
import json
import os
import platform
import resource
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ferrum_jax.asked.sampling import SamplingParams
from ferrum_jax.asked.transcription_params import TranscriptionParams
from ferrum_jax.batch.job import JobOptions, run_batch
from ferrum_jax.outputs import CompletionOutput, EmbeddingOutput, RequestOutput, ScoreOutput
from ferrum_jax.plan import StepPlan
from ferrum_jax.prefix_cache.cache_manager import CacheManager
from ferrum_jax.prompt import Prompt
from ferrum_jax.request import Request
from ferrum_jax.scheduling.in_flight import StepsInFlight
from ferrum_jax.scheduling.scheduler import Scheduler
from ferrum_jax.sizes.engine_sizes import EngineSizes
from ferrum_jax.transcribing.heard_sound import HeardSound
from scripts.git_state import git_state

TOKENS_IN, TOKENS_OUT, ROWS_AT_ONCE = 100, 10, 256
_TEXT = "x" * TOKENS_OUT


class HostLLM:
    """An LLM without its device's part: every token is 1."""

    def __init__(self, *, schedules: bool) -> None:
        sizes = EngineSizes(
            block_size=16,
            group_blocks=[16383],
            max_num_seqs=ROWS_AT_ONCE,
            max_num_batched_tokens=8192,
            max_model_len=1024,
        )
        self._scheduler = Scheduler([CacheManager(sizes)])
        self._schedules = schedules

    def as_completed(
        self,
        requests: Iterable[tuple[int, Prompt, SamplingParams]],
        *,
        resume: Callable[[int], Sequence[CompletionOutput]],
        wants_partials: Callable[[], bool],
        now: datetime.datetime,
    ) -> Generator[tuple[int, RequestOutput | ValueError], None, None]:
        source = iter(requests)
        if not self._schedules:
            for key, prompt, _ in source:
                resume(key)
                ids = array("i", [*prompt, *[1] * TOKENS_OUT])  # type: ignore[misc]
                yield key, _output(Request(id=key, token_ids=ids, num_prompt_tokens=TOKENS_IN, max_total_tokens=0))
            return
        in_flight: StepsInFlight[StepPlan] = StepsInFlight()
        running: dict[int, Request] = {}
        while True:
            for key, prompt, params in itertools.islice(source, 2 * ROWS_AT_ONCE - len(running)):
                resume(key)
                running[key] = self._add(key, array("i", prompt), params)  # type: ignore[arg-type]
            if not running:
                return
            if wants_partials():
                yield from [(request.id, _output(request, finished=False)) for request in running.values()]
            due = in_flight.advance(self._scheduler.schedule())
            if due is not None:
                tokens = np.ones(due.shards[0].num_rows, np.int32)
                for request, _ in self._scheduler.commit(due, tokens):
                    if request.finish_reason is not None:
                        yield request.id, _output(running.pop(request.id))

    def _add(self, key: int, token_ids: array[int], params: SamplingParams) -> Request:
        most = len(token_ids) + (params.max_tokens or 1)
        request = Request(id=key, token_ids=token_ids, num_prompt_tokens=len(token_ids), max_total_tokens=most)
        self._scheduler.add(request)
        return request

    def learn(self, texts: Iterable[str], *, cache_salt: str) -> None:
        """Nothing is drafted."""

    def hear(self, sound: str, params: TranscriptionParams) -> HeardSound:
        raise AssertionError("no row is a sound")

    def embed_as_completed(
        self, requests: Iterable[tuple[int, Prompt]]
    ) -> Generator[tuple[int, EmbeddingOutput | ValueError], None, None]:
        raise AssertionError("no row asks for a vector")

    def score_as_completed(
        self, requests: Iterable[tuple[int, Mapping[str, Any]]]
    ) -> Generator[tuple[int, ScoreOutput | ValueError], None, None]:
        raise AssertionError("no row asks for a score")

    @property
    def identity(self) -> None:
        """It answers always the same."""

    def stats(self) -> dict[str, Any]:
        metrics = self._scheduler.metrics()
        return {"live": metrics.live, "num_blocks": 16383, "computed_tokens": 1, "padded_tokens": 1}


def _output(request: Request, *, finished: bool = True) -> RequestOutput:
    generated = tuple(request.token_ids[request.num_prompt_tokens :])
    choice = CompletionOutput(
        index=0,
        text="x" * len(generated),
        token_ids=generated,
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="length" if finished else None,
        stop_reason=None,
    )
    return RequestOutput(
        request_id=request.id,
        prompt=None,
        prompt_token_ids=tuple(request.token_ids[: request.num_prompt_tokens]),
        outputs=(choice,),
        num_cached_tokens=0,
        finished=finished,
    )


def write_input(path: Path, num_rows: int) -> None:
    rng = np.random.default_rng(0)
    with open(path, "w", encoding="utf-8") as file:
        for index in range(num_rows):
            ids = rng.integers(0, 30000, TOKENS_IN).tolist()
            row = {"custom_id": f"row-{index}", "prompt_token_ids": ids, "max_tokens": TOKENS_OUT, "temperature": 0.8}
            file.write(json.dumps({**row, "return_token_ids": False}) + "\n")


def _json_loads_us() -> float:
    """CPU time to read a line's tokens, by which numbers from a busy machine are judged: 10 on an idle one here."""
    content = json.dumps(list(range(20000, 20000 + TOKENS_IN)))
    started = time.process_time()
    for _ in range(20000):
        json.loads(content)
    return (time.process_time() - started) * 1e6 / 20000


def _cpu_s() -> float:
    """CPU seconds of this process and of those that parse a large input for it."""
    return sum(os.times()[:4])


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(folder: Path, num_rows: int, *, schedules: bool) -> dict[str, Any]:
    """Runs a small job to warm up, then this one; correctness is asserted."""
    times: dict[str, float] = {}
    before_us = _json_loads_us()
    for name, count in (("warm", 1000), ("all", num_rows)):
        write_input(folder / f"{name}.jsonl", count)
        before_bytes = _peak_bytes()
        wall, cpu = time.perf_counter(), _cpu_s()
        code = run_batch(
            lambda rows: HostLLM(schedules=schedules),
            folder / f"{name}.jsonl",
            folder / f"{name}.out.jsonl",
            model="none",
            console=Console(file=io.StringIO()),
            options=JobOptions(),
        )
        times = {"wall_s": time.perf_counter() - wall, "cpu_s": _cpu_s() - cpu}
        report = json.loads((folder / f"{name}.out.jsonl.report.json").read_bytes())
        with open(folder / f"{name}.out.jsonl", "rb") as file:
            found = sum(_TEXT.encode() in line for line in file)
        assert code == 0 and found == count, f"{found} of {count} rows have their answer"
    json_loads_us = round((before_us + _json_loads_us()) / 2, 2)
    return {
        "rows": num_rows,
        "scheduler": schedules,
        "rows_per_s": round(num_rows / times["wall_s"]),
        "rows_per_cpu_s": round(num_rows / times["cpu_s"]),
        "json_loads_us": json_loads_us,
        "journal_share": round(report["runs"][0]["journal_s"] / times["wall_s"], 4),
        "peak_bytes_a_row_above_a_small_job": round((_peak_bytes() - before_bytes) / num_rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="of the job")
    parser.add_argument("--no-scheduler", action="store_true", help="answer rows without scheduling them")
    parser.add_argument("--folder", help="where files go; a new temporary folder if not given")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(Path(folder), args.rows, schedules=not args.no_scheduler)
    print(json.dumps({**found, "python": platform.python_version(), **git_state()}))


if __name__ == "__main__":
    main()
