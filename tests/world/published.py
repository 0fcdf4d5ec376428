"""Histories that begin from what an earlier version wrote (tests/published_files), and go on under faults."""

import functools
import json
import re
import tarfile
from dataclasses import replace
from typing import Any

from ferrum_jax.inputs.identity import ModelIdentity
from tests.batch.fake_llm import IDENTITY
from tests.support import ROOT
from tests.world.disk import Disk
from tests.world.history import History, Plan

_WRITTEN = sorted((ROOT / "tests/published_files").glob("*/job.tar.xz"))[-1].parent


@functools.cache
def files_of(name: str) -> dict[str, bytes]:
    """The files of an archive by their paths, which begin with a slash."""
    with tarfile.open(_WRITTEN / f"{name}.tar.xz") as archive:
        opened = {f"/{each.name}": archive.extractfile(each) for each in archive if each.isfile()}
        return {path: file.read() for path, file in opened.items() if file is not None}


def identity_of(name: str) -> ModelIdentity:
    """The model that answered there."""
    (content,) = (content for path, content in files_of(name).items() if path.endswith("/model.json"))
    recorded = json.loads(content)
    values: dict[str, Any] = {**recorded, "end_tokens": tuple(recorded["end_tokens"])}
    return ModelIdentity(**values, environment=IDENTITY.environment)


class PublishedJob(History):
    """A job of 1,500 rows; 303 were answered."""

    def __init__(self, plan: Plan, *, is_logged: bool = False) -> None:
        super().__init__(replace(plan, num_rows=1500), is_logged=is_logged)
        self.input, self.output, self.model = "/job/in.jsonl", "/job/out.jsonl", "tiny"
        self.identity = identity_of("job")

    def _put_files(self, disk: Disk) -> None:
        for path, content in files_of("job").items():
            disk.put(path, content)

    @property
    def rows_content(self) -> bytes:
        return files_of("job")["/job/in.jsonl"]

    def _is_whole(self) -> bool:
        return self.content() == whole()


@functools.cache
def whole() -> bytes:
    """The output of that job where nothing disturbs it: the lines that were there, and those of the others."""
    history = PublishedJob(Plan(seed=0, kind="published-disk", num_rows=1500, steps_s=(0.1,), faults=()))
    history._is_whole = lambda: True
    found = history.run().content() or b""
    lines, there = set(found.splitlines()), 0
    for path, content in files_of("job").items():
        records = content.splitlines() if "/segments/" in path else []
        kept = [record.split(b" ", 4)[4] for record in records if record.split(b" ", 2)[1] == b"ok"]
        assert lines.issuperset(kept), f"answers of {path} are gone"
        there += len(kept)
    assert there == 303 and len(lines) == 1500 == found.count(b"\n")
    assert re.findall(rb'"custom_id": "row-(\d+)"', found) == [b"%d" % index for index in range(1500)]
    return found
