"""Random weights at temperature 1.5 write every text that a grammar allows, and none that it does not."""

import dataclasses
import json
import random
import re

import jsonschema
import pytest

from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.text.structured.grammars import Grammars
from ferrum_jax.text.structured.vocabulary import Vocabulary
from tests.histories import seeded
from tests.structured.random_schemas import random_regex, random_schema
from tests.support import INVARIANT, run, small_llm

SIZES = [(300, 60, 15), pytest.param((10_000, 200, 50), marks=pytest.mark.long)]  # rows, schemas, regular expressions
FREE_EVERY = 6
WIDE = dataclasses.replace(INVARIANT, max_num_seqs=16, num_blocks=200)


def structures(rng: random.Random, num_schemas: int, num_regexes: int) -> list[StructuredOutputsParams]:
    schemas = [
        StructuredOutputsParams(json=random_schema(rng), disable_any_whitespace=rng.random() < 0.8)
        for _ in range(num_schemas)
    ]
    return [*schemas, *(StructuredOutputsParams(regex=random_regex(rng)) for _ in range(num_regexes))]


def is_valid(text: str, structure: StructuredOutputsParams) -> bool:
    if structure.kind == "regex":
        return re.fullmatch(str(structure.regex), text) is not None
    jsonschema.validate(json.loads(text), json.loads(str(structure.json)))
    return True


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: str(sizes[0]))
def test_every_row_that_ends_is_valid_and_nine_in_ten_end_and_others_are_as_alone(sizes):
    llm, rng = small_llm("qwen3", WIDE), random.Random(seeded(17))
    num_rows, *counts = sizes
    known = structures(rng, *counts)
    asked = [None if i % FREE_EVERY == 0 else rng.choice(known) for i in range(num_rows)]
    params = [
        SamplingParams(temperature=1.5, max_tokens=30 if one is None else 180, seed=seed, structured_outputs=one)
        for seed, one in enumerate(asked)
    ]
    prompts = [
        [1 + i % 7, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18 + i % 50] for i in range(num_rows)
    ]
    outputs = run(llm, prompts, params, num_blocks=40)
    constrained = [(output, one) for output, one in zip(outputs, asked, strict=True) if one is not None]
    ended = [(output, one) for output, one in constrained if output.finish_reason == "stop"]
    assert {output.finish_reason for output, _ in constrained} <= {"stop", "length"}
    assert len(ended) >= 0.9 * len(constrained)
    assert all(is_valid(output.text, one) for output, one in ended)
    vocabulary = Vocabulary(llm.tokenizer, vocab_size=310, end_ids=llm.loaded.end_ids)
    cut = [(output, one) for output, one in constrained if output.finish_reason == "length"]
    assert all(Grammars(vocabulary).get(one).matcher().replay(output.token_ids) for output, one in cut)
    print(f"{len(constrained)} under grammars, {len(ended)} ended, {len(cut)} cut")
    free = [i for i, one in enumerate(asked) if one is None]
    alone = run(llm, [prompts[i] for i in free], [params[i] for i in free])
    assert [outputs[i].token_ids for i in free] == [output.token_ids for output in alone]
