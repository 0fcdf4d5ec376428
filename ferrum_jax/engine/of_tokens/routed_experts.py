"""RoutedExperts: the experts that the tokens of a sequence went to, as steps give them."""

import numpy as np


class RoutedExperts:
    """The experts of tokens 0, 1, ... of a sequence, as far as they were computed or came with a hit.

    num_layers: the layers with experts.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._parts: list[tuple[int, np.ndarray]] = []  # position of the first token, experts of some

    def put(self, position: int, found: np.ndarray) -> None:
        """Keeps [n, num_layers * X] of the tokens from `position` on, in place of what was there before them.

        A preempted sequence begins anew, and a grammar may put other tokens where some were drawn.
        """
        self._parts.append((position, found.copy()))  # the rest of its step is not kept with it

    def of_first(self, count: int) -> np.ndarray | None:
        """[count, num_layers, X] of the first tokens; None where some of them are not there."""
        if not self._parts:
            return None
        width, dtype = self._parts[0][1].shape[1], self._parts[0][1].dtype
        found, is_there = np.zeros((count, width), dtype), np.zeros(count, bool)
        for start, part in self._parts:
            some = part[: max(0, count - start)]
            found[start : start + len(some)] = some
            is_there[start : start + len(some)] = True
        return found.reshape(count, self._num_layers, -1) if is_there.all() else None
