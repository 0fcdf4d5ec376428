"""Sounds of prompts made ready, without a model: tokens of Voxtral, spans among images, and what a folder says."""

import dataclasses
import json

import numpy as np
import pytest

from ferrum_jax.inputs.audio.prompt_sounds import PromptSounds
from ferrum_jax.inputs.audio.sound_sources import SoundSources
from ferrum_jax.inputs.images.prompt_images import PromptImages
from ferrum_jax.inputs.images.sources import ImageSources
from ferrum_jax.text.prompts import PromptEncoder
from scripts.goldens.pictures import picture
from scripts.goldens.sounds import sound
from scripts.goldens.video_folder import GEMMA_IMAGES

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


OF_GEMMA, IMAGE = 3, 6
_TOKENS = {"<|audio>": 2, "<|audio|>": OF_GEMMA, "<audio|>": 4, "<|image>": 5, "<|image|>": IMAGE, "<image|>": 7}
SOUNDS = [(sound(seconds, number), RATE) for number, seconds in enumerate((0.5, 1.0))]


@dataclasses.dataclass(frozen=True)
class Letters:
    """A tokenizer whose tokens are letters, and what stands for media."""

    def encode(self, text: str, **how: object) -> list[int]:
        found, at = [], 0
        while at < len(text):
            name = next((name for name in _TOKENS if text.startswith(name, at)), text[at])
            found.append(_TOKENS.get(name, 100 + ord(name[0])))
            at += len(name)
        return found


@pytest.fixture
def prompts(tmp_path):
    heard = {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 12}
    both = {"image_processor": GEMMA_IMAGES, "feature_extractor": heard, "processor_class": "Gemma4Processor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(both))
    return PromptEncoder(
        tokenizer=Letters(),  # pyright: ignore[reportArgumentType]
        chat=None,
        images=PromptImages.of_folder(tmp_path, ImageSources()),
        sounds=PromptSounds.of_folder(tmp_path, SoundSources(), 4096),
        max_model_len=4096,
    )


@pytest.mark.parametrize(
    "text", ["a<|audio|>b<|image|>c<|audio|>", "<|image|><|audio|>,<|audio|>", "<|audio|> <|audio|><|image|>"]
)
@pytest.mark.parametrize("as_ids", [False, True])
def test_spans_are_those_of_the_runs_in_any_order(prompts, text, as_ids):
    shown = picture(30, 40, 1)
    content = {"prompt_token_ids": Letters().encode(text)} if as_ids else {"prompt": text}
    found = prompts.encoded({**content, "sounds": SOUNDS, "images": [shown]})
    ids = np.asarray(found.token_ids)
    for span, part in zip(found.media, found.images, strict=True):
        own = OF_GEMMA if span.kind == "audio" else IMAGE
        assert (ids[span.start : span.start + span.length] == own).all()
        assert (ids[span.start - 1], ids[span.start + span.length]) == (own - 1, own + 1)
        assert (span.digest, span.length) == (part.digest, part.num_tokens)
    assert [span.length for span in found.media if span.kind == "audio"] == [13, 25]
    assert sum(span.length for span in found.media) == np.isin(ids, [OF_GEMMA, IMAGE]).sum()


def test_other_numbers_of_sounds_than_places_are_refused(prompts):
    with pytest.raises(ValueError, match=r"the prompt has 1 placeholder <\|audio\|> and 2 sounds"):
        prompts.encoded({"prompt": "<|audio|><|image|>", "sounds": SOUNDS, "images": [picture(30, 40, 1)]})
