"""Every example of the documentation runs and shows what it says."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import jsonschema
import pytest

from ferrum_jax import EngineConfig
from tests.support import COMPILED, GOLDENS, ROOT, written_by

FOLDER = ROOT / "docs/examples"
DEMO = str(ROOT / "checkpoints/demo")
CONFIG = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, compilation_cache_dir=str(COMPILED))
ENCODER = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, compilation_cache_dir=str(COMPILED))


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def own_folder(sizes: EngineConfig) -> EngineConfig:
    return dataclasses.replace(sizes, compilation_cache_dir=str(COMPILED))


def test_all_examples_are_listed_and_tested():
    names = {path.name for path in FOLDER.iterdir() if path.is_file()} - {"README.md"}
    listed = (FOLDER / "README.md").read_text()
    here = (ROOT / "tests/house/test_examples.py").read_text()
    for name in names:
        assert f"[{name}]({name})" in listed
        assert f'"{name.removesuffix(".py")}"' in here


@pytest.mark.slow
def test_a_model_in_memory_generates():
    first, second = example("from_model").main(own_folder(example("from_model").SIZES))
    assert len(first) == len(second) == 8


@pytest.mark.slow
def test_training_acts_at_once_and_compiles_nothing(capsys):
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        answers = example("train_and_generate").main(own_folder(example("train_and_generate").SIZES))
    assert answers[-1] == (4, 5, 6, 7, 8, 9) != answers[0]
    assert "0 compiles after the start" in capsys.readouterr().out


@pytest.mark.slow
def test_grpo_earns_more_than_it_began_with():
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        rewards = example("grpo").main(own_folder(example("grpo").SIZES), steps=40)
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


def test_a_query_finds_the_document_that_it_quotes():
    search = example("embed_and_search")
    best = search.main(str(GOLDENS / "encoders/bert"), search.DOCUMENTS[2], ENCODER)
    assert best[0][1] == search.DOCUMENTS[2] and best[0][0] > 0.999


@pytest.mark.slow
def test_every_document_has_a_record_of_the_schema(capsys):
    extract = example("extract_json")
    found = extract.main(DEMO, CONFIG, extract.DOCUMENTS[:6])
    assert [record["document"] for record in found] == extract.DOCUMENTS[:6]
    for record in found:
        jsonschema.validate({key: value for key, value in record.items() if key != "document"}, extract.SCHEMA)
    said = capsys.readouterr()
    assert [json.loads(line) for line in said.out.splitlines()] == found
    assert int(said.err.split(" prompt tokens reused")[0].split()[-1]) > 5 * 64 and "6 records" in said.err


@pytest.mark.slow
def test_a_likely_completion_has_a_higher_score_than_an_unlikely_one():
    logprobs = example("logprobs")
    scores = logprobs.main(DEMO, CONFIG)
    code, _, fruit = logprobs.COMPLETIONS
    assert list(scores) == logprobs.COMPLETIONS and scores[code] > scores[fruit]


@pytest.mark.slow
def test_a_system_prompt_is_computed_once_also_for_the_next_process(tmp_path, capsys):
    share, folder = example("system_prompt"), str(tmp_path / "prefixes")
    computed, read = share.main(DEMO, folder, CONFIG), share.main(DEMO, folder, CONFIG)
    assert min(computed) > 100 and read == computed
    assert "tokens computed and kept" in (said := capsys.readouterr().out) and "blocks read" in said


ON_RAY = """
import sys, ray
from tests.house.test_examples import example
from tests.support import SMALL
ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
sys.exit(example("ray_job").main(*sys.argv[1:], SMALL, num_actors=1))
"""


@pytest.mark.ray
def test_a_job_on_ray_answers_every_row(tmp_path):
    rows = [{"custom_id": f"row-{i}", "prompt_token_ids": [7, 8, 9 + i], "max_tokens": 4} for i in range(8)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-c", ON_RAY, str(GOLDENS / "qwen3"), str(source), str(target)]
    written_by(command, env=os.environ | {"PYTHONPATH": str(ROOT)})  # of the actors too
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [row["custom_id"] for row in rows]


DATA_ON_RAY = """
import sys, ray
from tests.house.test_examples import example
from tests.support import SMALL
ray.init(num_cpus=4, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
example("ray_data").main(*sys.argv[1:], SMALL, num_actors=1, rows_at_once=4)
"""


@pytest.mark.ray
def test_a_pipeline_on_ray_answers_what_is_missing_and_nothing_twice(tmp_path):
    import pyarrow.parquet

    source, target = tmp_path / "in.jsonl", tmp_path / "answers"
    rows = [{"custom_id": f"row-{i}", "prompt_token_ids": [7, 8, 9 + i], "max_tokens": 4} for i in range(10)]
    lines = [*map(json.dumps, rows), '{"prompt": 5}']

    def answered(lines: list[str]) -> dict[Path, bytes]:
        """Runs the pipeline over these lines; the files that it has written so far."""
        source.write_text("".join(f"{line}\n" for line in lines))
        command = [sys.executable, "-c", DATA_ON_RAY, str(GOLDENS / "qwen3"), str(source), str(target)]
        written_by(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300)  # of the actors too
        return {path: path.read_bytes() for path in target.glob("*.parquet")}

    first, second = answered(lines[:6]), answered(lines)
    assert len(first) == 2 and first.items() < second.items()
    new = [pyarrow.parquet.read_table(path) for path in second.keys() - first.keys()]
    assert sum(table.num_rows for table in new) == len(lines) - 6
    found = pyarrow.parquet.read_table(target).to_pylist()
    answers = {row["custom_id"]: json.loads(row["answer"]) for row in found}
    assert len(found) == len(answers) == len(lines)
    for row in rows:
        (choice,) = answers.pop(row["custom_id"])["response"]["body"]["choices"]
        assert len(choice["token_ids"]) == 4
    ((name, bad),) = answers.items()
    assert name.startswith("line ") and bad["error"]["code"]


ON_RAY_SERVE = """
from tests.house.test_examples import example
from tests.serve.ray_serve_program import check
check(example("ray_serve").replicas)
"""


@pytest.mark.ray
def test_two_replicas_under_ray_serve_answer_as_one_llm_does():
    command = [sys.executable, "-c", ON_RAY_SERVE]
    shown = written_by(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert json.loads(shown.splitlines()[-1]) == {"equal": True, "streamed": True, "ended": True}


def test_a_job_on_a_spot_tpu_asks_for_the_machine_and_gives_it_back():
    command = [str(FOLDER / "spot_tpu_job"), "gs://B", "--zone", "us-east5-b", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert "queued-resources create ferrum-job" in said[0] and "queued-resources delete ferrum-job" in said[-1]
    assert "gs://B/out.jsonl" in done.stdout
