"""Jobs whose rows name sounds: each window is a prompt, and stopped and gone on with, the output is the same."""

import base64
import dataclasses
import json
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
from scripts.goldens.sounds import wav
from tests.batch.running import run_rows
from tests.batch.stopping import stopping
from tests.support import GOLDENS
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
