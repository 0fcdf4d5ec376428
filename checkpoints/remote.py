"""Checkpoints behind a URL (gs://, s3://, memory://, ..): fsspec reads ranges of the weights' files where they lie.

The small files are copied to a temporary folder, which the RemoteFolder owns; a checkpoint of ours is copied there
whole, for Orbax reads local files. A `RemoteArray` stands for a tensor: it fetches what is read from it, rows of its
first axis as one range, and keeps nothing.
"""

import math
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.file_names import name_inside
from ferrum_jax.io.files.store import UrlStore

WEIGHTS = ".safetensors"  # files that are read in ranges


class RemoteFolder:
    """A folder behind a URL. path: the local folder with copies of all its files but the safetensors.

    Raises ValueError, with what to install or to change, for a URL that cannot be opened or holds nothing, and, before
    anything is written, for an object whose name leads out of the folder.
    """

    def __init__(self, url: str) -> None:
        self.url, self._store = url, UrlStore.of(url)
        try:
            sizes = self._store.sizes()
        except OSError as error:
            raise ValueError(f"{error}; name a folder that can be read") from error
        if not sizes:
            raise ValueError(f"{url} holds no files; name the folder of a checkpoint")
        self.sizes = {name_inside(name, url): size for name, size in sizes.items()}
        self.path = Path(tempfile.mkdtemp(prefix="ferrum_jax-"))
        weakref.finalize(self, shutil.rmtree, self.path)
        for name in self.sizes:
            if not name.endswith(WEIGHTS):
                self._store.copy_to(name, self.path / name)

    def read(self, name: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of a file. Raises ValueError when there are fewer."""
        data = self._store.read(name, start, end - start) or b""
        if len(data) != end - start:
            raise ValueError(f"{self.url}/{name} is truncated: {len(data)} of {end - start} bytes; copy it again")
        return data

    def reader(self, name: str) -> Callable[[int, int], bytes]:
        return lambda start, end: self.read(name, start, end)


class RemoteArray:
    """A tensor in a remote file; an array when NumPy asks for one, or for rows of its first axis."""

    def __init__(self, read: Callable[[int, int], bytes], start: int, dtype: Any, shape: tuple[int, ...]) -> None:
        self._read = read
        self._start = start
        self.dtype = np.dtype(dtype)
        self.shape = tuple(shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.elements(0, self.size).reshape(self.shape)
        return array if dtype is None else array.astype(dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Indexes like an array; a slice of the first axis reads only those rows."""
        index = index if isinstance(index, tuple) else (index,)
        if not self.shape or not index or not isinstance(index[0], slice):
            return np.asarray(self)[index]
        start, stop, step = index[0].indices(self.shape[0])
        first, last = (start, max(stop, start)) if step > 0 else (0, self.shape[0])
        width = math.prod(self.shape[1:])
        rows = self.elements(first * width, last * width).reshape(last - first, *self.shape[1:])
        return rows[(slice(None, None, step) if step > 0 else index[0], *index[1:])]

    def swapaxes(self, one: int, other: int) -> np.ndarray:
        return np.asarray(self).swapaxes(one, other)

    def elements(self, start: int, stop: int) -> np.ndarray:
        """Elements [start, stop) in the order of the file."""
        begin = self._start + start * self.dtype.itemsize
        data = self._read(begin, begin + (stop - start) * self.dtype.itemsize) if stop > start else b""
        return np.frombuffer(data, self.dtype)

    def take(self, flat: np.ndarray) -> np.ndarray:
        """The elements at increasing indices `flat`, read as one range for each run of neighbours."""
        runs = np.split(flat, np.flatnonzero(np.diff(flat) != 1) + 1)
        return np.concatenate([self.elements(int(run[0]), int(run[-1]) + 1) for run in runs])
