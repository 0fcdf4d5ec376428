"""Draws docs/pictures/killed_job.png: a batch job of the demo model that is killed twice and started again.

    python -m scripts.plot_killed_job [OUT.png]

The job answers the prompts of scripts/demo 20 times, with seeds of their own. `kill -9` comes when a third and when two
thirds of the rows are in the journal. Rows over time are counted in the journal; nothing is drawn that did not happen.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
_TIMES, _PERIOD_S = 20, 0.05


def main() -> None:
    """Runs the job and draws it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ROOT / "docs/pictures/killed_job.png"
    parser.add_argument("out", type=Path, nargs="?", default=default, metavar="OUT.png", help="picture to write")
    out: Path = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        rows, points, kills = run(Path(folder))
    draw(out, rows, points, kills)


def run(folder: Path) -> tuple[int, list[tuple[float, int]], list[float]]:
    """(rows, [(seconds, rows in the journal)], seconds of the kills) of a job in a folder."""
    prompts = [json.loads(line) for line in (ROOT / "scripts/demo_prompts.jsonl").read_text().splitlines()]
    rows = [row | {"custom_id": f"{i}/{row['custom_id']}", "seed": i} for i in range(_TIMES) for row in prompts]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = [sys.executable, "-m", "ferrum_jax", "batch", "--model", "checkpoints/demo", "--max-num-seqs", "16"]
    program += ["--max-model-len", "1024", "--max-num-batched-tokens", "512", "--no-invariant"]
    program += ["--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")]
    points: list[tuple[float, int]] = []
    kills: list[float] = []
    start = time.monotonic()
    for part in (1 / 3, 2 / 3, None):
        job = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while job.poll() is None:
            done = num_done(folder / "out.jsonl.journal")
            points.append((time.monotonic() - start, done))
            if part is not None and done >= part * len(rows):
                job.send_signal(signal.SIGKILL)
                job.wait()
                kills.append(time.monotonic() - start)
            time.sleep(_PERIOD_S)
    answers = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [row["custom_id"] for row in rows], "every row once, in order"
    points.append((time.monotonic() - start, len(answers)))
    return len(rows), points, kills


def num_done(journal: Path) -> int:
    """Whole lines of answers in the journal."""
    return sum(path.read_bytes().count(b"\n") for path in journal.glob("segments/[!.]*"))


def draw(out: Path, num_rows: int, points: list[tuple[float, int]], kills: list[float]) -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams["font.size"] = 15
    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=110)
    seconds, counts = [at for at, _ in points], [count for _, count in points]
    axes.fill_between(seconds, counts, color="#cfe3f5", step="post")
    axes.step(seconds, counts, color="#2f6ea5", linewidth=2, where="post")
    for kill in kills:
        axes.axvline(kill, color="#c0392b", linestyle="--", linewidth=1.5)
        axes.text(kill, num_rows * 1.03, "kill -9", color="#c0392b", ha="center")
    axes.set_xlabel("seconds, with every start")
    axes.set_ylabel("rows answered")
    axes.set_xlim(0, points[-1][0])
    axes.set_ylim(0, num_rows)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Software": None})


if __name__ == "__main__":
    main()
