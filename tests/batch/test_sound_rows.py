"""Jobs whose rows name sounds: each window is a prompt. Stopped, or killed ten times, a job has the same bytes."""

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
from types import SimpleNamespace

import pytest

from ferrum_jax import LLM
from ferrum_jax.batch.input.formats import BadRow, Row, parse_line
from ferrum_jax.batch.input.sound_folder import rows_of_folder
from ferrum_jax.batch.job import EXIT_OK, EXIT_PREEMPTED, EXIT_ROWS_FAILED
from ferrum_jax.batch.notice import Notice
from ferrum_jax.openai.asked import TRANSCRIBES
from ferrum_jax.tasks.transcription.forms import as_json, as_text, as_verbose_json
from scripts.goldens.sounds import sound, wav
from tests.batch.running import num_lines, run_rows
from tests.batch.stopping import stopping
from tests.histories import seeded
from tests.support import COMPILED, GOLDENS, ROOT
from tests.transcribing.heard import CONFIG, NAME, RATE

URL = "/v1/audio/transcriptions"


def row(custom_id: str, url: str = URL, **body: object) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def parsed(**line: object) -> Row | BadRow:
    return parse_line(json.dumps(line).encode(), 1)


def test_both_forms_of_a_row_name_a_sound():
    whole, short = parsed(**row("a", file="talk.wav", language="de")), parsed(custom_id="a", file="talk.wav")
    assert isinstance(whole, Row) and whole.kind == TRANSCRIBES and whole.prompts == ("talk.wav",)
    assert isinstance(short, Row) and short.url == URL and short.how.how.language is None
    other = parsed(**row("a", "/v1/audio/translations", file="talk.wav"))
    assert isinstance(other, Row) and other.how.how.task == "translate"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "body has no file"),
        ({"file": 7}, "file is 7; it must be a URL, or a path below the root"),
        ({"file": "a.wav", "stream": True}, "stream = true is not supported: a batch row is answered in one piece"),
        ({"file": "a.wav", "messages": []}, "messages is not known"),
        ({"file": "a.wav", "response_format": "mp3"}, "response_format is 'mp3'"),
        ({"file": "a.wav", "seed": "x"}, "seed is 'x'"),
    ],
)
def test_a_row_that_asks_for_something_else_is_a_bad_row(body, said):
    found = parsed(**row("a", **body))
    assert isinstance(found, BadRow) and said in found.message, found


def test_windows_have_the_seed_of_their_row():
    plain, own = parsed(**row("a", file="a.wav", temperature=1)), parsed(**row("a", file="a.wav", seed=5))
    assert isinstance(plain, Row) and isinstance(own, Row)
    windows = [SimpleNamespace(prompt=place, sampling=plain.asked) for place in range(3)]
    heard = SimpleNamespace(requests=windows)
    assert len(set(plain.with_windows(heard).seeds)) == 1
    assert own.with_windows(heard).seeds == (5, 5, 5)


def test_a_folder_is_a_row_for_each_of_its_sounds(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.wav", "sub/a.MP3", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "link.wav").symlink_to(tmp_path / "b.wav")
    lines = [json.loads(line) for line in rows_of_folder(tmp_path).splitlines()]
    assert lines == [{"custom_id": name, "file": name} for name in ("b.wav", "sub/a.MP3")]
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="has no file of sound"):
        rows_of_folder(tmp_path / "none")


class Job:
    """A job in a folder whose sounds its rows name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sounds = {"a": wav(1, RATE, 1), "b": wav(31, RATE, 1), "c": wav(95, RATE, 1)}
        for name, content in self.sounds.items():
            (folder / f"{name}.wav").write_bytes(content)
        url = "data:audio/wav;base64," + base64.b64encode(self.sounds["a"]).decode()
        rows = [
            row("c", file="c.wav", language="en", response_format="srt"),
            row("b", file=f"file://{folder}/b.wav", response_format="verbose_json"),
            row("a", file=url),
            row("drawn", file="c.wav", temperature=1),
            row("outside", file="../secret.wav"),
            row("unknown", file="a.wav", language="ru"),
        ]
        (folder / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        config = dataclasses.replace(CONFIG, image_root=str(folder), max_num_batched_tokens=64, invariant=True)
        self.llm = LLM(str(GOLDENS / NAME), config)

    def run(self, notice: Notice | None = None, output: str = "out.jsonl") -> int:
        return run_rows(self.folder, lambda start: self.llm, output, notice=notice)


def test_rows_get_what_a_program_gets_and_a_stopped_job_has_the_same_bytes(tmp_path, monkeypatch):
    job = Job(tmp_path)
    assert job.run() == EXIT_ROWS_FAILED
    content = (tmp_path / "out.jsonl").read_bytes()
    found = {each["custom_id"]: each for each in map(json.loads, content.splitlines())}
    bodies = {name: each["response"]["body"] for name, each in found.items() if each["response"]}
    (timed,) = job.llm.transcribe(job.sounds["c"], language="en", timestamps="segment")
    assert bodies["c"] == {"text": as_text(timed, "srt")}
    (verbose,) = job.llm.transcribe(job.sounds["b"], timestamps="segment", logprobs=True)
    assert bodies["b"] == as_verbose_json(verbose, 0.0)
    assert bodies["a"] == as_json(job.llm.transcribe(job.sounds["a"])[0])
    assert "which is not below the image root" in found["outside"]["error"]["message"]
    assert "this model has de, en, fr" in found["unknown"]["error"]["message"]
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert report["media"]["sounds_encoded"] == 4 + 2 + 1 and report["media"]["sound_s"] >= 2 * 95 + 31 + 1
    notices = stopping(monkeypatch, 40)
    while job.run(notices[-1], "stopped.jsonl") == EXIT_PREEMPTED:
        notices.append(Notice())
    assert len(notices) > 2
    assert (tmp_path / "stopped.jsonl").read_bytes() == content


def test_more_rows_than_are_read_ahead_are_each_answered_once(tmp_path):
    job = Job(tmp_path)
    rows = [row(str(i), file=f"{'abc'[i % 3]}.wav", language="en") for i in range(9)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert job.run() == EXIT_OK
    texts = [json.loads(line)["response"]["body"]["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(texts) == 9 and texts[:3] == texts[3:6] == texts[6:]


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
