"""A processor's file is honoured or refused by key, with the file's name."""

import json

import pytest

from ferrum_jax.inputs.audio.features import Gemma4Sounds, QwenSounds, VoxtralSounds, WhisperSounds
from ferrum_jax.inputs.audio.sound_processor_files import read_sound_processor, sound_processor_of
from tests.rows import rows_beside
from tests.sound.test_features import CASES

SETTINGS = {kind: CASES[f"{kind}_{n}"]["settings"] for kind, n in (("whisper", 1), ("voxtral", 1), ("qwen", 1))}
SETTINGS |= {"omni": CASES["omni_7.77"]["settings"], "gemma4": CASES["gemma4_1"]["settings"]}


def test_whisper_s_file_is_read(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS["whisper"] | {"mel_filters": [[0.0]]}))
    sizes = {"feature_size": 128, "sampling_rate": 16_000, "hop_length": 160, "n_fft": 400, "chunk_length": 30}
    found = read_sound_processor(tmp_path)
    assert found == WhisperSounds(**sizes) and (found.window_samples, found.window_frames) == (480_000, 3000)
    assert type(sound_processor_of(SETTINGS["voxtral"])) is VoxtralSounds
    assert sound_processor_of(SETTINGS["qwen"]) == QwenSounds(**sizes)
    assert sound_processor_of({**SETTINGS["whisper"], "processor_class": "Qwen3ASRProcessor"}) == QwenSounds(**sizes)
    assert sound_processor_of(SETTINGS["omni"]) == QwenSounds(**sizes | {"chunk_length": 300}, min_samples=0)


def test_a_part_of_a_processor_s_file_is_read_with_what_stands_beside_it(tmp_path):
    part = {name: value for name, value in SETTINGS["gemma4"].items() if name != "processor_class"}
    whole = {
        "audio_ms_per_token": 40,
        "audio_seq_length": 188,
        "processor_class": "Gemma4Processor",
        "image_seq_length": 1,
    }
    (tmp_path / "processor_config.json").write_text(json.dumps({**whole, "feature_extractor": part}))
    found = read_sound_processor(tmp_path)
    assert isinstance(found, Gemma4Sounds) and found.max_tokens == 188
    assert (found.frame_length, found.hop_length, found.fft_length) == (320, 160, 512)
    (tmp_path / "processor_config.json").write_text(json.dumps({**whole, "feature_extractor": {**part, "dither": 1.0}}))
    with pytest.raises(ValueError, match=r"processor_config\.json: dither is 1\.0, and no sound is processed so here"):
        read_sound_processor(tmp_path)


def test_a_folder_without_sounds_has_no_processor_of_them(tmp_path):
    assert read_sound_processor(tmp_path) is None
    images = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": images}))
    assert read_sound_processor(tmp_path) is None


@pytest.mark.parametrize("value", ["x", [1], 3])
def test_a_processor_that_is_no_object_is_refused_with_its_file(tmp_path, value):
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": value}))
    with pytest.raises(ValueError, match=r"processor_config\.json: feature_extractor is .*; it must be an object"):
        read_sound_processor(tmp_path)


KINDS = "feature_extractor_type is 'ClapFeatureExtractor'; known are Gemma4Audio.*, Qwen3ASR.*, Whisper"
USERS = "processor_class is 'SpeechProcessor', .*; known are Qwen3ASRProcessor, .*, VoxtralProcessor, WhisperProcessor"
LARGE = "chunk_length, sampling_rate and hop_length make .* frames of .* values; a window has at least one and at most"


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        *rows_beside(__file__)["a setting that is not followed here is refused by name"],
        ("whisper", {"feature_extractor_type": "ClapFeatureExtractor"}, KINDS),
        ("whisper", {"processor_class": "SpeechProcessor"}, USERS),
        ("whisper", {"sampling_rate": 10**9}, "sampling_rate is 1000000000; it must be a whole number, 1000 to 384000"),
        ("whisper", {"chunk_length": 3600, "hop_length": 1}, LARGE),
        ("whisper", {"hop_length": 10**9}, LARGE),
        ("whisper", {"n_fft": 10**9}, "n_fft is 1000000000; it must be a whole number, 2 to 65536"),
        ("gemma4", {"per_bin_mean": [0.0] * 128}, "per_bin_mean is .*, and no sound is processed so here"),
        ("gemma4", {"mel_floor": float("nan")}, "mel_floor is nan; it must be a number"),
    ],
)
def test_a_setting_that_is_not_followed_here_is_refused_by_name(kind, change, said):
    with pytest.raises(ValueError, match=said):
        sound_processor_of(SETTINGS[kind] | change)
