"""The waveform of a file that libsndfile reads, block by block, so that no header decides how much memory is taken; or
how long its header says that it is."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from ferrum_jax.inputs.audio.waveform import Look, SaidLength, SoundBounds, SoundRefused, Waveform, do_not_look, library

_BLOCK = 1 << 18  # samples of all channels that are decoded at once
_UNKNOWN = 1 << 62  # samples of a header that does not say how many there are


def waveform_of_file(content: bytes, rate: int, bounds: SoundBounds, look: Look = do_not_look) -> np.ndarray:
    """float32 [samples] at `rate`. Raises ValueError for a file that cannot be read whole, and for one too large."""
    with _opened(content, bounds) as (file, said):
        waveform = Waveform(file.samplerate, wanted=rate, bounds=bounds, look=look)
        block = np.empty((_BLOCK // file.channels, file.channels), np.float32)
        while len(samples := file.read(out=block)):
            waveform.add(samples)
    if file.format in ("FLAC", "OGG") and waveform.num_samples < said:
        raise SoundRefused(
            f"the sound is damaged: its header has {said:,} samples, and {waveform.num_samples:,} can be decoded"
        )
    return waveform.finished()


def said_of_file(content: bytes, bounds: SoundBounds) -> SaidLength | None:
    """None for a header that does not say it. Raises ValueError for what the header shows to be none or too large."""
    with _opened(content, bounds) as (file, said):
        return SaidLength(said, file.samplerate) if said else None


@contextlib.contextmanager
def _opened(content: bytes, bounds: SoundBounds) -> Iterator[tuple[Any, int]]:
    """A file whose header keeps the bounds, and the samples that it says, 0 where it does not."""
    library("soundfile")
    try:
        with _reader()(_Bytes(content)) as file:
            said = file.frames if 0 <= file.frames < _UNKNOWN else 0
            bounds.check(file.samplerate, file.channels, said)
            yield file, said
    except library("soundfile").LibsndfileError as error:
        raise SoundRefused(f"the sound is damaged and cannot be decoded: {error.error_string}") from error


class _Bytes(io.BytesIO):
    """A file in memory. libsndfile is told that a place before its beginning cannot be sought, as of a real file."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        start = (0, self.tell(), len(self.getbuffer()))[whence]
        return super().seek(start + offset) if start + offset >= 0 else -1


@functools.cache
def _reader() -> type[Any]:
    """libsndfile's file, read from its beginning to its end.

    One that can be sought in is sought in after each block, which fails for a FLAC that does not say how long it is.
    """

    class Forward(library("soundfile").SoundFile):
        def seekable(self) -> bool:
            return False

    return Forward
