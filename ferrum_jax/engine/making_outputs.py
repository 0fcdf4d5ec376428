"""Outputs: a submission's tokens so far, as its user gets them and as a request log records them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ferrum_jax.asked.message import AssistantMessage
from ferrum_jax.engine.growing_message import message_stream
from ferrum_jax.engine.submission import Choice, Submission
from ferrum_jax.outputs import CompletionOutput, Logprob, RequestOutput
from ferrum_jax.request import Request
from ferrum_jax.scheduling.request_log import LoggedChoice, LoggedRequest
from ferrum_jax.structured.reading.message_parser import NO_FORMS, MessageForms
from ferrum_jax.text.tokenizer import Tokenizer


def request_output(
    submission: Submission, tokenizer: Tokenizer | None, *, finished: bool, forms: MessageForms = NO_FORMS
) -> RequestOutput:
    """The output of a submission so far. finished: adds the prompt's log-probabilities, which are complete by then.

    forms: in which the model writes tool calls and reasoning.
    """
    tokenizer = tokenizer if submission.sampling.detokenize else None
    choices = tuple(_completion(choice, tokenizer, forms) for choice in submission.choices)
    return _output(submission, choices, tokenizer, finished=finished)


def choice_delta(
    choice: Choice, tokenizer: Tokenizer | None, *, finished: bool, forms: MessageForms = NO_FORMS
) -> RequestOutput:
    """What is new of one choice since this was last asked; the other choices are not in it.

    finished: it is the last one of its submission that ends, which then has the prompt's log-probabilities.
    """
    tokenizer = tokenizer if choice.submission.sampling.detokenize else None
    found = _completion(choice, tokenizer, forms, after=choice.num_given)
    choice.num_given += len(found.token_ids)
    return _output(choice.submission, (found,), tokenizer, finished=finished)


def _output(
    submission: Submission, choices: tuple[CompletionOutput, ...], tokenizer: Tokenizer | None, *, finished: bool
) -> RequestOutput:
    scores, is_scored = submission.scores if finished else None, submission.options.scores is not None
    first = submission.choices[0].request
    num_cached_tokens = min(first.num_cached_tokens, first.num_prompt_tokens)  # a resumed one hits its own too
    return RequestOutput(
        request_id=submission.id,
        prompt=submission.prompt,
        prompt_token_ids=submission.prompt_token_ids,
        outputs=choices,
        num_cached_tokens=num_cached_tokens,
        num_cached_media=sum(span.end <= num_cached_tokens for span in first.media),
        prompt_logprobs=None
        if scores is None or is_scored
        else tuple(e and _with_text(e, tokenizer) for e in scores.entries()),
        finished=finished,
        embedding=submission.embedding,
        scores=scores.sequence(num_cached_tokens, submission.weights_version) if scores and is_scored else None,
        weights_version=submission.weights_version,
        first_token_s=submission.first_token_s,
    )


def _completion(
    choice: Choice, tokenizer: Tokenizer | None, forms: MessageForms, after: int | None = None
) -> CompletionOutput:
    """after: so many tokens have been given before, and what is new is asked for; None asks for everything."""
    request = choice.request
    token_ids = tuple(request.token_ids[request.num_prompt_tokens + (after or 0) :])
    logprobs = None
    if choice.logprobs is not None:
        logprobs = tuple(_with_text(entry, tokenizer) for entry in choice.logprobs[after or 0 :])
    chosen = [entry[token].logprob for token, entry in zip(token_ids, logprobs or (), strict=False)]
    return CompletionOutput(
        index=request.choice,
        text=_final_text(choice, token_ids, tokenizer) if after is None else _new_text(choice),
        token_ids=token_ids,
        cumulative_logprob=math.fsum(chosen) if logprobs is not None else None,
        logprobs=logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        message=_message(choice, tokenizer, forms),
        routed_experts=_experts(choice),
        weights_versions=_versions(choice)[after or 0 :] if choice.updates else None,
        image_digests=choice.submission.image_digests,
    )


def _experts(choice: Choice) -> np.ndarray | None:
    """Those of all tokens of a choice that has ended, but the last, which no layer has seen."""
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


def _new_text(choice: Choice) -> str:
    return "" if choice.text is None else choice.text.take()


def _message(choice: Choice, tokenizer: Tokenizer | None, forms: MessageForms) -> AssistantMessage | None:
    """A chat's answer taken apart, as far as it is certain where it is streamed; else None while it runs.

    Marks of calls and of reasoning may be special tokens, so those are read too where no stop string has cut the text.
    """
    submission = choice.submission
    sampling, prompt = submission.sampling, submission.prompt_token_ids
    if choice.request.finish_reason is None:
        return choice.message and choice.message.so_far
    stream = message_stream(submission.options, sampling, prompt, tokenizer, forms)
    if stream is None or tokenizer is None:
        return None
    token_ids = tuple(choice.request.token_ids[choice.request.num_prompt_tokens :])
    text = _final_text(choice, token_ids, tokenizer)
    if not sampling.stop:
        ended_by_token = choice.request.finish_reason == "stop"
        shown = token_ids[:-1] if ended_by_token else token_ids
        text = tokenizer.decode(shown, skip_special_tokens=False, after=prompt)
    return forms.joined([*stream.feed(text), *stream.flush()])


def _final_text(choice: Choice, token_ids: tuple[int, ...], tokenizer: Tokenizer | None) -> str:
    """All text of a choice so far, after the prompt's if that is echoed; "" if no text is made."""
    request, sampling = choice.request, choice.submission.sampling
    if tokenizer is None or not sampling.detokenize:
        return ""
    if choice.ended_text is not None:
        return choice.ended_text
    echoed = (choice.submission.prompt or "") if sampling.echo else ""
    if choice.text is not None:
        return echoed + choice.text.text
    ended_by_token = request.finish_reason == "stop" and not sampling.include_stop_str_in_output
    shown = token_ids[:-1] if ended_by_token else token_ids
    return echoed + tokenizer.decode(
        shown, skip_special_tokens=sampling.skip_special_tokens, after=choice.submission.prompt_token_ids
    )


def _with_text(entry: dict[int, Logprob], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    if tokenizer is None:
        return entry
    return {
        t: dataclasses.replace(p, decoded_token=tokenizer.decode([t], skip_special_tokens=False))
        for t, p in entry.items()
    }


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
