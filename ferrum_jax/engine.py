"""The engine: the loop in which host and device meet.

`add` takes token ids and parameters, `step` plans and dispatches one step and commits the one before it,
so that the device always has the next step while the host looks at the last. A submission is what the user
asked for; it has one Request for each of its n choices.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import struct
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ferrum_jax import sampling as device_sampling
from ferrum_jax.plan import ShardPlan
from ferrum_jax.prompt import MediaSpan
from ferrum_jax.request import CompletionOutput, Logprob, Request, RequestOutput, SamplingParams
from ferrum_jax.runtime.runner import InFlight, Runner
from ferrum_jax.scheduling.scheduler import Scheduler
from ferrum_jax.text.stream import TextStream
from ferrum_jax.text.tokenizer import Tokenizer
from ferrum_jax.trace import TracedChoice, TracedRequest, TraceWriter


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Choice:
    """One choice of a submission and what has been made of its tokens."""

    request: Request
    submission: _Submission
    seed: int
    text: TextStream | None  # only where text is wanted before the end: streams and stop strings
    logprobs: list[dict[int, Logprob]] | None


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Submission:
    """What a user asked for in one call, complete when no choice is left."""

    id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    streams: bool
    choices: list[_Choice] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_left: int = 0
    arrival: int = 0  # calls of `Engine.step` before it


class _Dispatched(NamedTuple):
    """A step in flight and the rows whose prompt log-probabilities it computes."""

    step: InFlight
    prompt_rows: list[tuple[_Choice, int]]


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
        seed: int,
        trace: TraceWriter | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._max_model_len = max_model_len
        self._seed = seed
        self._ids = itertools.count(1)
        self._submissions: dict[int, _Submission] = {}
        self._choices: dict[int, _Choice] = {}  # by request id
        self._by_slot: dict[int, _Choice] = {}
        self._num_prompt_logprobs = 0
        self._in_flight: deque[_Dispatched] = deque()
        self._trace = trace
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
    ) -> int:
        """Queues a submission and returns its id. `key` tells equal prompts apart where no seed is given.

        cache_salt, media: see `ferrum_jax.prompt`; spans count tokens of the prompt as it is given.
        Raises ValueError for a prompt or parameters that cannot be served; nothing is left behind then.
        """
        token_ids = self._check(list(prompt_token_ids), sampling)
        spans = _check_media(media, len(prompt_token_ids), len(prompt_token_ids) - len(token_ids))
        submission = _Submission(
            id=next(self._ids),
            prompt=prompt,
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            streams=streams,
            prompt_logprobs=None if sampling.prompt_logprobs is None else [None for _ in token_ids],
        )
        seed = sampling.seed if sampling.seed is not None else self._derive_seed(token_ids, key)
        for choice in range(sampling.n):
            made = self._make_choice(submission, token_ids, choice, seed, priority)
            made.request.cache_salt, made.request.media = cache_salt.encode(), spans
            submission.choices.append(made)
        added: list[_Choice] = []
        try:
            for choice in submission.choices:
                self.scheduler.add(choice.request)
                added.append(choice)
        except ValueError:
            for choice in added:
                self.scheduler.abort(choice.request.id)
            raise
        submission.num_left = sampling.n
        submission.arrival = self._num_calls
        self._submissions[submission.id] = submission
        self._num_prompt_logprobs += submission.prompt_logprobs is not None
        self._choices.update((choice.request.id, choice) for choice in submission.choices)
        return submission.id

    def prompt_keys(
        self, prompt_token_ids: Sequence[int], *, cache_salt: str = "", media: Sequence[MediaSpan] = ()
    ) -> list[bytes]:
        """The keys of a prompt's full blocks."""
        request = Request(
            id=0,
            token_ids=[int(t) for t in prompt_token_ids],
            num_prompt_tokens=len(prompt_token_ids),
            max_total_tokens=len(prompt_token_ids) + 1,
            cache_salt=cache_salt.encode(),
            media=tuple(media),
        )
        return self.scheduler.cache.keys_of(request)

    def _make_choice(
        self, submission: _Submission, token_ids: list[int], choice: int, seed: int, priority: int
    ) -> _Choice:
        sampling = submission.sampling
        room = self._max_model_len - len(token_ids)
        request = Request(
            id=next(self._ids),
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            max_total_tokens=len(token_ids) + (room if sampling.max_tokens is None else sampling.max_tokens),
            min_tokens=sampling.min_tokens,
            stop_ids=self._stop_ids(sampling),
            priority=priority,
            choice=choice,
            num_choices=sampling.n,
            # every choice but the first may hit: the prompt's logprobs come from the first one
            takes_hits=sampling.prompt_logprobs is None or choice > 0,
        )
        needs_text = submission.streams or bool(sampling.stop)
        return _Choice(
            request=request,
            submission=submission,
            seed=seed,
            text=self._text_stream(submission) if needs_text and self.tokenizer else None,
            logprobs=None if sampling.logprobs is None else [],
        )

    def _check(self, token_ids: list[int], sampling: SamplingParams) -> list[int]:
        """The prompt as it will run. Raises ValueError with the value and the repair."""
        if sampling.truncate_prompt_tokens is not None:
            token_ids = token_ids[-sampling.truncate_prompt_tokens :]
        if not token_ids:
            raise ValueError("the prompt is empty (0 tokens); give at least one token")
        bad = next((t for t in token_ids if isinstance(t, bool) or not isinstance(t, int | np.integer)), None)
        if bad is not None:
            raise ValueError(f"the prompt holds {bad!r}, which is not a token id")
        named = (
            ("the prompt", token_ids),
            ("logit_bias", sampling.logit_bias or ()),
            ("stop_token_ids", sampling.stop_token_ids),
        )
        for what, ids in named:
            wrong = next((t for t in ids if not 0 <= t < self._vocab_size), None)
            if wrong is not None:
                raise ValueError(f"{what} holds token id {wrong}; the model's ids are 0 to {self._vocab_size - 1}")
        total = len(token_ids) + (1 if sampling.max_tokens is None else sampling.max_tokens)
        if total > self._max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and max_tokens is {sampling.max_tokens}: together {total}, "
                f"more than max_model_len, {self._max_model_len}; shorten one of them or set truncate_prompt_tokens"
            )
        num_stops = len(self._stop_ids(sampling))
        if num_stops > device_sampling.STOP_ROOM:
            raise ValueError(
                f"the model's end tokens and stop_token_ids are {num_stops} ids together; at most "
                f"{device_sampling.STOP_ROOM} fit, give fewer stop_token_ids or set ignore_eos"
            )
        if sampling.stop and self.tokenizer is None:
            raise ValueError(
                f"stop is {sampling.stop!r}, and there is no tokenizer; use stop_token_ids, or give LLM(tokenizer=...)"
            )
        return [int(t) for t in token_ids]

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        ends = frozenset() if sampling.ignore_eos else self._end_ids
        return ends | frozenset(sampling.stop_token_ids)

    def _derive_seed(self, token_ids: list[int], key: str) -> int:
        """64 bits from the engine's seed, the prompt and the key; the same in every process."""
        state = hashlib.blake2b(digest_size=8)
        state.update(struct.pack("<q", self._seed))
        state.update(np.asarray(token_ids, "<i4").tobytes())
        state.update(key.encode())
        return int.from_bytes(state.digest(), "little")

    def _text_stream(self, submission: _Submission) -> TextStream:
        sampling = submission.sampling
        assert self.tokenizer is not None
        return TextStream(
            self.tokenizer,
            stop=tuple(sampling.stop),
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            after=submission.prompt_token_ids,
        )

    def abort(self, submission_id: int) -> None:
        """Ends a submission; its output is dropped. Unknown ids (already finished) are ignored."""
        submission = self._submissions.get(submission_id)
        if submission is None:
            return
        self._forget(submission)
        for choice in submission.choices:
            if self._choices.pop(choice.request.id, None) is not None:
                self.scheduler.abort(choice.request.id)
        self._trace_end(submission)

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
        plan = self.scheduler.schedule()
        if plan is not None:
            for _, slot, request_id in plan.admitted:
                choice = self._by_slot[slot] = self._choices[request_id]
                self.runner.write_slot(slot, self._slot_record(choice))
            self._in_flight.append(_Dispatched(self.runner.dispatch(plan), self._prompt_rows(plan.shards[0])))
        if not self._in_flight or (plan is not None and len(self._in_flight) == 1):
            return []
        return self._commit(self._in_flight.popleft())

    def _slot_record(self, choice: _Choice) -> np.ndarray:
        request = choice.request
        return device_sampling.slot_record(
            choice.submission.sampling,
            seed=choice.seed,
            choice=request.choice,
            num_prompt_tokens=request.num_prompt_tokens,
            stop_ids=request.stop_ids,
            token_ids=request.token_ids,
            max_model_len=self._max_model_len,
        )

    def _prompt_rows(self, plan: ShardPlan) -> list[tuple[_Choice, int]]:
        """The rows whose prompt log-probabilities this step computes: known now, while slots are theirs."""
        if not self._num_prompt_logprobs:
            return []
        rows = [(self._by_slot[slot], row) for row, slot in enumerate(plan.slots.tolist())]
        return [(c, r) for c, r in rows if not c.request.takes_hits and plan.starts[r] < c.request.num_prompt_tokens]

    def _commit(self, dispatched: _Dispatched) -> list[RequestOutput]:
        step = dispatched.step
        rows = step.rows()
        if dispatched.prompt_rows:
            _collect_prompt_logprobs(dispatched)
        outputs: list[RequestOutput] = []
        for request, row in self.scheduler.commit(step.plan, rows[:, 0]):
            choice = self._choices[request.id]
            if choice.logprobs is not None:
                count = choice.submission.sampling.logprobs or 0
                choice.logprobs.append(device_sampling.unpack(rows).row(row, count))
            if choice.text is not None:
                self._advance_text(choice)
            if request.finish_reason is not None:
                self._finish_choice(choice, outputs)
            elif choice.submission.streams:
                outputs.append(self._output(choice.submission, finished=False))
        return outputs

    def _advance_text(self, choice: _Choice) -> None:
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

    # -- out -----------------------------------------------------------------------------------------

    def _finish_choice(self, choice: _Choice, outputs: list[RequestOutput]) -> None:
        submission = choice.submission
        del self._choices[choice.request.id]
        submission.num_left -= 1
        if submission.num_left == 0:
            self._forget(submission)
            self._trace_end(submission)
            outputs.append(self._output(submission, finished=True))

    def _trace_end(self, submission: _Submission) -> None:
        if self._trace is None:
            return
        requests = [choice.request for choice in submission.choices]
        first, sampling = requests[0], submission.sampling
        self._trace.write(
            TracedRequest(
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
        )

    def _forget(self, submission: _Submission) -> None:
        del self._submissions[submission.id]
        self._num_prompt_logprobs -= submission.prompt_logprobs is not None

    def _output(self, submission: _Submission, *, finished: bool) -> RequestOutput:
        entries = submission.prompt_logprobs if finished else None
        first = submission.choices[0].request
        return RequestOutput(
            request_id=submission.id,
            prompt=submission.prompt,
            prompt_token_ids=submission.prompt_token_ids,
            outputs=tuple(self._completion(choice) for choice in submission.choices),
            num_cached_tokens=first.num_cached_tokens,
            num_cached_media=sum(span.end <= first.num_cached_tokens for span in first.media),
            prompt_logprobs=None if entries is None else tuple(e and self._with_text(e) for e in entries),
            finished=finished,
        )

    def _completion(self, choice: _Choice) -> CompletionOutput:
        request = choice.request
        token_ids = tuple(request.token_ids[request.num_prompt_tokens :])
        logprobs = None
        if choice.logprobs is not None:
            logprobs = tuple(self._with_text(entry) for entry in choice.logprobs)
        chosen = [entry[token].logprob for token, entry in zip(token_ids, logprobs or (), strict=False)]
        return CompletionOutput(
            index=request.choice,
            text=self._final_text(choice, token_ids),
            token_ids=token_ids,
            cumulative_logprob=math.fsum(chosen) if logprobs is not None else None,
            logprobs=logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )

    def _final_text(self, choice: _Choice, token_ids: tuple[int, ...]) -> str:
        """All text of a choice so far; "" without a tokenizer."""
        if self.tokenizer is None:
            return ""
        request, sampling = choice.request, choice.submission.sampling
        if choice.text is not None:
            return choice.text.text
        ended_by_token = request.finish_reason == "stop" and not sampling.include_stop_str_in_output
        shown = token_ids[:-1] if ended_by_token else token_ids
        return self.tokenizer.decode(
            shown, skip_special_tokens=sampling.skip_special_tokens, after=choice.submission.prompt_token_ids
        )

    def _with_text(self, entry: dict[int, Logprob]) -> dict[int, Logprob]:
        if self.tokenizer is None:
            return entry
        return {
            t: dataclasses.replace(p, decoded_token=self.tokenizer.decode([t], skip_special_tokens=False))
            for t, p in entry.items()
        }


def _traced_choice(request: Request) -> TracedChoice:
    return TracedChoice(
        token_ids=request.token_ids[request.num_prompt_tokens :],
        finish_reason=request.finish_reason or "abort",
        stop_reason=request.stop_reason,
    )


def _check_media(media: Sequence[MediaSpan], num_tokens: int, num_cut: int) -> tuple[MediaSpan, ...]:
    """The spans of a prompt of `num_tokens`, counted after its first `num_cut` are cut off.

    Raises ValueError for a span that does not fit.
    """
    for span in media:
        what = f"the {span.kind} at tokens {span.start} to {span.end - 1}"
        if span.end > num_tokens:
            raise ValueError(f"{what} ends beyond the prompt of {num_tokens} tokens")
        if span.start < num_cut < span.end:
            raise ValueError(f"truncate_prompt_tokens cuts {what} in two; leave it whole or out")
    return tuple(dataclasses.replace(span, start=span.start - num_cut) for span in media if span.start >= num_cut)


def _collect_prompt_logprobs(dispatched: _Dispatched) -> None:
    """Stores what the step computed of each asking prompt: token p gives the log-probability of token p + 1."""
    results = device_sampling.unpack(dispatched.step.prompt())
    plan = dispatched.step.plan.shards[0]
    offsets = np.cumsum(plan.counts) - plan.counts
    for choice, row in dispatched.prompt_rows:
        entries = choice.submission.prompt_logprobs
        assert entries is not None
        count = choice.submission.sampling.prompt_logprobs or 0
        start, offset = int(plan.starts[row]), int(offsets[row])
        for i in range(int(plan.counts[row])):
            if start + i + 1 < choice.request.num_prompt_tokens:
                entries[start + i + 1] = results.row(offset + i, count)
