"""OpenSubmissions: what users asked an engine for and has not ended, by submission id, and the deltas of it."""

import time

import numpy as np

from ferrum_jax.core.delta import Beside, Delta, Entry, entry_of
from ferrum_jax.core.request import Request
from ferrum_jax.core.scheduler.request_log import LoggedChoice, LoggedRequest, RequestLogWriter
from ferrum_jax.engine.not_ready import NotReady
from ferrum_jax.engine.submission import Choice, Submission


class OpenSubmissions(dict[int, Submission]):
    """The unfinished submissions of one engine, in the order in which they came."""

    def __init__(self, not_ready: NotReady, request_log: RequestLogWriter | None) -> None:
        """not_ready: holds the adapters of submissions, to their end. request_log: gets a line for each that ended."""
        super().__init__()
        self.choices: dict[int, Choice] = {}  # unfinished ones, by request id
        self.num_scored = 0  # submissions whose prompt's tokens have log-probabilities
        self.num_embedded = 0  # submissions that ask for a vector
        self._ended: list[Choice] = []  # without a step: resumed ones that had, and ones that failed
        self._not_ready, self._request_log = not_ready, request_log

    @property
    def has_ended(self) -> bool:
        """Whether a choice has ended without a step, and its delta was not given yet."""
        return bool(self._ended)

    def add(self, submission: Submission) -> None:
        self[submission.id] = submission
        self.num_scored += submission.scores is not None
        self.num_embedded += submission.options.embeds
        self.choices.update((choice.request.id, choice) for choice in submission.open_choices)
        self._ended += [choice for choice in submission.choices if choice.request.finish_reason is not None]

    def fail(self, submission: Submission, why: str) -> None:
        """Ends a submission that was not queued."""
        failed = submission.open_choices
        for choice in failed:
            choice.request.finish_reason, choice.request.stop_reason = "error", why
            del self.choices[choice.request.id]
        submission.num_left = 0
        self._ended += failed

    def drop(self, submission: Submission) -> None:
        """Forgets a submission, which gives nothing more."""
        for choice in submission.choices:
            self.choices.pop(choice.request.id, None)
        self._ended = [ended for ended in self._ended if ended.submission is not submission]
        self._forget(submission)

    def peek(self, submission_id: int) -> list[Delta]:
        """The new tokens of a submission as far as they are known; [] if it has ended."""
        submission = self.get(submission_id)
        choices = () if submission is None else (*submission.open_choices, *self._ended)
        return [self.delta(choice) for choice in choices if choice.submission is submission]

    def progress(self) -> dict[str, tuple[float, float, float]]:
        """By the key of each: its prompt's tokens that are computed, all of them, and the tokens of all choices."""
        found = {}
        for submission in self.values():
            requests = [choice.request for choice in submission.choices]
            num_prompt = requests[0].num_prompt_tokens
            num_read = max(num_prompt if r.finish_reason else min(r.num_computed, num_prompt) for r in requests)
            num_written = sum(len(request.token_ids) - num_prompt for request in requests)
            found[submission.options.key] = num_read, num_prompt, num_written
        return found

    def give_ended(self) -> list[Delta]:
        """The last deltas of choices that end without a step."""
        ended, self._ended = self._ended, []
        last = {choice.submission.id: choice for choice in ended}
        return [
            self._last_delta(choice, not choice.submission.num_left and choice is last[choice.submission.id])
            for choice in ended
        ]

    def finish(self, choice: Choice) -> Delta:
        """The last delta of a choice; with the last choice its submission is forgotten."""
        del self.choices[choice.request.id]
        choice.submission.num_left -= 1
        return self._last_delta(choice, choice.submission.num_left == 0)

    def delta(self, choice: Choice, *, is_last: bool = False) -> Delta:
        """A choice's new tokens since the last call.

        is_last: its submission ends with it, and so has the prompt's log-probabilities.
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
            [time.monotonic_ns() // 1000] * len(token_ids),
            _beside(choice, is_last) if submission.weights_version or request.finish_reason is not None else None,
            submission.scores.named() if is_last and submission.scores is not None else None,
        )
        choice.num_given += len(token_ids)
        return delta

    def _last_delta(self, choice: Choice, ends: bool) -> Delta:
        delta = self.delta(choice, is_last=ends)
        if ends:
            self._forget(choice.submission)
        return delta

    def _forget(self, submission: Submission) -> None:
        del self[submission.id]
        self.num_scored -= submission.scores is not None
        self.num_embedded -= submission.options.embeds
        self._not_ready.release(submission)
        if self._request_log is not None:
            self._request_log.write(logged(submission))


def _prompt_logprobs(submission: Submission) -> list[Entry | None] | None:
    if submission.scores is None or submission.options.scores is not None:
        return None
    if submission.sampling.prompt_logprobs is None:
        return None
    return [None if entry is None else entry_of(entry) for entry in submission.scores.entries()]


def _beside(choice: Choice, is_last: bool) -> Beside:
    submission, first = choice.submission, choice.submission.choices[0].request
    has_scores = is_last and submission.options.scores is not None and choice.request.finish_reason != "abort"
    scores = submission.scores if has_scores else None
    num_cached_tokens = min(first.num_cached_tokens, first.num_prompt_tokens)
    return Beside(
        weights_version=submission.weights_version,
        weights_versions=_versions(choice) if choice.updates else None,
        embedding=submission.embedding,
        scores=scores and scores.sequence(num_cached_tokens, submission.weights_version),
        routed_experts=_experts(choice),
        sampling_mask=_mask(choice),
    )


def _experts(choice: Choice) -> np.ndarray | None:
    """Experts of all tokens of an ended choice but the last, which no layer has seen."""
    if choice.experts is None or choice.request.finish_reason is None:
        return None
    return choice.experts.of_first(len(choice.request.token_ids) - 1)


def _mask(choice: Choice) -> np.ndarray | None:
    """The sampling mask of each token of an ended choice; None where other processes drew some."""
    num_tokens = len(choice.request.token_ids) - choice.request.num_prompt_tokens
    if not choice.masks or choice.request.finish_reason is None or len(choice.masks) != num_tokens:
        return None
    return np.stack(choice.masks).view(np.uint8)


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
        prompt_logprobs=submission.scores is not None and first.most_hit_tokens is None,
        takes_hits=requests[-1].takes_hits,
        most_hit_tokens=first.most_hit_tokens,
        takes_drafts=sampling.speculative,
        draw=requests[-1].draw,
        needs_host=first.needs_host,
        stop_ids=tuple(sorted(first.stop_ids)),
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
