"""A job on a local Ray cluster of two actors, with one killed, stopped and resumed; the same without Ray.

    python -m tests.batch.ray_program

Its engine is the fake one. Prints a line of JSON.
"""

import functools
import io
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import ray
from rich.console import Console

from ferrum_jax.batch.job import JobSettings, run_batch
from ferrum_jax.batch.notice import EXIT_PREEMPTED, Notice
from ferrum_jax.batch.ray import run_batch_on_ray
from tests.batch.fake_llm import FakeLLM, json_lines
from tests.support import ROOT

NUM_ROWS, POISON = 60, "poison"


def write_rows(path: Path) -> None:
    """Rows with n and log-probabilities, vectors, a bad line, and one with which the engine crashes."""
    rows: list[dict] = [
        {"custom_id": f"row-{i}", "prompt": f"prompt {i}", "max_tokens": 3 + i % 7, "temperature": 0.8}
        | {"n": 1 + i % 2, "logprobs": 1}
        for i in range(NUM_ROWS)
    ]
    rows[20]["prompt"] = POISON
    rows[30]["colour"] = "red"
    rows += [{"custom_id": f"vector-{i}", "input": f"text {i}"} for i in range(8)]
    path.write_bytes(json_lines(rows))


def burn(llm: FakeLLM) -> None:
    if any(row.prompt == POISON for row in llm.running):
        raise RuntimeError("the device is on fire")


def burn_or_die(folder: Path, llm: FakeLLM) -> None:
    """The first actor that comes so far is killed there."""
    (folder / f"actor-{os.getpid()}").touch()
    if llm.num_steps == 4:
        try:
            os.close(os.open(folder / "killed", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
    burn(llm)


def make(on_step: Callable[[FakeLLM], None], rows: object = None) -> FakeLLM:
    return FakeLLM(on_step=on_step)


def main() -> None:
    os.environ["PYTHONPATH"] = str(ROOT)  # of the actors
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "in.jsonl")
        job = {"model": "fake", "console": Console(file=io.StringIO())}
        job["settings"] = JobSettings(now=lambda: 1000.0)
        assert run_batch(functools.partial(make, burn), folder / "in.jsonl", folder / "expected.jsonl", **job) == 1
        notice = Notice()

        def on_ray(**more: object) -> int:
            load = functools.partial(make, functools.partial(burn_or_die, folder))
            sizes = {"num_actors": 2, "rows_at_once": 8, "window_rows": 40}
            return run_batch_on_ray(load, folder / "in.jsonl", folder / "out.jsonl", **sizes, **job, **more)

        def stop() -> None:
            while not (folder / "killed").exists():
                time.sleep(0.01)
            notice.give("the program", EXIT_PREEMPTED)

        threading.Thread(target=stop, daemon=True).start()
        assert on_ray(notice=notice) == EXIT_PREEMPTED
        assert not (folder / "out.jsonl").exists()
        assert on_ray() == 1
        assert (folder / "out.jsonl").read_bytes() == (folder / "expected.jsonl").read_bytes(), "the bytes differ"
        actors, killed = len(list(folder.glob("actor-*"))), (folder / "killed").exists()
    ray.shutdown()
    print(json.dumps({"actors": actors, "killed": killed}))


if __name__ == "__main__":
    main()
