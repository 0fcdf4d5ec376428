"""Sounds of prompts made ready for a model, without one: tokens of Voxtral's windows, and what a folder says."""

from __future__ import annotations

import json

import pytest

from ferrum_jax.inputs.audio.prompt_sounds import PromptSounds
from ferrum_jax.inputs.audio.sound_sources import SoundSources
from scripts.goldens.sounds import sound

RATE, AUDIO = 16_000, 24
SETTINGS = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8}


def encode(text: str, adds: bool) -> list[int]:
    """Each letter is a token, and the placeholder."""
    ids = [id for part in text.replace("[AUDIO]", "\0") for id in [AUDIO if part == "\0" else 100 + ord(part)]]
    return [1, *ids] if adds else ids


def of_folder(folder, user: str, max_frames: int = 6000) -> PromptSounds | None:
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS | {"processor_class": user}))
    return PromptSounds.of_folder(folder, SoundSources(), max_frames)


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_sound_of_two_windows_has_their_tokens_and_one_span(tmp_path, as_ids):
    sounds, text = of_folder(tmp_path, "VoxtralProcessor"), "a[AUDIO]b[AUDIO]c"
    content = encode(text, False) if as_ids else text
    given = [(sound(30.5, 1), RATE), (sound(0.2, 2), RATE)]
    filled, clips = sounds.filled(content, given, encode)
    ids = encode(filled, False) if isinstance(filled, str) else filled
    spans = sounds.spans(ids, clips, encode)
    assert ids == [197, *[AUDIO] * 750, 198, *[AUDIO] * 375, 199]
    assert [(span.kind, span.start, span.length) for span in spans] == [("audio", 1, 750), ("audio", 752, 375)]
    assert [clip.grid for clip in clips] == [(2, 3000, 1), (1, 3000, 1)]
    assert [span.digest for span in spans] == [clip.digest for clip in clips]


def test_a_sound_longer_than_a_tower_takes_is_refused_before_all_is_decoded(tmp_path):
    sounds = of_folder(tmp_path, "VoxtralProcessor", max_frames=3000)
    with pytest.raises(ValueError, match=r"sound 0: the sound is 30.2 s long or more; at most 30 s are taken"):
        sounds.filled("[AUDIO]", [(sound(30.2, 1), RATE)], encode)


def test_sounds_of_one_window_beside_a_prompt_have_no_tokens_in_it(tmp_path):
    assert of_folder(tmp_path, "WhisperProcessor") is None
    (tmp_path / "preprocessor_config.json").unlink()
    assert PromptSounds.of_folder(tmp_path, SoundSources(), 100) is None


def test_a_tokenizer_without_the_placeholder_is_refused(tmp_path):
    sounds = of_folder(tmp_path, "VoxtralProcessor")
    with pytest.raises(ValueError, match=r"the tokenizer has no token \[AUDIO\]"):
        sounds.filled("[AUDIO]", [(sound(1, 1), RATE)], lambda text, adds: [ord(c) for c in text])
