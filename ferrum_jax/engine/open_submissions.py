"""OpenSubmissions: what users asked an engine for and has not ended, by submission id, and the deltas of it."""

from __future__ import annotations

import time

from ferrum_jax.delta import Delta
from ferrum_jax.engine.making_deltas import delta_of, logged
from ferrum_jax.engine.not_ready import NotReady
from ferrum_jax.engine.submission import Choice, Submission
from ferrum_jax.scheduling.request_log import RequestLogWriter


class OpenSubmissions(dict[int, Submission]):
    """The unfinished submissions of one engine, in the order in which they came."""

    def __init__(self, not_ready: NotReady, request_log: RequestLogWriter | None) -> None:
        """not_ready: holds the adapters of submissions, to their end. request_log: gets a line for each that ended."""
        super().__init__()
        self.choices: dict[int, Choice] = {}  # unfinished ones, by request id
        self.num_observed = 0  # submissions of which something is kept of each token
        self._ended: list[Choice] = []  # without a step: resumed ones that had, and ones that failed
        self._not_ready, self._request_log = not_ready, request_log

    @property
    def has_ended(self) -> bool:
        """Whether a choice has ended without a step, and its delta was not given yet."""
        return bool(self._ended)

    def add(self, submission: Submission) -> None:
        self[submission.id] = submission
        self.num_observed += submission.is_observed
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
        """Forgets a submission, of which nothing more is given."""
        for choice in submission.choices:
            self.choices.pop(choice.request.id, None)
        self._ended = [ended for ended in self._ended if ended.submission is not submission]
        self._forget(submission)

    def peek(self, submission_id: int) -> list[Delta]:
        """What is new of a submission as far as its tokens are known; nothing where it has ended."""
        submission = self.get(submission_id)
        choices = () if submission is None else (*submission.open_choices, *self._ended)
        return [self.delta(choice) for choice in choices if choice.submission is submission]

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
        """What is new of a choice."""
        return delta_of(choice, is_last=is_last, time_us=time.monotonic_ns() // 1000)

    def _last_delta(self, choice: Choice, ends: bool) -> Delta:
        delta = self.delta(choice, is_last=ends)
        if ends:
            self._forget(choice.submission)
        return delta

    def _forget(self, submission: Submission) -> None:
        del self[submission.id]
        self.num_observed -= submission.is_observed
        self._not_ready.release(submission)
        if self._request_log is not None:
            self._request_log.write(logged(submission))
