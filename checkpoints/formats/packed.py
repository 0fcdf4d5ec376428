"""PackedWeight: a weight with a form as a checkpoint has it, whose leaves are read when and where they are wanted.

It stands in the place of a tensor: rules slice its outputs and exchange its axes as an array's, for nothing. `leaf`
gives a `Leaf`, which is sliced in the same way and read when NumPy asks for it, checked and in the form's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from checkpoints.stored_weight import WeightForm

Ranges = tuple[range, ...]


class Leaf:
    """An array that is read in parts. read: gives the elements of ranges of its axes. ranges: of this part."""

    def __init__(self, read: Callable[[Ranges], np.ndarray], shape: tuple[int, ...], dtype: Any) -> None:
        self._read, self.ranges, self.dtype = read, tuple(map(range, shape)), np.dtype(dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.ranges))

    def __getitem__(self, index: Any) -> Leaf:
        """Slices of the axes, nothing read yet."""
        index = index if isinstance(index, tuple) else (index,)
        part = Leaf(self._read, (), self.dtype)
        part.ranges = tuple(r[s] for r, s in zip(self.ranges, index, strict=False)) + self.ranges[len(index) :]
        return part

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self._read(self.ranges)
        assert found.shape == self.shape and found.dtype == self.dtype, f"read {found.shape} {found.dtype}"
        return found if dtype is None else found.astype(dtype)


def slices(ranges: Ranges) -> tuple[slice, ...]:
    """The ranges as an index of an array; they go upwards."""
    return tuple(slice(r.start, r.stop, r.step) for r in ranges)


def stored_leaf(stored: Any, shape: tuple[int, ...] | None = None) -> Leaf:
    """A leaf that is a tensor as it is stored, or reshaped to `shape`; a slice of it is a view."""

    def read(ranges: Ranges) -> np.ndarray:
        array = stored if shape is None else np.asarray(stored).reshape(shape)
        return np.asarray(array[slices(ranges)])

    return Leaf(read, stored.shape if shape is None else shape, stored.dtype)


class PackedWeight:
    """[.., out, in], or [.., in, out] where outputs_last. name: of the tensor that it stands for, for messages."""

    dtype = np.dtype(np.float32)

    def __init__(self, name: str, form: WeightForm, leaves: Mapping[str, Leaf], *, outputs_last: bool = False) -> None:
        self.name, self.form = name, form
        self._leaves, self._outputs_last = dict(leaves), outputs_last

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, num_out, width = self._leaves["codes"].shape
        num_in = width * (2 if self._leaves["codes"].dtype == np.uint8 else 1)
        return (*lead, num_in, num_out) if self._outputs_last else (*lead, num_out, num_in)

    def swapaxes(self, first: int, second: int) -> PackedWeight:
        """The last two axes exchanged, the only ones that may be."""
        assert {first, second} == {-1, -2}, f"axes are {first} and {second}; they must be the last two"
        return PackedWeight(self.name, self.form, self._leaves, outputs_last=not self._outputs_last)

    def __getitem__(self, index: tuple[slice, ...]) -> PackedWeight:
        """Slices of the leading axes and of the outputs."""
        ndim = len(self.shape)
        full = (*index, *(slice(None),) * (ndim - len(index)))
        outputs, inputs = (full[-1], full[-2]) if self._outputs_last else (full[-2], full[-1])
        num_in = self.shape[-2 if self._outputs_last else -1]
        if range(num_in)[inputs] != range(num_in):
            raise ValueError(f"{self.name} is cut along its inputs, which share scales; its outputs alone can be cut")
        lead = full[: ndim - 2]
        leaves = {
            leaf: array[(*lead, outputs)] if leaf in ("codes", "scales", "zeros") else array[lead]
            for leaf, array in self._leaves.items()
        }
        return PackedWeight(self.name, self.form, leaves, outputs_last=self._outputs_last)

    @property
    def leaf_shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """{leaf: (shape, dtype)}."""
        return {leaf: (array.shape, array.dtype) for leaf, array in self._leaves.items()}

    def leaf(self, name: str) -> Leaf:
        """One of the form's arrays, [.., out, ..]."""
        return self._leaves[name]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        decoded = decode({leaf: np.asarray(array) for leaf, array in self._leaves.items()}, self.form)
        found = decoded.swapaxes(-1, -2) if self._outputs_last else decoded
        return found if dtype is None else found.astype(dtype)


_E2M1 = np.array((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0), np.float32)


def decode(leaves: Mapping[str, np.ndarray], form: WeightForm) -> np.ndarray:
    """[.., out, in] float32: what leaves stand for, inputs in the order of x."""
    codes, scales = leaves["codes"], leaves["scales"]
    if codes.dtype == np.uint8:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], -1)
    values = _E2M1[codes] if form.kind == "mxfp4" else codes.astype(np.float32)
    if scales.dtype == np.uint8:  # E8M0
        scales = np.where(scales == 255, np.float32(np.nan), np.ldexp(np.float32(1), scales.astype(np.int32) - 127))
    if form.kind == "int4" or form.has_zeros:
        values = values - (_spread(leaves["zeros"].astype(np.float32), values) if form.has_zeros else np.float32(8))
    with np.errstate(over="ignore"):
        found = values * _spread(scales.astype(np.float32), values)
    if "order" in leaves:
        order = np.broadcast_to(leaves["order"][..., None, :], found.shape)
        placed = np.empty_like(found)
        np.put_along_axis(placed, order, found, axis=-1)
        return placed
    return found


def _spread(of_groups: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.repeat(of_groups, values.shape[-1] // of_groups.shape[-1], axis=-1)
