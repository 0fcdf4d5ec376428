"""How texts, images and sounds become a model's prompts, read from the folders that the engine's side names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def read_texts(folder: str | None, images: Mapping[str, Any] | None = None) -> PromptEncoder:
    """Tokenizer and chat template of a folder, or of a tokenizer.json. images: what the engine's side says of them."""
    how = None
    if images is not None:
        how = PromptImages.of_folder(images["folder"], ImageSources(hosts=tuple(images["hosts"]), root=images["root"]))
    if folder is None:
        return PromptEncoder(tokenizer=None, chat=None, images=how)
    return PromptEncoder(tokenizer=Tokenizer.load(Path(folder)), chat=ChatTemplate.load(Path(folder)), images=how)


def read_transcriber(prompts: PromptEncoder, sounds: Mapping[str, Any] | None) -> Transcriber | None:
    """How a model writes down sounds. sounds: what the engine's side says of Whisper's."""
    if sounds is None:
        return PromptTranscriber.of_prompts(prompts)
    sources = SoundSources(hosts=tuple(sounds["hosts"]), root=sounds["root"])
    return WhisperTranscriber.of_folder(sounds["folder"], prompts, sources)


def read_prompt_sounds(heard: Mapping[str, Any] | None) -> PromptSounds | None:
    """How a model's prompts have sounds. heard: what the engine's side says of them."""
    if heard is None:
        return None
    sources = SoundSources(hosts=tuple(heard["hosts"]), root=heard["root"])
    return PromptSounds.of_folder(heard["folder"], sources, heard["max_frames"])
