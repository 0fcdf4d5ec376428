"""What a server costs; one JSON line.

    python -m scripts.bench_serving [--streams 64 256] [--tokens 400] [--step-ms 10]
    python -m scripts.bench_serving --model checkpoints/demo --streams 16 --tokens 200

Without a model it is the CPU time a token of both processes, over a device that only sleeps. Everything but model,
scheduler and device is real: the engine's thread, the link, the HTTP process, the client. The device takes step k + 1
before step k is read, as it does of an engine. `device_idle` is the share of the time between first and last step in
which it had nothing to do. CPU seconds are those of each process, whatever else the machine does; the scheduler's are
in `scripts.bench_host`.

With a model the same prompts, all at once and all in one step, are run by `LLM.generate`, then through HTTP by the same
LLM, and by `LLM.generate` again, since what else the machine does changes. `itl_over_step` is the p99 of the time
between tokens at the client over the median step of the two runs offline, which are those of decode alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import pickle
import platform
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ferrum_jax import LLM, EngineConfig
from ferrum_jax.asked.options import RequestOptions
from ferrum_jax.asked.sampling import SamplingParams
from ferrum_jax.bench.serving import run as serving
from ferrum_jax.bench.serving.http_client import Address
from ferrum_jax.bench.serving.loads import Load, requests_of
from ferrum_jax.bench.workloads import run_workload
from ferrum_jax.delta import Delta
from ferrum_jax.serve.app.http_process import HttpOrder
from ferrum_jax.serve.engine_process import HttpChild, listening
from ferrum_jax.serve.http.settings import ServerSettings
from scripts.git_state import git_state

_TEXTS = "checkpoints/demo"
_PROMPT = 16  # tokens of each
_PARTS = ("median", "p99")
_MORE = {"ignore_eos": True, "temperature": 0}


class SleepingEngine:
    """What an engine's thread asks of `LLM.calls`. Each row draws a token a step."""

    def __init__(self, step_s: float) -> None:
        self.idle_s = self.work_s = 0.0
        self.num_steps = 0
        self._step_s, self._ready = step_s, 0.0
        self._ids = itertools.count()
        self._left: dict[int, int] = {}
        self._inbox: Any = None
        self._in_flight: deque[tuple[float, list[int]]] = deque()

    def add(self, inbox: Any, token_ids: Any, sampling: SamplingParams, options: RequestOptions) -> int:
        self._inbox, number = inbox, next(self._ids)
        self._left[number] = sampling.max_tokens or 1
        return number

    def abort(self, number: int) -> None:
        self._left.pop(number, None)

    def end(self, inbox: Any) -> None:
        self._in_flight.clear()
        self._ready = 0.0

    def drop(self) -> None:
        self._left.clear()

    def step(self) -> None:
        """Dispatches a step, then waits for the one before it."""
        now = time.monotonic()
        if self._ready:
            self.idle_s += max(0.0, now - self._ready)
            self.work_s += self._step_s
        self._ready = max(now, self._ready) + self._step_s
        self._in_flight.append((self._ready, list(self._left)))
        self.num_steps += 1
        if len(self._in_flight) > 1:
            ready, rows = self._in_flight.popleft()
            time.sleep(max(0.0, ready - time.monotonic()))
            for number in rows:
                self._give(number)

    def _give(self, number: int) -> None:
        left = self._left.get(number, 0)
        if not left:
            return
        self._left[number] = left - 1
        reason = "length" if left == 1 else None
        if reason:
            del self._left[number]
        now_us, is_last = time.monotonic_ns() // 1000, reason is not None
        tokens = [300 + left % 1000]
        self._inbox.append(Delta(number, 0, tokens, None, reason, None, is_last, 0, None, [now_us]))


def _llm(engine: SleepingEngine, num_rows: int) -> Any:
    scheduler = SimpleNamespace(num_running=0, num_waiting=0)
    return SimpleNamespace(
        calls=engine,
        is_encoder=False,
        generates=True,
        max_model_len=1 << 20,
        startup_s=0.0,
        texts=_TEXTS,
        spec=SimpleNamespace(architecture="none", vocab_size=4096),
        config=SimpleNamespace(num_rows=num_rows),
        ledger=SimpleNamespace(num_shards=1),
        identity=SimpleNamespace(weights=""),
        engine=SimpleNamespace(scheduler=scheduler, runner=SimpleNamespace(recent_steps=())),
        stats=dict,
    )


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ask(port: int, load: Load, results: Any) -> None:
    """The clients, in a process of their own."""

    async def ask() -> list[Any]:
        place = Address.of(f"http://127.0.0.1:{port}")
        while True:
            try:
                return await serving.run(place, requests_of(load), model="none", headers={}, more=_MORE)
            except ConnectionError:
                await asyncio.sleep(0.1)

    found = serving.summary_of(asyncio.run(ask()), {})
    results.put(pickle.dumps(found))


def served(llm: Any, loads: Sequence[Load]) -> dict[str, Any]:
    """What came of the last of these loads, one after the other over HTTP, and the CPU seconds of both processes."""
    listener = listening("127.0.0.1", 0)
    port = listener.getsockname()[1]
    settings = ServerSettings(names=("none",))
    found: dict[str, Any] = {}
    with HttpChild(lambda link, fd: HttpOrder(settings=settings, link=link, listener=fd), listener) as child:
        pid = child._process.pid
        context = multiprocessing.get_context("spawn")
        results = context.Queue()

        def clients() -> None:
            for load in loads:
                before = _cpu_s(pid), time.process_time()
                client = context.Process(target=_ask, args=(port, load, results))
                client.start()
                found.update(pickle.loads(results.get()))
                client.join()
                found["http_cpu_s"], found["engine_side_cpu_s"] = (
                    _cpu_s(pid) - before[0],
                    time.process_time() - before[1],
                )
            os.kill(os.getpid(), 15)

        thread = threading.Thread(target=clients)
        code = child.serve(llm, drain_s=5.0, on_ready=thread.start)
    assert code == 0 and found["failed"] == 0, (code, found)
    total, wanted = found["total_output_tokens"], loads[-1].num_prompts * loads[-1].output_len
    assert total == wanted, f"{total} tokens came, not {wanted}"
    return found


def measure(streams: int, tokens: int, step_s: float) -> dict[str, Any]:
    """The numbers of one run over a device that sleeps."""
    engine = SleepingEngine(step_s)
    load = Load(num_prompts=streams, input_len=_PROMPT, output_len=tokens, request_rate=float("inf"))
    found = served(_llm(engine, streams), [load])
    total = found["total_output_tokens"]
    return {
        "streams": streams,
        "tokens": total,
        "wall_s": round(found["duration"], 2),
        "tokens_a_http_cpu_s": round(total / found["http_cpu_s"]),
        "engine_side_cpu_ms_a_step": round(1000 * found["engine_side_cpu_s"] / engine.num_steps, 2),
        "device_idle": round(engine.idle_s / (engine.idle_s + engine.work_s), 4),
        "p99_itl_ms": round(found["p99_itl_ms"], 2),
    }


def measure_model(model: str, streams: int, tokens: int) -> dict[str, Any]:
    """The numbers of one run of a model, offline and through HTTP."""
    config = EngineConfig(
        max_num_seqs=streams,
        max_num_batched_tokens=max(256, _PROMPT * streams),
        max_model_len=_PROMPT + tokens,
        ready="all",
    )
    llm = LLM(model, config)
    loads = [
        Load(num_prompts=streams, input_len=_PROMPT, output_len=tokens, request_rate=float("inf"), seed=seed)
        for seed in range(4)
    ]
    _offline(llm, loads[0])  # what comes first takes longer
    before = _offline(llm, loads[1])
    found = served(llm, [loads[2], loads[3]])
    after = _offline(llm, loads[1])
    step_ms = statistics.median([before["decode_step_ms"], after["decode_step_ms"]])
    return {
        "model": model,
        "streams": streams,
        "tokens": found["total_output_tokens"],
        "generate": [before, after],
        "output_tok_s": round(found["output_throughput"], 1),
        **{f"{part}_{name}_ms": round(found[f"{part}_{name}_ms"], 2) for name in ("itl", "ttft") for part in _PARTS},
        "itl_over_step": round(found["p99_itl_ms"] / step_ms, 3),
        "http_cpu_s": round(found["http_cpu_s"], 2),
    }


def _offline(llm: LLM, load: Load) -> dict[str, float]:
    """A load as `LLM.generate` runs it."""
    llm.reset_prefix_cache()
    found = run_workload(llm, [(asked.prompt, asked.max_tokens) for asked in requests_of(load)])
    steps_ms = {"decode_step_ms": found["decode_step_s"], "p99_decode_step_ms": found["decode_step_p99_s"]}
    return {"output_tok_s": round(found["output_tok_s"], 1)} | {
        name: round(1000 * value, 2) for name, value in steps_ms.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256], help="at once; as many rows")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=10.0, help="that a step takes a device that only sleeps")
    parser.add_argument("--model", metavar="DIR", help="model to measure, instead of a device that only sleeps")
    arguments = parser.parse_args()
    if arguments.model is None:
        runs = [measure(streams, arguments.tokens, arguments.step_ms / 1000) for streams in arguments.streams]
    else:
        runs = [measure_model(arguments.model, streams, arguments.tokens) for streams in arguments.streams]
    how = {"step_ms": arguments.step_ms} if arguments.model is None else {}
    where = {"load": os.getloadavg()[0], "python": platform.python_version(), "machine": platform.machine()}
    json.dump({"benchmark": "serving", **how, "runs": runs, **where, **git_state()}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
