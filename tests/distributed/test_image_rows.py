"""A batch job with images on two processes: pixels go to both, and the answers are those of one process."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.batch.test_image_rows import write_rows
from tests.distributed import together
from tests.engine.image_folder import write_folder
from tests.support import COMPILED

FLAGS = [
    *("--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--max-model-len", "128", "--num-blocks", "40"),
    *("--max-image-tokens", "64", "--max-image-patches", "256", "--block-size", "16", "--no-invariant"),
    *("--temperature", "0", "--compilation-cache-dir", str(COMPILED)),
]


def start(folder: Path, output: str, *more: str) -> subprocess.Popen:
    """`ferrum-jax batch` in a process of its own, on one device."""
    files = ["--model", "model", "--input", "in.jsonl", "--output", output, "--image-root", "."]
    return together.started("batch", *files, *FLAGS, *more, cwd=folder)


def answers(folder: Path, output: str) -> list:
    lines = [json.loads(line) for line in (folder / output).read_bytes().splitlines()]
    return [[choice["message"] for choice in line["response"]["body"]["choices"]] for line in lines]


@pytest.mark.slow
def test_a_job_with_images_on_two_processes_answers_as_on_one(tmp_path):
    write_folder(tmp_path / "model")
    write_rows(tmp_path)
    with start(tmp_path, "one.jsonl") as alone:
        _, said = alone.communicate(timeout=300)
    assert alone.returncode == 0, said
    with together.two(lambda n, *met: start(tmp_path, "two.jsonl", "--mesh", "tp=2", *met)) as both:
        for process in both:
            _, said = process.communicate(timeout=300)
            assert process.returncode == 0, said
    assert answers(tmp_path, "two.jsonl") == answers(tmp_path, "one.jsonl")
