"""Outputs and inputs of every form are verified, and reports that were damaged are refused by name."""

import io
import json
import signal

import pytest
from rich.console import Console

from ferrum_jax.batch.job import JobOptions
from ferrum_jax.batch.journal.job_record import record_in
from ferrum_jax.batch.verify.line_difference import BITS
from ferrum_jax.batch.verify.show import shown
from ferrum_jax.batch.verify.verify_job import Options, Verified, VerifyStopped
from tests.batch.fake_llm import FakeLLM, json_lines
from tests.batch.verify.planted import Written, verified, write_job
from tests.batch.verify.test_many_rows import many_rows
from tests.support import raising


@pytest.mark.parametrize("output", ["out.csv", "out.parquet", "out.jsonl.gz", "out.csv.gz"])
def test_an_output_of_any_form_is_verified(tmp_path, output):
    rows = [*many_rows(12), {"custom_id": "vector", "input": "abc"}, {"custom_id": "typo", "prompt": "x", "tempo": 1}]
    assert write_job(tmp_path, rows, lambda start: FakeLLM(), output=output) == 1
    found = verified(tmp_path, FakeLLM, output=output)
    assert found.is_right, found.findings.sentences
    assert found.counts[BITS] == 13 and found.num_lines == 14


def test_an_edited_cell_is_found(tmp_path):
    write_job(tmp_path, many_rows(12), lambda start: FakeLLM(), output="out.csv")
    path = tmp_path / "out.csv"
    content = path.read_text()
    path.write_text(content.replace('""finish_reason"": ""length""', '""finish_reason"": ""stop""', 1))
    assert path.read_text() != content
    found = verified(tmp_path, FakeLLM, output="out.csv")
    assert found.findings.counts["line_changed"] == 1 and found.counts["different"] == 1


def test_defaults_names_and_structures_that_must_be_whole_are_those_of_the_job(tmp_path):
    rows = [{"custom_id": "a", "prompt": "x", "model": "mine"}, {"custom_id": "b", "prompt": "y", "temperature": 0}]
    settings = {"defaults": {"max_tokens": 3, "temperature": 0.5}, "names": ["mine"], "require_valid": True, "seed": 9}
    assert write_job(tmp_path, rows, lambda start: FakeLLM(), **settings) == 0
    found = verified(tmp_path, FakeLLM)
    assert found.is_right and found.counts[BITS] == 2
    assert "if more than 95.0% of all rows were wrong, one" in _said(verified(tmp_path, FakeLLM, sample=1))


def test_a_row_that_crashed_the_engine_is_answered_again_and_may_not_work_now(tmp_path):
    class Crashing(FakeLLM):
        def _step(self):
            if any(row.prompt == "poison" for row in self.running):
                raise RuntimeError("the device failed")
            yield from super()._step()

    rows = [*many_rows(6), {"custom_id": "p", "prompt": "poison", "max_tokens": 2}]
    assert write_job(tmp_path, rows, lambda start: Crashing()) == 1
    found = verified(tmp_path, Crashing)
    assert found.is_right and found.counts[BITS] == 7
    found = verified(tmp_path, FakeLLM)
    assert not found.is_right and [row.custom_id for row in found.differing] == ["p"]


def test_a_job_that_has_not_ended_has_no_output_to_verify(tmp_path):
    rows = [{"custom_id": str(i), "prompt": "x", "max_tokens": 4, "tempo": 1} for i in range(4)] + many_rows(8)
    assert write_job(tmp_path, rows, lambda start: FakeLLM(), JobOptions(max_errors=1)) == 3
    with pytest.raises(ValueError, match=r"out\.jsonl\.report\.json knows no finished output: end the job first"):
        verified(tmp_path, FakeLLM)


def test_what_stops_the_answering_gives_its_code(tmp_path):
    write_job(tmp_path, many_rows(6), lambda start: FakeLLM())

    class Interrupted(FakeLLM):
        def _step(self):
            raise KeyboardInterrupt

    with pytest.raises(VerifyStopped) as stopped:
        verified(tmp_path, Interrupted)
    assert stopped.value.code == 130


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_what_was_found_before_a_signal_is_kept(tmp_path, number, code):
    write_job(tmp_path, many_rows(60), lambda start: FakeLLM())
    written = Written.read(tmp_path)
    for line in written.lines:
        line["response"]["body"]["choices"][0]["text"] += "#"
    written.forge()
    written.write(tmp_path)

    given: list[int] = []

    def signalled(llm: FakeLLM) -> None:
        if llm.num_answered > 20 and not given:
            given.append(number)
            signal.raise_signal(number)

    with pytest.raises(VerifyStopped) as stopped:
        verified(tmp_path, lambda: FakeLLM(on_step=signalled))
    found = stopped.value.found
    assert stopped.value.code == code
    assert 20 < found.num_answered == found.counts["different"] < 60 == found.num_answered + found.num_left
    assert len(found.differing) == 20 and found.differing[0].compared.differences
    said = _said(found)
    assert said.endswith(f"Stopped before all rows were answered again: {found.num_answered} of 60 were compared.")


def test_a_stop_before_the_first_row_claims_nothing_of_the_model(tmp_path):
    write_job(tmp_path, many_rows(6), lambda start: FakeLLM())
    with pytest.raises(VerifyStopped) as stopped:
        verified(tmp_path, raising(KeyboardInterrupt))
    said = _said(stopped.value.found)
    assert "Nothing wrong was found in what was read" in said and "0 of 6 were compared" in said
    assert "is what this model gives" not in said


def _said(found: Verified) -> str:
    text = io.StringIO()
    console = Console(file=text, width=300)
    for part in shown(found, "tiny", Options()):
        console.print(part)
    return text.getvalue().strip()


def reversed_at_2(rows: list[dict]) -> None:
    rows[2:4] = rows[3:1:-1]


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda rows: rows[7].update(max_tokens=9), "has 12 rows, as it had then; line 8 of it is the first that is"),
        (reversed_at_2, "has 12 rows, as it had then; line 3 of it is the first that is another"),
        (lambda rows: rows.pop(4), "has 11 rows, and had 12; line 5 of it is the first that is another"),
        (lambda rows: rows.pop(), "has 11 rows, and had 12; the last of them are gone"),
        (
            lambda rows: rows.append(rows[0] | {"custom_id": "new"}),
            "has 13 rows, and had 12; line 13 of it is the first",
        ),
    ],
)
def test_an_input_that_was_edited_has_its_first_changed_line_named(tmp_path, edit, sentence):
    write_job(tmp_path, many_rows(12), lambda start: FakeLLM())
    written = Written.read(tmp_path)
    edit(written.rows)
    (tmp_path / "in.jsonl").write_bytes(json_lines(written.rows))
    found = verified(tmp_path, FakeLLM)
    assert f"the input is not the one that was answered: it {sentence}" in " ".join(found.findings.sentences)


DAMAGE = {
    "its record has format 7": lambda record: record.update(format=7),
    "input.layout of its record": lambda record: record["input"].update(layout=None),
    "settings.seed of its record": lambda record: record["settings"].update(seed="x"),
    "settings.defaults of its record": lambda record: record["settings"].update(defaults=[1]),
    "names of its record": lambda record: record.update(names="tiny"),
    "model of its record": lambda record: record.update(model=[]),
    "created of its record": lambda record: record.update(created=10**14),
    "loading of its record": lambda record: record.update(loading="x"),
    "loading.adapters of its record": lambda record: record["loading"].update(adapters={"poet": 1}),
}


@pytest.mark.parametrize("sentence", DAMAGE)
def test_a_damaged_record_is_refused_by_name(tmp_path, sentence):
    write_job(tmp_path, many_rows(3), lambda start: FakeLLM())
    written = Written.read(tmp_path)
    DAMAGE[sentence](written.record)
    content = json.dumps(written.report).encode()
    with pytest.raises(ValueError, match=sentence):
        record_in(content, "r.json")
