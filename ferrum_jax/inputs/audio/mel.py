"""Mel spectrograms: how loud a sound is in each of some bands of frequency, frame by frame.

    frames = waveform[i * hop : i * hop + n_fft] * hann        |rfft(frames)|^2 @ filters        [frames, mels]

Block by block, so that an hour of sound takes no more memory than a minute. Products with filters are in float64.
"""

from __future__ import annotations

import functools

import numpy as np

from ferrum_jax.inputs.audio.waveform import Look, do_not_look

_BLOCK_FRAMES = 512
_LINEAR_MELS, _LINEAR_HERTZ = 15.0, 1000.0  # where Slaney's scale turns from linear to logarithmic
_LOG_STEP = np.log(6.4) / 27.0


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
