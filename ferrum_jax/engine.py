"""The engine: the loop in which host and device meet.

`add` takes token ids and parameters, `step` plans and dispatches one step and commits the one before it,
so that the device always has the next step while the host looks at the last. A submission is what the user
asked for; it has one Request for each of its n choices.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ferrum_jax import sampling as device_sampling
from ferrum_jax.outputs import request_output, traced
from ferrum_jax.plan import StepPlan
from ferrum_jax.prompt import MediaSpan
from ferrum_jax.request import CompletionOutput, Request, RequestOutput, SamplingParams
from ferrum_jax.runtime.runner import InFlight, Runner
from ferrum_jax.scheduling.scheduler import Scheduler
from ferrum_jax.submission import Choice, Intake, Submission
from ferrum_jax.text.tokenizer import Tokenizer
from ferrum_jax.trace import TraceWriter


class _PromptRow(NamedTuple):
    """A row whose prompt log-probabilities a step computes."""

    choice: Choice
    start: int  # position of its first token
    count: int
    offset: int  # of its first token among those of the step


class _Dispatched(NamedTuple):
    """A step in flight and the rows whose prompt log-probabilities it computes."""

    step: InFlight
    prompt_rows: list[_PromptRow]


class Engine:
    """Runs submissions to their end. One engine serves one thread."""

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        end_ids: frozenset[int],
        max_model_len: int,
        max_request_tokens: int,
        seed: int,
        trace: TraceWriter | None = None,
        guard: contextlib.AbstractContextManager[None] | None = None,
    ) -> None:
        """max_request_tokens: for which the executables' block tables have room. guard: around each step, such as a
        `WriteGuard`."""
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self._intake = Intake(
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            end_ids=end_ids,
            max_model_len=max_model_len,
            max_request_tokens=max_request_tokens,
            seed=seed,
        )
        self._submissions: dict[int, Submission] = {}
        self._choices: dict[int, Choice] = {}  # by request id
        self._by_slot: dict[tuple[int, int], Choice] = {}  # by data shard and slot
        self._num_prompt_logprobs = 0
        self._in_flight: deque[_Dispatched] = deque()
        self._trace = trace
        self._guard = guard or contextlib.nullcontext()
        self._num_calls = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._submissions)

    # -- in ------------------------------------------------------------------------------------------

    def add(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        prompt: str | None = None,
        key: str = "",
        priority: int = 0,
        streams: bool = False,
        cache_salt: str = "",
        media: Sequence[MediaSpan] = (),
        resume: Sequence[CompletionOutput] = (),
        embeds: bool = False,
    ) -> int:
        """Queues a submission and returns its id. `key` tells equal prompts apart where no seed is given.

        cache_salt, media: see `ferrum_jax.prompt`; spans count tokens of the prompt as it is given.
        resume: the choices as `peek` gave them in another life; they go on after their tokens, to the same end as if
        they had never stopped. With prompt_logprobs they begin anew.
        embeds: the output has the prompt's embedding.
        Raises ValueError for a prompt or parameters that cannot be served; nothing is left behind then.
        """
        submission = self._intake.take(
            prompt_token_ids,
            sampling,
            prompt=prompt,
            key=key,
            priority=priority,
            streams=streams,
            cache_salt=cache_salt,
            media=media,
            resume=resume,
        )
        self._queue(submission)
        submission.arrival, submission.embeds = self._num_calls, embeds
        self._submissions[submission.id] = submission
        self._num_prompt_logprobs += submission.prompt_logprobs is not None
        self._choices.update((choice.request.id, choice) for choice in submission.open_choices)
        return submission.id

    def _queue(self, submission: Submission) -> None:
        """Every choice, or none and ValueError."""
        added: list[Choice] = []
        try:
            for choice in submission.open_choices:
                self.scheduler.add(choice.request)
                added.append(choice)
        except ValueError:
            for choice in added:
                self.scheduler.abort(choice.request.id)
            raise

    def prompt_keys(
        self,
        prompt_token_ids: Sequence[int],
        *,
        cache_salt: str = "",
        media: Sequence[MediaSpan] = (),
        whole: bool = False,
    ) -> list[bytes]:
        """The keys of a prompt's full blocks; with `whole`, also the one under which the prompt's end is kept."""
        request = Request(
            id=0,
            token_ids=array("i", prompt_token_ids),
            num_prompt_tokens=len(prompt_token_ids),
            max_total_tokens=len(prompt_token_ids) + 1,
            cache_salt=cache_salt.encode(),
            media=tuple(media),
        )
        cache = self.scheduler.caches[0]  # keys are the same on all shards
        return [*cache.keys_of(request), *([cache.key_of_whole(request)] if whole else [])]

    def abort(self, submission_id: int) -> None:
        """Ends a submission; its output is dropped. Unknown ids (already finished) are ignored."""
        submission = self._submissions.get(submission_id)
        if submission is None:
            return
        for choice in submission.choices:
            if self._choices.pop(choice.request.id, None) is not None:
                self.scheduler.abort(choice.request.id)
        self._forget(submission)

    def peek(self, submission_id: int) -> RequestOutput | None:
        """An unfinished submission as far as its tokens are known; None if it has ended."""
        submission = self._submissions.get(submission_id)
        return None if submission is None else request_output(submission, self.tokenizer, finished=False)

    def drain(self) -> None:
        """Commits what is in flight when nothing is left that could want more."""
        while self._in_flight:
            self._commit(self._in_flight.popleft())

    def close(self) -> None:
        """Frees the pools; the engine serves no more. For one whose step was broken off."""
        self.runner.close()

    # -- one step ------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Dispatches the next step, commits the one before it. Returns what finished, and what streams moved."""
        self._num_calls += 1
        with self._guard:
            return self._step()

    def _step(self) -> list[RequestOutput]:
        plan = self._schedule()
        if plan is not None:
            for shard, slot, request_id in plan.admitted:
                choice = self._by_slot[shard, slot] = self._choices[request_id]
                self.runner.write_slot(shard, slot, self._intake.slot_record(choice))
            self._in_flight.append(_Dispatched(self.runner.dispatch(plan), self._prompt_rows(plan)))
        if not self._in_flight or (plan is not None and len(self._in_flight) == 1):
            return []
        return self._commit(self._in_flight.popleft())

    def _schedule(self) -> StepPlan | None:
        return self.scheduler.schedule()

    def _prompt_rows(self, plan: StepPlan) -> list[_PromptRow]:
        """The rows whose prompt log-probabilities this step computes: known now, while slots are theirs."""
        found: list[_PromptRow] = []
        offset = 0
        for index, shard in enumerate(plan.shards if self._num_prompt_logprobs else ()):
            rows = zip(shard.slots.tolist(), shard.starts.tolist(), shard.counts.tolist(), strict=True)
            for slot, start, count in rows:
                choice = self._by_slot[index, slot]
                if not choice.request.takes_hits and start < choice.request.num_prompt_tokens:
                    found.append(_PromptRow(choice, start, count, offset))
                offset += count
        return found

    def _commit(self, dispatched: _Dispatched) -> list[RequestOutput]:
        step = dispatched.step
        rows = step.rows()
        if dispatched.prompt_rows:
            _collect_prompt_logprobs(dispatched)
        outputs: list[RequestOutput] = []
        for request, row in self.scheduler.commit(step.plan, rows[:, 0]):
            choice = self._choices[request.id]
            if choice.submission.embeds and choice.submission.embedding is None:
                choice.submission.embedding = step.last_states()[row]
            if choice.logprobs is not None:
                count = choice.submission.sampling.logprobs or 0
                choice.logprobs.append(device_sampling.unpack(rows).row(row, count))
            if choice.text is not None:
                self._advance_text(choice)
            if request.finish_reason is not None:
                self._finish_choice(choice, outputs)
            elif choice.submission.streams:
                outputs.append(request_output(choice.submission, self.tokenizer, finished=False))
        return outputs

    def _advance_text(self, choice: Choice) -> None:
        """Feeds the last token to the text; a stop string in it ends the request."""
        request, text = choice.request, choice.text
        assert text is not None
        stopped = None
        if request.finish_reason != "stop" or choice.submission.sampling.include_stop_str_in_output:
            stopped = text.push(request.token_ids[-1])  # an end token is no text unless asked for
        if request.finish_reason is None:
            if stopped is not None:
                self.scheduler.finish(request, "stop", stopped)
            return
        stopped = text.flush()
        if stopped is not None:
            request.finish_reason, request.stop_reason = "stop", stopped

    def _finish_choice(self, choice: Choice, outputs: list[RequestOutput]) -> None:
        submission = choice.submission
        del self._choices[choice.request.id]
        submission.num_left -= 1
        if submission.num_left == 0:
            self._forget(submission)
            outputs.append(request_output(submission, self.tokenizer, finished=True))

    def _forget(self, submission: Submission) -> None:
        """It has ended; the trace gets its line."""
        del self._submissions[submission.id]
        self._num_prompt_logprobs -= submission.prompt_logprobs is not None
        if self._trace is not None:
            self._trace.write(traced(submission))


def _collect_prompt_logprobs(dispatched: _Dispatched) -> None:
    """Stores what the step computed of each asking prompt: token p gives the log-probability of token p + 1."""
    results = device_sampling.unpack(dispatched.step.prompt())
    for choice, start, count, offset in dispatched.prompt_rows:
        entries = choice.submission.prompt_logprobs
        assert entries is not None
        num_asked = choice.submission.sampling.prompt_logprobs or 0
        for i in range(count):
            if start + i + 1 < choice.request.num_prompt_tokens:
                entries[start + i + 1] = results.row(offset + i, num_asked)
