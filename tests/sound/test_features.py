"""Features are those of the reference, and how many tokens a clip has is known before any is computed."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from ferrum_jax.inputs.audio.clip import ProcessedClip, quiet_windows, windows
from ferrum_jax.inputs.audio.features import Gemma4Sounds, QwenSounds, VoxtralSounds, WhisperSounds
from ferrum_jax.inputs.audio.sound_processor_files import sound_processor_of
from scripts.goldens.pictures import sampled
from scripts.goldens.sounds import sound
from tests.support import GOLDENS

FOLDER = GOLDENS / "sounds"
CASES = json.loads((FOLDER / "cases.json").read_text())["features"]
ROUNDING = 1e-6  # of values up to 2, in float32
CLIPS = [name for name in CASES if not name.startswith("whole")]
WHISPER = sound_processor_of(CASES["whisper_1"]["settings"])


@functools.cache
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / "features.npz"))


def process(name: str) -> ProcessedClip:
    return sound_processor_of(CASES[name]["settings"]).process(sound(CASES[name]["seconds"], seed=3))


@pytest.mark.parametrize("name", CLIPS)
def test_features_are_the_reference_s(name):
    case, clip = CASES[name], process(name)
    frames, mels = case["shape"]
    assert clip.features.dtype == np.float32 and clip.patches is clip.features
    assert clip.grid == (case.get("windows", 1), len(clip.features) // case.get("windows", 1), 1)
    assert clip.features.shape[1] == mels and not np.any(clip.features[frames:])
    whole = np.pad(clip.features[:frames], ((0, max(0, frames - len(clip.features))), (0, 0)))  # Gemma's reference pads
    np.testing.assert_allclose(sampled(whole), golden()[name], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("whole")])
def test_a_sound_longer_than_a_window_has_the_reference_s_features_too(name):
    found = WHISPER.log_mel(sound(CASES[name]["seconds"], seed=3))
    assert list(found.shape) == CASES[name]["shape"]
    np.testing.assert_allclose(sampled(found), golden()[name], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", ["whisper_7", "whisper_small_1", "voxtral_31", "qwen_1.234", "omni_7.77"])
def test_features_are_nearer_to_the_reference_than_its_two_paths_to_each_other(name):
    """Else the path in float32, which it takes where torch is installed, would have to be followed."""
    frames = CASES[name]["shape"][0]
    assert np.abs(sampled(process(name).features[:frames]) - golden()[name]).max() < CASES[name]["apart"] / 10


@pytest.mark.parametrize("name", CLIPS)
def test_the_number_of_tokens_is_known_from_the_number_of_samples_alone(name):
    case, clip = CASES[name], process(name)
    processor = sound_processor_of(case["settings"])
    assert processor.num_tokens(len(sound(case["seconds"], seed=3))) == clip.num_tokens
    expected = {WhisperSounds: 1500, VoxtralSounds: 375 * case.get("windows", 1)}.get(type(processor))
    assert clip.num_tokens == case.get("num_tokens", expected)
    assert clip.num_frames == case.get("num_frames", min(case["shape"][0], int(case["seconds"] * 100)))
    assert clip.seconds == pytest.approx(case["seconds"], abs=1e-4)


def test_blocks_of_frames_do_not_show():
    """512 are computed at once."""
    waveform = sound(12, seed=5)
    whole = WHISPER.log_mel(waveform)
    part = WHISPER.log_mel(waveform[160 * 400 : 160 * 700])
    inner = slice(2, -2)  # a sound is mirrored at its ends
    loud = whole[400:700] > whole.max() - 1.9  # above what is cut, which the loudest band of all decides
    assert loud[inner].mean() > 0.5
    np.testing.assert_allclose(whole[400:700][inner][loud[inner]], part[inner][loud[inner]], rtol=0, atol=ROUNDING)


def test_whoever_waits_can_leave_between_blocks():
    looks = []
    WHISPER.process(sound(3, seed=1), look=lambda: looks.append(1))
    assert len(looks) == 6  # of 512 frames, in 3001


def test_a_digest_follows_the_waveform_and_the_settings_and_nothing_else():
    waveform = sound(2, seed=1)
    one = WHISPER.process(waveform).digest
    other = waveform.copy()
    other[123] += 1e-3
    digests = {
        one,
        WHISPER.process(other).digest,
        WHISPER.process(waveform[:-1]).digest,
        dataclasses.replace(WHISPER, feature_size=80).process(waveform).digest,
        dataclasses.replace(WHISPER, sampling_rate=8000, hop_length=80).process(waveform).digest,
        VoxtralSounds(**dataclasses.asdict(WHISPER)).process(waveform).digest,
    }
    assert len(digests) == 6 and WHISPER.process(waveform.copy()).digest == one


TOO_LONG = r"the sound is 30\.00 s long; at most 30 s are taken: cut it"


@pytest.mark.parametrize(
    ("processor", "count", "said"),
    [
        (WHISPER, 480_001, TOO_LONG),
        (WHISPER, 0, "the sound has no samples"),
        (sound_processor_of(CASES["voxtral_1"]["settings"]), 0, "the sound has no samples"),
        (sound_processor_of(CASES["qwen_1"]["settings"]), 0, "the sound has no samples"),
        (
            sound_processor_of(CASES["omni_7.77"]["settings"]),
            200,
            "the sound has 200 samples; it must have 201 or more",
        ),
        (sound_processor_of(CASES["gemma4_1"]["settings"]), 160, "the sound has 160 samples; it must have 161 or more"),
        (sound_processor_of(CASES["gemma4_1"]["settings"]), 480_001, TOO_LONG),
    ],
)
def test_a_clip_of_a_length_that_no_encoder_takes_is_refused(processor, count, said):
    for refuse in (processor.num_tokens, lambda count: processor.process(np.zeros(count, np.float32))):
        with pytest.raises(ValueError, match=said):
            refuse(count)


@pytest.mark.parametrize("kind", ["whisper_1", "voxtral_1", "qwen_1", "omni_0.3", "gemma4_1"])
@pytest.mark.parametrize("count", [1, 159, 160, 161, 201, 320, 7999, 8001, 16_001])
def test_a_clip_of_any_length_is_refused_or_has_as_many_tokens_as_said(kind, count):
    processor = sound_processor_of(CASES[kind]["settings"])
    try:
        said = processor.num_tokens(count)
    except ValueError:
        assert count <= 200
        with pytest.raises(ValueError, match="samples"):
            processor.process(np.ones(count, np.float32))
    else:
        clip = processor.process(sound(1.1, seed=2)[:count])
        assert clip.num_tokens == said >= 1 and np.isfinite(clip.features).all()


def test_silence_has_finite_features():
    for kind in ("whisper_1", "voxtral_1", "qwen_1", "gemma4_1"):
        features = sound_processor_of(CASES[kind]["settings"]).process(np.zeros(16_000, np.float32)).features
        assert np.isfinite(features).all()


def test_windows_follow_one_another_without_a_gap():
    waveform = sound(7.3, seed=0)
    found = windows(waveform, 16_000, 3)
    assert [start for start, _ in found] == [0.0, 3.0, 6.0]
    assert [len(part) for _, part in found] == [48_000, 48_000, 20_800]
    np.testing.assert_array_equal(np.concatenate([part for _, part in found]), waveform)
    assert len(windows(waveform[:48_000], 16_000, 3)) == 1 and windows(waveform[:0], 16_000, 3) == []
    with pytest.raises(ValueError, match="a window of 1e-05 s has no sample at 16000 a second; make it longer"):
        windows(waveform, 16_000, 1e-5)


def test_a_clip_whose_features_do_not_fill_its_grid_is_a_mistake():
    clip = process("whisper_1")
    for change in ({"grid": (1, 2999, 1)}, {"features": clip.features.astype(np.float64)}, {"num_frames": 3001}):
        with pytest.raises(AssertionError, match=r"frames|float32"):
            dataclasses.replace(clip, **change)


def test_kinds_of_encoders_are_told_apart():
    kinds = {name: type(sound_processor_of(CASES[name]["settings"])) for name in ("qwen_1", "omni_7.77", "gemma4_1")}
    assert kinds == {"qwen_1": QwenSounds, "omni_7.77": QwenSounds, "gemma4_1": Gemma4Sounds}


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
