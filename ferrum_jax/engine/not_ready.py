"""NotReady: submissions whose grammar or executable is compiled, whose adapter has no slot, or whose KV is read."""

from collections.abc import Iterator

from ferrum_jax.engine.adapters import HeldSlots
from ferrum_jax.engine.submission import Submission

_LOOK_S = 0.05  # how long a step waits for an executable that others make: meanwhile more may come, or end


class NotReady:
    """The requests of one engine that wait, in the order in which they came."""

    def __init__(self, adapters: HeldSlots) -> None:
        self._adapters = adapters
        self._waiting: dict[int, Submission] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, submission: Submission) -> None:
        self._waiting[submission.id] = submission

    def drop(self, submission_id: int) -> None:
        self._waiting.pop(submission_id, None)

    def clear(self) -> None:
        self._waiting.clear()

    def take(self, submission_id: int) -> tuple[Submission, ValueError | None]:
        """A submission that is to be queued, which has the slot of its adapter until it ends; or what is wrong."""
        submission = self._waiting.pop(submission_id)
        fault = _fault(submission)
        if fault is None and submission.adapter is not None:
            try:
                submission.adapter_slot = self._adapters.hold(submission.adapter)
            except ValueError as error:
                fault = error
            for choice in submission.open_choices:
                choice.request.adapter_id = submission.adapter_slot
        return submission, fault

    def release(self, submission: Submission) -> None:
        """Its slot has one holder less; what is in flight reads it before anything else is written there."""
        if submission.adapter_slot:
            self._adapters.release(submission.adapter_slot)
            submission.adapter_slot = 0

    def require_grammar(self, submission_id: int) -> None:
        """Waits for a submission's grammar. Raises ValueError with what is wrong with it."""
        submission = self._waiting.get(submission_id)
        fault = submission and _fault_of_grammar(submission)
        if fault is not None:
            raise fault

    def wait_for_first(self) -> None:
        """Nothing else is to do. For an executable it waits a moment alone, because its compile takes seconds."""
        first = next(iter(self._waiting.values()))
        if first.fetch is not None and not first.fetch.is_over:
            first.fetch.tier.store.news.wait(_LOOK_S)
            return
        if first.part is not None and not first.part.done:
            first.part.wait(_LOOK_S)
            return
        _fault_of_grammar(first)
        if first.adapter is not None:
            self._adapters.wait(first.adapter)

    def ready(self) -> Iterator[int]:
        """The ids that can be queued; each is taken before the next is asked for.

        A request that names an adapter never overtakes one that waits for a slot.
        """
        slots_are_asked = False
        for submission in list(self._waiting.values()):
            if submission.adapter is not None:
                is_next = self._adapters.prepare(submission.adapter) and not slots_are_asked
                slots_are_asked |= not is_next
                if not is_next:
                    continue
            if _has_parts(submission):
                yield submission.id
        self._adapters.keep_staged({s.adapter.key for s in self._waiting.values() if s.adapter is not None})


def _has_parts(submission: Submission) -> bool:
    """Whether its grammar and the executable that it needs are compiled, and its KV is not waited for."""
    if submission.fetch is not None and not submission.fetch.is_over:
        return False
    is_compiled = submission.part is None or submission.part.done
    return is_compiled and (submission.grammar is None or submission.grammar.is_ready)


def _fault(submission: Submission) -> ValueError | None:
    """The reason why it cannot be queued, or None. Waits for what is compiled."""
    if submission.part is not None:
        submission.part.wait()
        if (error := submission.part.error()) is not None:
            text = f"what gives prompt_logprobs could not be compiled ({type(error).__name__}: {error})"[:1000]
            return ValueError(f"{text}; ask without prompt_logprobs")
    return _fault_of_grammar(submission)


def _fault_of_grammar(submission: Submission) -> ValueError | None:
    """Why its grammar cannot be used; None where it can, or where there is none. Waits for its compile."""
    return None if submission.grammar is None else submission.grammar.fault()
