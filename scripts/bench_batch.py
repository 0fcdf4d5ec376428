"""Measures a batch job without a model: rows a second through parsing, scheduling, journal and output, bytes a row.

    python -m scripts.bench_batch --rows 1000000
    python -m scripts.bench_batch --rows 1000000 --no-scheduler     the job's own part alone
    python -m scripts.bench_batch --rows 1000000 --drafts --restart     with drafts, and stopped after half of the rows

The engine is the real scheduler and cache manager with made tokens in place of a device. Prints one line of JSON.
`restart_s` is from the command to the first new answer, without a model; `host_ms` what the host takes for a step with
all its rows, median and 99th percentile.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import math
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

from ferrum_jax.batch.batch_llm import RowRequest
from ferrum_jax.batch.job import EXIT_PREEMPTED, JobOptions, JobStart, run_batch
from ferrum_jax.batch.notice import Notice
from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.core.outputs import CompletionOutput, RequestOutput
from ferrum_jax.core.plan import StepPlan
from ferrum_jax.core.progress import plain_console
from ferrum_jax.core.request import Request
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.core.scheduler.drafting import StepCosts, drafting_of
from ferrum_jax.core.scheduler.scheduler import Scheduler, StepsInFlight
from ferrum_jax.inputs.identity import ModelIdentity
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes
from ferrum_jax.inputs.sizes.speculative import SpeculativeConfig
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.tasks.task import EngineRequest
from ferrum_jax.tasks.transcription.heard_sound import HeardSound
from scripts.git_state import git_state

TOKENS_IN, TOKENS_OUT, ROWS_AT_ONCE = 100, 10, 256
_TEXT, _KINDS = "x" * TOKENS_OUT, 200  # kinds of answers
_DRAFTS: Mapping[str, Any] = {"speculative_config": SpeculativeConfig(method="suffix"), "num_places": 2 * ROWS_AT_ONCE}


_OF_MODEL: Any = dict.fromkeys(("weights", "tokenizer", "chat_template", "vectors", "dtype", "kv_dtype"), "none")


class _Asked(RowRequest):
    requests = property(lambda self: [EngineRequest(self.content, self.params, RequestOptions())])


class HostLLM:
    """An LLM without its device's part. Answers repeat each other's, as those of a job do that drafts help."""

    identity: ModelIdentity | None = None  # it answers always the same

    def __init__(self, *, schedules: bool, drafts: bool = False, on_answer: Callable[[int], None] = lambda num: None):
        """on_answer: told the number of answers, before each is given."""
        sizes = EngineSizes(
            block_size=16,
            group_blocks=[16383],
            max_num_seqs=ROWS_AT_ONCE,
            max_num_batched_tokens=8192,
            max_model_len=1024,
            **_DRAFTS if drafts else {},
        )
        self.drafting = drafting = drafting_of(sizes)
        if drafting is not None:
            drafting.costs = [StepCosts(num_rows=ROWS_AT_ONCE, bare=1.0, sizes=((2 * ROWS_AT_ONCE, 1.0), (8192, 4.0)))]
        self._scheduler = Scheduler([CacheManager(sizes)], drafting)
        self._schedules, self.on_answer = schedules, on_answer
        self._running: dict[int, Request] = {}
        self._by_slot: dict[int, Request] = {}
        self.num_answers = 0
        self.step_s = array("d")  # of the host, for steps of all rows

    def row_tasks(self, now: datetime.datetime) -> Callable[[RowRequest], RowRequest]:
        return lambda request: _Asked(*request)

    def run(
        self,
        tasks: Iterable[tuple[int, Callable[[], RowRequest]]],
        *,
        wants_partials: Callable[[], bool],
        most_running: Callable[[], float] = lambda: math.inf,
    ) -> Generator[tuple[int, RequestOutput | ValueError], None, None]:
        source = (make() for _, make in tasks)
        if not self._schedules:
            for row in source:
                ids = array("i", [*row.content, *[1] * TOKENS_OUT])
                yield self._answer(Request(id=row.key, token_ids=ids, num_prompt_tokens=TOKENS_IN, max_total_tokens=0))
            return
        in_flight: StepsInFlight[tuple[StepPlan, np.ndarray]] = StepsInFlight()
        while True:
            room = int(min(2 * ROWS_AT_ONCE, most_running())) - len(self._running)
            for row in itertools.islice(source, max(room, 0)):
                self._running[row.key] = self._add(row.key, array("i", row.content), row.params)
            if not self._running:
                return
            if wants_partials():
                yield from [(request.id, _output(request, finished=False)) for request in self._running.values()]
            begun, is_full = time.perf_counter(), self._scheduler.num_running == ROWS_AT_ONCE
            ended = self._step(in_flight)
            if is_full:
                self.step_s.append(time.perf_counter() - begun)
            for request in ended:
                yield self._answer(self._running.pop(request.id))

    def _step(self, in_flight: StepsInFlight[tuple[StepPlan, np.ndarray]]) -> list[Request]:
        """Gives those that ended."""
        ended: list[Request] = []
        if self._scheduler.waits_for_commit:
            self._commit(*in_flight.popleft(), ended)
        plan = self._scheduler.schedule()
        due = in_flight.advance(None if plan is None else (plan, self._tokens(plan)))
        if due is not None:
            self._commit(*due, ended)
        return ended

    def _tokens(self, plan: StepPlan) -> np.ndarray:
        """[places] int32: what a model would draw."""
        for _, slot, id in plan.admitted:
            self._by_slot[slot] = self._running[id]
        shard = plan.shards[0]
        tokens = np.zeros(shard.num_places, np.int32)
        num_drafts, places = shard.num_drafts, shard.first_places
        firsts = shard.starts + shard.counts - num_drafts
        for row in np.flatnonzero(shard.samples).tolist():
            request, place = self._by_slot[int(shard.slots[row])], int(places[row])
            position = int(firsts[row]) - request.num_prompt_tokens
            for depth in range(1 + int(num_drafts[row])):
                tokens[place + depth] = request.id % _KINDS * 100 + position + depth
        return tokens

    def _commit(self, plan: StepPlan, tokens: np.ndarray, ended: list[Request]) -> None:
        got: Sequence[tuple[Request, int]] | None = self._scheduler.commit(plan, tokens)
        while got is not None:
            ended += [request for request, _ in got if request.finish_reason is not None]
            got = self._scheduler.commit_accepted()

    def _answer(self, request: Request) -> tuple[int, RequestOutput]:
        self.num_answers += 1
        self.on_answer(self.num_answers)
        return request.id, _output(request)

    def _add(self, key: int, token_ids: array[int], params: SamplingParams) -> Request:
        most = len(token_ids) + (params.max_tokens or 1)
        request = Request(id=key, token_ids=token_ids, num_prompt_tokens=len(token_ids), max_total_tokens=most)
        self._scheduler.add(request)
        return request

    def progress(self) -> dict[str, tuple[float, float, float]]:
        return {
            str(each.id): (each.num_computed, each.num_prompt_tokens, len(each.token_ids) - each.num_prompt_tokens)
            for each in self._running.values()
        }

    def learn(self, texts: Iterable[str], *, cache_salt: str) -> None:
        """Takes them in as tokens, as a tokenizer of bytes would."""
        if self.drafting is not None:
            for text in texts:
                self.drafting.source.learn(list(text.encode()), 0, cache_salt.encode())

    def hear(self, sound: str, params: TranscriptionParams) -> HeardSound:
        raise AssertionError("no row is a sound")

    def stats(self) -> dict[str, Any]:
        return {"live": self._scheduler.metrics().live, "num_blocks": 16383, "computed_tokens": 1, "padded_tokens": 1}


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


def _peak_bytes(who: int = resource.RUSAGE_SELF) -> int:
    return resource.getrusage(who).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _run(
    folder: Path, name: str, make_llm: Callable[[], HostLLM], notice: Notice | None = None, reuse: Sequence[str] = ()
) -> dict[str, Any]:
    """The time that the job took, until its first answer as well, and the LLM that it had."""
    made, first = list[HostLLM](), list[float]()

    def start(rows: JobStart) -> HostLLM:
        made.append(make_llm())
        tell = made[0].on_answer

        def on_answer(num_answers: int) -> None:
            if num_answers == 1:
                first.append(time.perf_counter() - wall)
            tell(num_answers)

        made[0].on_answer = on_answer
        return made[0]

    wall, cpu = time.perf_counter(), _cpu_s()
    code = run_batch(
        start,
        folder / f"{name}.jsonl",
        folder / f"{name}.out.jsonl",
        model="none",
        console=plain_console(quiet=True),
        options=JobOptions(reuse=reuse),
        notice=notice,
    )
    assert code == (0 if notice is None else EXIT_PREEMPTED)
    times = {"wall_s": time.perf_counter() - wall, "cpu_s": _cpu_s() - cpu, "first_s": first[0]}
    return {"llm": made[0], **times}


def _host_ms(llm: HostLLM) -> list[float]:
    """Median and 99th percentile of the host's time for a step of all rows."""
    return [round(1000 * float(found), 2) for found in np.percentile(llm.step_s, (50, 99))] if llm.step_s else []


def _require_answers(folder: Path, name: str, count: int) -> None:
    """Each row once and in its place. Raises AssertionError."""
    with open(folder / f"{name}.out.jsonl", "rb") as file:
        found = 0
        for index, line in enumerate(file):
            assert f'"custom_id": "row-{index}"'.encode() in line, f"line {index} is another row's"
            found += _TEXT.encode() in line
    assert found == count, f"{found} of {count} rows have their answer"


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Runs a small job to warm up, then this one; correctness is asserted."""
    num_rows, make_llm = args.rows, functools.partial(HostLLM, schedules=not args.no_scheduler, drafts=args.drafts)
    write_input(folder / "warm.jsonl", 1000)
    small = _run(folder, "warm", make_llm)
    _require_answers(folder, "warm", 1000)
    write_input(folder / "all.jsonl", num_rows)
    name, reuse, num_to_run = "all", [], num_rows
    if args.reuse:
        HostLLM.identity = ModelIdentity(**_OF_MODEL, end_tokens=(), max_model_len=1024, invariant=True)
        _run(folder, "all", make_llm)
        with open(folder / "all.jsonl", "rb") as old, open(folder / "new.jsonl", "wb") as new:
            new.writelines(line.replace(b"[", b"[1, ", number % 100 == 0) for number, line in enumerate(old))
        name, reuse, num_to_run = "new", [str(folder / "all.out.jsonl")], num_rows // 100
    before_bytes, restarted = _peak_bytes(), {}
    if args.restart:
        notice = Notice()

        def stop(num_answers: int) -> None:
            if num_answers == num_to_run // 2:
                notice.give("the benchmark", EXIT_PREEMPTED)

        half = _run(folder, name, lambda: make_llm(on_answer=stop), notice, reuse)
    whole = _run(folder, name, make_llm, None, reuse)
    _require_answers(folder, name, num_rows)
    if args.restart:
        restarted = {"restart_s": round(whole["first_s"], 1), "rows_before": half["llm"].num_answers}
        whole["wall_s"], whole["cpu_s"] = (whole[name] + half[name] for name in ("wall_s", "cpu_s"))
    report = json.loads((folder / f"{name}.out.jsonl.report.json").read_bytes())
    counts = whole["llm"].drafting and whole["llm"].drafting.counts
    return {
        "rows": num_rows,
        "computed": num_rows - report.get("reused", {"rows": 0})["rows"],
        "scheduler": not args.no_scheduler,
        "rows_per_s": round(num_rows / whole["wall_s"]),
        "rows_per_cpu_s": round(num_rows / whole["cpu_s"]),
        "json_loads_us": round(_json_loads_us(), 2),
        "journal_share": round(sum(run["journal_s"] for run in report["runs"]) / whole["wall_s"], 4),
        "host_ms": {"1000 rows": _host_ms(small["llm"]), f"{num_rows} rows": _host_ms(whole["llm"])},
        **restarted,
        **({"drafts": dataclasses.asdict(counts)} if counts else {}),
        "peak_mib": round(_peak_bytes() / 2**20),
        "peak_mib_of_a_process_beside": round(_peak_bytes(resource.RUSAGE_CHILDREN) / 2**20),
        "peak_bytes_a_row_above_a_small_job": round((_peak_bytes() - before_bytes) / num_rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="of the job")
    parser.add_argument("--no-scheduler", action="store_true", help="answer rows without scheduling them")
    parser.add_argument("--drafts", action="store_true", help="draft tokens from the answers of other rows")
    parser.add_argument("--restart", action="store_true", help="stop the job after half of its rows, and go on")
    parser.add_argument("--reuse", action="store_true", help="with the answers of an earlier job to 99 rows of 100")
    parser.add_argument("--folder", help="where files go; a new temporary folder if not given")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(Path(folder), args)
    print(json.dumps({**found, "python": platform.python_version(), **git_state()}))


if __name__ == "__main__":
    main()
