"""How close a result must be to its float64 oracle, by the dtype it was computed in. Never widened silently."""

TOLERANCE = {
    "float32": {"rtol": 1e-5, "atol": 1e-5},
    "bfloat16": {"rtol": 2e-2, "atol": 2e-2},
}
