"""The Slurm script with a stand-in for Slurm: three tasks share a job, and one goes on after its time is over."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fleets.manifests import FOLDER
from tests.support import COMPILED, GOLDENS, ROOT

NUM_ROWS, NUM_TASKS, MOST_S = 96, 3, 300.0
FLAGS = "--max-num-seqs 4 --max-num-batched-tokens 64 --max-model-len 256 --num-blocks 80 --block-size 16"
PROGRAMS = {
    "srun": 'exec "$@"',
    "scontrol": 'echo "$*" >>requeued',
    "ferrum-jax": f'exec {sys.executable} -m ferrum_jax "$@" {FLAGS} --compilation-cache-dir {COMPILED}',
}


def lay_out(folder: Path) -> None:
    """A checkout's folder as the script knows it, with a folder in place of the bucket."""
    (folder / ".venv/bin").mkdir(parents=True)
    for name, line in PROGRAMS.items():
        (folder / ".venv/bin" / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (folder / ".venv/bin" / name).chmod(0o755)
    (folder / "model").symlink_to(GOLDENS / "qwen3")
    rows = [
        {"custom_id": f"row-{i}", "prompt_token_ids": [7, 8, 9 + i], "max_tokens": 180, "ignore_eos": True}
        for i in range(NUM_ROWS)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "slurm.sbatch").write_text((FOLDER / "slurm.sbatch").read_text().replace("gs://B", str(folder)))


def start(folder: Path, task: int) -> subprocess.Popen:
    own = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_JOB_ID": str(100 + task), "PYTHONPATH": str(ROOT)}
    with open(folder / f"{task}.log", "a") as log:
        command = ["bash", "slurm.sbatch"]
        return subprocess.Popen(command, cwd=folder, env=os.environ | own, stderr=log, start_new_session=True)


def workers(folder: Path) -> set[str]:
    """Workers that have journaled rows."""
    return {path.name.partition(".")[0] for path in (folder / "out.jsonl.journal/segments").glob("[!.]*")}


@pytest.mark.parametrize(
    ("codes", "ends_with", "is_queued_again"),
    [((0,), 0, False), ((1,), 1, False), ((75,), 75, True), ((70, 2, 0), 0, False), ((2, 70, 70, 0), 70, False)],
    ids=str,
)
def test_the_script_starts_a_worker_again_where_that_may_help(tmp_path, codes, ends_with, is_queued_again):
    lay_out(tmp_path)
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    for name, line in (("sleep", "exit"), ("srun", "read -r code <codes; sed -i 1d codes; exit $code")):
        (tmp_path / ".venv/bin" / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    assert start(tmp_path, 2).wait(30) == ends_with
    assert (tmp_path / "requeued").exists() == is_queued_again
    assert len((tmp_path / "codes").read_text().split()) == max(0, len(codes) - 3)


@pytest.mark.slow
def test_three_tasks_share_a_job_and_one_is_queued_again_at_the_end_of_its_time(tmp_path):
    lay_out(tmp_path)
    tasks = [start(tmp_path, task) for task in range(NUM_TASKS)]
    try:
        until = time.monotonic() + MOST_S
        while len(workers(tmp_path)) < NUM_TASKS:
            assert time.monotonic() < until and tasks[0].poll() is None, (tmp_path / "0.log").read_text()
            time.sleep(0.05)
        os.killpg(tasks[0].pid, signal.SIGTERM)  # as Slurm signals: the worker, and the shell in some cases
        assert tasks[0].wait(30) == 75
        assert (tmp_path / "requeued").read_text() == "requeue 100\n" and not (tmp_path / "out.jsonl").exists()
        tasks[0] = start(tmp_path, 0)
        assert [task.wait(MOST_S) for task in tasks] == [0] * NUM_TASKS
    finally:
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)
                task.wait()
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"row-{i}" for i in range(NUM_ROWS)]
    assert all(line["error"] is None for line in lines)
    late = start(tmp_path, 3)
    assert late.wait(60) == 0 and "no model is loaded" in (tmp_path / "3.log").read_text()
