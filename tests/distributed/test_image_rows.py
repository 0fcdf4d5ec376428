"""A batch job with images on two processes: pixels go to both, and the answers are those of one process."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.batch.test_image_rows import write_rows
from tests.engine.image_folder import write_folder
from tests.support import COMPILED, ROOT

FLAGS = [
    *("--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--max-model-len", "128", "--num-blocks", "40"),
    *("--max-image-tokens", "64", "--max-image-patches", "256", "--block-size", "16", "--no-invariant"),
    *("--temperature", "0", "--compilation-cache-dir", str(COMPILED)),
]


def start(folder: Path, output: str, *more: str) -> subprocess.Popen:
    """`ferrum-jax batch` in a process of its own, on one device."""
    files = ["--model", "model", "--input", "in.jsonl", "--output", output, "--image-root", "."]
    return subprocess.Popen(
        [sys.executable, "-m", "ferrum_jax", "batch", *files, *FLAGS, *more],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def answers(folder: Path, output: str) -> list:
    lines = [json.loads(line) for line in (folder / output).read_bytes().splitlines()]
    return [[choice["message"] for choice in line["response"]["body"]["choices"]] for line in lines]


@pytest.mark.slow
def test_a_job_with_images_on_two_processes_answers_as_on_one(tmp_path):
    write_folder(tmp_path / "model")
    write_rows(tmp_path)
    with start(tmp_path, "one.jsonl") as alone:
        said, _ = alone.communicate(timeout=300)
    assert alone.returncode == 0, said
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    together = ["--mesh", "tp=2", "--coordinator", coordinator, "--num-processes", "2", "--process-id"]
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(start(tmp_path, "two.jsonl", *together, str(number))) for number in range(2)]
        stack.callback(lambda: [process.kill() for process in both])
        for process in both:
            said, _ = process.communicate(timeout=300)
            assert process.returncode == 0, said
    assert answers(tmp_path, "two.jsonl") == answers(tmp_path, "one.jsonl")
