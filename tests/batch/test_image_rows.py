"""Jobs whose rows have images: stopped and gone on with, the output is the same; changed images begin a row anew."""

import base64
import dataclasses
import io
import itertools
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from ferrum_jax import LLM
from ferrum_jax.batch.job import EXIT_OK, EXIT_PREEMPTED
from ferrum_jax.batch.journal.partials import decode_partial, encode_partial
from ferrum_jax.batch.notice import Notice
from tests.batch.fake_llm import CHOICE
from tests.batch.running import run_rows
from tests.batch.stopping import num_starts, stopping
from tests.batch.verify.planted import verified
from tests.engine.golden_media import CONFIG
from tests.engine.image_folder import picture, write_folder
from tests.vision.hostile import saved


def test_a_row_in_progress_has_the_digests_of_its_images_and_not_their_bytes():
    choice = dataclasses.replace(CHOICE, token_ids=(3, 4), finish_reason=None, image_digests=("c0ffee",))
    assert decode_partial(encode_partial([choice])) == (choice,)
    assert decode_partial(b'[[[3,4],null,"",null,null]]')[0].image_digests == (), "as rows without images have it"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("qwen3_vl") / "model")


def png(seed: int) -> bytes:
    return saved(Image.fromarray(picture(seed)), "PNG")


def write_rows(folder: Path) -> None:
    """Rows with images in data: URLs, and one, `file`, with one in a file of the folder."""
    urls = ["data:image/png;base64," + base64.b64encode(png(seed)).decode() for seed in (1, 2)]
    (folder / "photo.png").write_bytes(png(3))
    urls.append(f"file://{folder}/photo.png")
    rows = []
    for name, url in zip(("one", "two", "file"), urls, strict=True):
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": f" t{len(rows) + 9} t5"}]
        content = [*parts, parts[0]] if name == "two" else parts
        rows.append({"custom_id": name, "messages": [{"role": "user", "content": content}], "temperature": 0.8})
    (folder / "in.jsonl").write_text("".join(json.dumps({**row, "max_tokens": 30, "n": 2}) + "\n" for row in rows))


class Job:
    """A job in a folder, over one engine that is begun with."""

    def __init__(self, model: Path, folder: Path) -> None:
        folder.mkdir()
        write_rows(folder)
        self.folder = folder
        self.said = io.StringIO()
        self.llm = LLM(str(model), dataclasses.replace(CONFIG, image_root=str(folder), max_num_seqs=2))

    def run(self, notice: Notice | None = None, output: str = "out.jsonl") -> int:
        return run_rows(self.folder, lambda start: self.llm, output, notice=notice, shown=self.said)

    def lines(self, output: str = "out.jsonl") -> dict[str, list[str]]:
        found = [json.loads(line) for line in (self.folder / output).read_bytes().splitlines()]
        return {
            line["custom_id"]: [choice["message"]["content"] for choice in line["response"]["body"]["choices"]]
            for line in found
        }


@pytest.fixture
def job(model, tmp_path) -> Job:
    return Job(model, tmp_path / "job")


@pytest.mark.slow
def test_a_stopped_job_with_images_has_the_bytes_of_an_unstopped_one(job, monkeypatch):
    assert job.run(output="whole.jsonl") == EXIT_OK
    assert len(set(itertools.chain(*job.lines("whole.jsonl").values()))) == 6
    assert num_starts(job.run, stopping(monkeypatch, 7)) > 3
    assert (job.folder / "out.jsonl").read_bytes() == (job.folder / "whole.jsonl").read_bytes()
    journaled = b"".join(path.read_bytes() for path in (job.folder / "out.jsonl.journal/segments").iterdir())
    digests = set(re.findall(rb"\"([0-9a-f]{64})\"", journaled))
    assert len(digests) == 3 and base64.b64encode(png(1))[:80] not in journaled


@pytest.mark.slow
def test_a_row_whose_image_changed_begins_anew_and_others_go_on(job, monkeypatch):
    assert job.run(output="whole.jsonl") == EXIT_OK
    (job.folder / "photo.png").write_bytes(png(4))
    assert job.run(output="changed.jsonl") == EXIT_OK
    (job.folder / "photo.png").write_bytes(png(3))
    notices = stopping(monkeypatch, 12)
    assert job.run(notices[-1]) == EXIT_PREEMPTED
    journaled = b"".join(path.read_bytes() for path in (job.folder / "out.jsonl.journal/segments").iterdir())
    assert len(re.findall(rb" partial ", journaled)) >= 1
    (job.folder / "photo.png").write_bytes(png(4))
    before = job.said.getvalue()
    monkeypatch.undo()
    assert job.run() == EXIT_OK
    whole, changed, found = job.lines("whole.jsonl"), job.lines("changed.jsonl"), job.lines()
    assert whole["file"] != changed["file"], "another image has another answer"
    assert found == {**whole, "file": changed["file"]}
    said = job.said.getvalue()[len(before) :]
    assert said.count("an image is not what it was") == 1 and "file: an image" in said


@pytest.mark.slow
def test_a_replaced_image_is_found_by_answering_again(job):
    assert job.run() == EXIT_OK
    assert verified(job.folder, lambda: job.llm).is_right
    (job.folder / "photo.png").write_bytes(png(4))
    (row,) = verified(job.folder, lambda: job.llm).differing
    assert row.custom_id == "file"
    assert "response.record.images" in [difference.where for difference in row.compared.differences]
