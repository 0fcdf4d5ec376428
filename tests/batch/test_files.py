"""Rows come from compressed files and columns as they come from JSON lines, and answers go back that way."""

import csv
import gzip
import io
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console

from ferrum_jax.batch.files import reading_rows, writing_rows
from ferrum_jax.batch.job import run_batch
from tests.batch.fake_llm import FakeLLM

ROWS = [
    {"custom_id": "1", "prompt": 'a,\n"b" é', "max_tokens": 3, "stop": ["x"], "logit_bias": {"7": -1.5}},
    {"custom_id": "2", "prompt_token_ids": [5, 6], "temperature": 0.5, "n": 2},
    {"custom_id": "3", "messages": [{"role": "user", "content": "hi"}]},
]
OPENAI = {"custom_id": "4", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p", "max_tokens": 2}}


def lines(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def zstd(content: bytes) -> bytes:
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


def parquet(rows: list[dict]) -> bytes:
    target = io.BytesIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    pyarrow.parquet.write_table(table, target)
    return target.getvalue()


def comma_separated(rows: list[dict]) -> bytes:
    target = io.BytesIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.TextIOWrapper(target, encoding="utf-8", newline="")
    writer = csv.DictWriter(text, names, restval="")
    writer.writeheader()
    for row in rows:
        writer.writerow({n: v if isinstance(v, str) else json.dumps(v) for n, v in row.items()})
    text.flush()
    return target.getvalue()


FORMS = {
    "in.jsonl": lines(ROWS),
    "in.jsonl.gz": gzip.compress(lines(ROWS)),
    "in.jsonl.zst": zstd(lines(ROWS)),
    "in.parquet": parquet(ROWS),
    "in.csv": comma_separated(ROWS),
    "in.csv.gz": gzip.compress(comma_separated(ROWS)),
}


@pytest.mark.parametrize("name", FORMS)
def test_all_forms_of_input_are_the_same_rows(name):
    with reading_rows(io.BytesIO(FORMS[name]), name) as file:
        found = [json.loads(line) for line in file]
        file.seek(0)
        assert len(file.readline()) > 10
    assert found == ROWS


def test_the_openai_form_is_read_from_columns_with_the_body_as_text_or_as_a_struct():
    as_text = {**OPENAI, "body": json.dumps(OPENAI["body"])}
    for name, content in (("a.parquet", parquet([OPENAI])), ("b.parquet", parquet([as_text]))):
        with reading_rows(io.BytesIO(content), name) as file:
            assert json.loads(file.read()) == OPENAI
    with reading_rows(io.BytesIO(comma_separated([OPENAI])), "c.csv") as file:
        assert json.loads(file.read()) == OPENAI


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst", "out.csv", "out.parquet"])
def test_a_job_writes_the_form_that_the_outputs_name_says_with_equal_bytes_each_time(tmp_path, name):
    (tmp_path / "in.parquet").write_bytes(FORMS["in.parquet"])
    contents = []
    for folder in (tmp_path / "1", tmp_path / "2"):
        folder.mkdir()
        console = Console(file=io.StringIO())
        for _ in range(2):  # the second start finds all done
            code = run_batch(
                FakeLLM, tmp_path / "in.parquet", folder / name, model="m", console=console, now=lambda: 1000.0
            )
            assert code == 0
        contents.append((folder / name).read_bytes())
    assert contents[0] == contents[1]
    assert [row["custom_id"] for row in answers(tmp_path / "1" / name)] == ["1", "2", "3"]
    assert all(row["response"]["status_code"] == 200 and not row["error"] for row in answers(tmp_path / "1" / name))


def answers(path: Path) -> list[dict]:
    """The lines of an output of any form; CSV and Parquet hold responses as JSON text."""
    content = path.read_bytes()
    with reading_rows(io.BytesIO(content), path.name) as file:
        rows = [json.loads(line) for line in file]
    for row in rows:
        row["response"] = json.loads(row["response"]) if isinstance(row["response"], str) else row["response"]
        row.setdefault("error", None)
    return rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("in.jsonl.gz", b"{}", "in.jsonl.gz cannot be read as JSON lines.gz: Not a gzipped file"),
        ("in.jsonl.zst", b"{}", "in.jsonl.zst cannot be read as JSON lines.zst"),
        ("in.parquet", b"{}", "in.parquet cannot be read as .parquet"),
        ("in.csv", b"custom_id,prompt\na,b,c\n", "line 2 has not as many cells as there are columns"),
        ("in.csv", b"custom_id,prompt\na,\xff\n", "in.csv cannot be read as .csv: 'utf-8' codec"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(name, content, message):
    with pytest.raises(ValueError, match=message), reading_rows(io.BytesIO(content), name):
        pass


def test_without_pyarrow_a_form_that_needs_it_is_refused_before_the_model_loads(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "in.jsonl").write_bytes(lines(ROWS))
    with pytest.raises(ValueError, match=r"needs pyarrow; pip install 'ferrum-jax\[columns\]'"):
        run_batch(FakeLLM, tmp_path / "in.jsonl", tmp_path / "o.parquet", model="m", console=Console(quiet=True))


def test_a_plain_file_is_written_as_it_is():
    target = io.BytesIO()
    with writing_rows(target, "out.jsonl") as file:
        assert file is target
