"""Kills a job of the demo model, starts it again, and compares its output with that of one that nobody killed.

    python -m tests.batch.kill_demo --kills 100
    python -m tests.batch.kill_demo --kills 10 --wide             36 rows in steps of up to 512 tokens
    python -m tests.batch.kill_demo --kills 100 --no-invariant    on the devices that jax finds: how many rows differ

Drawn tokens, two choices, log-probabilities, shared prefixes, some rows under grammars, and a pool so small that rows
are preempted. Half of the kills are SIGKILL; the others are SIGTERM, after which rows go on from their tokens. Without
equal bits, as on an accelerator, each row still has one line, and what the journal holds never changes.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support import ROOT

_PREFIX = '"""Stacks and queues."""\n\nclass Stack:\n    def __init__(self):\n        self.items = []\n\n'
_MAX_EXIT_S = 20  # after a signal
_NAMES = ("push", "pop", "peek", "clear", "extend", "is_empty", "size", "reverse", "copy", "index")
_WIDE_NAMES = tuple(f"{name}_{part}" for name in _NAMES[:9] for part in ("first", "last", "all", "many"))
_PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
_GRAMMARS = (
    {"regex": "the function [a-z ]{20} does [0-9]{4} things"},
    {"json": _PERSON, "disable_any_whitespace": True},
)  # of some rows
_FLAGS = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256", "--num-blocks", "24"]
_WIDE_FLAGS = ["--max-num-seqs", "36", "--max-num-batched-tokens", "512", "--max-model-len", "256"]


def _write_rows(path: Path, names: Sequence[str], tokens: int, *, is_wide: bool) -> None:
    heads = [f"# {name}\n" if is_wide else "" for name in names]  # a prefix that is shared is computed once
    rows = [
        {"custom_id": name, "prompt": f"{head}{_PREFIX}    def {name}(self", "max_tokens": tokens + 5 * (index % 3)}
        | {"temperature": 0.8, "n": 2, "logprobs": 2}
        | ({"structured_outputs": _GRAMMARS[index % 2], "logprobs": None} if index % 3 == 2 else {})
        for index, (name, head) in enumerate(zip(names, heads, strict=True))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class DemoJob:
    """A job of the demo model in a folder. is_wide: of so many rows that steps are larger than the smallest bucket."""

    def __init__(self, folder: Path, tokens: int, *, is_invariant: bool = True, is_wide: bool = False) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.names = _WIDE_NAMES if is_wide else _NAMES
        _write_rows(self.input, self.names, tokens, is_wide=is_wide)
        self._num_runs = self.num_saved = 0  # runs that ended for a notice and saved prefixes
        self._segments: dict[str, bytes] = {}
        self._environment = {**os.environ, "JAX_PLATFORMS": "cpu"} if is_invariant else {**os.environ}
        self._command = [sys.executable, "-m", "ferrum_jax", "batch", "--model", "checkpoints/demo"]
        self._command += _WIDE_FLAGS if is_wide else _FLAGS
        self._command += ["--invariant" if is_invariant else "--no-invariant"]
        self._command += ["--compilation-cache-dir", str(folder / "cache")]
        self._command += ["--input", str(self.input), "--output", str(self.output)]

    def run(self, *, number: int = 0, after_s: float = 0.0) -> int:
        """Runs the job; a signal of this number comes so long after the model is ready. The exit code."""
        self._num_runs += 1
        prefixes = self.input.parent / f"prefixes-{self._num_runs}"
        command = [*self._command, "--save-prefixes-at-notice", str(prefixes)]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=self._environment) as process:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if number and " ready in " in line:
                    time.sleep(after_s)
                    process.send_signal(number)
                    said.append(process.communicate(timeout=_MAX_EXIT_S)[1])
                    break
            code = process.wait()
        assert code in (0, 75, -signal.SIGKILL), "".join(said)
        self.num_saved += code == 75 and prefixes.exists()
        self._check_journal()
        return code

    def _check_journal(self) -> None:
        """What was written is there as it was."""
        found = {path.name: path.read_bytes() for path in Path(f"{self.output}.journal/segments").glob("[!.]*")}
        for name, content in self._segments.items():
            assert found.get(name) == content, f"{name} of the journal has changed"
        self._segments = found

    def forget(self) -> None:
        self.output.unlink()
        shutil.rmtree(f"{self.output}.journal")
        self._segments = {}


def kill(folder: Path, kills: int, seed: int, *, is_invariant: bool = True, is_wide: bool = False) -> dict[str, float]:
    """How many kills of each kind there were, and how many rows of ended jobs, and differ from an uninterrupted one's.

    is_invariant: bits are promised. Raises AssertionError if a row has not one line, if what was written has changed,
    and if a row differs where bits are promised.
    """
    job, rng = DemoJob(folder, tokens=24, is_invariant=is_invariant, is_wide=is_wide), random.Random(seed)
    assert job.run() == 0
    started = time.monotonic()
    job.forget()
    assert job.run() == 0
    duration_s = time.monotonic() - started
    expected = _without_start(job.output.read_bytes())
    assert [line["custom_id"] for line in expected] == list(job.names)
    counts = dict.fromkeys(("killed", "terminated", "jobs", "rows", "rows_that_differ", "of_other_text"), 0)
    job.forget()

    def compare() -> None:
        found = _without_start(job.output.read_bytes())
        assert [line["custom_id"] for line in found] == list(job.names)
        counts["jobs"] += 1
        counts["rows"] += len(found)
        counts["rows_that_differ"] += sum(a != b for a, b in zip(found, expected, strict=True))
        counts["of_other_text"] += sum(_texts(a) != _texts(b) for a, b in zip(found, expected, strict=True))
        assert not (is_invariant and counts["rows_that_differ"])

    while counts["killed"] + counts["terminated"] < kills:
        number = rng.choice((signal.SIGKILL, signal.SIGTERM))
        code = job.run(number=number, after_s=rng.uniform(0.0, 0.5))
        counts["killed"] += code == -signal.SIGKILL
        counts["terminated"] += code == 75
        if code == 0:
            compare()
            job.forget()
    assert job.run() == 0
    compare()
    return {**counts, "saved_prefixes": job.num_saved, "uninterrupted_s": round(duration_s, 1)}


def _texts(line: dict) -> list[str]:
    return [choice["text"] for choice in line["response"]["body"]["choices"]]


def _without_start(content: bytes) -> list[dict]:
    """Lines but for `created`, the time of day at which each of the two jobs began, and the digest that covers it."""
    lines = [json.loads(line) for line in content.splitlines()]
    for line in lines:
        del line["response"]["body"]["created"], line["response"]["record"]["line"]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-invariant", action="store_true", help="without equal bits: tell how many rows differ")
    parser.add_argument("--wide", action="store_true", help="36 rows in steps of up to 512 tokens")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = kill(Path(folder), args.kills, args.seed, is_invariant=not args.no_invariant, is_wide=args.wide)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
