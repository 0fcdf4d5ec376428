"""One check of argument shapes whose call reads as the documentation."""

from __future__ import annotations

import jax


def check_shapes(*arrays: tuple[str, jax.Array], **sizes: int) -> dict[str, int]:
    """The size of each named axis: check_shapes(("T N H", q), ("T K H", k), T=64) gives {"T": 64, "N": ...}.

    Raises ValueError where an array has another rank or two sizes of one axis differ.
    """
    known = dict(sizes)
    for axes, array in arrays:
        names = axes.split()
        if len(names) != array.ndim:
            raise ValueError(f"an array of shape {array.shape} was given for [{axes}]")
        for name, size in zip(names, array.shape, strict=True):
            if known.setdefault(name, size) != size:
                raise ValueError(f"axis {name} of an array of shape {array.shape}, [{axes}], must be {known[name]}")
    return known
