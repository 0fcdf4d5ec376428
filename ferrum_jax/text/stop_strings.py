"""StopStrings: the stop strings of a request as one automaton, which reads each character of a text once.

A state is the longest end of the text that begins a stop string. How many strings there are does not change what a
character costs: each is followed to the next state, or back along failures as far as earlier ones went forward.
Source: Aho and Corasick 1975, Efficient string matching.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence

_MOST_KEPT = 32  # automata; the choices of a request, and the rows of a job, have the same one


class StopStrings:
    """ends[state]: the longest stop string that is complete there, if any. held[state]: how many of the text's last
    characters may be the beginning of a stop string that is not complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.ends: list[str | None] = [None]
        self._next: list[dict[str, int]] = [{}]
        depths = [0]
        for stop in stops:
            state = 0
            for depth, character in enumerate(stop, 1):
                found = self._next[state].get(character)
                if found is None:
                    found = self._next[state][character] = len(self._next)
                    self._next.append({})
                    self.ends.append(None)
                    depths.append(depth)
                state = found
            self.ends[state] = stop
        self.held = [depth if further else 0 for depth, further in zip(depths, self._next, strict=True)]
        self._failure = [0] * len(self._next)
        self._link()

    def _link(self) -> None:
        """Gives each state its failure, the longest shorter end of its text that is a state, the shortest texts first.

        What is complete there is complete here too; what ends a longest stop string may yet begin another one there.
        """
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            failure = self._failure[state]
            if self.ends[state] is None:
                self.ends[state] = self.ends[failure]
            if not self._next[state]:
                self.held[state] = self.held[failure]
            for character, further in self._next[state].items():
                self._failure[further] = self.step(failure, character)
                queue.append(further)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (found := self._next[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._failure[state]
        return found


@functools.lru_cache(maxsize=_MOST_KEPT)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """The automaton of these, one for all who have the same."""
    return StopStrings(stops)
