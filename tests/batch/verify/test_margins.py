"""Where two answers part, the margin says by how much the draw preferred its own token."""

import datetime
import json
from pathlib import Path

import pytest

from ferrum_jax.batch.input.formats import Row, parse_line
from ferrum_jax.batch.verify.line_difference import DIFFERENT, TIE
from ferrum_jax.batch.verify.margins import parting_of
from ferrum_jax.batch.verify.output_lines import Line, line_in
from tests.batch.verify.planted import Written, verified, write_job
from tests.support import INVARIANT, small_llm

SHOWN = {"logprobs": 4, "skip_special_tokens": False}
ROWS = [
    {"custom_id": "greedy", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, **SHOWN},
    {"custom_id": "drawn", "prompt": "My name is", "max_tokens": 8, "temperature": 1.3, **SHOWN},
    {"custom_id": "twice", "prompt": ["One", "Two"], "max_tokens": 8, "n": 3, "seed": 6, **SHOWN},
    {"custom_id": "filtered", "prompt": "The", "max_tokens": 6, "n": 4, "temperature": 0.9, "top_k": 4, **SHOWN},
    {"custom_id": "edited", "prompt": "The", "max_tokens": 4, "presence_penalty": 0.5, **SHOWN},
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert write_job(folder, ROWS, lambda start: small_llm("qwen3", INVARIANT)) == 0
    return folder


def with_text(line: Line, choice: int, text: str) -> Line:
    response = json.loads(json.dumps(line.response))
    response["body"]["choices"][choice]["text"] = text
    return line._replace(response=response)


def others(choice: dict):
    """Texts that part at each token for one of the likeliest others, with the token's place."""
    logprobs = choice["logprobs"]
    for place, tops in enumerate(logprobs["top_logprobs"]):
        own, lead = logprobs["tokens"][place], "".join(logprobs["tokens"][:place])
        for name in tops:
            is_plain = "\ufffd" not in lead + name + own and "token_id:" not in lead + name + own
            if name != own and is_plain and not own.startswith(name) and not name.startswith(own):
                yield place, lead + name, tops[own] - tops[name]


@pytest.mark.parametrize("name", ["greedy", "drawn", "twice", "filtered"])
def test_a_draw_prefers_its_own_token_to_each_of_the_likeliest(whole, name):
    written = Written.read(whole)
    line = line_in(json.dumps(written.line(name)).encode())
    row = parse_line(json.dumps(written.row(name)).encode(), 1)
    assert isinstance(row, Row)
    now, count, closer = datetime.datetime.fromtimestamp(1000, datetime.UTC), 0, 0
    for number, choice in enumerate(written.body(name)["choices"]):
        for place, text, gap in others(choice):
            edited = with_text(line, number, text)
            parting = parting_of(small_llm("qwen3", INVARIANT), row, edited, line, now)
            assert parting is not None and (parting.choice, parting.token) == (number, place)
            if parting.margin is None or parting.is_at_least:
                continue  # a longer token fits the text too
            assert parting.margin > 0
            count += 1
            closer += parting.margin != pytest.approx(gap, abs=1e-6)
    assert count > 5
    assert bool(closer) == (name != "greedy"), "noise was added where it decides"


def test_a_near_tie_is_rounding_where_equal_bits_are_not_promised(whole, tmp_path):
    written = Written.read(whole)
    place, text, gap = next(found for found in others(written.choice("greedy")) if found[0] > 0)
    written.choice("greedy")["text"] = text
    written.line("greedy")["response"]["record"]["tokens"] = "0" * 16
    written.forge()
    written.write(tmp_path)
    loose = small_llm("qwen3")
    assert verified(tmp_path, lambda: loose, margin=gap + 0.01).counts[TIE] == 1
    found = verified(tmp_path, lambda: loose, margin=gap / 2)
    assert found.counts[DIFFERENT] == 1
    (row,) = found.differing
    assert row.parting is not None and row.parting.token == place
    assert row.parting.margin == pytest.approx(gap, abs=1e-3)
    assert verified(tmp_path, lambda: small_llm("qwen3", INVARIANT), margin=100.0).counts[DIFFERENT] == 1


def test_the_margin_of_a_draw_from_edited_logits_is_not_said(whole):
    written = Written.read(whole)
    line = line_in(json.dumps(written.line("edited")).encode())
    row = parse_line(json.dumps(written.row("edited")).encode(), 1)
    now = datetime.datetime.fromtimestamp(1000, datetime.UTC)
    assert isinstance(row, Row)
    parting = parting_of(small_llm("qwen3", INVARIANT), row, with_text(line, 0, ""), line, now)
    assert parting is not None and parting.token == 0 and parting.margin is None and not parting.is_at_least
