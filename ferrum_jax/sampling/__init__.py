"""Sampling on the device: a pool of row records in, token ids and their log-probabilities out.

A row's state is one int32 record in the pool `slots: [S, W + L]`: W = RECORD_WORDS words of parameters,
then the row's token ids at their absolute positions. Slot 0 is null: all zeros, greedy, asks for nothing.
The record is written at admission; each step appends one token; nothing else changes it, so a record built
again from the host's tokens continues with the same draws. `record` is its layout and the host's half,
`slots` the pool, `edits` what changes logits, `noise` and `draw` the choice, `logprobs` what is reported.
"""

from ferrum_jax.sampling.draw import Sampled, sample
from ferrum_jax.sampling.logprobs import RESULT_WORDS, ByRow, TokenLogprobs, prompt_logprobs, unpack
from ferrum_jax.sampling.record import RECORD_WORDS, STOP_ROOM, slot_record
from ferrum_jax.sampling.slots import append_tokens, read_tokens, wants_prompt_logprobs, write_slot

__all__ = [
    "RECORD_WORDS",
    "RESULT_WORDS",
    "STOP_ROOM",
    "ByRow",
    "Sampled",
    "TokenLogprobs",
    "append_tokens",
    "prompt_logprobs",
    "read_tokens",
    "sample",
    "slot_record",
    "unpack",
    "wants_prompt_logprobs",
    "write_slot",
]
