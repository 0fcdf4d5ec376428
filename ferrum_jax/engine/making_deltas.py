"""What is new of a choice, as its user is given it, and a submission as a request log records it."""

from __future__ import annotations

import numpy as np

from ferrum_jax.delta import Beside, Delta, Entry, entry_of
from ferrum_jax.engine.submission import Choice, Submission
from ferrum_jax.request import Request
from ferrum_jax.scheduling.request_log import LoggedChoice, LoggedRequest


def delta_of(choice: Choice, *, is_last: bool, time_us: int) -> Delta:
    """What is new of a choice since this was last asked.

    is_last: its submission ends with it, and so has the prompt's log-probabilities. time_us: of `time.monotonic`.
    """
    request, submission = choice.request, choice.submission
    token_ids = request.token_ids[request.num_prompt_tokens + choice.num_given :].tolist()
    first = submission.choices[0].request
    delta = Delta(
        submission.id,
        request.choice,
        token_ids,
        None if choice.logprobs is None else choice.logprobs[choice.num_given :],
        request.finish_reason,
        request.stop_reason,
        is_last,
        min(first.num_cached_tokens, first.num_prompt_tokens),  # a resumed one hits its own tokens too
        _prompt_logprobs(submission) if is_last else None,
        [time_us] * len(token_ids),
        _beside(choice, is_last) if submission.weights_version or request.finish_reason is not None else None,
    )
    choice.num_given += len(token_ids)
    return delta


def _prompt_logprobs(submission: Submission) -> list[Entry | None] | None:
    if submission.scores is None or submission.options.scores is not None:
        return None
    return [None if entry is None else entry_of(entry) for entry in submission.scores.entries()]


def _beside(choice: Choice, is_last: bool) -> Beside:
    submission, first = choice.submission, choice.submission.choices[0].request
    scores = submission.scores if is_last and submission.options.scores is not None else None
    num_cached_tokens = min(first.num_cached_tokens, first.num_prompt_tokens)
    return Beside(
        weights_version=submission.weights_version,
        weights_versions=_versions(choice) if choice.updates else None,
        embedding=submission.embedding,
        scores=scores and scores.sequence(num_cached_tokens, submission.weights_version),
        routed_experts=_experts(choice),
        first_token_s=submission.first_token_s,
    )


def _experts(choice: Choice) -> np.ndarray | None:
    """Experts of all tokens of an ended choice but the last, which no layer has seen."""
    if choice.experts is None or choice.request.finish_reason is None:
        return None
    return choice.experts.of_first(len(choice.request.token_ids) - 1)


def _versions(choice: Choice) -> tuple[int, ...]:
    """How many updates of the weights came before each token."""
    last = choice.submission.weights_version
    num_tokens = len(choice.request.token_ids) - choice.request.num_prompt_tokens
    first = choice.updates[0][1] - 1
    steps = [sum(start <= token for start, _ in choice.updates) for token in range(num_tokens)]
    versions = [first, *(version for _, version in choice.updates)]
    assert versions[-1] == last, "an update was missed"
    return tuple(versions[step] for step in steps)


def logged(submission: Submission) -> LoggedRequest:
    """The line of a request log for a submission that has ended."""
    requests = [choice.request for choice in submission.choices]
    first, sampling = requests[0], submission.sampling
    return LoggedRequest(
        id=submission.id,
        arrival=submission.arrival,
        prompt_token_ids=list(submission.prompt_token_ids),
        max_tokens=first.max_total_tokens - first.num_prompt_tokens,
        choices=[_logged_choice(request) for request in requests],
        priority=first.priority,
        prompt_logprobs=sampling.prompt_logprobs is not None,
        takes_hits=submission.choices[0].experts is None,
        takes_drafts=first.takes_drafts,
        adapter=first.adapter,
        cache_salt=first.cache_salt.decode(),
        media=first.media,
        images=first.images,
    )


def _logged_choice(request: Request) -> LoggedChoice:
    return LoggedChoice(
        token_ids=request.token_ids[request.num_prompt_tokens :].tolist(),
        finish_reason=request.finish_reason or "abort",
        stop_reason=request.stop_reason,
    )
