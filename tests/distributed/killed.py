"""`ferrum-jax` with arguments as usual, in a process that a signal ends, or stops, at a step of its engine.

python -m tests.distributed.killed STEP SIGNAL ARGUMENTS...
"""

import itertools
import os
import signal
import sys

from ferrum_jax.__main__ import main
from ferrum_jax.engine.engine import Engine


def kill_at(step: int, signal: signal.Signals) -> None:
    """The step-th call does not return. That it has come to it stands on stdout."""
    calls, whole = itertools.count(1), Engine.step

    def step_or_die(engine: Engine) -> list:
        if next(calls) == step:
            print(signal.name, flush=True)
            os.kill(os.getpid(), signal)
        return whole(engine)

    Engine.step = step_or_die


if __name__ == "__main__":
    kill_at(int(sys.argv[1]), signal.Signals[sys.argv[2]])
    sys.exit(main(sys.argv[3:]))
