"""`ferrum-jax serve` is killed while it answers a batch, and goes on with it when it is started again."""

import os
import signal
import subprocess
import time
from pathlib import Path

import openai
import pytest

from tests.serve.batch_input import begin, ended, lines_of, rows
from tests.serve.running import demo_server, url_of

pytestmark = pytest.mark.slow
NUM_ROWS = 60


def children(process: subprocess.Popen, function: str) -> list[int]:
    """Processes below it that call this function."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, parent = (
                (folder / "cmdline").read_bytes(),
                (folder / "stat").read_text().rpartition(")")[2].split()[1],
            )
        except OSError:
            continue
        if int(parent) == process.pid and function.encode() in words:
            found.append(int(folder.name))
    return found


def wait_for(client, batch, num_answered: int) -> None:
    until = time.monotonic() + 120
    while client.batches.retrieve(batch.id).request_counts.completed < num_answered:
        assert time.monotonic() < until, "no row is answered"
        time.sleep(0.05)


def test_a_server_that_is_killed_goes_on_with_its_batch(tmp_path):
    (tmp_path / "texts").mkdir()
    words = ("--batches", str(tmp_path / "batches"))
    content = rows(NUM_ROWS, max_tokens=60, model="demo", ignore_eos=True)
    process = demo_server(tmp_path / "texts", *words)
    try:
        with openai.OpenAI(base_url=url_of(process) + "/v1", api_key="none", max_retries=0, timeout=300) as client:
            batch = begin(client, content)
            wait_for(client, batch, 3)
            (answers,) = children(process, "batch_process:main")
            os.kill(answers, signal.SIGKILL)  # it is begun anew, and live requests are answered meanwhile
            assert client.completions.create(model="demo", prompt="a", max_tokens=2).usage.completion_tokens == 2
            wait_for(client, batch, client.batches.retrieve(batch.id).request_counts.completed + 3)
            process.kill()
            process.wait(60)
        process.stderr.close()
        process = demo_server(tmp_path / "texts", *words)
        with openai.OpenAI(base_url=url_of(process) + "/v1", api_key="none", max_retries=0, timeout=300) as client:
            done = ended(client, batch, 300)
            assert done.status == "completed" and done.request_counts.completed == NUM_ROWS
            found = lines_of(client, done.output_file_id)
            assert [line["custom_id"] for line in found] == [f"row-{i}" for i in range(NUM_ROWS)]
            assert {line["response"]["body"]["usage"]["completion_tokens"] for line in found} == {60}
        process.terminate()
        assert process.wait(60) == 0, "a server that ends in order ends its batches in order"
    finally:
        process.kill()
        process.wait(60)
        process.stderr.close()
