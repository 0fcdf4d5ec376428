"""StepsInFlight: the rule of every loop around a scheduler: dispatch the next step, then commit the one before it."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

Step = TypeVar("Step")


class StepsInFlight(deque[Step]):
    """Steps that were dispatched and not yet committed, the oldest first; what a step is, its loop decides."""

    def advance(self, dispatched: Step | None) -> Step | None:
        """Takes the step that was dispatched just now, if there was one to plan; the one that must be committed now.

        That is the step before it, so the device has work while the host looks at results; None where there is none.
        """
        due = self.popleft() if self else None
        if dispatched is not None:
            self.append(dispatched)
        return due
