"""The record of one row: how a request's sampling parameters lie in int32 words.

Floats are bitcast, a 64-bit seed is two words, lists are a count and a fixed room. The word FLAGS says
what the row asks for, so that the step can skip what no row asks for; a field without its flag is not
read. The token ids follow at word RECORD_WORDS. NumPy only; the device's half is in `slots`.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from ferrum_jax.core.plan import Draw
from ferrum_jax.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams

# words
FLAGS, CHOICE, SEED_HIGH, SEED_LOW, NUM_PROMPT_TOKENS, MIN_TOTAL_TOKENS, TEMPERATURE, TOP_K, TOP_P, MIN_P = range(10)
REPETITION, PRESENCE, FREQUENCY, NUM_BIAS, NUM_STOP_IDS, ADAPTER, STAMPS_FROM = range(10, 17)
NUM_PARAMETERS = 17
STOP_ROOM = 2 * MAX_STOP_IDS  # the user's and the model's end tokens
BIAS_IDS = NUM_PARAMETERS
BIAS_VALUES = BIAS_IDS + MAX_LOGIT_BIAS
STOP_IDS = BIAS_VALUES + MAX_LOGIT_BIAS
RECORD_WORDS = STOP_IDS + STOP_ROOM

# bits of FLAGS
ASKS_BIAS = 1 << 0
ASKS_MIN_TOKENS = 1 << 1
ASKS_REPETITION = 1 << 2
ASKS_COUNTS = 1 << 3  # presence or frequency
ASKS_NOISE = 1 << 4
ASKS_TOP_K = 1 << 5
ASKS_TOP_P = 1 << 6
ASKS_MIN_P = 1 << 7
ASKS_LOGPROBS = 1 << 8
ASKS_TOP_LOGPROBS = 1 << 9
ASKS_PROCESSED = 1 << 10  # of a prompt that is scored: log-probabilities of what its tokens are drawn from
ASKS_STAMPS = 1 << 11  # of a transcript with times: where these are more likely than each word, one is drawn
ASKS_LIKELIEST_FIRST = 1 << 12  # of a transcript that begins with its language: this is not drawn, whatever the text is

_GREEDY_BELOW = 1e-6  # a temperature so small that float32 division by it is of no use
_INT32_MAX = 2**31 - 1
_FLOAT32 = np.finfo(np.float32)


def slot_record(
    sampling: SamplingParams,
    *,
    seed: int,
    choice: int,
    num_prompt_tokens: int,
    stop_ids: Iterable[int],
    token_ids: Sequence[int],
    max_model_len: int,
    processed: bool = False,
    adapter_id: int = 0,
) -> np.ndarray:
    """The record of one choice of a request: [RECORD_WORDS + max_model_len] int32.

    seed: any 64-bit integer, signed or not. stop_ids: tokens that min_tokens forbids, end tokens and stop_token_ids
    together. token_ids: all tokens known so far, prompt first, at least num_prompt_tokens. processed: see
    `RequestOptions.scores`. adapter_id: the slot, 0 without one.

    Raises ValueError if the tokens or the stop ids do not fit.
    """
    stops = sorted(set(stop_ids))
    if len(token_ids) > max_model_len:
        raise ValueError(f"{len(token_ids)} tokens do not fit in max_model_len, {max_model_len}; shorten the prompt")
    if len(stops) > STOP_ROOM:
        raise ValueError(
            f"{len(stops)} end tokens and stop_token_ids together; at most {STOP_ROOM} fit, give fewer stop_token_ids"
        )
    record = np.zeros(RECORD_WORDS + max_model_len, np.int32)
    record[FLAGS] = _flags(sampling, stops) | (ASKS_PROCESSED if processed else 0)
    record[CHOICE] = choice
    bits = seed & (2**64 - 1)
    record[SEED_HIGH : SEED_LOW + 1] = np.array([bits >> 32, bits & (2**32 - 1)], np.uint32).view(np.int32)
    record[NUM_PROMPT_TOKENS] = num_prompt_tokens
    record[MIN_TOTAL_TOKENS] = min(num_prompt_tokens + sampling.min_tokens, _INT32_MAX)
    record[TOP_K] = min(max(sampling.top_k, 0), _INT32_MAX)
    _write_floats(record.view(np.float32), sampling)
    record[NUM_STOP_IDS] = len(stops)
    record[ADAPTER] = adapter_id
    record[STAMPS_FROM] = 0 if sampling.transcript is None else sampling.transcript.stamps_from or 0
    record[STOP_IDS : STOP_IDS + len(stops)] = stops
    record[RECORD_WORDS : RECORD_WORDS + len(token_ids)] = token_ids
    return record


def draw_of(sampling: SamplingParams) -> Draw:
    """The least that serves a request."""
    flags = _flags(sampling, [0] if sampling.min_tokens else [])
    if sampling.needs_mask or flags & ~(ASKS_NOISE | ASKS_LOGPROBS):
        return Draw.FULL
    return Draw.PLAIN if flags else Draw.GREEDY


def _write_floats(floats: np.ndarray, sampling: SamplingParams) -> None:
    for word, value in (
        (TEMPERATURE, sampling.temperature),
        (TOP_P, sampling.top_p),
        (MIN_P, sampling.min_p),
        (REPETITION, sampling.repetition_penalty),
    ):
        floats[word] = np.clip(value, _FLOAT32.tiny, _FLOAT32.max)
    floats[PRESENCE] = sampling.presence_penalty
    floats[FREQUENCY] = sampling.frequency_penalty
    bias = sampling.logit_bias or {}
    words = floats.view(np.int32)
    words[NUM_BIAS] = len(bias)
    words[BIAS_IDS : BIAS_IDS + len(bias)] = list(bias)
    floats[BIAS_VALUES : BIAS_VALUES + len(bias)] = list(bias.values())


def _flags(sampling: SamplingParams, stops: list[int]) -> int:
    noisy = sampling.temperature >= _GREEDY_BELOW
    asked = {
        ASKS_BIAS: bool(sampling.logit_bias),
        ASKS_MIN_TOKENS: sampling.min_tokens > 0 and bool(stops),
        ASKS_REPETITION: sampling.repetition_penalty != 1.0,
        ASKS_COUNTS: sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0,
        ASKS_NOISE: noisy,
        ASKS_TOP_K: noisy and sampling.top_k > 0,
        ASKS_TOP_P: noisy and sampling.top_p < 1.0,
        ASKS_MIN_P: noisy and sampling.min_p > 0.0,
        ASKS_LOGPROBS: sampling.logprobs is not None,
        ASKS_TOP_LOGPROBS: bool(sampling.logprobs),
        ASKS_STAMPS: sampling.transcript is not None and sampling.transcript.stamps_from is not None,
        ASKS_LIKELIEST_FIRST: noisy and sampling.transcript is not None and bool(sampling.transcript.languages),
    }
    return sum(bit for bit, asks in asked.items() if asks)
