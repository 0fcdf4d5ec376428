"""`ferrum-jax` with arguments as usual, and one row breaks the engine of every process once it has three tokens.

python -m tests.distributed.crashing TOKEN ARGUMENTS...         the row whose prompt ends with this token
"""

import sys

from ferrum_jax.__main__ import main
from ferrum_jax.engine.engine import Engine


def break_on(token: int) -> None:
    whole = Engine._step

    def step_or_break(engine: Engine) -> list:
        for submission in engine._submissions.values():
            prompt = submission.prompt_token_ids
            if prompt[-1] == token and len(submission.choices[0].request.token_ids) >= len(prompt) + 3:
                raise RuntimeError(f"no step for {token}")
        return whole(engine)

    Engine._step = step_or_break


if __name__ == "__main__":
    break_on(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
