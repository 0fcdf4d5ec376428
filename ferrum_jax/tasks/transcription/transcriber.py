"""Transcriber: a sound as requests, one for each of its windows, which run side by side and know nothing of each other.

    waveform = transcriber.waveform(Path("talk.mp3"))     decoded once
    windows = transcriber.windows(waveform)               one after the other without a gap, as features
    requests = transcriber.requests(windows, params)      prompts, and how their tokens are drawn
    answer = transcriber.answer(window, output, params)   what a window's tokens say

`HeardSound` does all of it. A subclass is a way in which checkpoints are asked.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from ferrum_jax.core.outputs import CompletionOutput, TranscriptionSegment
from ferrum_jax.inputs.audio.clip import ProcessedClip
from ferrum_jax.inputs.audio.features import WhisperSounds
from ferrum_jax.inputs.audio.sound_sources import SoundSources
from ferrum_jax.inputs.audio.waveform import Look, do_not_look
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SoundWindow:
    """A window of a sound, as the encoder takes it. start_s: in the whole sound."""

    clip: ProcessedClip
    start_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.clip.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowRequest:
    """One window's request. prompt: a mapping of `ferrum_jax.inputs.prompt`."""

    prompt: dict[str, Any]
    sampling: SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowAnswer:
    """What a window's tokens say beside its text.

    token_ids: without those that say language and task. logprobs: of these. language: its code, None
    where neither the request nor the model says it. segments: the parts of the text, all with the id 0; none where no
    times were asked for.
    """

    language: str | None
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    segments: Sequence[TranscriptionSegment] = ()


class Words(Protocol):
    """Which of a window's tokens are its text, while they come."""

    def push(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Takes the next tokens, and gives those that are certain to be text."""
        ...

    def end(self) -> Sequence[int]:
        """Gives what remains after the last token."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transcriber(abc.ABC):
    """How a checkpoint writes down sounds. sources: where sounds may come from."""

    processor: WhisperSounds
    tokenizer: Tokenizer
    sources: SoundSources

    spaced: ClassVar[bool]  # whether the texts of windows bring the space between them

    @property
    @abc.abstractmethod
    def digest(self) -> str:
        """Digest of everything that turns a sound into features and requests, in hexadecimal."""

    def waveform(self, sound: Any, look: Look = do_not_look) -> np.ndarray:
        """float32 [samples] of what a user gives. Raises ValueError for what is not a sound that can be read."""
        return self.sources.waveform(sound, self.processor.sampling_rate, look)

    def windows(self, waveform: np.ndarray, look: Look = do_not_look) -> list[SoundWindow]:
        """The windows of a sound, in their order, with their features."""
        return [
            SoundWindow(clip=self.processor.process(samples, look), start_s=start)
            for start, samples in self.cut(waveform)
        ]

    @abc.abstractmethod
    def check(self, params: TranscriptionParams) -> None:
        """Raises ValueError for what the model cannot do."""

    @abc.abstractmethod
    def cut(self, waveform: np.ndarray) -> list[tuple[float, np.ndarray]]:
        """Where each window starts, in seconds, and its samples."""

    @abc.abstractmethod
    def num_windows(self, num_samples: int) -> int:
        """How many `cut` makes of so many samples."""

    @abc.abstractmethod
    def prompt_ids(self, params: TranscriptionParams, num_samples: int | None) -> Sequence[int]:
        """The prompt of the longest window of so many samples, with all of its tokens; None of a whole window."""

    @abc.abstractmethod
    def requests(self, sounds: Sequence[SoundWindow], params: TranscriptionParams) -> list[WindowRequest]:
        """One request for each window, all drawn alike. Raises ValueError as `check`."""

    @abc.abstractmethod
    def words(self, params: TranscriptionParams) -> Words:
        """Which tokens of one window are text, where it is asked for so."""

    @abc.abstractmethod
    def answer(self, window: SoundWindow, output: CompletionOutput, params: TranscriptionParams) -> WindowAnswer:
        """What the output to a window says."""


def logprobs_of(output: CompletionOutput) -> list[float]:
    """How likely each of its tokens was; none where that was not asked for."""
    return [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs or (), strict=False)]


def mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return sum(values) / len(values) if values else None


def require_transcriber(found: Transcriber | None, architecture: str) -> Transcriber:
    """The transcriber, or ValueError that says why there is none."""
    if found is None:
        raise ValueError(
            f"{architecture} writes down no sounds here: it is not Whisper, Qwen3-ASR or Voxtral, or its folder lacks "
            "one of its processor's file, tokenizer.json, Whisper's generation_config.json with "
            "no_timestamps_token_id, and Qwen3-ASR's chat template"
        )
    return found
