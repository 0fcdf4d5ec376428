"""A launch whose ceiling is counted, and the work of its kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from scripts.gpu_static import Compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The work of one kernel that multiplies, over the whole chip.

    consumers: warpgroups that multiply, beside one that fetches. operations: multiplications and additions. lanes: of a
    token, that hold a head; the kernel fills them up to the rows of its products, or to the columns where tokens are
    rows. None: operations count what is filled up too. fetched_bytes: that come into shared memory, None where that is
    not known. hbm_bytes: that must come from or go to HBM at least once.
    """

    name: str
    consumers: int
    operations: float
    lanes: int | None = None
    fetched_bytes: float | None
    hbm_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """parts: the kernels that multiply; where two have as many consumers, in the order in which they are compiled.

    has_roles: arms of the main loop are each one consumer's, so that over all of them each runs once a stage.
    measured_us: on an H200, with all that XLA does around the kernels.
    """

    name: str
    compile: Callable[[], Compiled]
    parts: tuple[Part, ...]
    has_roles: bool = False
    measured_us: float | None = None
