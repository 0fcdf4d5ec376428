"""`ferrum-jax serve` as users start it: two processes, a signal, and messages for what cannot be."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from ferrum_jax import SamplingParams
from tests.support import COMPILED, GOLDENS, ROOT, small_llm

SMALL = ("--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--max-model-len", "256", "--num-blocks", "80")
MODEL = ("--model", str(GOLDENS / "qwen3"), *SMALL, "--block-size", "16", "--compilation-cache-dir", str(COMPILED))


class Started:
    """A server that was started. lines: what it has said."""

    def __init__(self, *flags: str) -> None:
        words = [sys.executable, "-m", "ferrum_jax", "serve", *MODEL, "--port", "0", *flags]
        self.process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if " at http" in line:
                self.url = line.split(" at ")[1].split("/v1 ")[0]
                return
        self.process.stderr.close()
        raise AssertionError("".join(self.lines))

    def post(self, **body: object):
        content = json.dumps({"max_tokens": 8, "temperature": 0, **body}).encode()
        asked = urllib.request.Request(f"{self.url}/v1/completions", content, {"Content-Type": "application/json"})
        return urllib.request.urlopen(asked, timeout=60)

    def stream(self, **body: object):
        return self.post(stream=True, **body)

    def end(self, *signals: int) -> int:
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.3)
        return self.process.wait(60)


@contextlib.contextmanager
def started(*flags: str) -> Iterator[Started]:
    server = Started(*flags)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        server.process.stderr.close()


def test_two_processes_answer_as_one_does_and_sigterm_lets_what_runs_end():
    (wanted,) = small_llm("qwen3").generate("def main():", SamplingParams(max_tokens=8, temperature=0.0))
    with started("--drain-s", "20") as server:
        with server.post(prompt="def main():") as answer:
            found = json.loads(answer.read())
        assert found["choices"][0]["text"] == wanted.text
        with server.stream(prompt="x", max_tokens=240, ignore_eos=True) as stream:
            stream.readline()
            server.process.send_signal(signal.SIGTERM)
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert server.end() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_second_signal_ends_at_once(number, code):
    with started() as server, server.stream(prompt="x", max_tokens=200, n=100, ignore_eos=True) as stream:
        stream.readline()
        assert server.end(number, number) == code


@pytest.mark.slow
def test_the_http_process_ends_with_the_engines_and_the_other_way_round():
    with started() as server:
        port = int(server.url.rsplit(":", 1)[1])
        server.process.kill()
        server.process.wait()
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except OSError:
                break
            time.sleep(0.05)
        else:
            raise AssertionError("the HTTP process goes on alone")


def refused(*flags: str) -> tuple[int, str]:
    words = [sys.executable, "-m", "ferrum_jax", "serve", *MODEL, *flags]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_what_cannot_be_is_said_in_a_sentence_before_the_model_loads(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, said = refused("--port", port)
    assert code == 2 and f"127.0.0.1:{port} cannot be listened at: Address already in use" in said
    (tmp_path / "bad.pem").write_text("no certificate")
    code, said = refused("--ssl-certfile", str(tmp_path / "bad.pem"))
    assert code == 2 and "bad.pem cannot be used" in said
    code, said = refused("--api-key-file", str(tmp_path / "none"))
    assert code == 2 and "No such file" in said
    code, said = refused("--max-waiting", "0")
    assert code == 2 and "max_waiting is 0" in said
