"""A clerk over a fake engine that kills its own process at a place that its command names.

python -m tests.serve.clerk_program FOLDER PLACE NOW      PLACE: a word of PLACES, or "none"
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from ferrum_jax.openai.asked import BodyLimits
from ferrum_jax.serve.batches.batch_folder import BatchFolder
from ferrum_jax.serve.batches.clerk import Clerk, ClerkTimes
from ferrum_jax.serve.batches.input_lines import InputRules
from ferrum_jax.serve.batches.stored import BatchState
from tests.batch.fake_llm import FakeLLM

# before the first state; when a state is written; at a step of the engine; before and after the files of an end
PLACES = ("validating", "in_progress", "rows", "finalizing", "first file", "files", "end", "final")


class _Killing(BatchFolder):
    """Dies at its place."""

    def __init__(self, root: str, place: str) -> None:
        super().__init__(root, most_stored_bytes=1 << 30)
        self._place, self._num_files = place, 0

    def reach(self, place: str) -> None:
        if place == self._place:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    def keep_state(self, batch_id: str, state: BatchState) -> None:
        if state.is_final:
            self.reach("end")
        elif state.status == "in_progress" and not state.num_ok:
            self.reach("validating")
        super().keep_state(batch_id, state)
        self.reach("final" if state.is_final else state.status)

    def add_file(self, *args, **more):
        found = super().add_file(*args, **more)
        self._num_files += 1
        self.reach("first file" if self._num_files == 1 else "files")
        return found


def rules_of(endpoint: str) -> InputRules:
    limits = BodyLimits()
    names, most = ("small",), 1 << 20
    return InputRules(endpoint=endpoint, names=names, listed=names, max_rows=1000, max_line_bytes=most, limits=limits)


def work(root: str, place: str, now: float) -> None:
    """Until every batch has ended and no job of them is left."""
    folder = _Killing(root, place)

    def step(llm: FakeLLM) -> None:
        time.sleep(0.005)
        if llm.num_steps >= 12 and any(Path(root, "jobs").rglob("segments/[!.]*")):  # some rows' answers are durable
            folder.reach("rows")

    times = ClerkTimes(poll_s=0.02, flush_s=0.02, pause_s=0.05, now=lambda: now)
    clerk = Clerk(folder, lambda owner: FakeLLM(on_step=step), rules_of, times)
    thread = threading.Thread(target=clerk.run)
    thread.start()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        is_left = any(name != "README" for name in folder.store.names("jobs"))
        if not is_left and all(folder.state(batch.id).is_final for batch in folder.batches()):
            break
        time.sleep(0.02)
    clerk.end()
    thread.join()


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], float(sys.argv[3]))
