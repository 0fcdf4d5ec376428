"""Outputs: what a submission's tokens so far say to its user and to a trace."""

from __future__ import annotations

import dataclasses
import math

from ferrum_jax.request import CompletionOutput, Logprob, Request, RequestOutput
from ferrum_jax.submission import Choice, Submission
from ferrum_jax.text.tokenizer import Tokenizer
from ferrum_jax.trace import TracedChoice, TracedRequest


def request_output(submission: Submission, tokenizer: Tokenizer | None, *, finished: bool) -> RequestOutput:
    """What a submission has so far. finished: with the prompt's log-probabilities, which are complete then."""
    entries = submission.prompt_logprobs if finished else None
    first = submission.choices[0].request
    num_cached_tokens = min(first.num_cached_tokens, first.num_prompt_tokens)  # a resumed one hits its own too
    return RequestOutput(
        request_id=submission.id,
        prompt=submission.prompt,
        prompt_token_ids=submission.prompt_token_ids,
        outputs=tuple(_completion(choice, tokenizer) for choice in submission.choices),
        num_cached_tokens=num_cached_tokens,
        num_cached_media=sum(span.end <= num_cached_tokens for span in first.media),
        prompt_logprobs=None if entries is None else tuple(e and _with_text(e, tokenizer) for e in entries),
        finished=finished,
        embedding=submission.embedding,
    )


def _completion(choice: Choice, tokenizer: Tokenizer | None) -> CompletionOutput:
    request = choice.request
    token_ids = tuple(request.token_ids[request.num_prompt_tokens :])
    logprobs = None
    if choice.logprobs is not None:
        logprobs = tuple(_with_text(entry, tokenizer) for entry in choice.logprobs)
    chosen = [entry[token].logprob for token, entry in zip(token_ids, logprobs or (), strict=False)]
    return CompletionOutput(
        index=request.choice,
        text=_final_text(choice, token_ids, tokenizer),
        token_ids=token_ids,
        cumulative_logprob=math.fsum(chosen) if logprobs is not None else None,
        logprobs=logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )


def _final_text(choice: Choice, token_ids: tuple[int, ...], tokenizer: Tokenizer | None) -> str:
    """All text of a choice so far; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    request, sampling = choice.request, choice.submission.sampling
    if choice.ended_text is not None:
        return choice.ended_text
    if choice.text is not None:
        return choice.text.text
    ended_by_token = request.finish_reason == "stop" and not sampling.include_stop_str_in_output
    shown = token_ids[:-1] if ended_by_token else token_ids
    return tokenizer.decode(
        shown, skip_special_tokens=sampling.skip_special_tokens, after=choice.submission.prompt_token_ids
    )


def _with_text(entry: dict[int, Logprob], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    if tokenizer is None:
        return entry
    return {
        t: dataclasses.replace(p, decoded_token=tokenizer.decode([t], skip_special_tokens=False))
        for t, p in entry.items()
    }


def traced(submission: Submission) -> TracedRequest:
    """The line that a trace has of a submission that ended."""
    requests = [choice.request for choice in submission.choices]
    first, sampling = requests[0], submission.sampling
    return TracedRequest(
        id=submission.id,
        arrival=submission.arrival,
        prompt_token_ids=list(submission.prompt_token_ids),
        max_tokens=first.max_total_tokens - first.num_prompt_tokens,
        choices=[_traced_choice(request) for request in requests],
        priority=first.priority,
        prompt_logprobs=sampling.prompt_logprobs is not None,
        cache_salt=first.cache_salt.decode(),
        media=first.media,
    )


def _traced_choice(request: Request) -> TracedChoice:
    return TracedChoice(
        token_ids=request.token_ids[request.num_prompt_tokens :].tolist(),
        finish_reason=request.finish_reason or "abort",
        stop_reason=request.stop_reason,
    )
