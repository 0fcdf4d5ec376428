"""Transcriber: a sound as requests, one for each of its windows, which run side by side and know nothing of each other.

    waveform = transcriber.waveform(Path("talk.mp3"))     decoded once
    windows = transcriber.windows(waveform)               30 s each, the last what remains, as features
    requests = transcriber.requests(windows, params)      prompts, and how their tokens are drawn

`HeardSound` does all three.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ferrum_jax.asked.sampling import SamplingParams
from ferrum_jax.asked.transcription_params import TranscriptionParams
from ferrum_jax.sound.clip import ProcessedClip, windows
from ferrum_jax.sound.features import WhisperSounds
from ferrum_jax.sound.sound_processor_files import FILES, read_sound_processor
from ferrum_jax.sound.sound_sources import SoundSources
from ferrum_jax.sound.waveform import Look, do_not_look
from ferrum_jax.spec.identity import digest_of
from ferrum_jax.text.tokenizer import Tokenizer
from ferrum_jax.transcribing.generation_file import FILE, WhisperTokens, read_whisper_tokens

MOST_PROMPT_TOKENS = 223  # of the text before: half of what Whisper's decoder reads


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
    """One window's request. prompt: a mapping of `ferrum_jax.prompt`."""

    prompt: dict[str, Any]
    sampling: SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transcriber:
    """How a checkpoint writes down sounds. folder: of its files. sources: where sounds may come from."""

    tokens: WhisperTokens
    processor: WhisperSounds
    tokenizer: Tokenizer
    folder: Path
    sources: SoundSources

    @classmethod
    def of_folder(cls, folder: str | Path, tokenizer: Tokenizer | None, sources: SoundSources) -> Transcriber | None:
        """That of a checkpoint's folder; None where it lacks one of the files that say how.

        Raises ValueError naming the file and what is wrong with it.
        """
        tokens, processor = read_whisper_tokens(folder), read_sound_processor(folder)
        if tokens is None or not isinstance(processor, WhisperSounds) or tokenizer is None:
            return None
        return cls(tokens=tokens, processor=processor, tokenizer=tokenizer, folder=Path(folder), sources=sources)

    @property
    def digest(self) -> str:
        """Digest of everything that turns a sound into features and requests, in hexadecimal."""
        return digest_of(self.processor.kind, dataclasses.asdict(self.processor), dataclasses.asdict(self.tokens))

    def waveform(self, sound: Any, look: Look = do_not_look) -> np.ndarray:
        """float32 [samples] of what a user gives. Raises ValueError for what is not a sound that can be read."""
        return self.sources.waveform(sound, self.processor.sampling_rate, look)

    def windows(self, waveform: np.ndarray, look: Look = do_not_look) -> list[SoundWindow]:
        """The windows of a sound, in their order, with their features."""
        processor = self.processor
        cut = windows(waveform, processor.sampling_rate, processor.chunk_length)
        return [SoundWindow(clip=processor.process(samples, look), start_s=start) for start, samples in cut]

    def requests(self, sounds: Sequence[SoundWindow], params: TranscriptionParams) -> list[WindowRequest]:
        """One request for each window. Raises ValueError for what the model cannot do."""
        token_ids, sampling = self.asked(params)
        return [
            WindowRequest(prompt={"prompt_token_ids": token_ids, "sounds": [each.clip]}, sampling=sampling)
            for each in sounds
        ]

    def asked(self, params: TranscriptionParams) -> tuple[list[int], SamplingParams]:
        """The prompt's tokens of each window, and how tokens are drawn behind them. Raises ValueError as `requests`."""
        prompt, rules = self.tokens.asked(params)
        sampling = SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            seed=params.seed,
            logprobs=0 if params.logprobs else None,
            detokenize=False,
            transcript=rules,
        )
        return self._before(params.prompt) + prompt, sampling

    def _before(self, text: str | None) -> list[int]:
        """The tokens of the text that is taken to stand before. Raises ValueError where it cannot be given."""
        if text is None:
            return []
        if self.tokens.before is None:
            raise ValueError(f"prompt is given, and {FILE} names no prev_sot_token_id; leave it out")
        ids = self.tokenizer.encode(f" {text.strip()}", add_special_tokens=False)
        special = next((token for token in ids if token >= self.tokens.end), None)
        if special is not None:
            name = self.tokenizer.token(special)
            raise ValueError(f"prompt has the token {name!r}, which is no text; leave it out")
        return [self.tokens.before, *ids[-MOST_PROMPT_TOKENS:]]


def require_transcriber(found: Transcriber | None, architecture: str) -> Transcriber:
    """The transcriber, or ValueError that says why there is none."""
    if found is None:
        files = " or ".join(FILES)
        raise ValueError(
            f"{architecture} writes down no sounds here: it is not Whisper, or its folder lacks tokenizer.json, "
            f"{files}, or a {FILE} with no_timestamps_token_id"
        )
    return found
