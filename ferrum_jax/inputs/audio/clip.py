"""A processed clip: the features that an encoder reads, and how many tokens of a prompt stand for it.

For transcription `windows` cuts a long sound into clips.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np


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
