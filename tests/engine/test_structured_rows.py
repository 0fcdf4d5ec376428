"""Random weights at temperature 1.5 write every text that a grammar allows, and none that it does not."""

import dataclasses
import json
import random
import re

import jsonschema
import pytest

from ferrum_jax.request import SamplingParams
from ferrum_jax.structured.asked.params import StructuredOutputsParams
from tests.structured.random_schemas import random_regex, random_schema
from tests.support import INVARIANT, run, small_llm

ROWS, SCHEMAS, REGEXES = 300, 60, 15
FREE_EVERY = 6
WIDE = dataclasses.replace(INVARIANT, max_num_seqs=16, num_blocks=200)


def structures(rng: random.Random) -> list[StructuredOutputsParams]:
    schemas = [
        StructuredOutputsParams(json=random_schema(rng), disable_any_whitespace=rng.random() < 0.8)
        for _ in range(SCHEMAS)
    ]
    return [*schemas, *(StructuredOutputsParams(regex=random_regex(rng)) for _ in range(REGEXES))]


def is_valid(text: str, structure: StructuredOutputsParams) -> bool:
    if structure.kind == "regex":
        return re.fullmatch(str(structure.regex), text) is not None
    jsonschema.validate(json.loads(text), json.loads(str(structure.json)))
    return True


@pytest.mark.slow
def test_every_row_that_ends_is_valid_and_nine_in_ten_end():
    llm, rng = small_llm("qwen3", WIDE), random.Random(17)
    known = structures(rng)
    asked = [None if i % FREE_EVERY == 0 else rng.choice(known) for i in range(ROWS)]
    params = [
        SamplingParams(temperature=1.5, max_tokens=30 if one is None else 180, seed=seed, structured_outputs=one)
        for seed, one in enumerate(asked)
    ]
    prompts = [[1 + i % 7, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18 + i % 50] for i in range(ROWS)]
    outputs = run(llm, prompts, params, num_blocks=40)
    constrained = [(output, one) for output, one in zip(outputs, asked, strict=True) if one is not None]
    ended = [(output, one) for output, one in constrained if output.finish_reason == "stop"]
    assert {output.finish_reason for output, _ in constrained} <= {"stop", "length"}
    assert len(ended) >= 0.9 * len(constrained)
    assert all(is_valid(output.text, one) for output, one in ended)
    free = [i for i, one in enumerate(asked) if one is None]
    alone = run(llm, [prompts[i] for i in free], [params[i] for i in free])
    assert [outputs[i].token_ids for i in free] == [output.token_ids for output in alone]
