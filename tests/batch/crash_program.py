"""Kills the real job code over a fake engine, at random moments and at every step of a write, and starts it again.

    python -m tests.batch.crash_program random --kills 1000
    python -m tests.batch.crash_program boundaries
    python -m tests.batch.crash_program workers --kills 100
    python -m tests.batch.crash_program stopped --kills 10
    python -m tests.batch.crash_program unlike --kills 30

Each start is a fork of this process, which has no threads and no jax, so a start takes milliseconds. After every job
the output has the bytes of an uninterrupted one and no row has two lines in the journal. Prints a line of JSON.
"""

import argparse
import functools
import io
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from ferrum_jax.batch.job import EXIT_PREEMPTED, JobOptions, JobSettings, run_batch
from ferrum_jax.batch.journal.leases import Leases
from tests.batch.fake_llm import FakeLLM
from tests.batch.running import num_lines, row_records

NUM_ROWS = 40
_LOST = EXIT_PREEMPTED  # exit code of a worker that was taken for dead


class Arena:
    """One job in a folder: started in forks, killed, and compared with what it should be."""

    def __init__(self, folder: Path, seed: int, expiry_s: float = 60.0, num_rows: int = NUM_ROWS) -> None:
        self.input, self.output, self.expiry_s = folder / "in.jsonl", folder / "out.jsonl", expiry_s
        self.random = random.Random(seed)
        self.input.write_bytes(b"".join(_line(index) for index in range(num_rows)))
        self.measure()
        self.expected = self.output.read_bytes()
        assert self.expected.count(b"\n") == num_rows
        self.num_resumed = 0
        self.forget()

    def measure(self) -> None:
        """Runs a job to its end, for how long one takes now: what else the machine does comes and goes."""
        started = time.monotonic()
        assert self.wait(self.start()) == 1  # some of its lines are bad
        self.duration_s = time.monotonic() - started

    def forget(self) -> None:
        self.output.unlink(missing_ok=True)
        shutil.rmtree(f"{self.output}.journal", ignore_errors=True)

    def start(self, prepare: Callable[[], None] = lambda: None, **how: float | bool) -> int:
        """The id of a process that runs the job. how: of `_run`."""
        order = self.random.randrange(1 << 30)
        is_first = not Path(f"{self.output}.journal/job.json").exists()
        pid = os.fork()
        if pid:
            return pid
        code = 7
        try:
            prepare()
            code = self._run(order, 1000.0 if is_first else float(order), **how)  # the time of day may jump
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _run(self, order: int, now: float, step_s: float = 0.0, leaves_early: bool = False) -> int:
        """step_s: of the engine, beside what it computes."""
        return run_batch(
            lambda rows: FakeLLM(order=order, width=4, limit=120, on_step=lambda llm: time.sleep(step_s)),
            self.input,
            self.output,
            model="fake",
            console=Console(file=io.StringIO()),
            options=JobOptions(
                flush_s=0.002,
                partials_s=0.002,
                poll_s=0.005,
                expiry_s=self.expiry_s,
                share_s=0.01,
                leaves_early=leaves_early,
            ),
            settings=JobSettings(now=lambda: now),
        )

    def wait(self, pid: int) -> int:
        """The exit code of a process, or less than 0 if it was killed."""
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def kill_after(self, pid: int, seconds: float) -> bool:
        """Whether the process was killed before it came to its end."""
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        code = self.wait(pid)
        assert code in (-signal.SIGKILL, 1, _LOST), f"the job ended with {code}"
        return code == -signal.SIGKILL

    def prove(self, *, once: bool = True) -> None:
        """The output is that of an uninterrupted job. once: no line was written twice, not even into the journal."""
        assert self.output.read_bytes() == self.expected, "the bytes differ"
        assert not once or set(num_lines(self.output).values()) == {1}, "a row has two lines"
        self.num_resumed += sum(kind == b"partial" for kind, _ in row_records(self.output))
        self.forget()


def _line(index: int) -> bytes:
    """Rows with shared prefixes, n, log-probabilities; a few bad ones, and one that the engine refuses."""
    row = {"custom_id": f"row-{index}", "prompt": f"prefix {index % 5} " * (1 + index % 7) + str(index)}
    row |= {"max_tokens": 3 + index % 11, "temperature": 0.8, "n": 1 + index % 2, "logprobs": 1}
    if index % 13 == 5:
        row["colour"] = "red"
    if index == 17:
        row["prompt"] = "long " * 40
    return json.dumps(row).encode() + b"\n"


def kill_at_random(arena: Arena, kills: int) -> int:
    """Kills at random moments; a job is killed several times before it may end."""
    num_killed = measured = 0
    while num_killed < kills:
        pid = arena.start()
        if arena.kill_after(pid, arena.random.uniform(0.0, arena.duration_s)):
            num_killed += 1
            continue
        if not arena.output.exists():
            continue
        arena.prove()
        if num_killed >= measured + 50:
            arena.measure()
            arena.forget()
            measured = num_killed
    assert arena.wait(arena.start()) == 1
    arena.prove()
    return num_killed


def kill_at_boundaries(arena: Arena, stride: int) -> int:
    """Kills before and after each `stride`-th call that makes something durable or visible, one job each."""
    num_killed = 0
    for after in (False, True):
        for count in itertools.count(1, stride):
            if arena.wait(arena.start(lambda count=count, after=after: _kill_at(count, after))) == 1:
                arena.prove()
                break
            num_killed += 1
            assert arena.wait(arena.start()) == 1
            arena.prove()
    return num_killed


def _kill_at(count: int, after: bool) -> None:
    """Makes this process kill itself at the count-th call of those that commit."""
    calls = itertools.count(1)
    for name in ("fsync", "link", "replace", "unlink"):
        setattr(os, name, _deadly(getattr(os, name), calls, count, after))


def _deadly(call: Callable, calls: Iterator[int], count: int, after: bool) -> Callable:
    """The function, which kills this process before or after the count-th of the calls."""

    def wrapped(*args: object, **kwargs: object) -> object:
        is_last = next(calls) == count
        if is_last and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args, **kwargs)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped


def kill_workers(arena: Arena, kills: int) -> int:
    """Two workers share each job and are killed in turn; those that are left take over."""
    num_killed = 0
    while num_killed < kills:
        pids = [arena.start(), arena.start()]
        num_killed += arena.kill_after(pids[0], arena.random.uniform(0.0, arena.duration_s))
        num_killed += arena.kill_after(pids[1], arena.random.uniform(0.0, arena.duration_s / 2))
        if arena.random.random() < 0.3:
            pids = [arena.start(), arena.start()]
            assert [arena.wait(pid) for pid in pids] == [1, 1]
            arena.prove()
    assert arena.wait(arena.start()) == 1
    arena.prove()
    return num_killed


def kill_those_who_share(arena: Arena, kills: int) -> int:
    """Three unlike workers share each job; one is killed before or after it takes or gives a piece of a part."""
    num_killed = 0
    while num_killed < kills:
        steps_s = [0.03, 0.01, 0.003]
        arena.random.shuffle(steps_s)
        change = ("give", "_create")[num_killed % 2]
        count, after = arena.random.randrange(1, 4), arena.random.random() < 0.5
        killed = arena.start(functools.partial(_kill_at_change, change, count, after), step_s=steps_s[0])
        others = [arena.start(step_s=s, leaves_early=arena.random.random() < 0.5) for s in steps_s[1:]]
        code = arena.wait(killed)
        assert code in (-signal.SIGKILL, 1), f"the worker that was to be killed ended with {code}"
        num_killed += code == -signal.SIGKILL
        codes = [arena.wait(pid) for pid in others]
        assert set(codes) <= {0, 1}, f"the others ended with {codes}"
        assert arena.wait(arena.start()) == 1
        arena.prove()
    return num_killed


def _kill_at_change(name: str, count: int, after: bool) -> None:
    """Makes this process kill itself at the count-th call of a method of leases that changes whose rows are."""
    setattr(Leases, name, _deadly(getattr(Leases, name), itertools.count(1), count, after))


def stop_workers(arena: Arena, stops: int) -> int:
    """A worker that is stopped for longer than its leases last is replaced; awake again, it does no harm."""
    num_replaced = 0
    for _ in range(stops):
        stopped = arena.start()
        time.sleep(arena.random.uniform(0.0, arena.duration_s))
        os.kill(stopped, signal.SIGSTOP)
        assert arena.wait(arena.start()) == 1
        before = arena.output.read_bytes()
        os.kill(stopped, signal.SIGCONT)
        code = arena.wait(stopped)
        assert code in (1, _LOST), f"the stopped worker ended with {code}"
        assert arena.output.read_bytes() == before
        num_replaced += code == _LOST
        arena.prove(once=False)  # what it had not written yet it may write once more, under its old lease
    return num_replaced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("random", "boundaries", "workers", "stopped", "unlike"))
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        how = {"stopped": {"expiry_s": 0.4}, "unlike": {"num_rows": 10 * NUM_ROWS}}.get(args.what, {})
        arena = Arena(Path(folder), args.seed, **how)
        if args.what == "boundaries":
            count = kill_at_boundaries(arena, args.stride)
        else:
            run = {
                "random": kill_at_random,
                "workers": kill_workers,
                "stopped": stop_workers,
                "unlike": kill_those_who_share,
            }[args.what]
            count = run(arena, args.kills)
    assert "jax" not in sys.modules
    print(json.dumps({"kills": count, "partials": arena.num_resumed, "uninterrupted_s": round(arena.duration_s, 3)}))


if __name__ == "__main__":
    main()
