"""A child of the server of forks sees and says what a process of its own does, and leaves nothing behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax._src import xla_bridge

from tests.forked import call, run
from tests.support import ROOT, child_environment, is_running


def show():
    print("on stdout")
    print("on stderr", file=sys.stderr)
    return sys.argv, os.getcwd(), os.environ["ASKED"], os.environ.get("NOT_ASKED"), sys.stdin.read()


def test_a_child_sees_its_arguments_folder_and_environment(tmp_path, monkeypatch):
    run(os.getpid)  # the server began before this variable
    monkeypatch.setenv("ASKED", "here")
    ended = run(show, argv=["program", "--flag"], cwd=tmp_path)
    assert ended == (0, "on stdout\n", "on stderr\n", (["program", "--flag"], str(tmp_path), "here", None, ""))


def fail(error):
    print("before")
    raise error


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (SystemExit(3), 3, ""),
        (SystemExit("what was wrong"), 1, "what was wrong\n"),
        (SystemExit(), 0, ""),
        (ValueError("mine"), 1, "ValueError: mine\n"),
        (KeyboardInterrupt(), 1, "KeyboardInterrupt\n"),
    ],
)
def test_it_ends_with_the_code_and_the_words_of_a_program(error, code, says):
    ended = run(fail, error)
    assert (ended.returncode, ended.stdout, ended.value) == (code, "before\n", None)
    assert ended.stderr.endswith(says) and ("Traceback" in ended.stderr) == (not isinstance(error, SystemExit))


def devices():
    fresh = not xla_bridge.backends_are_initialized()
    return fresh, jax.device_count(), jax.devices()[0].platform, np.asarray(jax.numpy.ones(3).sum()).item()


def test_each_makes_a_backend_of_its_own_and_the_server_has_none_and_one_thread():
    assert call(devices, devices=4) == (True, 4, "cpu", 3)
    assert call(devices) == (True, 1, "cpu", 3)
    assert len(os.listdir(f"/proc/{call(os.getppid)}/task")) == 1
    assert call(eval, "'ferrum_jax.llm' in __import__('sys').modules"), "the server has imported it"


@pytest.mark.parametrize("name", ["JAX_ENABLE_X64", "PYTHONPATH", "HF_HOME"])
def test_what_imports_have_read_is_not_changed_in_silence(name):
    ended = run(os.getpid, environment={name: "other"})
    assert ended.returncode == 1 and f"['{name}'] were read when the server began" in ended.stderr


def leave_one():
    return subprocess.Popen(["sleep", "600"]).pid


def test_what_a_child_has_started_and_left_ends_with_it():
    assert_gone(call(leave_one))


def test_one_that_hangs_is_killed_when_its_time_is_over():
    with pytest.raises(subprocess.TimeoutExpired):
        run(time.sleep, 600, timeout_s=0.1)
    assert not multiprocessing.active_children()


def hang(path):
    Path(path, "begun").write_text(f"{os.getpid()} {os.getppid()} {leave_one()}")
    Path(path, "begun").rename(Path(path, "processes"))
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_server_and_child_end_with_the_process_that_started_them(tmp_path, number):
    program = f"from tests.forked import run; from tests.house.test_forked import hang; run(hang, {str(tmp_path)!r})"
    with subprocess.Popen([sys.executable, "-c", program], env=child_environment(), cwd=ROOT, stderr=-3) as parent:
        while not (tmp_path / "processes").exists():
            assert parent.poll() is None
            time.sleep(0.01)
        parent.send_signal(number)
    assert_gone(*map(int, (tmp_path / "processes").read_text().split()))


def assert_gone(*processes: int) -> None:
    until = time.monotonic() + 30
    while any(map(is_running, processes)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(map(is_running, processes))
