"""Two workers share a job over fake engines; one is 60 times as slow and hands over the rows that it runs at the end.

    python -m tests.batch.unlike_program

Prints a line of JSON: the codes of the slow and the fast worker, the lines of the output, the most lines and the
partial records that the journal has of a row, and whether the slow one said that it ended early.
"""

import io
import json
import os
import tempfile
import time
from pathlib import Path

from rich.console import Console

from ferrum_jax.batch.job import JobOptions, JobSettings, run_batch
from tests.batch.fake_llm import FakeLLM, json_lines
from tests.batch.running import num_lines, row_records

NUM_ROWS = 160
SLOW_S = 0.3  # of a step; a busy machine slows the fast worker, whose steps take 5 ms, and must not make them alike


def work(folder: Path, step_s: float) -> int:
    """The id of a process that runs the job in steps of `step_s`."""
    if pid := os.fork():
        return pid
    shown, code = io.StringIO(), 9
    try:
        code = run_batch(
            lambda start: FakeLLM(width=8, on_step=lambda llm: time.sleep(step_s)),
            folder / "in.jsonl",
            folder / "out.jsonl",
            model="fake",
            console=Console(file=shown, width=200),
            options=JobOptions(flush_s=0.05, poll_s=0.05, share_s=0.2, leaves_early=True),
            settings=JobSettings(now=lambda: 1000.0),
        )
    finally:
        (folder / f"shown-{step_s}").write_text(shown.getvalue())
        os._exit(code)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = ({"custom_id": str(i), "prompt": f"{i} " * 9, "max_tokens": 40} for i in range(NUM_ROWS))
        (folder / "in.jsonl").write_bytes(json_lines(rows))
        pids = [work(folder, step_s) for step_s in (SLOW_S, 0.005)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        kinds = [kind for kind, _ in row_records(folder / "out.jsonl")]
        found = {
            "codes": codes,
            "lines": (folder / "out.jsonl").read_bytes().count(b"\n"),
            "most_lines_of_a_row": max(num_lines(folder / "out.jsonl").values()),
            "partials": kinds.count(b"partial"),
            "ended_early": "Ended early: other workers run" in (folder / f"shown-{SLOW_S}").read_text(),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
