"""DrawnTokens: what a drawn token brings about: a stop string, an error, tokens that must come after it."""

import numpy as np

from ferrum_jax.core.delta import entry_of
from ferrum_jax.core.request import Request
from ferrum_jax.core.scheduler.scheduler import Scheduler
from ferrum_jax.engine.constraints import Constraints
from ferrum_jax.engine.submission import Choice
from ferrum_jax.runtime import sampling as device_sampling
from ferrum_jax.runtime.dispatched import InFlight
from ferrum_jax.text.stream import TextStream


class DrawnTokens:
    """The effects of one engine's drawn tokens."""

    def __init__(self, scheduler: Scheduler, constraints: Constraints) -> None:
        self._scheduler, self._constraints = scheduler, constraints
        self._extended: dict[int, Choice] = {}  # by request id: those whose row slot lacks forced tokens

    def begin(self, choice: Choice) -> None:
        """Gives a choice that has no token yet those with which its grammar begins."""
        request = choice.request
        if len(request.token_ids) == request.num_prompt_tokens:
            request.token_ids.extend(self._constraints.beginning(choice))

    def take(self, choice: Choice, step: InFlight, rows: np.ndarray, place: int) -> None:
        """Takes what came with a choice's last token, which may end its request. rows: of the step's results."""
        request = choice.request
        keeps = choice.logprobs is not None or choice.masks is not None or choice.submission.options.embeds
        if (keeps or request.is_constrained) and request.finish_reason != "error":
            self._take_row(choice, step, rows, place)
        if self._scheduler.drafting is not None:
            self._take_draft(request, step, place)
        if choice.stops is not None:
            self._look_for_stops(choice, choice.stops)
        if request.is_constrained and request.finish_reason is None:
            self._force(choice)

    def _take_row(self, choice: Choice, step: InFlight, rows: np.ndarray, place: int) -> None:
        """Takes a row's results beside its token; a constraint that goes no further ends the request."""
        request, submission = choice.request, choice.submission
        if submission.options.embeds and submission.embedding is None:
            submission.embedding = step.last_states[place]
        if choice.logprobs is not None:
            found = device_sampling.unpack(rows).row(place, submission.sampling.logprobs or 0)
            choice.logprobs.append(entry_of(found))
        if choice.masks is not None:
            choice.masks.append(rows[place, device_sampling.RESULT_WORDS :].copy())
        if request.is_constrained:
            error = self._constraints.advance(choice, request.token_ids[-1])
            if error is not None:
                self._scheduler.finish(request, "error", error)

    def _take_draft(self, request: Request, step: InFlight, place: int) -> None:
        """Keeps what the model drafts behind the last token of a request that goes on."""
        drafting = self._scheduler.drafting
        if drafting is not None and drafting.heads is not None and request.finish_reason is None:
            assert step.drafts is not None, "the model has drafts in each step"
            drafting.heads.take(request, int(step.drafts[place]))

    def _look_for_stops(self, choice: Choice, stops: TextStream) -> None:
        """Feeds the last token to the search for stop strings; one that it completes ends the request."""
        request, stopped = choice.request, None
        if request.finish_reason == "error":
            return
        if request.finish_reason != "stop" or choice.submission.sampling.include_stop_str_in_output:
            stopped = stops.push(request.token_ids[-1])  # an end token has no text unless asked for
        if request.finish_reason is None:
            if stopped is not None:
                self._scheduler.finish(request, "stop", stopped)
            return
        stopped = stops.flush()
        if stopped is not None:
            request.finish_reason, request.stop_reason = "stop", stopped

    def _force(self, choice: Choice) -> None:
        """Gives a choice the tokens that its grammar leaves no choice of; a stop string in them ends it."""
        taken: list[int] = []
        stopped = None
        for token in self._constraints.forced(choice):
            taken.append(token)
            stopped = None if choice.stops is None else choice.stops.push(token)
            if stopped is not None:
                break
        if not taken:
            return
        self._scheduler.extend(choice.request, taken)
        self._extended[choice.request.id] = choice
        if stopped is not None:
            self._scheduler.finish(choice.request, "stop", stopped)

    def written(self, request_id: int) -> None:
        """All of its tokens are in its row slot, as of one that is admitted."""
        self._extended.pop(request_id, None)

    def take_unwritten(self) -> list[Choice]:
        """Choices whose row slot lacks forced tokens: they go over what the step in flight drew in their place."""
        found = [choice for choice in self._extended.values() if choice.request.slot]
        self._extended.clear()  # one that was preempted is written when it is admitted
        return found

    def forget(self, choice: Choice) -> None:
        """The choice has ended."""
        self.written(choice.request.id)
        self._constraints.forget(choice)
