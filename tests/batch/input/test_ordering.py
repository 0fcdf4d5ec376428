"""Rows that share a prefix run as neighbours, so that a pool that holds few prefixes computes each of them once."""

import io
import itertools
import random

import pytest

from ferrum_jax.batch.input.ordering import DEPTHS
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.core.scheduler.request_log import LoggedChoice, LoggedRequest, Segment
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes
from ferrum_jax.planning.offline.replay import Outcome, replay
from tests.batch.fake_llm import json_lines
from tests.histories import seeded

BLOCK = 16


def rows_of(*lines: dict) -> Rows:
    return Rows(io.BytesIO(json_lines({"custom_id": str(i), **line} for i, line in enumerate(lines))))


def test_rows_of_one_adapter_are_neighbours_however_they_name_it():
    lines = [
        {"custom_id": str(i), "prompt": "x" * (i + 1), **fields}
        for i, fields in enumerate([{}, {"model": "poet"}, {"adapter": "clerk"}] * 3 + [{"adapter": "poet"}])
    ]
    rows = Rows(io.BytesIO(json_lines(lines)), names=["m"], adapters=["poet", "clerk"])
    ran = [rows.read(index).adapter for index in rows.order.tolist()]
    assert [name for name, _ in itertools.groupby(ran)] in ([None, "poet", "clerk"], [None, "clerk", "poet"])
    assert ran.count("poet") == 4


def outcome(prompts: list[list[int]], num_blocks: int) -> Outcome:
    """What the real scheduler and cache make of these prompts, all queued in this order."""
    sizes = EngineSizes(
        block_size=BLOCK,
        group_blocks=[num_blocks],
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=1024,
    )
    choice = LoggedChoice(token_ids=[1] * 4, finish_reason="length")
    requests = [
        LoggedRequest(id=i, arrival=0, prompt_token_ids=p, max_tokens=4, choices=[choice])
        for i, p in enumerate(prompts)
    ]
    return replay([Segment(sizes=sizes, requests=requests)], num_blocks)


def test_a_pool_of_3_saves_95_percent_for_2000_rows_with_20_prefixes():
    rng = random.Random(seeded(1))
    num_shared = 32 * BLOCK
    prefixes = [[rng.randrange(1000) for _ in range(num_shared)] for _ in range(20)]
    prompts = [prefixes[i % 20] + [rng.randrange(1000) for _ in range(10 + i % 7)] for i in range(2000)]
    rng.shuffle(prompts)
    rows = rows_of(*({"prompt_token_ids": prompt, "max_tokens": 4} for prompt in prompts))
    ideal = (2000 - 20) * num_shared
    pool = 3 * num_shared // BLOCK
    ordered = outcome([prompts[i] for i in rows.order.tolist()], pool)
    assert ordered.too_large == 0 and ordered.hit_tokens >= 0.95 * ideal
    assert outcome(prompts[:200], pool).hit_tokens < 0.5 * (200 - 20) * num_shared  # as they came


def test_prefixes_in_prefixes_are_neighbours_too():
    system, few_shot = "s" * DEPTHS[1], ["a" * DEPTHS[2], "b" * DEPTHS[2]]
    texts = [system + few_shot[i % 2] + str(i) for i in range(20)] + ["t" * DEPTHS[1] + str(i) for i in range(10)]
    random.Random(seeded(1)).shuffle(texts)
    order = [texts[i] for i in rows_of(*({"prompt": text} for text in texts)).order.tolist()]
    for length in (DEPTHS[1], DEPTHS[1] + DEPTHS[2]):
        heads = [text[:length] for text in order if len(text) > length]
        assert sum(a != b for a, b in itertools.pairwise(heads)) == len(set(heads)) - 1


@pytest.mark.parametrize("field", ["prompt", "prompt_token_ids", "messages"])
def test_rows_that_share_nothing_are_in_order_of_length(field):
    prompts = {
        "prompt": lambda i: chr(97 + i % 26) * (130 + 37 * i % 400),
        "prompt_token_ids": lambda i: [i] * (33 + 37 * i % 100),
        "messages": lambda i: [{"role": "user", "content": chr(97 + i) * (130 + 37 * i % 400)}],
    }
    lines = [{field: prompts[field](i), "max_tokens": 4} for i in range(20)]
    lengths = [len(str(lines[i][field])) for i in rows_of(*lines).order.tolist()]
    if field == "prompt_token_ids":
        lengths = [len(lines[i][field]) for i in rows_of(*lines).order.tolist()]
    assert lengths == sorted(lengths) and len(set(lengths)) > 10


def test_rows_with_other_salts_share_nothing():
    text = "x" * DEPTHS[0]
    lines = [{"prompt": text + "y" * (40 - i), "cache_salt": "ab"[i % 2], "max_tokens": 4} for i in range(10)]
    order = rows_of(*lines).order.tolist()
    assert sum(a % 2 != b % 2 for a, b in itertools.pairwise(order)) == 1


def test_order_and_parts_follow_from_the_input_and_hold_each_good_row_once():
    lines = [{"prompt": "p" * (i % 300) or None, "max_tokens": 1 + i % 3} for i in range(700)]
    first, second = rows_of(*lines), rows_of(*lines)
    assert [part.tolist() for part in first.parts()] == [part.tolist() for part in second.parts()]
    taken = [index for part in first.parts() for index in part.tolist()]
    assert sorted(taken) == [i for i in range(700) if i % 300]  # one without a prompt is a bad row
    assert {len(part) for part in first.parts()[:-1]} == {11} and first.num_bad == 3


def ran(content: list[dict], **how) -> list[int]:
    rows = Rows(io.BytesIO(json_lines({"custom_id": str(i), **line} for i, line in enumerate(content))), **how)
    assert sorted(rows.order.tolist()) == list(range(len(content)))
    assert [index for part in rows.parts() for index in part.tolist()] == rows.order.tolist()
    return rows.order.tolist()


def test_rows_of_lower_priority_numbers_come_first_each_as_they_are_best_run():
    lines = [{"prompt": "x" * (1 + i * 7 % 50), "priority": (-1, 0, 5)[i % 3]} for i in range(60)]
    order = ran(lines)
    assert [lines[i]["priority"] for i in order] == [-1] * 20 + [0] * 20 + [5] * 20
    assert all(
        sorted(each, key=lambda i: len(lines[i]["prompt"]) // 4) == each
        for each in (order[:20], order[20:40], order[40:])
    )


def test_in_turn_the_parts_follow_priority_and_then_the_input():
    lines = [{"prompt": "x" * (1 + i * 7 % 50), "priority": int(i >= 60)} for i in reversed(range(80))]
    order = ran(lines, in_turn=True)
    urgent = [i for i in order if lines[i]["priority"] == 0]
    assert order[:60] == urgent
    assert [set(order[start : start + 8]) for start in (0, 8, 48)] == [
        {*range(start + 20, start + 28)} for start in (0, 8, 48)
    ]
    assert all(len(lines[a]["prompt"]) // 4 <= len(lines[b]["prompt"]) // 4 for a, b in itertools.pairwise(order[:8]))


def test_parts_in_another_order_have_leases_of_their_own_and_rows_the_same_layout():
    lines = [{"prompt": "x" * (20 - i)} for i in range(20)]
    plain, in_turn = (
        Rows(io.BytesIO(json_lines({"custom_id": str(i), **line} for i, line in enumerate(lines))), in_turn=t)
        for t in (False, True)
    )
    assert plain.layout == plain.part_layout == in_turn.layout != in_turn.part_layout


def test_what_rows_read_and_may_write_is_about_their_tokens():
    rows = rows_of(
        {"prompt": "x" * 400, "max_tokens": 30, "n": 2},
        {"prompt_token_ids": [1] * 50, "max_tokens": 7},
        {"input": "x" * 40},
    )
    assert rows.tokens.tolist() == [[100, 60], [50, 7], [10, 0]]
