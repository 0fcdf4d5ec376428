"""`ferrum-jax batch --reuse` and `--fork` as a user sees them."""

import json
from pathlib import Path

import pytest

from ferrum_jax.__main__ import main
from tests.commands.test_every_command import ENGINE
from tests.rows import rows_beside
from tests.support import COMPILED, GOLDENS

ROWS = rows_beside(__file__)["rows"]


def batch(flags: str) -> int:
    return main(f"batch --model {GOLDENS / 'qwen3'} --max-tokens 4 {ENGINE} {flags}".split())


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert batch(f"--input {folder}/in.jsonl --output {folder}/out.jsonl --compilation-cache-dir {COMPILED}") == 0
    return folder


def test_only_a_new_row_is_computed_and_the_plan_says_so(first, tmp_path, capsys):
    new = [ROWS[0], {**ROWS[1], "custom_id": "renamed"}, {**ROWS[1], "custom_id": "new", "max_tokens": 3}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in new))
    flags = f"--input {tmp_path}/in.jsonl --output {tmp_path}/out.jsonl --compilation-cache-dir {COMPILED}"
    assert batch(f"{flags} --reuse {first}/out.jsonl --plan") == 0
    assert "│ rows with an earlier answer │ 2 │" in " ".join(capsys.readouterr().out.split())
    assert batch(f"{flags} --reuse {first}/out.jsonl") == 0
    report = json.loads((tmp_path / "out.jsonl.report.json").read_bytes())
    assert report["reused"]["rows"] == 2 and report["runs"][0]["output_tokens"] == 3
    assert main(f"verify {tmp_path}/out.jsonl --sample all --compilation-cache-dir {COMPILED} {ENGINE}".split()) == 0
    assert "to the bit" in " ".join(capsys.readouterr().out.split())


def test_a_forked_job_goes_on_and_its_rows_are_kept_for_verify(first, tmp_path, capsys):
    (tmp_path / "turns").write_text("Why?\nAnd then?\n")
    flags = f"--fork {first}/out.jsonl --append-file {tmp_path}/turns --output {tmp_path}/out.jsonl"
    flags += f" --compilation-cache-dir {COMPILED}"
    assert batch(f"{flags} --plan") == 0 and not list(tmp_path.glob("out*"))
    for _ in range(2):
        assert batch(flags) == 0
    (kept,) = tmp_path.glob("out.jsonl.fork-*.jsonl")
    rows = [json.loads(line) for line in kept.read_bytes().splitlines()]
    assert [row["messages"][-1]["content"] for row in rows] == ["Why?", "And then?"]
    assert main(f"verify {tmp_path}/out.jsonl --sample all --compilation-cache-dir {COMPILED} {ENGINE}".split()) == 0
    assert "to the bit" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("flags", "why"), rows_beside(__file__)["flags that do not fit"])
def test_flags_that_do_not_fit_are_refused(tmp_path, monkeypatch, capsys, flags, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(json.dumps(ROWS[0]))
    (tmp_path / "no-text").write_bytes(b"\xff\n")
    assert batch(f"{flags} --output out.jsonl") == 2
    assert why in " ".join(capsys.readouterr().err.split())
