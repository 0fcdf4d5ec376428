"""No change is found where there is none, whatever the company in which rows were answered and are answered again."""

import itertools
import random
from pathlib import Path

import pytest

from ferrum_jax.batch.verify.line_difference import BITS, DIFFERENT
from tests.batch.fake_llm import FakeLLM
from tests.batch.verify.planted import Written, verified, write_job
from tests.support import INVARIANT, small_llm


def many_rows(count: int) -> list[dict]:
    """Short rows of many kinds."""
    kinds = itertools.cycle(
        (
            {"temperature": 0},
            {"temperature": 0.8, "logprobs": 2},
            {"temperature": 1.0, "n": 2, "top_p": 0.9},
            {"temperature": 0.7, "stop": ["e"], "presence_penalty": 0.5},
            {"temperature": 0, "return_token_ids": True, "logprobs": 0},
            {"temperature": 1.2, "top_k": 5, "seed": 5},
        )
    )
    texts = ("Once upon a time", "The sea", "A list of words:", "import ")
    lengths = random.Random(1)
    return [
        {"custom_id": f"row-{i}", "prompt": f"{texts[i % 4]} {i}", "max_tokens": lengths.randint(1, 6)} | next(kinds)
        for i in range(count)
    ]


def check_all(folder: Path, count: int, make) -> None:
    found = verified(folder, make)
    assert found.is_right and not found.findings.kept and not found.differing, found.findings.sentences
    assert found.counts[BITS] == found.num_answered == found.num_lines == count


def test_no_row_of_a_fake_engine_is_called_another_than_it_was(tmp_path):
    write_job(tmp_path, many_rows(600), lambda start: FakeLLM(order=1, width=16))
    check_all(tmp_path, 600, lambda: FakeLLM(order=2, width=3))


@pytest.mark.slow
def test_of_ten_thousand_rows_of_a_fake_engine_the_forged_ones_alone_are_found(tmp_path):
    write_job(tmp_path, many_rows(10_000), lambda start: FakeLLM(order=1, width=64))
    check_all(tmp_path, 10_000, lambda: FakeLLM(order=2, width=9))
    written, forged = Written.read(tmp_path), random.Random(2).sample(range(10_000), 50)
    for index in forged:
        choice = written.lines[index]["response"]["body"]["choices"][-1]
        choice["text"] = choice["text"][:-1] + "#"
    written.forge()
    written.write(tmp_path)
    found = verified(tmp_path, lambda: FakeLLM(order=3, width=32))
    assert found.counts[DIFFERENT] == 50 and found.counts[BITS] == 9_950
    assert {row.custom_id for row in found.differing} <= {f"row-{index}" for index in forged}


@pytest.mark.slow
def test_no_row_of_an_invariant_engine_is_called_another_in_other_company(tmp_path):
    llm, count = small_llm("qwen3", INVARIANT), 300
    rows = many_rows(count)
    random.Random(3).shuffle(rows)
    write_job(tmp_path, rows, lambda start: llm)
    check_all(tmp_path, count, lambda: llm)
    for seed in range(3):
        found = verified(tmp_path, lambda: llm, sample=40, seed=seed)
        assert found.is_right and found.counts[BITS] == 40
