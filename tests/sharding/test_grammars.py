"""Rows with grammars say on a mesh what they say alone on one device; in invariant mode to the last token."""

import dataclasses
import json
import re

import pytest

from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.llm import LLM
from ferrum_jax.sampling_params import SamplingParams
from tests.distributed.folder import write_model, write_tokenizer
from tests.sharding.same import said_on
from tests.support import INVARIANT, answers, finish, fresh_engine, peek, run, step

HOT = SamplingParams(temperature=1.5, max_tokens=40)
WISHES = (
    {"regex": "[a-c]{12,30}x"},
    None,
    {"json": {"type": "array", "items": {"enum": ["a", "b", None]}}, "disable_any_whitespace": True},
    {"choice": ["yes", "no", "yesterday"]},
    None,
    {"json_object": True},
    {"regex": "(ü|ö|x){4,25}!"},
    {"json": {"type": "integer", "minimum": 10**9}},
)
PROMPTS = [[5 + i % 3, *range(30, 50), 6 + i] for i in range(len(WISHES))]
RESUMED_AFTER = 9  # tokens of the first row


def rows() -> list[SamplingParams]:
    made = [None if wish is None else StructuredOutputsParams.from_dict(wish) for wish in WISHES]
    return [dataclasses.replace(HOT, seed=seed, structured_outputs=one) for seed, one in enumerate(made)]


def say(model: str, mesh: str) -> dict[str, object]:
    """Tokens of each row together, alone, from a pool that is too small, and of those that go on elsewhere."""
    llm, params = LLM(model, dataclasses.replace(INVARIANT, mesh=mesh, max_num_seqs=2)), rows()
    pressed = fresh_engine(llm, num_blocks=5)
    late = answers(pressed, zip(PROMPTS, params, strict=True))
    return {
        "together": [output.token_ids for output in run(llm, PROMPTS, params)],
        "alone": [run(llm, [prompt], one)[0].token_ids for prompt, one in zip(PROMPTS, params, strict=True)],
        "preempted": [output.token_ids for output in late],
        "resumed": _resumed(llm, params),
        "preemptions": pressed.scheduler.metrics().preemptions,
        "texts": [output.text for output in late],
        "reasons": [output.finish_reason for output in late],
    }


def _resumed(llm: LLM, params: list[SamplingParams]) -> list[tuple[int, ...]]:
    """Rows that are broken off together and go on in a fresh engine."""
    engine = fresh_engine(llm)
    ids = [engine.add(*request) for request in zip(PROMPTS, params, strict=True)]
    ended = {}
    while (first := peek(engine, ids[0])) is not None and len(first.token_ids) < RESUMED_AFTER:
        ended |= {output.request_id: output for output in step(engine)}
    left = {i: peek(engine, i) for i in ids if i not in ended}
    other = fresh_engine(llm)
    again = {
        i: other.add(PROMPTS[ids.index(i)], params[ids.index(i)], RequestOptions(resume=output.outputs))
        for i, output in left.items()
        if output is not None
    }
    outputs = finish(other)
    return [(ended[i] if i in ended else outputs[again[i]]).token_ids for i in ids]


@pytest.mark.slow
def test_rows_with_grammars_are_the_same_on_every_mesh(tmp_path):
    model = write_model(tmp_path / "model")
    write_tokenizer(model)
    meshes = ("tp=1", "dp=2,tp=2")
    found = dict(zip(meshes, said_on(say, str(model), *meshes), strict=True))
    expected = found["tp=1"]["alone"]
    for mesh, said in found.items():
        for how in ("together", "alone", "preempted", "resumed"):
            assert said[how] == expected, f"{how} on {mesh}"
        assert said["preemptions"] > 0, mesh
        texts, reasons = said["texts"], said["reasons"]
        assert set(reasons) <= {"stop", "length"} and reasons.count("stop") >= 2
        assert reasons[0] == "length" or re.fullmatch("[a-c]{12,30}x", texts[0])
        assert texts[3] in ("yes", "no", "yesterday")
        assert reasons[2] == "length" or set(json.loads(texts[2])) <= {"a", "b", None}
