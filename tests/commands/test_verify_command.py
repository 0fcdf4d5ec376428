"""`ferrum-jax verify` as a user sees it: what it prints, what it needs to be told, and its exit codes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ferrum_jax.__main__ import main
from tests.commands.test_every_command import ENGINE
from tests.rows import rows_beside
from tests.support import COMPILED, GOLDENS

SIZES = "--max-num-seqs 4 --max-num-batched-tokens 16 --num-blocks 80"  # of ENGINE
ROWS = [
    {"custom_id": "a", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0},
    {"custom_id": "b", "prompt": "The sea", "max_tokens": 4, "seed": 3},
]


def run_job(folder: Path, flags: str = "") -> Path:
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    files = f"--input {folder}/in.jsonl --output {folder}/out.jsonl"
    engine = f"{flags} {ENGINE} --compilation-cache-dir {COMPILED}"
    assert main(f"batch --model {GOLDENS / 'qwen3'} {files} {engine}".split()) == 0
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return run_job(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def job(whole, tmp_path) -> Path:
    for path in whole.glob("*.json*"):
        if path.is_file():
            shutil.copy(path, tmp_path / path.name)
    return tmp_path


def verify(job: Path, capsys, flags: str = "") -> tuple[int, str, str]:
    """Exit code, what was printed, and what was said on stderr, each with its lines joined."""
    capsys.readouterr()
    code = main(f"verify {job}/out.jsonl --compilation-cache-dir {COMPILED} {SIZES} {flags}".split())
    said = capsys.readouterr()
    return code, " ".join(said.out.split()), " ".join(said.err.split())


def test_the_report_alone_tells_how_the_rows_are_answered_again(job, capsys):
    code, shown, _ = verify(job, capsys)
    assert code == 0, shown
    assert "│ rows answered again │ 2 │" in shown and "│ different │ 0 │" in shown
    assert "The output is what this model gives, to the bit" in shown


@pytest.mark.slow
def test_without_invariant_mode_the_output_is_what_the_model_gives_within_rounding(tmp_path, capsys):
    code, shown, _ = verify(run_job(tmp_path, "--no-invariant"), capsys)
    assert code == 0, shown
    assert "Equal bits are not promised, because the job did not run in invariant mode." in shown
    assert "The output is what this model gives, within rounding" in shown


def test_an_edited_text_gives_code_1_and_is_named_with_its_token(job, capsys):
    content = (job / "out.jsonl").read_text()
    text = json.loads(content.splitlines()[0])["response"]["body"]["choices"][0]["text"]
    (job / "out.jsonl").write_text(content.replace(json.dumps(text), json.dumps("#" + text), 1))
    code, shown, _ = verify(job, capsys)
    assert code == 1
    assert "- 'a' was edited: its digest is not that of what it says" in shown
    assert "Rows that differ" in shown and "choice 0, token 0" in shown
    assert "The output is not what its report says: 2 findings of what was read, and 1 of 2 rows" in shown
    code, shown, _ = verify(job, capsys, "--json")
    found = json.loads(shown)
    assert code == 1 and not found["is_right"] and found["verdicts"]["different"] == 1
    assert found["differing"][0]["custom_id"] == "a" and found["differing"][0]["parting"]["token"] == 0
    assert {each["code"] for each in found["findings"]} == {"line_changed", "output_changed"}


def test_an_edited_prompt_gives_code_1(job, capsys):
    (job / "in.jsonl").write_text((job / "in.jsonl").read_text().replace("upon a", "upon the"))
    code, shown, _ = verify(job, capsys, f"--input {job}/in.jsonl")
    assert code == 1
    assert "'a' was answered to another request than the input has now: its prompt or a parameter was edited" in shown


def test_another_model_gives_code_1_and_says_what_is_another(job, capsys):
    folder = job / "other"
    shutil.copytree(GOLDENS / "qwen3", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    code, shown, _ = verify(job, capsys, f"--model {folder} --sample 1")
    assert code == 1
    assert "- another model answered: weights " in shown and "name the one that did with --model" in shown


def test_another_model_that_is_shorter_than_the_record_gives_code_1_too(job, capsys):
    code, shown, said = verify(job, capsys, f"--model {shortened(job, rms_norm_eps=0.5)} --sample 1")
    assert code == 1, said
    assert "- another model answered: weights " in shown and "max_model_len" not in shown


def test_a_length_that_the_same_model_cannot_have_is_refused_as_it_is(job, capsys):
    edit_record(job, lambda record: record["loading"]["config"].update(max_model_len=1024))
    code, _, said = verify(job, capsys)
    assert code == 2 and "max_model_len is 1024, more than the model's 512 positions" in said


def shortened(job: Path, **fields: object) -> Path:
    """A copy of the model with fewer positions than the record has, and with these fields of its config."""
    folder = job / "other"
    shutil.copytree(GOLDENS / "qwen3", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16} | fields))
    return folder


def test_a_flag_that_says_what_the_record_says_is_taken(job, capsys):
    code, _, said = verify(job, capsys, "--seed 0 --max-model-len 256 --dtype float32 --sample 1")
    assert code == 0, said


def test_rows_chosen_with_the_same_seed_are_the_same(job, capsys):
    _, first, _ = verify(job, capsys, "--sample 1 --sample-seed 4 --json")
    _, second, _ = verify(job, capsys, "--sample 1 --sample-seed 4 --json")
    assert json.loads(first) == json.loads(second) and json.loads(first)["answered_again"] == 1


@pytest.mark.parametrize(
    ("flags", "sentence"), rows_beside(__file__)["what is missing or another is named with code 2"]
)
def test_what_is_missing_or_another_is_named_with_code_2(job, capsys, flags, sentence):
    code, shown, said = verify(job, capsys, flags.format(job=job))
    assert code == 2 and not shown
    assert sentence in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"\x7fELF\xff\x00", "line 1 is not UTF-8"),
        (b'{"a": tru}\n', "line 1 is not valid JSON: Expecting value at character 7"),
        (b'{"custom_id": "a"}\n' * 3, "none of its 3 lines is one, and line 1 has the id None"),
    ],
)
def test_a_file_that_no_job_wrote_is_called_that_alone(job, capsys, content, why):
    (job / "out.jsonl").write_bytes(content)
    code, shown, said = verify(job, capsys)
    assert code == 2 and not shown
    assert f"out.jsonl is no output of ferrum-jax batch: {why}" in said and said.endswith("name the job's output")


def test_a_report_of_a_job_that_has_not_ended_says_so_alone(job, capsys):
    edit_record(job, lambda record: record.update(output=None))
    (job / "out.jsonl").write_text((job / "out.jsonl").read_text().splitlines()[0] + "\n")
    code, shown, said = verify(job, capsys)
    assert code == 2 and not shown
    assert "out.jsonl.report.json knows no finished output: end the job first" in said


@pytest.mark.parametrize(
    ("what", "place"),
    [
        *(("model", "https://example.org/a"), ("input", "https://example.org/a")),
        *(("model", "org/name"), ("tokenizer", "org/name")),
    ],
)
def test_a_report_has_nothing_fetched_from_elsewhere(job, capsys, what, place):
    def edit(record: dict) -> None:
        record["input" if what == "input" else "loading"]["path" if what == "input" else what] = place

    edit_record(job, edit)
    code, shown, said = verify(job, capsys)
    assert code == 2 and not shown
    assert f"the report names '{place}', and what is fetched is for you to say; give --{what}" in said


def edit_record(job: Path, edit: Callable[[dict], None]) -> None:
    report = json.loads((job / "out.jsonl.report.json").read_text())
    edit(report["record"])
    (job / "out.jsonl.report.json").write_text(json.dumps(report))


def test_a_report_does_not_say_how_much_of_this_machine_is_used(job, capsys):
    sizes = ("host_cache_bytes", "max_cached_prompts", "max_adapters", "max_state_snapshots")
    edit_record(job, lambda record: record["loading"]["config"].update(dict.fromkeys(sizes, 2**60)))
    code, shown, _ = verify(job, capsys)
    assert code == 1 and "is not as it was written: its digest" in shown and "│ different │ 0 │" in shown


def test_a_report_of_an_older_version_is_told_how_to_be_made_anew(job, capsys):
    report = json.loads((job / "out.jsonl.report.json").read_text())
    del report["record"]
    (job / "out.jsonl.report.json").write_text(json.dumps(report))
    code, _, said = verify(job, capsys)
    assert code == 2 and "has no record of the job" in said and "start the job's command once more" in said


@pytest.mark.parametrize("value", ["0", "-1", "some"])
def test_a_sample_is_a_count_or_all(job, capsys, value):
    with pytest.raises(SystemExit):
        verify(job, capsys, f"--sample {value}")
    assert "is not a whole number above 0, or all" in capsys.readouterr().err


def test_a_line_keeps_the_body_that_clients_read(whole):
    for line in map(json.loads, (whole / "out.jsonl").read_text().splitlines()):
        assert line.keys() == {"id", "custom_id", "response", "error"}
        assert line["response"].keys() == {"status_code", "request_id", "body", "record"}
        assert line["response"]["record"].keys() == {"seed", "request", "tokens", "line"}
        assert "record" not in line["response"]["body"]
