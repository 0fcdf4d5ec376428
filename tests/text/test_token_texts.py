"""Texts of single tokens beside their log-probabilities: together they are the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_jax.core.delta import Delta
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.openai.logprob_forms import choice_entries, completion_logprobs, echo_entries
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.text.output_processor.choice_text import TokenTexts
from ferrum_jax.text.output_processor.collect import Collector
from tests.text.samples import KINDS, tokenizer
from tests.text.test_stream import PROFILE

BOS, EOS = 1, 2


def collected(kind: str, prompt: str, ids: list[int], **asked: object):
    """What came of a request whose tokens are these: its output, and the entries of its chunks with their texts."""
    own, params = tokenizer(kind), SamplingParams(logprobs=1, **asked)
    found = Collector(TokenTexts(own), 100).collected(
        own.encode(prompt), params, RequestOptions(key="0", streams=True, prompt=prompt)
    )
    chunks = []
    for number, token in enumerate(ids):
        entries = [[(token, -0.5, 1), (100, -1.0, 2)]]
        ends = "stop" if number == len(ids) - 1 else None
        of_prompt = None if number else [None, *([(each, -0.1, 1)] for each in own.encode(prompt)[1:])]
        chunks += found.push(Delta(0, 0, [token], entries, ends, None, bool(ends), 0, of_prompt, [0]))
    return found.output(), chunks


@pytest.mark.parametrize("kind", KINDS)
@PROFILE
@given(prompt=st.text("ab ", max_size=6), text=st.text("abd f", max_size=12))
def test_the_texts_of_tokens_make_up_the_text_and_their_places_are_those_in_it(kind, prompt, text):
    ids = tokenizer(kind).encode(text, add_special_tokens=False)
    output, chunks = collected(kind, prompt, [*ids, EOS])
    choice = output.outputs[0]
    form = completion_logprobs(choice_entries(choice))
    assert "".join(form["tokens"]) == choice.text
    assert all(
        choice.text[place:].startswith(name) for place, name in zip(form["text_offset"], form["tokens"], strict=True)
    )
    streamed = [name for chunk in chunks for name in completion_logprobs(choice_entries(chunk))["tokens"]]
    assert streamed[:-1] == form["tokens"][:-1]


def test_tokens_with_and_without_a_space_have_two_names():
    own = tokenizer("sentencepiece")
    ids = {own.token(token): token for token in range(own.vocab_size)}
    name, spaced = next((token, ids[f"▁{token}"]) for token in ids if f"▁{token}" in ids)
    texts = TokenTexts(own).entries([[(spaced, -1.0, 1), (ids[name], -2.0, 2)]] * 2, named=True, start=1)
    found = [[each.decoded_token for each in entry.values()] for entry in texts if entry]
    assert found == [[f" {name}", name], [name, name]]


def test_an_echo_has_its_prompt_without_a_space_before_it():
    output, _ = collected("sentencepiece", "the end", tokenizer("sentencepiece").encode("the"), prompt_logprobs=0)
    first, entries = echo_entries(output)
    form = completion_logprobs(entries, first=first)
    assert first == (BOS, "") and "".join(form["tokens"][1:]) == "the end"
    assert form["text_offset"][:2] == [0, 0]
