"""Rows come from compressed files and columns as they come from JSON lines, and answers go back that way."""

import csv
import gzip
import io
import json
import math
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from ferrum_jax.batch.input.files import reading_rows, writing_rows
from ferrum_jax.batch.input.formats import BadRow, Row, parse_line
from ferrum_jax.batch.job import JobSettings, run_batch
from ferrum_jax.io.paths import install_command
from tests.batch.fake_llm import FakeLLM, json_lines

ROWS = [
    {
        "custom_id": "1",
        "prompt": 'a,\n"b" é',
        "max_tokens": 3,
        "stop": ["x"],
        "logit_bias": {"7": -1.5, "8": -math.inf},
    },
    {"custom_id": "2", "prompt_token_ids": [5, 6], "temperature": 0.5, "n": 2},
    {"custom_id": "3", "messages": [{"role": "user", "content": "hi"}]},
]
OPENAI = {"custom_id": "4", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p", "max_tokens": 2}}


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
    "in.jsonl": json_lines(ROWS),
    "in.jsonl.gz": gzip.compress(json_lines(ROWS)),
    "in.jsonl.zst": zstd(json_lines(ROWS)),
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
            settings = JobSettings(now=lambda: 1000.0)
            source = tmp_path / "in.parquet"
            code = run_batch(FakeLLM, source, folder / name, model="m", console=console, settings=settings)
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
        (
            "in.jsonl.gz",
            gzip.compress(b"abcd" * 99, mtime=0)[:10] + b"\xff" * 9,
            "in.jsonl.gz cannot be read as JSON lines.gz: ",
        ),
        ("in.csv", b"custom_id,prompt,prompt\n", r"columns are given twice: \['prompt'\]"),
        ("in.csv", b"custom_id,\xff\n", "in.csv cannot be read as .csv: 'utf-8' codec"),
        ("in.arrow", b"", "in.arrow: .arrow is not supported; name .jsonl, .csv or .parquet, also"),
        ("in.npy.gz", b"", ".npy.gz is not supported"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(name, content, message):
    with pytest.raises(ValueError, match=message), reading_rows(io.BytesIO(content), name):
        pass


def parsed(content: bytes, name: str) -> list[Row | BadRow]:
    with reading_rows(io.BytesIO(content), name) as file:
        return [parse_line(line, number) for number, line in enumerate(file, 1)]


@pytest.mark.parametrize(
    ("row", "custom_id", "message"),
    [
        (b"bad,x,5,more", "bad", "line 3 of the CSV has 4 cells, and there are 3 columns"),
        (b"bad,x", "bad", "line 3 of the CSV has 2 cells"),
        (b"bad,\xff,5", None, "line 3 of the CSV is not UTF-8; write the file as UTF-8"),
        (b"bad,x," + b"[" * 50_000, "bad", "line 3 of the CSV: nested too deeply"),
        (b"bad,x," + b"[" * 200 + b"]" * 200, "bad", "line 3 of the CSV: nested too deeply"),
        (b'bad,"x"y,5', None, "line 3 of the CSV: ',' expected after '\"'"),
        (b"bad,x,NaN", "bad", "max_tokens is 'NaN'; it must be a whole number"),
        (b"bad,x," + b"9" * 5000, "bad", "max_tokens is '9999"),
        (b"bad,x,1e999", "bad", "max_tokens is '1e999'; it must be a whole number"),
        (b",x,5", None, "has no custom_id"),
    ],
)
def test_a_csv_row_that_cannot_be_read_fails_alone(row, custom_id, message):
    content = b"custom_id,prompt,max_tokens\na,x,5\n" + row + b"\n\nb," + b"y" * 200_000 + b",6\n"
    first, bad, last = parsed(content, "in.csv")
    assert isinstance(first, Row) and isinstance(last, Row) and len(last.prompt) == 200_000
    assert isinstance(bad, BadRow) and bad.custom_id == custom_id and message in bad.message


def test_a_parquet_row_that_cannot_be_read_fails_alone():
    names = pyarrow.array(["a", "b", "c", "d"])
    offsets, content = b"".join(i.to_bytes(4, "little") for i in range(5)), b"x\xffzw"  # the second is no UTF-8
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(content)]
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 4, buffers)
    far = pyarrow.array([None, None, 2**62, None], pyarrow.timestamp("us"))  # no date that Python knows
    target = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"custom_id": names, "prompt": texts, "user": far}), target)
    good, *bad, last = parsed(target.getvalue(), "in.parquet")
    assert isinstance(good, Row) and isinstance(last, Row) and good.prompt == "x" and last.prompt == "w"
    assert [row.custom_id for row in bad] == ["b", "c"]
    assert all("the row cannot be read: " in row.message for row in bad)
    biased = parsed(parquet([{"custom_id": "5", "prompt": "x", "logit_bias": {"7": math.nan}}]), "in.parquet")
    assert "NaN is not a JSON number" in biased[0].message and biased[0].custom_id == "5"
    deep = parsed(
        parquet([{**OPENAI, "body": body} for body in ("[" * 5000, json.dumps(OPENAI["body"]))]), "in.parquet"
    )
    assert "nested too deeply" in deep[0].message and deep[0].custom_id == "4" and isinstance(deep[1], Row)


@settings(max_examples=150)
@given(st.lists(st.lists(st.sampled_from([b",", b'"', b"\n", b"\r", b"\xff", b"\0", b"[", b"{}", b"a", b"7"]))))
def test_every_row_of_a_csv_gives_a_line_whatever_bytes_it_has(rows):
    content = b"\n".join(b"".join(row) for row in rows)
    for row in parsed(b"custom_id,prompt,input,stop\n" + content + b'\n"\nlast,x,,\n', "in.csv"):
        assert len(row.id) == 32


_CELLS = (
    st.lists(st.none() | st.text(max_size=3)),
    st.lists(st.none() | st.binary(max_size=3)),
    st.lists(st.none() | st.floats()),
    st.lists(st.none() | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=2)),
    st.lists(st.none() | st.datetimes()),
    st.lists(st.none() | st.dictionaries(st.sampled_from("ab"), st.decimals(0, 9, places=2), min_size=1)),
)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(["prompt", "input", "n", "stop", "body", "url"]), st.one_of(*_CELLS)), max_size=3
    )
)
def test_every_row_of_a_parquet_file_gives_a_line_whatever_its_cells_are(columns):
    cells = dict(columns)
    num_rows = max(map(len, cells.values()), default=0)
    table = {name: (values + [None] * num_rows)[:num_rows] for name, values in cells.items()}
    target = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"custom_id": [str(i) for i in range(num_rows)], **table}), target)
    rows = parsed(target.getvalue(), "in.parquet")
    assert [row.custom_id for row in rows] == [str(i) for i in range(num_rows)]


def test_without_pyarrow_a_form_that_needs_it_is_refused_before_the_model_loads(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "in.jsonl").write_bytes(json_lines(ROWS))
    with pytest.raises(ValueError, match=re.escape(f"needs pyarrow; {install_command('columns')}")):
        run_batch(FakeLLM, tmp_path / "in.jsonl", tmp_path / "o.parquet", model="m", console=Console(quiet=True))


def test_a_plain_file_is_written_as_it_is():
    target = io.BytesIO()
    with writing_rows(target, "out.jsonl") as file:
        assert file is target
