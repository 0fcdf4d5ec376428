"""Prompts of Gemma 4 with sounds and images: each placeholder becomes its tokens, and spans are found among all."""

from __future__ import annotations

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

RATE = 16_000
AUDIO, IMAGE = 3, 6
_TOKENS = {"<|audio>": 2, "<|audio|>": AUDIO, "<audio|>": 4, "<|image>": 5, "<|image|>": IMAGE, "<image|>": 7}
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
        own = AUDIO if span.kind == "audio" else IMAGE
        assert (ids[span.start : span.start + span.length] == own).all()
        assert (ids[span.start - 1], ids[span.start + span.length]) == (own - 1, own + 1)
        assert (span.digest, span.length) == (part.digest, part.num_tokens)
    assert [span.length for span in found.media if span.kind == "audio"] == [13, 25]
    assert sum(span.length for span in found.media) == np.isin(ids, [AUDIO, IMAGE]).sum()


def test_other_numbers_of_sounds_than_places_are_refused(prompts):
    with pytest.raises(ValueError, match=r"the prompt has 1 placeholder <\|audio\|> and 2 sounds"):
        prompts.encoded({"prompt": "<|audio|><|image|>", "sounds": SOUNDS, "images": [picture(30, 40, 1)]})
