"""A processed clip: the features that an encoder reads, and how many tokens of a prompt stand for it.

For transcription `windows` cuts a long sound into clips.
"""

import dataclasses
import math

import numpy as np

from ferrum_jax.io.ints import ceil_div

_LISTENED_S = 0.1  # a cut is in the middle of the quietest stretch of so long
_STEP_S = 0.02
_MOST_S, _SHARE = 2.0, 16  # how far a cut is moved at most, and what part of a window that is at most


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ProcessedClip:
    """One clip as a model's encoder takes it.

    features: float32 [windows * frames, mels], those of one window after another.
    grid: (windows, frames, 1). Voxtral: windows of 30 s; others: one.
    num_frames: of the sound itself, without those that fill the last window.
    num_tokens: placeholder tokens of a prompt that stand for it, or of Whisper the states that its decoder reads.
    seconds: of the sound itself.
    digest: blake2b of the waveform and the processor's settings: equal clips have equal digests.
    """

    features: np.ndarray
    grid: tuple[int, int, int]
    num_frames: int
    num_tokens: int
    seconds: float
    digest: bytes

    def __post_init__(self) -> None:
        assert self.features.dtype == np.float32, f"features are float32, not {self.features.dtype}"
        assert self.features.ndim == 2, "features are [frames, mels]"
        assert len(self.features) == math.prod(self.grid), f"{len(self.features)} frames do not fill {self.grid}"
        assert 0 < self.num_frames <= len(self.features), f"{self.num_frames} of {len(self.features)} frames have sound"

    @property
    def kind(self) -> str:
        return "audio"

    @property
    def patches(self) -> np.ndarray:
        """float32 [windows * frames, mels], as an image's are [patches, values]."""
        return self.features


def windows(waveform: np.ndarray, rate: int, seconds: float) -> list[tuple[float, np.ndarray]]:
    """The windows of a waveform, none longer than `seconds`: where each starts, in seconds, and its samples.

    They follow one another without a gap; the last has what remains.
    """
    count = int(seconds * rate)
    if count < 1:
        raise ValueError(f"a window of {seconds} s has no sample at {rate} a second; make it longer")
    return [(start / rate, waveform[start : start + count]) for start in range(0, len(waveform), count)]


def quiet_windows(waveform: np.ndarray, rate: int, most: int) -> list[np.ndarray]:
    """The windows of a waveform [samples], none longer than `most` samples, one after the other without a gap."""
    count, reach = num_quiet_windows(len(waveform), rate, most), _reach(rate, most)
    middles = [len(waveform) * number // count for number in range(1, count)]
    return np.split(waveform, [middle + _quietest(waveform, rate, middle, reach) for middle in middles])


def num_quiet_windows(num_samples: int, rate: int, most: int) -> int:
    """How many windows `quiet_windows` makes of so many samples."""
    return 1 if num_samples <= most else ceil_div(num_samples, most - 2 * _reach(rate, most))


def _reach(rate: int, most: int) -> int:
    """How far a cut is moved at most, in samples."""
    return min(int(_MOST_S * rate), most // _SHARE)


def _quietest(waveform: np.ndarray, rate: int, middle: int, reach: int) -> int:
    """How far from the middle it is quietest, in samples; the first of equals."""
    half, step = int(_LISTENED_S * rate) // 2, max(1, int(_STEP_S * rate))
    near = np.asarray(waveform[max(0, middle - reach - half) : middle + reach + half], np.float64)
    before = min(middle, reach + half)
    power = np.concatenate([[0.0], np.cumsum(near**2)])
    places = np.arange(max(-reach, half - before), min(reach, len(near) - before - half) + 1, step)
    if not len(places):
        return 0
    return int(places[np.argmin(power[before + places + half] - power[before + places - half])])
