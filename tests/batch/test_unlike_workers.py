"""A slow worker hands over the rows that it runs when fast ones have room for all that are left."""

import json
import subprocess
import sys

from tests.batch.unlike_program import NUM_ROWS
from tests.support import ROOT


def test_a_slow_worker_hands_over_its_last_rows_with_their_tokens_and_ends():
    command = [sys.executable, "-W", "error", "-m", "tests.batch.unlike_program"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["codes"] == [0, 0] and found["lines"] == NUM_ROWS and found["most_lines_of_a_row"] == 1
    assert found["ended_early"] and found["partials"] > 0
