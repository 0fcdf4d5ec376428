"""`ferrum-jax` with arguments as usual, in a process that is slower than the others to open its model.

python -m tests.distributed.late SECONDS ARGUMENTS...
"""

import sys
import time

from ferrum_jax.__main__ import main
from ferrum_jax.engine.startup import chosen


def refuse_late(seconds: float) -> None:
    """What is wrong with the mesh comes out so much later."""
    whole = chosen.require_all_processes

    def wait_and_refuse(mesh) -> None:
        time.sleep(seconds)
        whole(mesh)

    chosen.require_all_processes = wait_and_refuse


if __name__ == "__main__":
    refuse_late(float(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
