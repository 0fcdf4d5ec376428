"""`ferrum-jax` with arguments as usual, in a process with a fault.

python -m tests.distributed.faults FAULT VALUE... ARGUMENTS...   the fault's name here, and what it takes
"""

import itertools
import os
import signal
import sys
import time

from ferrum_jax.__main__ import main
from ferrum_jax.engine.engine import Engine
from ferrum_jax.engine.startup import chosen


def crashing(token: str) -> None:
    """The row whose prompt ends with this token breaks the engine of every process once it has three tokens."""
    whole = Engine._step

    def step_or_break(engine: Engine) -> list:
        for submission in engine._submissions.values():
            prompt = submission.prompt_token_ids
            if prompt[-1] == int(token) and len(submission.choices[0].request.token_ids) >= len(prompt) + 3:
                raise RuntimeError(f"no step for {token}")
        return whole(engine)

    Engine._step = step_or_break


def killed(step: str, name: str) -> None:
    """A signal ends or stops the process in the step-th call, which does not return; stdout says that it came to it."""
    calls, whole = itertools.count(1), Engine.step

    def step_or_die(engine: Engine) -> list:
        if next(calls) == int(step):
            print(name, flush=True)
            os.kill(os.getpid(), signal.Signals[name])
        return whole(engine)

    Engine.step = step_or_die


def late(seconds: str) -> None:
    """The process is slower than the others to open its model: what is wrong with the mesh comes out so much later."""
    whole = chosen.require_all_processes

    def wait_and_refuse(mesh) -> None:
        time.sleep(float(seconds))
        whole(mesh)

    chosen.require_all_processes = wait_and_refuse


if __name__ == "__main__":
    fault, *words = sys.argv[1:]
    given = 2 if fault == "killed" else 1
    {"crashing": crashing, "killed": killed, "late": late}[fault](*words[:given])
    sys.exit(main(words[given:]))
