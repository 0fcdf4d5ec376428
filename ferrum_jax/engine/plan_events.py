"""PlanEvents: what plans follow beside requests. Each is an event before a step, decided by process 0 and recorded.

So equal events give equal plans: on the hosts of one engine, and when a request log is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrum_jax.core.scheduler.drafting import StepCosts
from ferrum_jax.core.scheduler.request_log import LearntText, PlanLimit, RequestLogWriter, ToldCosts
from ferrum_jax.core.scheduler.scheduler import Scheduler


class PlanEvents:
    """The events of one engine. arrival: steps before the event."""

    def __init__(self, scheduler: Scheduler, request_log: RequestLogWriter | None) -> None:
        self._scheduler, self._log = scheduler, request_log
        self._told: tuple[int | None, Sequence[tuple[int, int, int]]] = (None, ())

    def limit(self, tokens: int | None, horizons: Sequence[tuple[int, int, int]], arrival: int) -> None:
        """Plans follow the largest executable that is there, and launches that go on, from the next step on."""
        if self._told == (tokens, horizons):
            return
        self._told = tokens, horizons
        self._scheduler.limit(tokens, horizons)
        if self._log is not None:
            self._log.event(PlanLimit(arrival=arrival, token_limit=tokens, horizons=horizons))

    def take_costs(self, costs: Sequence[StepCosts], arrival: int) -> None:
        """Drafted tokens are computed as pays by these costs, from the next step on."""
        if self._scheduler.drafting is None:
            return
        self._scheduler.drafting.costs = costs
        if self._log is not None:
            self._log.event(ToldCosts(arrival=arrival, costs=[(c.num_rows, c.bare, c.sizes) for c in costs]))

    def learn(self, token_ids: Sequence[int], num_prompt_tokens: int, cache_salt: str, arrival: int) -> None:
        """Tokens may be drafted from a text that ended elsewhere, from the next step on."""
        if self._scheduler.drafting is None:
            return
        self._scheduler.drafting.source.learn(token_ids, num_prompt_tokens, cache_salt.encode())
        if self._log is not None:
            learnt = list(token_ids)
            self._log.event(
                LearntText(arrival=arrival, learnt=learnt, num_prompt_tokens=num_prompt_tokens, cache_salt=cache_salt)
            )
