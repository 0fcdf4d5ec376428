"""`ferrum-jax serve` as users start it: two processes, a signal, and messages for what cannot be."""

import contextlib
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.__main__ import command
from tests.forked import run
from tests.serve.running import url_of
from tests.support import COMPILED, GOLDENS, ROOT, small_llm

SMALL = ("--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--max-model-len", "256", "--num-blocks", "80")
MODEL = ("--model", str(GOLDENS / "qwen3"), *SMALL, "--block-size", "16", "--compilation-cache-dir", str(COMPILED))


class Started:
    """A server that was started."""

    def __init__(self, *flags: str, program: Sequence[str] = ("-m", "ferrum_jax")) -> None:
        words = [sys.executable, *program, "serve", *MODEL, "--port", "0", *flags]
        self.process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.url = url_of(self.process)

    def post(self, *, trusts: str | None = None, **body: object):
        content = json.dumps({"max_tokens": 8, "temperature": 0, **body}).encode()
        asked = urllib.request.Request(f"{self.url}/v1/completions", content, {"Content-Type": "application/json"})
        tls = None if trusts is None else ssl.create_default_context(cafile=trusts)
        return urllib.request.urlopen(asked, timeout=60, context=tls)

    def stream(self, **body: object):
        return self.post(stream=True, **body)

    def end(self, *signals: int) -> int:
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.3)
        return self.process.wait(60)


@contextlib.contextmanager
def started(*flags: str, program: Sequence[str] = ("-m", "ferrum_jax")) -> Iterator[Started]:
    server = Started(*flags, program=program)
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


FAILING = """
import sys
from ferrum_jax.__main__ import command
from ferrum_jax.runtime.runner import Runner

def fail(self, plan, before_sampling=None):
    raise RuntimeError("injected")

Runner.dispatch = fail
sys.argv[0] = "ferrum-jax"
command()
"""


@pytest.mark.slow
def test_an_engine_whose_steps_fail_again_and_again_ends_the_server_with_70():
    with started(program=("-c", FAILING)) as server:
        for _ in range(3):
            with pytest.raises(urllib.error.HTTPError) as failed:
                server.post(prompt="x")
            assert failed.value.code == 500 and "injected" in failed.value.read().decode()
            failed.value.close()
        assert server.process.wait(60) == 70
        assert (
            "the engine is given up: the engine failed in a step: RuntimeError: injected"
            in server.process.stderr.read()
        )


FULL_DISK = """
import os, sys
from ferrum_jax.__main__ import command
from ferrum_jax.cli import serve
greet = serve._greet

def greet_and_fill(*arguments):
    greet(*arguments)
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)

serve._greet = greet_and_fill
sys.argv[0] = "ferrum-jax"
command()
"""


@pytest.mark.slow
def test_a_disk_that_is_full_for_logs_ends_no_answer_and_no_drain():
    with started(program=("-c", FULL_DISK)) as server:
        assert server.process.stderr is not None
        server.process.stderr.close()  # the HTTP process cannot write there either
        for _ in range(3):
            with server.post(prompt="x") as answer:
                assert json.loads(answer.read())["usage"]["completion_tokens"] == 8
        with server.stream(prompt="x", max_tokens=100, ignore_eos=True) as stream:
            stream.readline()
            server.process.send_signal(signal.SIGTERM)
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert server.end() == 0


@pytest.mark.slow
def test_a_certificate_makes_it_https(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(words, check=True, capture_output=True)
    with started("--ssl-keyfile", key, "--ssl-certfile", certificate) as server:
        assert server.url.startswith("https://")
        with server.post(prompt="x", trusts=certificate) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 8
        with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
            server.post(prompt="x")


def refused(*flags: str) -> tuple[int, str]:
    done = run(command, argv=["ferrum-jax", "serve", *MODEL, *flags], timeout_s=60)
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
