"""WhisperTranscriber: windows of 30 s beside prompts of a few tokens that say language, task and whether times come.

Times come in pairs of tokens, the beginning and the end of a part, counted from the beginning of its window. A part
without its end, which a window may have as its last, ends with the window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from ferrum_jax.core.outputs import CompletionOutput, TranscriptionSegment
from ferrum_jax.inputs.audio.clip import windows
from ferrum_jax.inputs.audio.features import WhisperSounds
from ferrum_jax.inputs.audio.sound_processor_files import read_sound_processor
from ferrum_jax.inputs.audio.sound_sources import SoundSources
from ferrum_jax.inputs.identity import digest_of
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.tasks.transcription.generation_file import FILE, WhisperTokens, read_whisper_tokens
from ferrum_jax.tasks.transcription.transcriber import (
    SoundWindow,
    Transcriber,
    WindowAnswer,
    WindowRequest,
    logprobs_of,
    mean,
)
from ferrum_jax.text.prompts import PromptEncoder

MOST_PROMPT_TOKENS = 223  # of the text before: half of what Whisper's decoder reads, or less where that is shorter
SECONDS_PER_STEP = 0.02  # from one time to the next


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhisperTranscriber(Transcriber):
    """Asks Whisper. folder: of its files. max_model_len: of its decoder; half of it may be the text
    before."""

    tokens: WhisperTokens
    folder: Path
    max_model_len: int | None

    spaced: ClassVar[bool] = True

    @classmethod
    def of_folder(cls, folder: str | Path, prompts: PromptEncoder, sources: SoundSources) -> WhisperTranscriber | None:
        """That of a checkpoint's folder; None where it lacks one of the files that say how. prompts: of its model.

        Raises ValueError naming the file and what is wrong with it.
        """
        tokens, processor = read_whisper_tokens(folder), read_sound_processor(folder)
        if tokens is None or not isinstance(processor, WhisperSounds) or prompts.tokenizer is None:
            return None
        return cls(
            tokens=tokens,
            processor=processor,
            tokenizer=prompts.tokenizer,
            folder=Path(folder),
            sources=sources,
            max_model_len=prompts.max_model_len,
        )

    @property
    def digest(self) -> str:
        return digest_of(self.processor.kind, dataclasses.asdict(self.processor), dataclasses.asdict(self.tokens))

    def check(self, params: TranscriptionParams) -> None:
        self.asked(params)

    def cut(self, waveform: np.ndarray) -> list[tuple[float, np.ndarray]]:
        return windows(waveform, self.processor.sampling_rate, self.processor.chunk_length)

    def num_windows(self, num_samples: int) -> int:
        return ceil_div(num_samples, self.processor.window_samples)

    def prompt_ids(self, params: TranscriptionParams, num_samples: int | None) -> Sequence[int]:
        return self.asked(params)[0]

    def requests(self, sounds: Sequence[SoundWindow], params: TranscriptionParams) -> list[WindowRequest]:
        token_ids, sampling = self.asked(params)
        return [
            WindowRequest(prompt={"prompt_token_ids": token_ids, "sounds": [each.clip]}, sampling=sampling)
            for each in sounds
        ]

    def asked(self, params: TranscriptionParams) -> tuple[list[int], SamplingParams]:
        """The prompt's tokens of each window, and how tokens are drawn behind them. Raises ValueError as `check`."""
        prompt, rules = self.tokens.asked(params)
        sampling = SamplingParams(
            max_tokens=None if params.max_tokens is None else params.max_tokens + rules.num_leading,
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
        most = MOST_PROMPT_TOKENS
        if self.max_model_len is not None:
            most = max(1, min(most, self.max_model_len // 2 - 1))
        return [self.tokens.before, *ids[-most:]]

    def words(self, params: TranscriptionParams) -> WhisperWords:
        _, rules = self.tokens.asked(params)
        return WhisperWords(self.tokens.end, rules.num_leading)

    def answer(self, window: SoundWindow, output: CompletionOutput, params: TranscriptionParams) -> WindowAnswer:
        tokens, ids = self.tokens, output.token_ids
        _, rules = tokens.asked(params)
        leading = rules.num_leading
        codes = {token: code for code, token in tokens.languages.items()}
        given = "en" if params.language is None else tokens.language_code(params.language)
        own, logprobs = ids[leading:], logprobs_of(output)[leading:]
        parts = _TimedParts(self, window, own, logprobs).found() if params.timestamps else []
        return WindowAnswer(
            language=codes.get(ids[0], given) if leading and ids else given,
            token_ids=own,
            logprobs=logprobs,
            segments=parts,
        )

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of tokens that may have times among them."""
        return self.tokenizer.decode([token for token in token_ids if token < self.tokens.end])


class WhisperWords:
    """The tokens behind the first, without times and ends."""

    def __init__(self, end: int, num_leading: int) -> None:
        self._end, self._num_leading = end, num_leading

    def push(self, token_ids: Sequence[int]) -> Sequence[int]:
        behind = token_ids[self._num_leading :]
        self._num_leading = max(0, self._num_leading - len(token_ids))
        return [token for token in behind if token < self._end]

    def end(self) -> Sequence[int]:
        return ()


class _TimedParts:
    """The parts of a window's text, by the times among its tokens."""

    def __init__(
        self,
        transcriber: WhisperTranscriber,
        window: SoundWindow,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
    ) -> None:
        self._transcriber, self._tokens, self._window = transcriber, transcriber.tokens, window
        self._token_ids, self._logprobs = token_ids, logprobs

    def found(self) -> list[TranscriptionSegment]:
        """In their order; parts without a text are left out."""
        found: list[TranscriptionSegment] = []
        begun: int | None = None  # the place of the time, or of the word, that begins a part
        for place, token in enumerate(self._token_ids):
            if begun is None:
                begun = place
            elif token >= self._tokens.times_from:
                is_end = self._has_text(begun, place)
                found += [self._part(begun, place + 1)] if is_end else []
                begun = None if is_end else place
        if begun is not None and self._has_text(begun, len(self._token_ids)):
            found.append(self._part(begun, len(self._token_ids)))
        return [each for each in found if each.text.strip()]

    def _has_text(self, begun: int, end: int) -> bool:
        return any(token < self._tokens.end for token in self._token_ids[begun:end])

    def _part(self, begun: int, end: int) -> TranscriptionSegment:
        """That of tokens [begun, end)."""
        own, window, first = self._token_ids[begun:end], self._window, self._tokens.times_from
        start_s = self._time(own[0]) if own[0] >= first else window.start_s
        return TranscriptionSegment(
            id=0,
            start_s=start_s,
            end_s=self._time(own[-1]) if own[-1] >= first else max(start_s, window.end_s),
            text=self._transcriber.text_of(own),
            token_ids=tuple(own),
            avg_logprob=mean(self._logprobs[begun:end]),
        )

    def _time(self, token: int) -> float:
        """Within the window: a model may count on into the silence that pads a sound."""
        time_s = self._window.start_s + (token - self._tokens.times_from) * SECONDS_PER_STEP
        return min(round(time_s, 2), self._window.end_s)
