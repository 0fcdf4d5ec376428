"""A job of two hundred clips that is killed ten times has the bytes of one that nobody killed."""

import base64
import dataclasses
import io
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ferrum_jax import LLM
from scripts.goldens.sounds import sound
from tests.batch.running import num_lines
from tests.histories import seeded
from tests.support import COMPILED, GOLDENS, ROOT
from tests.transcribing.heard import CONFIG, NAME, RATE

NUM_CLIPS, KILLS, NUM_AT_ONCE = 200, 10, 32
_FLAGS = ["--max-num-seqs", str(NUM_AT_ONCE), "--max-num-batched-tokens", "64", "--invariant"]
_DAMAGED = 19  # the clip that is cut in half, a FLAC
_ASKED = (
    {"language": "en"},
    {"response_format": "verbose_json"},
    {"response_format": "srt", "language": "de"},
    {"temperature": 1},
    {"prompt": "water and stone", "max_tokens": 20},
)


def clip(number: int) -> tuple[str, bytes]:
    """Its ending, and a file of less than two seconds; each fortieth has two windows."""
    import soundfile

    samples = sound(31 if number % 40 == 3 else 0.3 + 0.07 * (number % 23), number)
    kind = "mp3" if number % 8 == 1 else ("wav", "flac")[number % 2]
    content = io.BytesIO()
    soundfile.write(content, samples, RATE, format=kind.upper())
    found = content.getvalue()
    return kind, found[: len(found) // 2] if number == _DAMAGED else found


def write_folder(folder: Path) -> Path:
    """Clips in folders, with names of several alphabets."""
    for number in range(NUM_CLIPS):
        kind, content = clip(number)
        path = folder / "clips" / ("Straße", "水 stone", "plain")[number % 3] / f"{number:03}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder / "clips"


def write_rows(folder: Path) -> Path:
    """Rows that hold their clips, asked in several ways."""
    lines = []
    for number in range(NUM_CLIPS):
        kind, content = clip(number)
        body = {"file": f"data:audio/{kind};base64,{base64.b64encode(content).decode()}", **_ASKED[number % 5]}
        task = "translations" if number % 7 == 0 and "language" not in body else "transcriptions"
        lines.append({"custom_id": f"clip-{number}", "method": "POST", "url": f"/v1/audio/{task}", "body": body})
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "in.jsonl"


class ClipJob:
    """A job over the tiny Whisper, in processes that are killed."""

    def __init__(self, folder: Path, given: Path) -> None:
        self.output = folder / "out.jsonl"
        self._command = [sys.executable, "-m", "ferrum_jax", "batch", "--model", str(GOLDENS / NAME), *_FLAGS]
        self._command += ["--compilation-cache-dir", str(COMPILED), "--input", str(given), "--output", str(self.output)]

    def run(self, after_s: float | None = None) -> int:
        """The exit code of a run, which is killed so many seconds after it began."""
        how = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(self._command, **how) as process:
            try:
                said = process.communicate(timeout=after_s)[1]
            except subprocess.TimeoutExpired:
                process.kill()
                said = process.communicate()[1]
        assert process.returncode in (1, -signal.SIGKILL), said  # the damaged clip is an error line
        return process.returncode

    def forget(self) -> None:
        self.output.unlink(missing_ok=True)
        shutil.rmtree(f"{self.output}.journal")


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_folder, write_rows])
def test_two_hundred_clips_killed_ten_times_have_the_bytes_of_an_unkilled_job(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    job, moments = ClipJob(tmp_path, write(tmp_path)), random.Random(seeded(1))
    began = time.monotonic()
    assert job.run() == 1
    whole_s, expected = time.monotonic() - began, job.output.read_bytes()
    found = [json.loads(line) for line in expected.splitlines()]
    assert len({line["custom_id"] for line in found}) == len(found) == NUM_CLIPS
    assert [f"{_DAMAGED}" in line["custom_id"] for line in found if line["error"]] == [True]
    job.forget()
    killed = grown = ended = 0
    while killed < KILLS or not ended:
        left = killed < KILLS
        if job.run(moments.uniform(0.1, 0.45) * whole_s if left else None) == 1:
            assert job.output.read_bytes() == expected
            assert list(num_lines(job.output).values()) == [1] * NUM_CLIPS
            ended += 1
            job.forget()
            continue
        killed += 1
        lines = num_lines(job.output)
        assert not job.output.exists() and set(lines.values()) <= {1}
        grown += 0 < len(lines) < NUM_CLIPS
    assert grown > 1, "kills came in the midst of the rows"


@pytest.mark.slow
def test_thirty_two_clips_at_once_have_the_texts_of_each_alone() -> None:
    llm = LLM(str(GOLDENS / NAME), dataclasses.replace(CONFIG, max_num_seqs=NUM_AT_ONCE, max_num_batched_tokens=64))
    clips = [clip(number)[1] for number in range(1 + NUM_AT_ONCE) if number != _DAMAGED]
    how = {"language": "en", "timestamps": "segment", "max_tokens": 30}
    together = llm.transcribe(clips, **how)
    assert len({each.text for each in together}) > NUM_AT_ONCE // 2
    assert together == [llm.transcribe(each, **how)[0] for each in clips]
