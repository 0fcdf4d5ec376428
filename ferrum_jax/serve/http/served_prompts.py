"""How texts, images and sounds become a model's prompts, read from the folders that the engine's side names."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ferrum_jax.inputs.audio.prompt_sounds import PromptSounds
from ferrum_jax.inputs.audio.sound_sources import SoundSources
from ferrum_jax.inputs.images.prompt_images import PromptImages
from ferrum_jax.inputs.images.sources import ImageSources
from ferrum_jax.tasks.transcription.prompt_transcriber import PromptTranscriber
from ferrum_jax.tasks.transcription.transcriber import Transcriber
from ferrum_jax.tasks.transcription.whisper_transcriber import WhisperTranscriber
from ferrum_jax.text.chat import ChatTemplate
from ferrum_jax.text.prompts import PromptEncoder
from ferrum_jax.text.tokenizer import Tokenizer

Sources = TypeVar("Sources")


class ServedPrompts(NamedTuple):
    """transcriber: of a model that writes down sounds."""

    prompts: PromptEncoder
    transcriber: Transcriber | None


def read_prompts(facts: Mapping[str, Any]) -> ServedPrompts:
    """How a model reads prompts and sounds. facts: what the engine's side says of it."""
    images, heard, sounds, folder = facts["images"], facts["heard"], facts["sounds"], facts["texts"]
    prompts = PromptEncoder(
        tokenizer=None if folder is None else Tokenizer.load(Path(folder)),
        chat=None if folder is None else ChatTemplate.load(Path(folder)),
        images=images and PromptImages.of_folder(images["folder"], _sources(ImageSources, images)),
        sounds=heard and PromptSounds.of_folder(heard["folder"], _sources(SoundSources, heard), heard["max_frames"]),
        hears=sounds is not None,
        max_model_len=facts["max_model_len"],
    )
    if sounds is None:
        return ServedPrompts(prompts, PromptTranscriber.of_prompts(prompts))
    by_whisper = WhisperTranscriber.of_folder(sounds["folder"], prompts, _sources(SoundSources, sounds))
    return ServedPrompts(prompts, by_whisper)


def _sources(kind: Callable[..., Sources], said: Mapping[str, Any]) -> Sources:
    return kind(hosts=tuple(said["hosts"]), root=said["root"])
