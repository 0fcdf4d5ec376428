"""Files that users keep are read by each later version, or refused by a sentence that says what differs.

A folder here holds what a version wrote, named by its commit; make.py wrote it. Today's version goes on from a copy:

| file of d4cd2b56 | today |
|---|---|
| job.tar.xz: 1,500 rows killed with 303 rows in the journal | goes on: the bytes of a job that was never killed |
| ended.tar.xz, vectors.tar.xz: outputs, reports and journals of jobs | verified: nothing differs |
| batches.tar.xz: folder of `serve --batches`, killed | the ended batch is as it was, the others end |
| prefixes.tar.xz: kimi_linear, whose digest is today's | hit, with the experts of its tokens |
| prefixes.tar.xz: qwen3, whose digest is another | refused: model is ... there and ... here |
| orbax.tar.xz: a quantised model, by `convert` | loads, and gives the tokens of its source |
| bundle.tar.xz: manifest and the smallest parts | compiled again: the sources differ; refused if required |
| checked.tar.xz: a check's verdict, a request log | followed; replayed |

The folders checkpoints/demo and checkpoints/demo_digits are Orbax folders of the first format, read by many tests.
"""

import dataclasses
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import openai
import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.__main__ import main
from ferrum_jax.runtime.compile.executable_store import Unloadable, load_executable
from ferrum_jax.serve.http.settings import ServerSettings
from tests.published_files.make import SIZES, batch, verdict_in
from tests.serve.batch_input import ended, lines_of
from tests.serve.running import running
from tests.support import COMPILED, GOLDENS, INVARIANT, small_llm

HERE = Path(__file__).parent
FLAGS = f"--max-num-seqs 4 {SIZES}"
ENCODER = "--max-num-seqs 8 --max-num-batched-tokens 128 --max-model-len 64"  # executables of other tests
OTHER_SOURCES = r"(?s)none of its executables can run here: .*made with sources '[0-9a-f]+', here '[0-9a-f]+'"
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(params=sorted(path.parent.name for path in HERE.glob("*/job.tar.xz")))
def copy_of(request, tmp_path):
    """Unpacks an archive of the version."""

    def unpack(name: str) -> Path:
        shutil.unpack_archive(HERE / request.param / f"{name}.tar.xz", tmp_path, filter="data")
        return tmp_path / name

    return unpack


def said(capsys, command: str) -> tuple[int, str]:
    """The exit code of a command and what it printed."""
    capsys.readouterr()
    code = main([*command.split(), "--compilation-cache-dir", str(COMPILED)])
    return code, capsys.readouterr().out


def test_a_job_that_was_killed_goes_on_and_has_the_bytes_of_one_that_was_not(copy_of, capsys):
    folder = copy_of("job")
    recorded = sum(path.read_bytes().count(b"\n") for path in (folder / "out.jsonl.journal/segments").iterdir())
    assert 257 <= recorded < 400
    assert said(capsys, batch(str(folder), str(GOLDENS / "qwen3"), FLAGS))[0] == 0
    content = (folder / "out.jsonl").read_bytes()
    assert [json.loads(line)["custom_id"] for line in content.splitlines()] == [f"row-{i}" for i in range(1500)]
    assert hashlib.sha256(content).hexdigest() == (folder / "whole.sha256").read_text()
    report = json.loads((folder / "out.jsonl.report.json").read_text())
    assert (report["rows"]["ok"], report["rows"]["unrecorded"], report["torn_segments"]) == (1500, recorded, 0)


@pytest.mark.parametrize(("name", "golden"), [("ended", "qwen3"), ("vectors", "encoders/bert")])
def test_an_output_is_verified_by_its_report(copy_of, capsys, name, golden):
    folder, flags = copy_of(name), FLAGS if name == "ended" else ENCODER
    files = f"--model {GOLDENS / golden} --input {folder}/in.jsonl --sample all --json"
    code, shown = said(capsys, f"verify {folder}/out.jsonl {files} {flags}")
    found = json.loads(shown)
    assert code == 0 and found["is_right"] and found["verdicts"]["different"] == 0, found


def test_batches_of_a_server_that_was_killed_end(copy_of):
    folder = copy_of("batches")
    for worker in folder.rglob("*.beat"):
        worker.with_suffix(".dead").touch()  # which others know after a minute of its silence
    for asked in (folder / "batches").iterdir():  # they expire a day after they were made
        asked.write_text(re.sub(r'"expires": \d+', '"expires": 9999999999', asked.read_text()))
    settings = ServerSettings(names=("tiny",), batches=str(folder))
    with running(settings, inner=small_llm("qwen3", INVARIANT)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        listed = {(each.metadata or {})["rows"]: each for each in client.batches.list()}
        begun = [listed[rows].in_progress_at is not None for rows in ("3", "24", "5")]
        assert listed["3"].status == "completed" and begun == [True, True, False]
        for num_rows, each in listed.items():
            done = ended(client, each)
            lines = lines_of(client, done.output_file_id)
            assert done.status == "completed" and done.error_file_id is None
            assert [line["custom_id"] for line in lines] == [f"row-{i}" for i in range(int(num_rows))]
            texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
            body = {"model": "tiny", "prompt": "The sea", "max_tokens": 100 if num_rows == "24" else 4}
            for seed in (0, len(texts) - 1):
                live = client.completions.create(**body, seed=seed, extra_body={"ignore_eos": True})
                assert texts[f"row-{seed}"] == live.choices[0].text


@pytest.mark.slow
def test_saved_prefixes_are_hit_where_the_models_digest_is_the_same(copy_of):
    folder = copy_of("prefixes")
    asked: dict[str, Any] = json.loads((folder / "kimi_linear.json").read_text())
    llm = small_llm("kimi_linear", dataclasses.replace(INVARIANT, return_routed_experts=True))
    llm.load_prefix_cache(folder / "kimi_linear")
    (output,) = llm.generate([asked["prompt"]], GREEDY, progress=False)
    (choice,) = output.outputs
    assert (output.num_cached_tokens, list(choice.token_ids)) == (len(asked["prompt"]), asked["tokens"])
    assert choice.routed_experts is not None
    assert len(choice.routed_experts) == len(asked["prompt"]) + len(asked["tokens"]) - 1


def test_saved_prefixes_are_refused_by_name_where_the_models_digest_is_another(copy_of):
    folder = copy_of("prefixes") / "qwen3"
    saved = json.loads((folder / "prefixes.json").read_text())["identity"]["model"]
    message = rf"holds prefixes of another engine: model is '{saved}' there and '[0-9a-f]{{32}}' here; save them with"
    with pytest.raises(ValueError, match=message):
        small_llm("qwen3", INVARIANT).load_prefix_cache(folder)


@pytest.mark.slow
def test_an_orbax_folder_gives_the_tokens_of_its_source(copy_of):
    prompts = [list(range(5, 5 + length)) for length in (1, 9, 30)]
    found = [
        [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, progress=False)]
        for llm in (LLM(str(copy_of("orbax")), INVARIANT), small_llm("quantised/w4a16", INVARIANT))
    ]
    assert found[0] == found[1]


@pytest.mark.usefixtures("compiles_at_start")
def test_a_bundle_is_not_used_and_what_differs_is_said(copy_of):
    folder = copy_of("bundle")
    problems: list[str] = []
    stats = LLM(str(GOLDENS / "qwen3"), INVARIANT, bundle=str(folder), on_problem=problems.append).stats()
    assert stats["bundle_hits"] == 0 < stats["bundle_misses"]
    assert re.search(OTHER_SOURCES, problems[0])
    with pytest.raises(ValueError, match=f"{OTHER_SOURCES}.*; make the bundle anew with"):
        LLM(str(GOLDENS / "qwen3"), INVARIANT, bundle=str(folder), require_bundle=True)


def test_a_kept_executable_whose_classes_have_moved_is_one_that_is_compiled_again(copy_of):
    """An executable names classes of its trees by their modules, and that of blocks stood in another once."""
    kept = [path.read_bytes() for path in (copy_of("bundle") / "parts").iterdir()]
    moved = [each for each in kept if b"ferrum_jax.pools.blocks" in each]
    assert moved
    for each in moved:
        with pytest.raises(Unloadable, match="No module named 'ferrum_jax\\.pools'"):
            load_executable(each, jax.devices()[:1])


def test_a_verdict_of_a_check_is_found(copy_of):
    store, entry, found = verdict_in(copy_of("checked"))
    assert store.find(entry) == found


def test_a_request_log_is_replayed(copy_of, capsys):
    assert main(["cache", "simulate", "--request-log", str(copy_of("checked") / "requests.jsonl")]) == 0
    assert "hit" in capsys.readouterr().out
