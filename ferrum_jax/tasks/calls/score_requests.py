"""Requests for log-probabilities of given tokens: what a user names, checked, as sequences that one prefill scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ferrum_jax.core.outputs import RequestOutput, SequenceLogprobs
from ferrum_jax.core.request_options import RequestOptions, ScoresAsked
from ferrum_jax.io.ints import as_whole
from ferrum_jax.sampling_params import MAX_LOGPROBS, WHOLE_VOCABULARY, SamplingParams
from ferrum_jax.text.tokenizer import Tokenizer, require_tokenizer

MODES = ("raw", "processed")
Completion = str | Sequence[int]


class ScoreRequest(NamedTuple):
    """A sequence, and which of its tokens are scored."""

    token_ids: list[int]
    options: RequestOptions


def score_params(
    top: int, mode: str, sampling_params: SamplingParams | None, default: SamplingParams
) -> SamplingParams:
    """The parameters of the requests. default: where none are given. Raises ValueError for values that mean nothing."""
    top = as_whole(top)
    if not isinstance(top, int) or isinstance(top, bool) or not WHOLE_VOCABULARY <= top <= MAX_LOGPROBS:
        raise ValueError(
            f"top is {top!r}; it must be between 0 and {MAX_LOGPROBS}, or -1 for the whole vocabulary of each token"
        )
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; it must be one of {MODES}")
    if mode == "raw" and sampling_params is not None:
        raise ValueError(
            "sampling_params are given, and mode is 'raw': log-probabilities of the model's own distribution do not "
            "depend on them; leave them out, or say mode='processed'"
        )
    if mode == "processed" and top == WHOLE_VOCABULARY:
        raise ValueError("top is -1, and mode is 'processed'; the whole vocabulary is reported in mode 'raw' alone")
    params = sampling_params or (default if mode == "processed" else SamplingParams())
    if params.structured_outputs is not None:
        raise ValueError("sampling_params have structured_outputs, whose masks scores do not follow; leave them out")
    if params.min_tokens:
        raise ValueError(f"min_tokens is {params.min_tokens}, which scores do not follow; leave it out")
    return dataclasses.replace(params, n=1, max_tokens=1, prompt_logprobs=top, logprobs=None, stop=(), detokenize=False)


def score_requests(
    prompts: Iterable[tuple[Sequence[int], RequestOptions]],
    completions: Sequence[Completion] | None,
    tokenizer: Tokenizer | None,
    mode: str,
    max_model_len: int,
) -> list[ScoreRequest | None]:
    """The sequence of each prompt and its completion; None where no token is to be scored.

    Raises ValueError naming the prompt that is empty, and so says nothing of its first token, or whose completion is
    none.
    """
    many = list(prompts)
    if completions is not None and (isinstance(completions, str) or len(completions) != len(many)):
        given = "a text" if isinstance(completions, str) else f"{len(completions)}"
        raise ValueError(f"completions is {given} for {len(many)} prompts; give a list with one for each prompt")
    found = []
    for number, (token_ids, options) in enumerate(many):
        try:
            completion = None if completions is None else _ids(completions[number], tokenizer, max_model_len)
            found.append(_request(token_ids, options, completion, mode))
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from error
    return found


def _request(
    prompt: Sequence[int], options: RequestOptions, completion: Sequence[int] | None, mode: str
) -> ScoreRequest | None:
    if not len(prompt):
        raise ValueError(
            "the prompt is empty (0 tokens), and the first token of a sequence has no log-probability; give at least "
            "one token, such as the one that begins every text"
        )
    start, token_ids = (1, list(prompt)) if completion is None else (len(prompt), [*prompt, *completion])
    if start == len(token_ids):
        return None
    scores = ScoresAsked(start=start, processed=mode == "processed")
    return ScoreRequest(token_ids, dataclasses.replace(options, scores=scores))


def _ids(completion: Completion, tokenizer: Tokenizer | None, most: int) -> Sequence[int]:
    if isinstance(completion, str):
        tokenizer = require_tokenizer(tokenizer, "the model")
        return tokenizer.encode(completion, add_special_tokens=False, at_most=most)
    if not isinstance(completion, Sequence | np.ndarray):
        raise ValueError(f"the completion is {completion!r}; it must be a text or a list of token ids")
    return [int(token) if isinstance(token, np.integer) else token for token in completion]


def scores_of(output: RequestOutput | None, top: int, vocab_size: int) -> SequenceLogprobs:
    """What was asked for of a sequence; of one without a token to be scored, which did not run, nothing.

    Raises ValueError where it could not be computed.
    """
    if output is not None:
        if output.finish_reason == "error":
            raise ValueError(str(output.outputs[0].stop_reason))
        assert output.scores is not None, "it was asked for scores"
        return output.scores
    none, k = np.zeros(0, np.float32), max(top, 0)
    return SequenceLogprobs(
        token_ids=(),
        logprobs=none,
        ranks=none.astype(np.int32),
        top_ids=np.zeros((0, k), np.int32),
        top_logprobs=np.zeros((0, k), np.float32),
        all_logprobs=np.zeros((0, vocab_size), np.float32) if top == WHOLE_VOCABULARY else None,
    )
