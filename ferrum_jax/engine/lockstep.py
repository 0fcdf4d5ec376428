"""Engines in lockstep: process 0 broadcasts its calls; the other processes replay them.

The wire carries the calls that change an engine: `add`, `abort`, `queue_ready`, `take_costs`, `learn`, `step`, `drain`,
`reset_prefix_cache`. All else follows from them. Each engine digests its plans, and process 0 compares the digests
every few steps. If a step fails in every process, all rebuild their engines, because host code failed on a row; if
only some fail, all exit.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ferrum_jax.core.delta import Delta
from ferrum_jax.core.plan import StepPlan
from ferrum_jax.core.request_options import NO_OPTIONS, RequestOptions
from ferrum_jax.engine.engine import Engine
from ferrum_jax.runtime.distributed.messages import Call, encode
from ferrum_jax.runtime.distributed.processes import CHECK_STEPS, Processes
from ferrum_jax.sampling_params import SamplingParams


class StepFailed(RuntimeError):
    """An engine broke in a step, and those of all processes with it."""


class LockstepEngine(Engine):
    """An engine that does what those of other processes do."""

    def __init__(self, processes: Processes, **parts: Any) -> None:
        super().__init__(**parts)
        self._processes = processes
        self._digest = hashlib.blake2b(digest_size=16)

    def step(self) -> list[Delta]:
        with self._together():
            return super().step()

    def drain(self) -> None:
        with self._together():
            super().drain()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Raises StepFailed for an error that all processes have, and ProcessLost for one that others do not have."""
        try:
            yield
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self._processes.break_together(self._num_calls, f"a step failed: {what}")
            raise StepFailed(what) from error

    def _queue_all_ready(self) -> None:
        """Process 0 announces a ready grammar; others then wait for theirs."""

    def _tell_costs(self) -> None:
        """Process 0 announces what steps take."""

    def _schedule(self) -> StepPlan | None:
        plan = super()._schedule()
        if plan is not None:
            self._digest.update(plan_bytes(plan))
            if plan.step % CHECK_STEPS == 0:
                self._processes.compare(plan.step, self._digest.digest())
        return plan


class LeadingEngine(LockstepEngine):
    """Process 0's engine: it sends its calls before it makes them, so that all devices begin a step together."""

    def __init__(self, processes: Processes, **parts: Any) -> None:
        super().__init__(processes, **parts)
        self._calls: list[bytes] = []  # encoded, to be sent with the next step

    def add(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, options: RequestOptions = NO_OPTIONS
    ) -> int:
        self._calls.append(encode(Call("add", (prompt_token_ids, sampling, options))))
        return super().add(prompt_token_ids, sampling, options)

    def abort(self, submission_id: int) -> None:
        self._calls.append(encode(Call("abort", (submission_id,))))
        super().abort(submission_id)

    def reset_prefix_cache(self) -> bool:
        self._calls.append(encode(Call("reset_prefix_cache", ())))
        return super().reset_prefix_cache()

    def queue_ready(self, submission_id: int) -> None:
        self._calls.append(encode(Call("queue_ready", (submission_id,))))
        super().queue_ready(submission_id)

    def take_costs(self, costs: Sequence[tuple[int, float, Sequence[Sequence[float]]]]) -> None:
        self._calls.append(encode(Call("take_costs", (costs,))))
        super().take_costs(costs)

    def learn(self, token_ids: Sequence[int], num_prompt_tokens: int, cache_salt: str = "") -> None:
        self._calls.append(encode(Call("learn", (token_ids, num_prompt_tokens, cache_salt))))
        super().learn(token_ids, num_prompt_tokens, cache_salt)

    def step(self) -> list[Delta]:
        Engine._queue_all_ready(self)
        Engine._tell_costs(self)
        self._send("step")
        return super().step()

    def drain(self) -> None:
        self._send("drain")
        super().drain()

    def _send(self, last: str) -> None:
        calls, self._calls = [*self._calls, encode(Call(last, ()))], []
        self._processes.send_all(calls)


def make_engine(processes: Processes | None, **parts: Any) -> Engine:
    """An engine of one process, or this process's one of several."""
    if processes is None:
        return Engine(**parts)
    return (LeadingEngine if processes.leads else LockstepEngine)(processes, **parts)


def plan_bytes(plan: Any) -> bytes:
    """Every integer of a plan: equal for equal plans alone."""
    if isinstance(plan, np.ndarray):
        return repr(plan.shape).encode() + plan.tobytes()
    if dataclasses.is_dataclass(plan):
        return b"".join(plan_bytes(getattr(plan, field.name)) for field in dataclasses.fields(plan))
    if isinstance(plan, tuple):
        return b"(%d" % len(plan) + b"".join(map(plan_bytes, plan))
    assert isinstance(plan, int | np.integer), f"a plan holds {plan!r}"
    return b"%d," % plan
