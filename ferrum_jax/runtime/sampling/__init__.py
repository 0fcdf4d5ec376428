"""Sampling on the device: a pool of row records in, token ids and their log-probabilities out.

A row's state is one int32 record in the pool `slots: [S, W + L]`: W = RECORD_WORDS words of parameters,
then the row's token ids at their absolute positions. Slot 0 is null: all zeros, greedy, asks for nothing.
The record is written at admission; each step appends one token; nothing else changes it, so a record built
again from the host's tokens continues with the same draws. `record_words` is its layout and the host's half,
`slots` the pool, `masks` which tokens a row may draw, `edits` what changes logits, `noise` and `draw` the choice,
`logprobs` what is reported.
"""

from ferrum_jax.runtime.sampling.draw import Sampled, drawn, reported, sample
from ferrum_jax.runtime.sampling.edits import are_stops
from ferrum_jax.runtime.sampling.logprobs import (
    RESULT_WORDS,
    SCORE_WORDS,
    ByRow,
    TokenLogprobs,
    all_results,
    finite_or_marked,
    named_results,
    row_results,
    unpack,
)
from ferrum_jax.runtime.sampling.masks import ALL, write_masks
from ferrum_jax.runtime.sampling.record_words import RECORD_WORDS, STOP_ROOM, draw_of, slot_record
from ferrum_jax.runtime.sampling.slots import append_tokens, read_adapters, read_tokens, write_slot
