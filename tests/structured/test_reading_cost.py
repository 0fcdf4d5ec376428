"""Reading calls costs time that grows with the text, however it is cut: looks at characters are counted."""

import json
import random

import pytest

from ferrum_jax.inputs.params.tools import tools_of
from ferrum_jax.text.structured.reading.message_stream import MessageForms
from ferrum_jax.text.structured.reading.text_reader import TextReader
from ferrum_jax.text.structured.reading.tool_parser import MAX_CALLS
from tests.histories import seeded
from tests.structured.form_samples import DEMANDED, NOW, TOOLS

KNOWN = tools_of(TOOLS)
MOST_LOOKS = 24  # at a character, on average; the longest mark has 31


@pytest.fixture
def looks(monkeypatch):
    """A list of one number: the characters that were looked at so far."""
    count = [0]

    def counting(name, cost):
        plain = getattr(TextReader, name)

        def counted(reader, *where):
            found = plain(reader, *where)
            count[0] += cost(reader, found, *where)
            return found

        monkeypatch.setattr(TextReader, name, counted)

    counting("match", lambda reader, end, pattern, at: max(end - at, 0) + 1)
    counting("search", lambda reader, found, pattern, at: (found[1] if found else len(reader)) - at + 1)
    counting("part", lambda reader, found, start, stop: len(found))
    return count


def read(name, text, size, *, thinks=False):
    stream = MessageForms.named(name, "think" if thinks else None).stream(tools=KNOWN, is_open=thinks)
    pieces = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
    parts = [part for piece in pieces for part in stream.feed(piece)] + stream.flush()
    return [call for part in parts for call in part.tool_calls], "".join(part.content for part in parts)


@pytest.mark.parametrize("name", DEMANDED)
def test_calls_that_are_begun_again_and_again_are_read_a_bounded_number_of_times(name, looks):
    rng, whole = random.Random(seeded(4)), DEMANDED[name]
    for _ in range(12):
        begun = whole[: rng.randrange(2, len(whole))] + rng.choice(["", "\n", '"', "x"])
        text = begun * (2500 // len(begun)) + rng.choice(["", whole, whole[-12:], " \n" * 200, "x" * 200])
        looks[0] = 0
        read(name, text, rng.choice([3, None]), thinks=rng.random() < 0.3)
        assert looks[0] <= MOST_LOOKS * len(text), (begun, looks[0] / len(text))


@pytest.mark.parametrize("name", DEMANDED)
def test_a_call_whose_argument_is_long_is_read_once(name, looks):
    lines = "if (a[i] > b) { go(); }\\\\n" * 120
    text = DEMANDED[name].replace("Oslo", lines, 1)
    calls, _ = read(name, text, 5)
    assert json.loads(calls[0].arguments)["city"].count("go();") == 120
    assert looks[0] <= MOST_LOOKS * len(text)


@pytest.mark.parametrize("name", ["glm", "qwen3_coder", "minimax_m2", "seed_oss", "hermes"])
def test_a_call_behind_many_that_were_begun_is_found(name):
    begun = DEMANDED[name].partition("Oslo")[0]
    calls, _ = read(name, begun * 200 + "\n" + DEMANDED[name], None)
    assert NOW[0] in [call.name for call in calls]


@pytest.mark.parametrize("name", ["hermes", "glm", "harmony"])
def test_what_follows_the_calls_that_a_text_may_have_is_text(name):
    one = DEMANDED[name].partition("\n<tool_call>\n" if name == "hermes" else "\n<tool_call>now")[0]
    calls, content = read(name, f"{one}{'<|call|>' * (name == 'harmony')}\n" * (MAX_CALLS + 2), None)
    assert len(calls) == MAX_CALLS and content.count("Oslo") == 2


def test_an_answer_of_white_space_is_read_once(looks):
    text = "<tool_call>" + "\n" * 3000
    assert read("hermes", text, 1) == ([], text) and looks[0] <= MOST_LOOKS * len(text)
