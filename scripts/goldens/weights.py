"""Weights of goldens by formula: a recipe says of each tensor what it is drawn from, and everyone draws the same bits.

    python -m scripts.goldens.weights NAME...      makes these goldens where they are missing; prints their folders

A recipe FILE.json stands in a golden's folder in place of the safetensors file FILE. It has a seed, and for each tensor
its dtype, its shape and one of the laws in `LAWS`. A number in braces is each of these: layers.{0,1}.norm.weight.

Bits are those of Philox, keyed by the seed and the tensor's name. Sums of integers, one product and one sum in float32
make numbers of them, which IEEE 754 rounds the same way everywhere. Neither torch nor jax is needed.
"""

import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).parent.parent.parent
CACHE = ROOT / ".pytest_cache" / "goldens"
ENDING = ".safetensors.json"
_STORED = {
    "float32": (np.dtype(np.float32), "F32"),
    "float16": (np.dtype(np.float16), "F16"),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), "BF16"),
    "float8_e4m3fn": (np.dtype(ml_dtypes.float8_e4m3fn), "F8_E4M3"),
    "uint8": (np.dtype(np.uint8), "U8"),
    "int8": (np.dtype(np.int8), "I8"),
    "int32": (np.dtype(np.int32), "I32"),
    "int64": (np.dtype(np.int64), "I64"),
}
_DEVIATION = 37837.2  # of the sum of four numbers of 16 bits


class Draw:
    """Random bits of one tensor, and the laws that make its values of them."""

    def __init__(self, seed: int, name: str, size: int) -> None:
        self.key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16], "little")
        self.size = size

    def bits(self, times: int = 1) -> np.ndarray:
        """uint64 [size * times]"""
        return np.random.Philox(key=self.key).random_raw(self.size * times)

    def normal(self, mean: float, deviation: float) -> np.ndarray:
        """Nearly: at most 3.46 deviations away."""
        total = self.bits().view(np.uint16).reshape(-1, 4).sum(axis=1, dtype=np.int32) - np.int32(131070)
        return total.astype(np.float32) * np.float32(deviation / _DEVIATION) + np.float32(mean)

    def uniform(self, low: float, high: float) -> np.ndarray:
        part = (self.bits() >> np.uint64(40)).astype(np.float32)
        return np.float32(low) + part * np.float32((high - low) / 2**24)

    def integers(self, low: int, high: int, times: int = 1) -> np.ndarray:
        """Both ends belong to it."""
        part = (self.bits(times) >> np.uint64(32)) * np.uint64(high - low + 1) >> np.uint64(32)
        return part.astype(np.int64) + low

    def words(self, width: int, low: int, high: int) -> np.ndarray:
        """Words of 32 bits, each of codes of `width` bits."""
        count = 32 // width
        codes = self.integers(low, high, count).astype(np.uint32).reshape(-1, count)
        return np.bitwise_or.reduce(codes << (np.arange(count, dtype=np.uint32) * np.uint32(width)), axis=1).view(
            np.int32
        )

    def groups(self, size: int) -> np.ndarray:
        """The numbers of groups of `size` in an order drawn at random."""
        return (np.arange(self.size) // size)[np.argsort(self.bits(), kind="stable")]

    def values(self, *values: int | float) -> np.ndarray:
        """These, or one in all places."""
        return np.broadcast_to(np.asarray(values), self.size) if len(values) == 1 else np.asarray(values)


LAWS = ("normal", "uniform", "integers", "words", "groups", "values")


def draw(seed: int, name: str, said: dict[str, Any]) -> np.ndarray:
    """One tensor. said: its dtype, shape and law, and its seed, name and dtype in another golden that has it too."""
    (law,) = (key for key in said if key in LAWS)
    shape = tuple(said["shape"])
    source = Draw(said.get("seed", seed), said.get("name", name), int(np.prod(shape)))
    values = getattr(source, law)(*said[law])
    for dtype in (said.get("through", said["dtype"]), said["dtype"]):
        values = values.astype(_STORED[dtype][0])
    return values.reshape(shape)


def names_of(pattern: str) -> Iterator[str]:
    """The names that a pattern stands for."""
    parts = re.split(r"\{([\d,]+)\}", pattern)
    return map("".join, itertools.product(*(part.split(",") if i % 2 else [part] for i, part in enumerate(parts))))


def recipe_of(path: Path) -> dict[str, dict[str, Any]]:
    """What a recipe says of each tensor."""
    tensors = json.loads(path.read_text())["tensors"]
    return {name: said for pattern, said in tensors.items() for name in names_of(pattern)}


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a recipe."""
    seed = json.loads(path.read_text())["seed"]
    return {name: draw(seed, name, said) for name, said in recipe_of(path).items()}


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    kinds, end = dict(_STORED.values()), 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": kinds[tensor.dtype], "shape": tensor.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def make(golden: Path, folder: Path) -> None:
    """Writes a checkpoint's folder: the golden's files, and tensors in place of recipes."""
    shutil.copytree(golden, folder, ignore=shutil.ignore_patterns(f"*{ENDING}"), dirs_exist_ok=True)
    for recipe in golden.rglob(f"*{ENDING}"):
        write_tensors(folder / recipe.relative_to(golden).with_suffix(""), tensors_of(recipe))


def made(golden: Path) -> Path:
    """The folder of a golden with its weights, which are made at first use and anew after a change."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(path for path in golden.rglob("*") if path.is_file()):
        digest.update(f"\0{path.relative_to(golden)}\0".encode() + path.read_bytes())
    folder = CACHE / digest.hexdigest()[:16] / golden.name
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as begun:
            make(golden, Path(begun) / "whole" / golden.name)
            try:
                os.rename(Path(begun) / "whole", folder.parent)
            except OSError:  # another process was faster
                if not folder.exists():
                    raise
    return folder


class Goldens(type(pathlib.Path())):
    """The folder of goldens: the path to one leads to where it has been made, with weights."""

    def __truediv__(self, name: Any) -> Path:
        path = Path(super().__truediv__(name))
        if has_recipe(path):
            return made(path)
        return Goldens(path) if path.is_dir() else path


def has_recipe(path: Path) -> bool:
    return any(path.glob(f"*{ENDING}"))


if __name__ == "__main__":
    for golden in sys.argv[1:]:
        print(made(ROOT / "tests" / "goldens" / golden))
