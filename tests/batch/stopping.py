"""Jobs over a real engine that are stopped at steps and go on."""

import itertools
from collections.abc import Callable

from ferrum_jax.batch.job import EXIT_OK, EXIT_PREEMPTED
from ferrum_jax.batch.notice import Notice
from ferrum_jax.runtime.runner import Runner


def stopping(monkeypatch, after: int) -> list[Notice]:
    """Notices; the last is given at every step whose number `after` divides."""
    dispatch, steps, notices = Runner.dispatch, itertools.count(1), [Notice()]

    def noticed(self, plan, *more):
        if next(steps) % after == 0:
            notices[-1].give("the test", EXIT_PREEMPTED)
        return dispatch(self, plan, *more)

    monkeypatch.setattr(Runner, "dispatch", noticed)
    return notices


def num_starts(run: Callable[[Notice], int], notices: list[Notice]) -> int:
    """How often a job was started until it was done."""
    while (code := run(notices[-1])) == EXIT_PREEMPTED:
        notices.append(Notice())
        assert len(notices) < 40
    assert code == EXIT_OK
    return len(notices)
