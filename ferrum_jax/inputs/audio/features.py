"""From a waveform to an encoder's features, as a checkpoint's processor file says: one class for each kind of encoder.

    waveform float32 [samples]  ->  mel spectrogram  ->  logarithm, cut and scaled: float32 [frames, mels]

Each has `sampling_rate`, the rate that its waveform is at; `num_tokens(num_samples)`, known before any work; and
`process(waveform)`. Every key of the file is honoured or refused by name.
"""

import dataclasses
import functools
from typing import ClassVar

import numpy as np

from ferrum_jax.inputs.audio.clip import ProcessedClip
from ferrum_jax.inputs.audio.waveform import SoundRefused
from ferrum_jax.inputs.media.kinds import Look, do_not_look, media_digest
from ferrum_jax.io.ints import ceil_div

_BLOCK_FRAMES = 512
_LINEAR_MELS, _LINEAR_HERTZ = 15.0, 1000.0  # where Slaney's scale turns from linear to logarithmic
_LOG_STEP = np.log(6.4) / 27.0
_HIGHEST_HERTZ = 8000.0
_QUIETEST = 1e-10  # of a band's power
_RANGE = 8.0  # between the loudest band and what is heard, in powers of ten
_MIN_SAMPLES = 8000  # of Qwen's clips; shorter ones are filled with silence
_FULL_CHUNK_TOKENS = 13  # of Qwen's chunks
_GEMMA_MULTIPLE = 128  # samples
_GEMMA_MOST = 480_000  # samples


def mel_power(
    waveform: np.ndarray,
    filters: np.ndarray,
    *,
    frame: int,
    hop: int,
    n_fft: int,
    power: int = 2,
    dtype: type[np.floating] = np.float64,
    look: Look = do_not_look,
) -> np.ndarray:
    """float64 [frames, mels]: the magnitudes of each frame to this power, under each filter.

    Block by block, so that an hour of sound takes no more memory than a minute.
    waveform: float32 [samples]; what is no whole frame at its end is left out. filters: [n_fft // 2 + 1, mels].
    frame: samples under the window, which is Hann's of that many; zeros fill n_fft. dtype: of the transform.
    """
    views = np.lib.stride_tricks.sliding_window_view(waveform, frame)[::hop]
    window = hann(frame).astype(dtype)
    found = np.empty((len(views), filters.shape[1]))
    for start in range(0, len(views), _BLOCK_FRAMES):
        look()
        spectrum = np.fft.rfft(views[start : start + _BLOCK_FRAMES] * window, n=n_fft, axis=1)
        magnitudes = np.abs(spectrum) if power == 1 else spectrum.real**2 + spectrum.imag**2
        found[start : start + _BLOCK_FRAMES] = magnitudes @ filters
    return found


@functools.lru_cache(maxsize=8)
def hann(count: int) -> np.ndarray:
    """float64 [count]: a window that begins again after its last value."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(count) / count)


@functools.lru_cache(maxsize=8)
def slaney_filters(n_fft: int, mels: int, rate: int, highest: float) -> np.ndarray:
    """float64 [n_fft // 2 + 1, mels]: triangles of equal area, from 0 Hz to `highest`.

    Source: M. Slaney, Auditory Toolbox, 1998: the scale is linear below 1 kHz and logarithmic above.
    """
    top = _LINEAR_MELS * highest / _LINEAR_HERTZ
    if highest >= _LINEAR_HERTZ:
        top = _LINEAR_MELS + np.log(highest / _LINEAR_HERTZ) / _LOG_STEP
    scale = np.linspace(0.0, top, mels + 2)
    above = np.maximum(scale - _LINEAR_MELS, 0.0)
    edges = np.minimum(scale, _LINEAR_MELS) * _LINEAR_HERTZ / _LINEAR_MELS * np.exp(_LOG_STEP * above)
    return _triangles(edges, n_fft, rate) * (2.0 / (edges[2:] - edges[:-2]))


@functools.lru_cache(maxsize=8)
def htk_filters(n_fft: int, mels: int, rate: int, lowest: float, highest: float) -> np.ndarray:
    """float64 [n_fft // 2 + 1, mels]: triangles of equal height on the scale 2595 log10(1 + f / 700)."""
    bottom, top = (2595.0 * np.log10(1.0 + hertz / 700.0) for hertz in (lowest, highest))
    edges = 700.0 * (10.0 ** (np.linspace(bottom, top, mels + 2) / 2595.0) - 1.0)
    return _triangles(edges, n_fft, rate)


def _triangles(edges: np.ndarray, n_fft: int, rate: int) -> np.ndarray:
    """A filter for each edge but the outer ones: 1 at it, 0 at its neighbours, and straight between."""
    bins = np.linspace(0, rate // 2, n_fft // 2 + 1)[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return np.maximum(0.0, np.minimum(rising, falling))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhisperSounds:
    """Clips of up to one window for Whisper's encoder, filled with silence to its end.

    chunk_length: seconds of a window. feature_size: bands of frequency.
    """

    feature_size: int
    sampling_rate: int
    hop_length: int
    n_fft: int
    chunk_length: int

    kind: ClassVar[str] = "whisper"

    @property
    def window_samples(self) -> int:
        """Samples of one window."""
        return self.chunk_length * self.sampling_rate

    @property
    def window_frames(self) -> int:
        """Frames of one window."""
        return self.window_samples // self.hop_length

    def num_windows(self, num_samples: int) -> int:
        """Windows of a clip."""
        return 1

    def num_tokens(self, num_samples: int) -> int:
        """States of the encoder, which reads whole windows and halves their frames."""
        self.check(num_samples)
        return ceil_div(self.window_frames, 2)

    def check(self, num_samples: int) -> None:
        """Raises ValueError for a clip that is longer than a window, and for an empty one."""
        _check_length(num_samples, self.window_samples, self.sampling_rate)

    def process(self, waveform: np.ndarray, look: Look = do_not_look) -> ProcessedClip:
        """waveform: float32 [samples], at sampling_rate. Raises ValueError as `check` does."""
        self.check(len(waveform))
        count = self.num_windows(len(waveform))
        features = self.log_mel(_filled(waveform, count * self.window_samples), look)
        num_frames = min(len(features), max(1, len(waveform) // self.hop_length))
        return _clip(self, waveform, features, (count, self.window_frames, 1), num_frames)

    def log_mel(self, waveform: np.ndarray, look: Look = do_not_look) -> np.ndarray:
        """float32 [len(waveform) // hop_length, feature_size] of a waveform of any length, cut below its loudest band.

        A frame's middle is at its place in the waveform, which is mirrored at its ends.
        """
        self._check_mirrored(len(waveform))
        filters = slaney_filters(self.n_fft, self.feature_size, self.sampling_rate, _HIGHEST_HERTZ)
        mirrored = np.pad(waveform, self.n_fft // 2, mode="reflect")
        power = mel_power(mirrored, filters, frame=self.n_fft, hop=self.hop_length, n_fft=self.n_fft, look=look)
        found = np.log10(np.maximum(power[: len(waveform) // self.hop_length], _QUIETEST))
        np.maximum(found, found.max() - _RANGE, out=found)
        return ((found + 4.0) / 4.0).astype(np.float32)

    def _check_mirrored(self, num_samples: int) -> None:
        least = max(self.n_fft // 2 + 1, self.hop_length)
        if num_samples < least:
            raise SoundRefused(f"the sound has {num_samples} samples; it must have {least} or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VoxtralSounds(WhisperSounds):
    """Clips of any length for Voxtral's encoder: whole windows, whose loudest band is that of the whole clip.

    tokens_per_window: placeholder tokens of each window.
    """

    tokens_per_window: int = 375

    kind: ClassVar[str] = "voxtral"

    @property
    def unit_samples(self) -> int:
        """Clips are filled to a multiple of so many."""
        return self.window_samples

    def num_windows(self, num_samples: int) -> int:
        return ceil_div(num_samples, self.window_samples)

    def num_tokens(self, num_samples: int) -> int:
        """Placeholder tokens of a clip of so many samples."""
        self.check(num_samples)
        return self.num_windows(num_samples) * self.tokens_per_window

    def check(self, num_samples: int) -> None:
        """Raises ValueError for an empty clip."""
        _check_length(num_samples, num_samples, self.sampling_rate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenSounds(WhisperSounds):
    """Clips of any length for the encoder of Qwen3-ASR and Qwen3-Omni: its frames, and zeros that fill the last chunk.

    chunk_frames: frames that the encoder's convolutions see together. min_samples: shorter clips are filled with
    silence to so many.
    """

    chunk_frames: int = 100
    min_samples: int = _MIN_SAMPLES

    kind: ClassVar[str] = "qwen"

    @property
    def unit_samples(self) -> int:
        """Clips are filled to a multiple of so many."""
        return self.chunk_frames * self.hop_length

    def num_tokens(self, num_samples: int) -> int:
        """Placeholder tokens of a clip of so many samples: each chunk's frames halved three times, rounded up."""
        self.check(num_samples)
        chunks, frames = divmod(max(num_samples, self.min_samples) // self.hop_length, self.chunk_frames)
        return chunks * _FULL_CHUNK_TOKENS + ceil_div(frames, 8)

    def check(self, num_samples: int) -> None:
        """Raises ValueError for a clip that is too short."""
        _check_length(num_samples, num_samples, self.sampling_rate)
        self._check_mirrored(max(num_samples, self.min_samples))

    def process(self, waveform: np.ndarray, look: Look = do_not_look) -> ProcessedClip:
        """waveform: float32 [samples], at sampling_rate. Raises ValueError as `check` does."""
        self.check(len(waveform))
        found = self.log_mel(_filled(waveform, max(len(waveform), self.min_samples)), look)
        frames = ceil_div(len(found), self.chunk_frames) * self.chunk_frames
        features = np.pad(found, ((0, frames - len(found)), (0, 0)))
        return _clip(self, waveform, features, (1, frames, 1), len(found))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Sounds:
    """Clips of up to 30 s for Gemma 4's encoder.

    frame_length, hop_length, fft_length: in samples. mel_floor: added to each band before its natural logarithm.
    max_tokens: of a clip.
    """

    feature_size: int
    sampling_rate: int
    frame_length: int
    hop_length: int
    fft_length: int
    min_frequency: float
    max_frequency: float
    mel_floor: float
    max_tokens: int

    kind: ClassVar[str] = "gemma4"

    def num_frames(self, num_samples: int) -> int:
        """Frames that lie in the sound, each with the sample behind it."""
        return max(0, (num_samples + self.frame_length // 2 - self.frame_length - 1) // self.hop_length + 1)

    def num_tokens(self, num_samples: int) -> int:
        """Placeholder tokens of a clip of so many samples: its frames halved twice, rounded up."""
        self.check(num_samples)
        return min(self.max_tokens, ceil_div(self.num_frames(num_samples), 4))

    def check(self, num_samples: int) -> None:
        """Raises ValueError for a clip that is longer than 30 s, and for one without a whole frame."""
        _check_length(num_samples, _GEMMA_MOST, self.sampling_rate)
        if not self.num_frames(num_samples):
            least = self.frame_length - self.frame_length // 2 + 1
            raise SoundRefused(f"the sound has {num_samples} samples; it must have {least} or more")

    def process(self, waveform: np.ndarray, look: Look = do_not_look) -> ProcessedClip:
        """waveform: float32 [samples], at sampling_rate. Raises ValueError as `check` does."""
        self.check(len(waveform))
        whole = ceil_div(len(waveform), _GEMMA_MULTIPLE) * _GEMMA_MULTIPLE
        padded = np.pad(waveform, (self.frame_length // 2, whole - len(waveform)))[:-1]
        bands = self.fft_length, self.feature_size, self.sampling_rate, self.min_frequency, self.max_frequency
        sizes = {"frame": self.frame_length, "hop": self.hop_length, "n_fft": self.fft_length}
        how = {"power": 1, "dtype": np.float32, "look": look}  # in float32, as the reference
        features = np.log(mel_power(padded, htk_filters(*bands), **sizes, **how) + self.mel_floor)
        own = self.num_frames(len(waveform))
        features = features[:own]  # what is behind them is no sound
        return _clip(self, waveform, features.astype(np.float32), (1, own, 1), own)


SoundProcessor = WhisperSounds | Gemma4Sounds


def _check_length(num_samples: int, most: int, rate: int) -> None:
    if num_samples < 1:
        raise SoundRefused("the sound has no samples")
    if num_samples > most:
        raise SoundRefused(
            f"the sound is {num_samples / rate:,.2f} s long; at most {most / rate:g} s are taken: cut it"
        )


def _filled(waveform: np.ndarray, count: int) -> np.ndarray:
    """With silence to so many samples."""
    return np.pad(waveform, (0, count - len(waveform)))


def _clip(
    processor: SoundProcessor, waveform: np.ndarray, features: np.ndarray, grid: tuple[int, int, int], num_frames: int
) -> ProcessedClip:
    settings = {"kind": processor.kind, **dataclasses.asdict(processor), "shape": waveform.shape}
    return ProcessedClip(
        features=features,
        grid=grid,
        num_frames=num_frames,
        num_tokens=processor.num_tokens(len(waveform)),
        seconds=len(waveform) / processor.sampling_rate,
        digest=media_digest(np.asarray(waveform, np.float32), settings),
    )
