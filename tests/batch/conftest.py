"""A job, stores of both kinds, and three rows that a journal is about."""

import pytest

from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.io.files.store import LocalStore, Store, open_store
from tests.batch.fake_llm import json_lines
from tests.batch.job import Job

NAMES = ("a", "b", "c")


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def expected(job) -> bytes:
    return job.whole()


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path) -> Store:
    return LocalStore(tmp_path / "j") if request.param == "local" else open_store(f"memory://{tmp_path}/j")


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(json_lines({"custom_id": name, "prompt": "x", "n": 2} for name in NAMES))
    with open(path, "rb") as file:
        yield Rows(file)
