"""A waveform: float32 [samples], mono, at the rate that a processor wants, and the bounds that a sound keeps to it.

    waveform = Waveform(44100, wanted=16000, bounds=SoundBounds())
    waveform.add(samples)                      float32 [n, channels], as they are decoded
    waveform.finished()                        float32 [samples at 16 kHz]

Channels are averaged and then resampled piece by piece, to the bits that one call over the whole gives: no sound stands
in memory at its own rate. Bounds are checked twice, of what a header says and of what comes, since a header may lie.
"""

import dataclasses
import functools
import importlib
import math
from types import ModuleType
from typing import NamedTuple

import numpy as np

from ferrum_jax.inputs.media.kinds import Look, do_not_look
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.io.paths import install_command

_PAIRWISE = 8  # values from which NumPy adds in another order
_LOUDEST = 2.0**31  # of a sample; whole numbers written as floats are no more


class SoundRefused(ValueError):
    """An error about a sound whose file may be whole, in words that stand alone."""


class SaidLength(NamedTuple):
    """How long a file's header says that its sound is. num_samples: of each channel, `rate` of them a second."""

    num_samples: int
    rate: int

    def samples_at(self, rate: int) -> int:
        """Samples of its waveform at another rate."""
        return ceil_div(self.num_samples * rate, self.rate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoundBounds:
    """How large a sound may be.

    max_bytes: of a file. max_seconds: of its length. max_samples: of all channels together, which is what decoding
    costs. decode_seconds: in which a container is decoded, in a process of its own.
    """

    max_bytes: int = 128 << 20
    max_seconds: float = 3600.0
    max_samples: int = 1 << 29
    max_channels: int = 16
    min_rate: int = 2000
    max_rate: int = 384_000
    decode_seconds: float = 120.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"{field.name} is {value!r}; it must be a number over 0")

    def check_bytes(self, count: int) -> None:
        """Raises ValueError for an empty file, and for one that is too large."""
        if not count:
            raise SoundRefused("the sound is empty: it has no bytes")
        if count > self.max_bytes:
            raise SoundRefused(f"the sound is {count:,} bytes; at most {self.max_bytes:,} are taken: make it shorter")

    def check(self, rate: int, channels: int, samples: int = 0) -> None:
        """Raises ValueError for a sound that is too large. samples: of each channel."""
        if not self.min_rate <= rate <= self.max_rate:
            raise SoundRefused(
                f"the sound has {rate:,} samples a second; it must have {self.min_rate:,} to {self.max_rate:,}"
            )
        if not 1 <= channels <= self.max_channels:
            raise SoundRefused(f"the sound has {channels} channels; it must have 1 to {self.max_channels}")
        if samples > self.max_seconds * rate:
            raise SoundRefused(
                f"the sound is {samples / rate:,.1f} s long or more; at most {self.max_seconds:g} s are taken: cut it"
            )
        if samples * channels > self.max_samples:
            raise SoundRefused(
                f"the sound has {samples * channels:,} samples or more; at most {self.max_samples:,} are taken: cut it"
            )


@functools.cache
def library(name: str) -> ModuleType:
    """A library of the extra `audio`. Raises ValueError naming the extra if it is not installed."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # a library of C that its package has not found
        raise ValueError(f"sounds need {name}; {install_command('audio')}") from error


class Waveform:
    """Samples as they are decoded, made mono and resampled to `wanted` samples a second.

    Raises ValueError, from each call, for a sound that is too large or that no number describes.
    """

    def __init__(self, rate: int, *, wanted: int, bounds: SoundBounds, look: Look = do_not_look) -> None:
        bounds.check(rate, channels=1)
        self._rate, self._wanted, self._bounds, self._look = rate, wanted, bounds, look
        self._pieces: list[np.ndarray] = []
        self._resampler = None
        if rate != wanted:
            how = {"num_channels": 1, "dtype": "float32", "quality": "soxr_hq"}  # as librosa's and transformers'
            self._resampler = library("soxr").ResampleStream(rate, wanted, **how)
        self.num_samples = 0  # of each channel, at the sound's own rate

    def add(self, samples: np.ndarray) -> None:
        """samples: float32 [n, channels], the next of the sound."""
        self._look()
        self.num_samples += len(samples)
        self._bounds.check(self._rate, samples.shape[1], self.num_samples)
        loudest = np.abs(samples).max(initial=0)
        if not loudest <= _LOUDEST:  # nor where it is no number
            raise SoundRefused(f"the sound has a sample of {loudest:g}; samples are numbers, mostly between -1 and 1")
        self._pieces.append(self._resampled(_mono(samples), is_last=False))

    def finished(self) -> np.ndarray:
        """float32 [samples]: as many as the sound's length has at the wanted rate, rounded up."""
        if not self.num_samples:
            raise SoundRefused("the sound has no samples")
        self._pieces.append(self._resampled(np.empty(0, np.float32), is_last=True))
        count = SaidLength(self.num_samples, self._rate).samples_at(self._wanted)
        whole = np.concatenate(self._pieces)
        return whole[:count] if len(whole) >= count else np.pad(whole, (0, count - len(whole)))

    def _resampled(self, mono: np.ndarray, *, is_last: bool) -> np.ndarray:
        if self._resampler is None:
            return np.array(mono, np.float32)  # a copy: decoders fill one buffer again and again
        return self._resampler.resample_chunk(np.ascontiguousarray(mono), last=is_last)


def _mono(samples: np.ndarray) -> np.ndarray:
    """float32 [n]: the mean of float32 [n, channels], to the bits of NumPy's, which takes seven times as long."""
    if samples.shape[1] == 1:
        return samples[:, 0]
    if samples.shape[1] >= _PAIRWISE:
        return samples.T.mean(axis=0)
    total = samples[:, 0] + samples[:, 1]
    for channel in samples.T[2:]:
        total += channel
    return total / np.float32(samples.shape[1])
