"""How close a result must be to its float64 oracle, by the dtype it was computed in. Never widened silently."""

import dataclasses
from collections.abc import Mapping

import numpy as np

TOLERANCE = {
    "float32": {"rtol": 1e-5, "atol": 1e-5},
    "bfloat16": {"rtol": 2e-2, "atol": 2e-2},
}


def tolerance_of(dtype: str, platform: str) -> Mapping[str, float]:
    """The tolerance of a dtype on a platform: off the CPU float32 is multiplied as bfloat16 or TF32 by default."""
    return TOLERANCE[dtype if platform == "cpu" else "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """How far a result is from what it should be. error: the largest, as a share of what is allowed there.

    problem: None where all are within it, else in a clause where it is largest.
    """

    error: float
    problem: str | None


def difference(
    found: np.ndarray, expected: np.ndarray, tolerance: Mapping[str, float], axes: tuple[str, ...] = ()
) -> Difference:
    """How two arrays of one shape differ, as np.testing.assert_allclose compares them. axes: names for the clause."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if not found.size:
        return Difference(error=0.0, problem=None)
    allowed = tolerance["atol"] + tolerance["rtol"] * np.abs(expected)
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    apart = np.where(np.isnan(found), np.inf, np.abs(found - expected))
    shares = np.where(same, 0.0, apart / np.maximum(allowed, np.finfo(np.float64).tiny))
    place = np.unravel_index(int(np.argmax(shares)), shares.shape)
    error = float(shares[place])
    if error <= 1:
        return Difference(error=error, problem=None)
    where = ", ".join(f"{name} {at}" for name, at in zip(axes, place, strict=False)) or f"{tuple(map(int, place))}"
    what = f"{found[place]:.4g} where {expected[place]:.4g} is right (at {where}; {allowed[place]:.2g} is allowed)"
    return Difference(error=error, problem=what)
