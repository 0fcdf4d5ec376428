"""A job over the engine itself, with a tiny model: interrupted, its device failing, its output stays the same."""

import dataclasses
import json
from pathlib import Path

import pytest

from ferrum_jax import LLM
from ferrum_jax.batch.job import EXIT_OK, EXIT_PREEMPTED, EXIT_ROWS_FAILED
from ferrum_jax.batch.notice import Notice
from ferrum_jax.runtime.runner import Runner
from ferrum_jax.sampling_params import SamplingParams
from tests.batch.running import run_rows
from tests.batch.stopping import num_starts, stopping
from tests.support import GOLDENS, INVARIANT, small_llm

pytestmark = pytest.mark.slow
POISON = 299  # a token that only one row has


def write_rows(path: Path) -> None:
    rows = [
        {"custom_id": str(i), "prompt_token_ids": [*range(6, 40), 50 + i], "max_tokens": 6 + i, "temperature": 0.8}
        | {"n": 2, "logprobs": 2, "stop": ["e"] if i % 2 else ["zz"]}
        for i in range(6)
    ]
    rows[3]["prompt_token_ids"][-1] = POISON
    rows.append({"custom_id": "vector", "input": [7, 8, 9]})
    rows.append({"custom_id": "several", "prompt": [[7, 8, 9], [9, 8]], "max_tokens": 5, "n": 2, "echo": True})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: Path, notice: Notice | None = None, llm: LLM | None = None) -> int:
    return run_rows(folder, lambda rows: llm or small_llm("qwen3", INVARIANT), notice=notice)


@pytest.fixture
def expected(tmp_path) -> bytes:
    (tmp_path / "whole").mkdir()
    write_rows(tmp_path / "whole" / "in.jsonl")
    assert run(tmp_path / "whole") == EXIT_OK
    write_rows(tmp_path / "in.jsonl")
    return (tmp_path / "whole" / "out.jsonl").read_bytes()


def test_noticed_every_few_steps_the_output_has_the_bytes_of_an_uninterrupted_one(tmp_path, expected, monkeypatch):
    assert num_starts(lambda notice: run(tmp_path, notice), stopping(monkeypatch, 4)) > 3
    assert (tmp_path / "out.jsonl").read_bytes() == expected


def write_alike(path: Path) -> None:
    """Rows whose answers repeat themselves and one another, and whose texts are the tokens that were drawn."""
    texts = ["Once upon a time", "The sea is ", '{"name": "']
    rows = [
        {"custom_id": str(i), "prompt": texts[i % 3] * (1 + i % 2), "max_tokens": 40 + i, "temperature": 0.0}
        | ({"temperature": 0.7, "seed": 3, "n": 2} if i % 4 == 3 else {"logprobs": 2})
        | ({"stop": ["e"], "min_tokens": 20} if i % 3 == 2 else {"ignore_eos": True})
        for i in range(12)
    ]
    rows.append({"custom_id": "vector", "input": "The sea"})
    rows.append({"custom_id": "chosen", "prompt": "a", "structured_outputs": {"regex": "(ab|c){9,30}"}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_killed_every_few_steps_a_job_with_drafts_has_the_bytes_of_one_without(tmp_path, monkeypatch, method):
    (tmp_path / "whole").mkdir()
    for folder in (tmp_path, tmp_path / "whole"):
        write_alike(folder / "in.jsonl")
    assert run(tmp_path / "whole") == EXIT_OK
    asked = {"method": method, "num_speculative_tokens": 6}
    llm = small_llm("qwen3", dataclasses.replace(INVARIANT, speculative_config=asked))
    learnt, accepted = [], []

    def start(notice: Notice) -> int:
        """A fresh engine each time, as a process that is started again has."""
        llm.calls.drop()
        engine = llm.calls.engine
        engine.take_costs([(1, 1.0, [(64, 1.0)])])
        monkeypatch.setattr(engine, "_tell_costs", lambda: None)  # a test's machine has other costs each time
        learn, texts = engine.learn, []
        monkeypatch.setattr(engine, "learn", lambda ids, *more: (texts.append(ids), learn(ids, *more)))
        code = run(tmp_path, notice, llm)
        learnt.append(len(texts))
        accepted.append(engine.scheduler.drafting.counts.accepted_tokens)
        return code

    assert num_starts(start, stopping(monkeypatch, 23)) > 3
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole" / "out.jsonl").read_bytes()
    assert sum(accepted) > 10
    assert learnt == sorted(learnt) and learnt[0] == 0 and bool(learnt[-1]) == (method == "suffix")


def test_a_row_with_which_the_device_fails_is_set_aside_and_the_others_are_as_ever(tmp_path, expected, monkeypatch):
    write_slot = Runner.write_slot

    def failing(self, shard, slot, record):
        if POISON in record.tolist():
            raise RuntimeError("the device failed")
        write_slot(self, shard, slot, record)

    monkeypatch.setattr(Runner, "write_slot", failing)
    assert run(tmp_path) == EXIT_ROWS_FAILED
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert json.loads(lines[3])["error"]["code"] == "engine_crash"
    del lines[3]
    others = expected.splitlines()
    del others[3]
    assert lines == others


def test_a_job_with_adapters_that_is_stopped_gives_each_row_what_its_adapter_says(tmp_path, monkeypatch):
    slots = dataclasses.replace(INVARIANT, max_adapters=1, max_adapter_rank=8)
    llm = LLM(str(GOLDENS / "llama"), slots)
    folders = {"poet": "llama_patterns", "clerk": "llama_attention"}
    for name, folder in folders.items():
        llm.load_adapter(name, GOLDENS / "adapters" / folder)
    asked = [{}, {"model": "poet"}, {"adapter": "clerk"}, {"model": "llama", "adapter": "poet"}] * 2
    rows = [{"custom_id": str(i), "prompt_token_ids": [7, 8, 9 + i], **fields} for i, fields in enumerate(asked)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({**row, "max_tokens": 12}) + "\n" for row in rows))
    settings = {"names": ["llama"], "adapters": tuple(folders), "defaults": {"temperature": 0}}

    def run(llm: LLM, notice: Notice | None = None, output: str = "out.jsonl") -> int:
        return run_rows(tmp_path, lambda start: llm, output, notice=notice, **settings)

    assert run(llm, output="whole.jsonl") == EXIT_OK
    notices = stopping(monkeypatch, 5)
    assert num_starts(lambda notice: run(llm, notice), notices) > 2
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    bodies = [json.loads(line)["response"]["body"] for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    names = [None if body["model"] == "tiny" else body["model"] for body in bodies]
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    wanted = llm.generate([row["prompt_token_ids"] for row in rows], greedy, adapter=names)
    assert names[:4] == [None, "poet", "clerk", "poet"]
    assert [body["choices"][0]["token_ids"] for body in bodies] == [list(output.token_ids) for output in wanted]
    notices.append(Notice())
    assert run(llm, notices[-1], "third.jsonl") == EXIT_PREEMPTED
    llm.load_adapter("poet", GOLDENS / "adapters" / "llama_attention")  # another one of that name
    with pytest.raises(ValueError, match=r'begun with other settings: adapter "clerk=.*, now'):
        run(llm, Notice(), "third.jsonl")
