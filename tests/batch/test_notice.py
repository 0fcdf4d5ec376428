"""A notice comes from signals and from the cloud's metadata server, and the first one counts."""

import http.server
import json
import signal
import subprocess
import sys
import threading

import pytest

from ferrum_jax.batch import notice as module
from ferrum_jax.batch.notice import EXIT_INTERRUPTED, EXIT_PREEMPTED, Notice, notice_of_cloud, notice_of_signals
from tests.support import ROOT


class Metadata(http.server.BaseHTTPRequestHandler):
    """Google's says FALSE until the machine is taken back; Amazon's has nothing there until then, and wants a token."""

    is_taken = False
    takes_tokens = wants_token = True
    flavor: str | None = "Google"
    page: bytes | None = None  # what it says instead, to everyone
    asked: "list[tuple[str, str | None, str | None]]"

    def do_PUT(self):
        life = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        Metadata.asked.append((self.path, life, None))
        self._answer(200 if life and Metadata.takes_tokens else 405, b"secret")

    def do_GET(self):
        token = self.headers.get("X-aws-ec2-metadata-token")
        Metadata.asked.append((self.path, self.headers.get("Metadata-Flavor"), token))
        if Metadata.page is not None:
            self._answer(200, Metadata.page)
        elif self.path == "/computeMetadata/v1/instance/preempted":
            self._answer(200, b"TRUE" if Metadata.is_taken else b"FALSE", flavor=Metadata.flavor)
        elif Metadata.wants_token and token != "secret":
            self._answer(401, b"Unauthorized")
        else:
            self._answer(200 if Metadata.is_taken else 404, b'{"action": "terminate", "time": "2026-01-01T00:00:00Z"}')

    def _answer(self, code: int, content: bytes, *, flavor: str | None = None) -> None:
        self.send_response(code)
        if flavor is not None:
            self.send_header("Metadata-Flavor", flavor)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """A metadata server for both clouds; its URL."""
    for name, value in {"is_taken": False, "takes_tokens": True, "wants_token": True}.items():
        monkeypatch.setattr(Metadata, name, value)
    monkeypatch.setattr(Metadata, "asked", [], raising=False)
    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(module, "ENDPOINTS", dict.fromkeys(module.ENDPOINTS, url))
        monkeypatch.setattr(module, "_POLL_S", 0.01)
        yield url
        server.shutdown()
        thread.join()


GOOGLE = ("/computeMetadata/v1/instance/preempted", "Google", None)
AMAZON = "/latest/meta-data/spot/instance-action"
TOKEN = ("/latest/api/token", "60", None)


@pytest.mark.parametrize(
    ("cloud", "asked"), [("gce", {GOOGLE}), ("aws", {TOKEN, (AMAZON, None, "secret")})], ids=["gce", "aws"]
)
def test_the_clouds_notice_is_given_when_the_machine_is_taken_back(server, cloud, asked):
    notice = Notice()
    with notice_of_cloud(notice, cloud):
        while len(Metadata.asked) < 5:
            assert not notice.wait(0.01)
        Metadata.is_taken = True
        assert notice.wait(20.0)
    assert (notice.reason, notice.exit_code) == (f"preemption notice of {cloud}", EXIT_PREEMPTED)
    assert set(Metadata.asked) == asked


@pytest.mark.parametrize(("cloud", "has_tokens"), [("gce", True), ("aws", True), ("aws", False)])
def test_no_proxy_is_asked_for_the_notice_and_no_token_is_needed(server, monkeypatch, cloud, has_tokens):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody is
    monkeypatch.setenv("no_proxy", "")
    for name, value in {"takes_tokens": has_tokens, "wants_token": has_tokens, "is_taken": True}.items():
        monkeypatch.setattr(Metadata, name, value)
    notice = Notice()
    with notice_of_cloud(notice, cloud):
        assert notice.wait(20.0)


@pytest.mark.parametrize("cloud", ["gce", "aws"])
@pytest.mark.parametrize("page", [b"<html>Log in to the network</html>", b"TRUE", b"[]", b"\xff"])
def test_a_page_of_somebody_else_is_no_notice(server, monkeypatch, cloud, page):
    monkeypatch.setattr(Metadata, "page", page)
    notice = Notice()
    with notice_of_cloud(notice, cloud):
        while len(Metadata.asked) < 5:
            assert not notice.wait(0.01)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_server_that_does_not_speak_http_or_is_not_there_is_asked_again(server, monkeypatch, is_there):
    monkeypatch.setattr(Metadata, "do_GET", lambda self: self.wfile.write(b"hello\n"))
    if not is_there:
        monkeypatch.setattr(module, "ENDPOINTS", {"gce": "http://127.0.0.1:9"})
    notice = Notice()
    with notice_of_cloud(notice, "gce"):
        assert not notice.wait(0.1)
        assert any(thread.name == "preemption notice" for thread in threading.enumerate())


def test_an_unknown_cloud_is_refused_and_none_asks_nobody():
    with pytest.raises(ValueError, match="no preemption notice is known for 'moon'; known are aws, gce"):
        notice_of_cloud(Notice(), "moon").__enter__()
    before = threading.active_count()
    with notice_of_cloud(Notice(), None):
        assert threading.active_count() == before


def test_a_second_signal_ends_what_the_first_one_would_let_end_in_order():
    notice = Notice()
    with notice_of_signals(notice):
        notice.is_orderly = True
        signal.raise_signal(signal.SIGTERM)
        assert (notice.reason, notice.exit_code) == ("SIGTERM", EXIT_PREEMPTED)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert notice.exit_code == EXIT_PREEMPTED != EXIT_INTERRUPTED


JOB = """
import atexit, ctypes, io, sys, time
from rich.console import Console
from ferrum_jax import __main__ as cli
from ferrum_jax.batch.job import run_batch
from ferrum_jax.batch.notice import Notice, exit_in_time
from tests.batch.fake_llm import FakeLLM

folder, what = sys.argv[1:]

def on_step(llm):
    if llm.num_steps == 3:
        print("running", flush=True)
        if what == "stuck":  # a second lock of a mutex: a call that no signal ends
            mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
            library.pthread_mutex_lock(mutex), library.pthread_mutex_lock(mutex)
    time.sleep(0.01)

def main():
    notice = Notice(lambda llm: print("saved"))
    with exit_in_time(notice, 0.5 if what == "stuck" else 17):
        return run_batch(lambda rows: FakeLLM(on_step=on_step), folder + "/in.jsonl", folder + "/out.jsonl",
            model="fake", notice=notice, console=Console(file=io.StringIO()))

@atexit.register
def block():
    print("waited for", flush=True)
    time.sleep(60)

cli.main = main
cli.command()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, EXIT_PREEMPTED), (signal.SIGINT, EXIT_INTERRUPTED)])
@pytest.mark.parametrize("what", ["answering", "stuck"])
def test_a_signalled_process_ends_within_20_seconds_with_its_own_code(tmp_path, what, number, code):
    rows = [{"custom_id": str(i), "prompt": f"row {i}", "max_tokens": 64} for i in range(100)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-W", "error", "-c", JOB, str(tmp_path), what]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "running\n"
        process.send_signal(number)
        said, _ = process.communicate(timeout=20)
    assert process.returncode == code
    if what == "answering":
        segments = list((tmp_path / "out.jsonl.journal" / "segments").iterdir())
        assert said == "saved\n" and b" partial " in b"".join(path.read_bytes() for path in segments)
