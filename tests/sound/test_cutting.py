"""Where long sounds are cut: without a gap, about equally, in the quiet."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_jax.inputs.audio.clip import quiet_windows

RATE = 16_000


@pytest.mark.parametrize("seconds", [0.01, 3.9, 4.0, 4.01, 7.9, 31.0, 95.3])
def test_windows_follow_without_a_gap_and_none_is_too_long_or_tiny(seconds):
    waveform = np.random.default_rng(1).normal(size=int(seconds * RATE)).astype(np.float32)
    found = quiet_windows(waveform, RATE, 4 * RATE)
    np.testing.assert_array_equal(np.concatenate(found), waveform)
    assert max(map(len, found)) <= 4 * RATE
    assert len(found) == 1 or min(map(len, found)) > RATE


def test_a_cut_is_in_the_quiet():
    waveform = np.random.default_rng(2).normal(size=64 * RATE).astype(np.float32)
    waveform[int(31.2 * RATE) : int(31.5 * RATE)] = 0
    first, second = quiet_windows(waveform, RATE, 40 * RATE)
    assert not np.any(first[-800:]) and not np.any(second[:800])


def test_a_silent_sound_is_cut_too():
    assert [len(each) for each in quiet_windows(np.zeros(90, np.float32), 10, 40)] == [28, 30, 32]
