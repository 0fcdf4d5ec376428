"""A row in progress goes on from all that it had: nothing of its choices is another after the journal."""

from __future__ import annotations

import dataclasses
import json

from ferrum_jax.batch.journal.partials import decode_partial, encode_partial
from ferrum_jax.outputs import CompletionOutput, Logprob

RUNNING = CompletionOutput(
    index=0,
    text="",
    token_ids=(7, 8),
    cumulative_logprob=None,
    logprobs=(
        {7: Logprob(logprob=-0.1 / 3, rank=1)},
        {9: Logprob(logprob=-1e-9, rank=1), 8: Logprob(logprob=-2.5, rank=40)},
    ),
    finish_reason=None,
    stop_reason=None,
)
ENDED = dataclasses.replace(
    RUNNING, index=1, text="ab\u2028", logprobs=None, finish_reason="stop", stop_reason=13, image_digests=("aa", "bb")
)


def test_choices_are_what_they_were_with_ranks_bits_reasons_and_images():
    choices = (RUNNING, ENDED, dataclasses.replace(ENDED, index=2, stop_reason="b", logprobs=(), image_digests=()))
    content = encode_partial(choices)
    assert decode_partial(content) == choices and b"\n" not in content


def test_of_a_choice_that_goes_on_the_text_is_made_again():
    found = decode_partial(encode_partial([dataclasses.replace(RUNNING, text="half")]))
    assert found == (RUNNING,) and "half" not in json.dumps(found[0].text)
