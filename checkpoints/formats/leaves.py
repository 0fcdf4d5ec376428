"""Leaves of a form from a format's tensors, checked as they are read: a scale that is none stops the load."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints.formats.packed import Leaf, Ranges, slices, stored_leaf
from checkpoints.formats.scheme import Module

_E8M0_NAN = 255


def scale_leaf(module: Module, stored: Any, name: str, shape: tuple[int, int], rows: int = 1) -> Leaf:
    """[out, groups] of a stored scale: one for all, for each output, each group, or each block of `rows` outputs.

    shape: of the weight. Raises ValueError where the scale has no such shape; reading it, where a scale is not finite,
    not above 0, or not what it was in the form's dtype.
    """
    groups = 1 if module.form.group is None else shape[1] // module.form.group
    wanted = (-(-shape[0] // rows), groups)
    size = int(np.prod(stored.shape, dtype=np.int64))
    is_one = size == 1 and module.form.group is None
    if not is_one and (size != wanted[0] * wanted[1] or not stored.shape or stored.shape[0] != wanted[0]):
        raise ValueError(
            f"{name} is {list(stored.shape)}; the scales of a weight {list(shape)} are {list(wanted)} here"
        )
    _refuse_kind(stored, name, jnp.floating, "a scale is a float")
    dtype = jnp.dtype(module.form.scale_dtype)

    def read(ranges: Ranges) -> np.ndarray:
        found = checked_scales(np.asarray(stored), name, dtype).reshape((1, 1) if size == 1 else wanted)
        where = np.arange(shape[0])[slices(ranges[:1])] // rows
        return found[where if size > 1 else np.zeros_like(where)][:, slices(ranges[1:])[0]]

    return Leaf(read, (shape[0], groups), dtype)


def checked_scales(stored: np.ndarray, name: str, dtype: np.dtype) -> np.ndarray:
    """The scales in a dtype that holds each of them. Raises ValueError for one that is not finite or not above 0."""
    numbers = stored.astype(np.float64)
    wrong = ~(np.isfinite(numbers) & (numbers > 0))
    if wrong.any():
        place = tuple(map(int, np.argwhere(wrong)[0]))
        raise ValueError(
            f"{name} is {numbers[place]} at {list(place)}; a scale must be finite and above 0: copy the "
            "checkpoint again"
        )
    with np.errstate(over="ignore"):
        found = stored.astype(dtype)
    if (found.astype(np.float64) != numbers).any():
        raise ValueError(f"{name} is {stored.dtype}, and its scales are not the same in {dtype}")
    return found


def checked_exponents(stored: np.ndarray, name: str) -> np.ndarray:
    """Scales of E8M0. Raises ValueError for NaN."""
    wrong = np.argwhere(stored == _E8M0_NAN)
    if len(wrong):
        raise ValueError(f"{name} is NaN at {wrong[0].tolist()}; a scale must be a number: copy the checkpoint again")
    return stored


def input_scale_leaf(module: Module, stored: Any, name: str) -> Leaf:
    """[1] float32 of a scale of activations that is known beforehand."""
    if int(np.prod(stored.shape, dtype=np.int64)) != 1:
        raise ValueError(f"{name} is {list(stored.shape)}; activations of {module.name} have one scale")
    _refuse_kind(stored, name, jnp.floating, "a scale is a float")

    def read(ranges: Ranges) -> np.ndarray:
        return checked_scales(np.asarray(stored).reshape(1), name, np.dtype(np.float32))[slices(ranges)]

    return Leaf(read, (1,), np.float32)


def nibble_leaf(codes: Callable[[range], np.ndarray], shape: tuple[int, int]) -> Leaf:
    """[out, in / 2] of what gives, for a range of outputs, their codes [outputs, in], one a byte."""

    def read(ranges: Ranges) -> np.ndarray:
        found = codes(ranges[0])
        return (found[:, 0::2] | found[:, 1::2] << 4)[:, slices(ranges[1:])[0]]

    return Leaf(read, (shape[0], shape[1] // 2), np.uint8)


def byte_leaf(codes: Callable[[range], np.ndarray], shape: tuple[int, int]) -> Leaf:
    """[out, in] int8 of what gives, for a range of outputs, their unsigned codes, which are 128 more."""

    def read(ranges: Ranges) -> np.ndarray:
        return (codes(ranges[0]) ^ 128).view(np.int8)[:, slices(ranges[1:])[0]]

    return Leaf(read, shape, np.int8)


def finite_leaf(leaf: Leaf, name: str) -> Leaf:
    """A leaf of float8 whose reading raises ValueError for a code that is NaN."""

    def read(ranges: Ranges) -> np.ndarray:
        found = np.asarray(leaf[slices(ranges)])
        wrong = np.argwhere((found.view(np.uint8) & 127) == 127)
        if len(wrong):
            place = [r[i] for r, i in zip(ranges, wrong[0].tolist(), strict=True)]
            raise ValueError(f"{name} is NaN at {place}; a weight must be a number: copy the checkpoint again")
        return found

    return Leaf(read, leaf.shape, leaf.dtype)


def whole_leaf(array: Callable[[], np.ndarray], shape: tuple[int, ...], dtype: Any) -> Leaf:
    """A small leaf that is made whole whenever some of it is read."""
    return Leaf(lambda ranges: array()[slices(ranges)], shape, dtype)


def order_of(g_idx: Any, name: str, num_inputs: int, group: int) -> np.ndarray:
    """[in] int32: inputs sorted by their group. Raises ValueError unless each group has `group` of them."""
    _refuse_kind(g_idx, name, jnp.integer, "groups are whole numbers")
    groups = np.asarray(g_idx)
    num_groups = num_inputs // group
    if groups.shape != (num_inputs,):
        raise ValueError(f"{name} is {list(groups.shape)}; it must name the group of each of {num_inputs} inputs")
    wrong = np.flatnonzero((groups < 0) | (groups >= num_groups))
    if len(wrong):
        raise ValueError(f"{name} is {groups[wrong[0]]} at {wrong[0]}; there are groups 0 to {num_groups - 1}")
    counts = np.bincount(groups, minlength=num_groups)
    if (counts != group).any():
        odd = int(np.flatnonzero(counts != group)[0])
        raise ValueError(f"{name} puts {counts[odd]} inputs into group {odd}; each group must have {group}")
    return np.argsort(groups, kind="stable").astype(np.int32)


def check_leaf(leaf: str, array: np.ndarray, name: str) -> None:
    """Raises ValueError where a leaf of a form holds what no weight has: `checked_scales`, a code that is NaN, an order
    that is no permutation."""
    if leaf in ("scales", "input_scale"):
        if array.dtype == np.uint8:
            checked_exponents(array, name)
        else:
            checked_scales(array, name, array.dtype)
    elif leaf == "order" and (np.sort(array, axis=-1) != np.arange(array.shape[-1])).any():
        raise ValueError(f"{name} is no order of inputs; it must have each of 0 to {array.shape[-1] - 1} once")
    elif array.dtype == float8():
        np.asarray(finite_leaf(stored_leaf(array), name))


def check_words(stored: Any, name: str) -> None:
    """Raises ValueError for codes that are not in words of 32 bits: read as bytes they would be other codes."""
    if stored.dtype != np.int32:
        raise ValueError(f"{name} is {stored.dtype}; codes are packed in int32: copy the checkpoint again")


def check_shape(module: Module, end: str, wanted: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raises ValueError unless a tensor of a module, by the end of its name, has the shape that its weight needs."""
    found, base = list(module.tensors[end].shape), module.name.removesuffix(".weight")
    if found != list(wanted):
        raise ValueError(f"{base}{end} is {found}; a weight of shape {list(shape)} needs {list(wanted)}")


def words_of(module: Module, end: str, axes: str) -> Any:
    """The int32 words of a weight's codes, [in, out] in words as `axes` says. Raises ValueError for what are none."""
    base, words = module.name.removesuffix(".weight"), module.tensors[end]
    if ".weight" in module.tensors:
        raise ValueError(f"{base} has .weight and {end}, a dense weight and a quantised one; keep one of them")
    if words.dtype != np.int32 or len(words.shape) != 2:
        raise ValueError(f"{base}{end} is {words.dtype} {list(words.shape)}; it must be int32 {axes}")
    return words


def _refuse_kind(stored: Any, name: str, kind: Any, what: str) -> None:
    """Raises ValueError for a tensor of another kind of dtype: its bits may mean something else."""
    if not jnp.issubdtype(stored.dtype, kind):
        raise ValueError(f"{name} is {stored.dtype}; {what}: copy the checkpoint again")


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:  # [.., n] int32 -> [.., n * 32 / bits] uint8
    """The codes of 4 or 8 bits that words hold, lowest first."""
    codes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return codes
    return np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], -1)


def float8() -> np.dtype:
    """The dtype of fp8 codes."""
    return np.dtype(jnp.float8_e4m3fn)
