"""The walk around a kernel's tiles: its own and the neighbours that it names, by whatever says how long they take.

On a chip `ferrum-jax check --tune` measures; without one `scripts/tune_static.py` counts cycles.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

Tiles = TypeVar("Tiles")
_WORTH = 0.03  # of the time: less is noise, and not worth that a machine runs other tiles than the next


def fastest(own: Tiles, neighbours: Sequence[Tiles], seconds_of: Callable[[Tiles], float | None]) -> Tiles:
    """The tiles that take least, if that is 3 % less than their own take; else their own.

    seconds_of: None for tiles that are wrong or refused; of its own too it is asked first.
    """
    times = [(seconds, tiles) for tiles in (own, *neighbours) if (seconds := seconds_of(tiles)) is not None]
    if not times:
        return own
    own_s = next((seconds for seconds, tiles in times if tiles is own), float("inf"))
    best_s, best = min(times, key=lambda pair: pair[0])
    return best if best_s < (1 - _WORTH) * own_s else own
