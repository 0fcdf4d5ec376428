"""StepSizes: of the compiled steps, whose padding is what FLEX rows take beside others.

A step has the size of the smallest compiled one that holds it. What it would be padded with costs little more when
tokens are there in its place; a token more than that would make it a larger step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class StepSizes(NamedTuple):
    """Tokens of the compiled steps, smallest first: of those with one token a row, and of those with any counts.

    None at all leave FLEX rows nothing beside others.
    """

    decode: Sequence[int] = ()
    mixed: Sequence[int] = ()

    def alone(self, num_rows: int) -> float:
        """Most tokens of a step that only FLEX rows have: who comes meanwhile waits for it, and for one behind it."""
        return min([size for size in self.mixed if size >= 2 * num_rows], default=math.inf)

    def spare(self, num_tokens: int, *, decodes: bool) -> int:
        """Tokens that a step of so many is padded with. decodes: no row computes more than one."""
        sizes = [*self.mixed, *(self.decode if decodes else ())]
        return min([size - num_tokens for size in sizes if size >= num_tokens], default=0)
