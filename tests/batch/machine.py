"""A machine with a fake device: workers of jobs run on it one after the other, each a fork that may be killed."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import time
import traceback
from pathlib import Path

from rich.console import Console

from ferrum_jax.batch.deadline.end_terms import EndTerms
from ferrum_jax.batch.deadline.forecaster import WorkerReport
from ferrum_jax.batch.deadline.row_meter import Throughput
from ferrum_jax.batch.job import JobOptions, JobSettings, run_batch
from tests.batch.fake_llm import FakeLLM

_STEPS_OF_A_ROW = 10  # of 8 tokens, as the fake engine leaves out a fifth of its steps
_QUICK = JobOptions(flush_s=0.3, partials_s=2.0, poll_s=0.1, share_s=0.5)


class FakeDevice:
    """Takes `step_s` for each step. The host works beside it; where it comes late, the device idles."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.free_s = time.monotonic()  # when its last step ends
        self.began_s = 0.0  # its first step
        self.busy_s = self.idle_s = 0.0

    def step(self, llm: FakeLLM) -> None:
        """Returns once the step before has ended."""
        if not self._step_s:
            return
        now_s = time.monotonic()
        self.began_s = self.began_s or now_s
        if now_s < self.free_s:
            time.sleep(self.free_s - now_s)
        else:
            self.idle_s += (now_s - self.free_s) * (self.busy_s > 0)  # but while the job was read
        self.busy_s += self._step_s
        self.free_s = max(now_s, self.free_s) + self._step_s


class StampedLines(io.StringIO):
    """A console's file: whole lines, each with its second, to the end of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def write(self, text: str) -> int:
        with open(self._path, "a", encoding="utf-8") as file:
            file.writelines(f"{time.monotonic():.2f} {line}\n" for line in text.splitlines() if line.strip())
        return len(text)


class Machine:
    """rate: rows of 8 tokens a second; None is as fast as the host. is_quick: jobs are so short that fewer rows run at
    once and workers look at each other more often."""

    def __init__(self, folder: Path, *, rate: float | None, is_quick: bool = False) -> None:
        folder.mkdir()
        self.folder, self._width = folder, 16 if is_quick else 64
        self._step_s = 0.0 if rate is None else self._width / _STEPS_OF_A_ROW / rate
        self._options = _QUICK if is_quick else JobOptions()
        self._pids: list[int] = []
        self.died_s = list[float]()  # when its workers were killed, by the clock of `time.monotonic`
        self._num_lines = 0  # that were shown before the last start
        self.code: int | None = 0  # of the last worker, None while it is at work
        self.cpu_s = 0.0  # of all workers

    @property
    def num_starts(self) -> int:
        return len(self._pids)

    def start(self, source: Path, target: Path, deadline: float | None = None) -> None:
        """Starts a worker of the job from `source` to `target`."""
        assert self.code is not None, "its worker is at work"
        self._num_lines = len(self.shown())
        self.code = None
        if pid := os.fork():
            self._pids.append(pid)
            return
        code = 7
        try:
            os.setpgid(0, 0)
            code = self._work(source, target, deadline)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _work(self, source: Path, target: Path, deadline: float | None) -> int:
        device = FakeDevice(self._step_s)

        def step(llm: FakeLLM) -> None:
            if not device.began_s:
                with open(self.folder / "began", "a") as file:
                    file.write(f"{time.monotonic()}\n")
            device.step(llm)

        options = dataclasses.replace(self._options, terms=EndTerms(deadline=deadline), on_throughput=self._keep)
        code = run_batch(
            lambda start: FakeLLM(order=os.getpid(), width=self._width, on_step=step),
            source,
            target,
            model="fake",
            console=Console(file=StampedLines(self.folder / "shown"), width=200),
            options=options,
            settings=JobSettings(now=lambda: 1000.0),
        )
        share = device.idle_s / max(device.idle_s + device.busy_s, 1e-9)
        (self.folder / "idle").write_text(json.dumps([share, device.free_s]))
        return code

    def _keep(self, own: WorkerReport) -> None:
        (self.folder / "pace").write_text(json.dumps(vars(own)))

    def throughput(self) -> WorkerReport:
        """What the last worker that came to an end measured."""
        said = json.loads((self.folder / "pace").read_text())
        return WorkerReport(**{**said, "throughput": Throughput(*said["throughput"])})

    def idle(self) -> tuple[float, float]:
        """How much of its time the device idled between steps of the last worker that came to an end, and when its
        last step ended."""
        share, ended_s = json.loads((self.folder / "idle").read_text())
        return share, ended_s

    def down_s(self) -> float:
        """Seconds from the kills of workers to the first steps of those that came after them."""
        began = [float(line) for line in (self.folder / "began").read_text().split()]
        return sum(min((each for each in began if each > died_s), default=died_s) - died_s for died_s in self.died_s)

    @property
    def is_at_work(self) -> bool:
        if self.code is None:
            pid, status, usage = os.wait4(self._pids[-1], os.WNOHANG)
            if pid:
                self._ended(status, usage.ru_utime + usage.ru_stime)
        return self.code is None

    def kill(self) -> bool:
        """Whether the worker was killed before its end."""
        os.kill(self._pids[-1], signal.SIGKILL)
        if self.wait() != -signal.SIGKILL:
            return False
        self.died_s.append(time.monotonic())
        return True

    def wait(self) -> int:
        """The code of the last worker once it has ended, less than 0 where it was killed."""
        if self.code is None:
            _, status, usage = os.wait4(self._pids[-1], 0)
            self._ended(status, usage.ru_utime + usage.ru_stime)
        assert self.code is not None
        return self.code

    def _ended(self, status: int, cpu_s: float) -> None:
        self.code = os.waitstatus_to_exitcode(status)
        self.cpu_s += cpu_s

    def num_left(self) -> int:
        """Counts the starts whose process, or one that it began, is left."""
        found = 0
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, 0)
                found += 1
        return found

    def shown(self, *, last: bool = False) -> list[tuple[float, str]]:
        """What its workers showed: lines and when, by the clock of `time.monotonic`. last: of the last start alone."""
        path = self.folder / "shown"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        pairs = (line.split(" ", 1) for line in lines[self._num_lines if last else 0 :])
        return [(float(when_s), text) for when_s, text in pairs]
