"""Log-probabilities of given tokens as tasks: one prefill scores a sequence."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ferrum_jax.core.outputs import RequestOutput, SequenceLogprobs
from ferrum_jax.core.request_options import ScoresAsked
from ferrum_jax.inputs.prompt import Prompt
from ferrum_jax.io.ints import as_whole
from ferrum_jax.sampling_params import MAX_LOGPROBS, WHOLE_VOCABULARY, SamplingParams
from ferrum_jax.tasks.task import EngineRequest, Task, succeeded
from ferrum_jax.text.tokenizer import Tokenizer, require_tokenizer

MODES = ("raw", "processed")
Completion = str | Sequence[int]


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


def completions_for(
    prompts: Sequence[Prompt], completions: Sequence[Completion] | None
) -> list[tuple[Prompt, Completion | None]]:
    """Each prompt with its completion; None scores the prompt. Raises ValueError unless there is one for each."""
    if completions is None:
        return [(prompt, None) for prompt in prompts]
    if isinstance(completions, str) or len(completions) != len(prompts):
        given = "a text" if isinstance(completions, str) else f"{len(completions)}"
        raise ValueError(f"completions is {given} for {len(prompts)} prompts; give a list with one for each prompt")
    return list(zip(prompts, completions, strict=True))


def logprobs_task(
    prompt: EngineRequest, completion: Sequence[int] | None, mode: str, vocab_size: int
) -> Task[SequenceLogprobs]:
    """The log-probabilities of a completion's tokens; None scores the prompt from its second token on.

    prompt: drawn as `score_params` says. A sequence without a token to be scored has no request. Raises ValueError for
    an empty prompt, which says nothing of its first token.
    """
    ids, top = prompt.token_ids, prompt.sampling.prompt_logprobs
    assert top is not None, "score_params sets it"
    if not len(ids):
        raise ValueError(
            "the prompt is empty (0 tokens), and the first token of a sequence has no log-probability; give at least "
            "one token, such as the one that begins every text"
        )
    start, token_ids = (1, list(ids)) if completion is None else (len(ids), [*ids, *completion])
    if start == len(token_ids):
        return Task([], lambda outputs: _nothing(top, vocab_size))
    scores = ScoresAsked(start=start, processed=mode == "processed")
    options = dataclasses.replace(prompt.options, scores=scores)
    return Task([EngineRequest(token_ids, prompt.sampling, options)], _scores)


def _scores(outputs: Sequence[RequestOutput]) -> SequenceLogprobs:
    scores = succeeded(outputs[0]).scores
    assert scores is not None, "it was asked for scores"
    return scores


def completion_ids(completion: Completion | None, tokenizer: Tokenizer | None, most: int) -> Sequence[int] | None:
    """The token ids of a completion, if there is one. Raises ValueError for a value that is no completion."""
    if completion is None:
        return None
    if isinstance(completion, str):
        tokenizer = require_tokenizer(tokenizer, "the model")
        return tokenizer.encode(completion, add_special_tokens=False, at_most=most)
    if not isinstance(completion, Sequence | np.ndarray):
        raise ValueError(f"the completion is {completion!r}; it must be a text or a list of token ids")
    return [int(token) if isinstance(token, np.integer) else token for token in completion]


def _nothing(top: int, vocab_size: int) -> SequenceLogprobs:
    """The scores of no token."""
    none, k = np.zeros(0, np.float32), max(top, 0)
    return SequenceLogprobs(
        token_ids=(),
        logprobs=none,
        ranks=none.astype(np.int32),
        top_ids=np.zeros((0, k), np.int32),
        top_logprobs=np.zeros((0, k), np.float32),
        all_logprobs=np.zeros((0, vocab_size), np.float32) if top == WHOLE_VOCABULARY else None,
    )
