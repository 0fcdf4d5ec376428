"""PromptTranscriber: windows of two minutes whose tokens stand in prompts, asked for as their makers do.

    Qwen3-ASR    the chat template over a system message with the text before and a user's with the sound, then
                 "language German<asr_text>" where the language is given; else the model writes that itself
    Voxtral      <s>[INST][BEGIN_AUDIO][AUDIO][/INST]lang:de[TRANSCRIBE], without lang where none is given

Neither writes times, nor translates so.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ferrum_jax.core.outputs import CompletionOutput
from ferrum_jax.inputs.audio.clip import num_quiet_windows, quiet_windows
from ferrum_jax.inputs.audio.features import QwenSounds, VoxtralSounds
from ferrum_jax.inputs.identity import digest_of
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.io.error_text import quoted
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.tasks.transcription.languages import code_of, name_of
from ferrum_jax.tasks.transcription.transcriber import (
    SoundWindow,
    Transcriber,
    WindowAnswer,
    WindowRequest,
    Words,
    logprobs_of,
)
from ferrum_jax.text.prompts import PromptEncoder

MOST_SECONDS = 120  # of a window
_TOKENS_PER_SECOND, _MORE_TOKENS = 20, 64  # that a window's text has at most by itself; nobody speaks faster
_MARK = "<asr_text>"  # stands between the language and the text
_MOST_BEFORE_MARK = 16  # tokens; a text in which it does not come is all text
_NO_LANGUAGE = "none"  # what is written where nobody speaks
_OF_QWEN = {
    *("ar", "cs", "da", "de", "el", "en", "es", "fa", "fi", "fr", "hi", "hu", "id", "it", "ja", "ko", "mk", "ms", "nl"),
    *("pl", "pt", "ro", "ru", "sv", "th", "tl", "tr", "vi", "yue", "zh"),
}  # as Shi et al. 2026 (Qwen3-ASR) list them
_OWN_CODES, _OWN_NAMES = {"filipino": "tl", "fil": "tl"}, {"tl": "Filipino"}  # that Whisper has otherwise


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptTranscriber(Transcriber):
    """Asks models whose prompts have tokens for sounds. prompts: how texts and sounds become token ids."""

    prompts: PromptEncoder

    spaced: ClassVar[bool] = False
    maker: ClassVar[str]

    @staticmethod
    def of_prompts(prompts: PromptEncoder) -> PromptTranscriber | None:
        """That of a model whose prompts are these; None of one that writes down nothing, or lacks a file for it."""
        if prompts.sounds is None or prompts.tokenizer is None:
            return None
        processor, known = prompts.sounds.processor, prompts.tokenizer.special_texts()
        for kind, processed, needed in (
            (QwenTranscriber, QwenSounds, (_MARK,)),
            (VoxtralTranscriber, VoxtralSounds, VoxtralTranscriber.places),
        ):
            has_template = prompts.chat is not None or kind is VoxtralTranscriber
            if isinstance(processor, processed) and has_template and all(each in known for each in needed):
                return kind(
                    processor=processor,
                    tokenizer=prompts.tokenizer,
                    sources=prompts.sounds.sources,
                    prompts=prompts,
                )
        return None

    @property
    def digest(self) -> str:
        assert self.prompts.sounds is not None, "of_prompts has seen to it"
        return digest_of(self.maker, self.prompts.sounds.digest)

    def check(self, params: TranscriptionParams) -> None:
        if params.timestamps:
            raise ValueError(
                f"times are asked for, and {self.maker} writes none: give the response_format 'json' or 'text', or "
                "leave timestamps out"
            )
        if params.task != "transcribe":
            raise ValueError(f"task is {params.task!r}; {self.maker} writes down what is said: ask for it in a chat")
        special = next((each for each in self.tokenizer.special_texts() if each in (params.prompt or "")), None)
        if special is not None:
            raise ValueError(f"prompt has the token {special!r}, which is no text; leave it out")

    def cut(self, waveform: np.ndarray) -> list[tuple[float, np.ndarray]]:
        rate = self.processor.sampling_rate
        found, start = [], 0
        for samples in quiet_windows(waveform, rate, self.most_samples):
            found.append((start / rate, samples))
            start += len(samples)
        return found

    def num_windows(self, num_samples: int) -> int:
        return num_quiet_windows(num_samples, self.processor.sampling_rate, self.most_samples)

    def prompt_ids(self, params: TranscriptionParams, num_samples: int | None) -> Sequence[int]:
        longest = self.most_samples if num_samples is None else min(num_samples, self.most_samples)
        return [*self.prompt(params), *[self._place] * (self.processor.num_tokens(longest) - 1)]

    @property
    def most_samples(self) -> int:
        """How long a window is at most. Raises ValueError where the model has no room for any."""
        processor, sounds = self.processor, self.prompts.sounds
        assert sounds is not None, "of_prompts has seen to it"
        assert isinstance(processor, QwenSounds | VoxtralSounds), "of_prompts has seen to it"
        most, unit = MOST_SECONDS * processor.sampling_rate, processor.unit_samples
        samples = min(most, sounds.max_frames * processor.hop_length) // unit * unit
        while samples and processor.num_tokens(samples) > self._max_model_len // 2:
            samples -= unit
        if not samples:
            raise ValueError(
                f"max_model_len is {self._max_model_len:,} and max_image_patches {sounds.max_frames:,}; a window of "
                f"{unit / processor.sampling_rate:g} s has {processor.num_tokens(unit):,} tokens, which may be half of "
                "the one, and must fit in the other"
            )
        return samples

    def requests(self, sounds: Sequence[SoundWindow], params: TranscriptionParams) -> list[WindowRequest]:
        self.check(params)
        ids = self.prompt(params)
        longest = max(each.clip.num_tokens for each in sounds)
        most = int(max(each.clip.seconds for each in sounds) * _TOKENS_PER_SECOND) + _MORE_TOKENS
        sampling = SamplingParams(
            max_tokens=params.max_tokens or max(1, min(most, self._max_model_len - len(ids) - longest)),
            temperature=params.temperature,
            seed=params.seed,
            logprobs=0 if params.logprobs else None,
            detokenize=False,
        )
        return [
            WindowRequest(prompt={"prompt_token_ids": ids, "sounds": [each.clip]}, sampling=sampling) for each in sounds
        ]

    @property
    def _place(self) -> int:
        """The token that stands for sounds."""
        assert self.prompts.sounds is not None, "of_prompts has seen to it"
        return self.tokenizer.special_texts()[self.prompts.sounds.placeholder]

    @property
    def _max_model_len(self) -> int:
        assert self.prompts.max_model_len is not None, "a model that is open has one"
        return self.prompts.max_model_len

    @abc.abstractmethod
    def prompt(self, params: TranscriptionParams) -> list[int]:
        """The prompt's tokens, with one for the sound of a window. Raises ValueError as `check`."""

    def words(self, params: TranscriptionParams) -> Words:
        return AllWords()

    def answer(self, window: SoundWindow, output: CompletionOutput, params: TranscriptionParams) -> WindowAnswer:
        language = None if params.language is None else _code(params.language)
        return WindowAnswer(language=language, token_ids=output.token_ids, logprobs=logprobs_of(output))


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenTranscriber(PromptTranscriber):
    """Asks Qwen3-ASR."""

    maker: ClassVar[str] = "Qwen3-ASR"

    def check(self, params: TranscriptionParams) -> None:
        super().check(params)
        if params.language is not None:
            _qwen_name(params.language)

    def prompt(self, params: TranscriptionParams) -> list[int]:
        said = [{"role": "user", "content": [{"type": "audio", "audio": None}]}]
        if params.prompt is not None:
            said = [{"role": "system", "content": params.prompt.strip()}, *said]
        text = self.prompts.render_chat(said)
        if params.language is not None:
            text += f"language {_qwen_name(params.language)}{_MARK}"
        return self.tokenizer.encode(text, add_special_tokens=False)

    def words(self, params: TranscriptionParams) -> Words:
        return AllWords() if params.language is not None else WordsBehind(self._mark)

    def answer(self, window: SoundWindow, output: CompletionOutput, params: TranscriptionParams) -> WindowAnswer:
        found = super().answer(window, output, params)
        place = _place_of(self._mark, output.token_ids)
        if params.language is not None or place is None:
            return found
        said = self.tokenizer.decode(output.token_ids[:place]).strip().lower().removeprefix("language").strip()
        return dataclasses.replace(
            found,
            language=None if said in ("", _NO_LANGUAGE) else _code(said),
            token_ids=found.token_ids[place + 1 :],
            logprobs=found.logprobs[place + 1 :],
        )

    @property
    def _mark(self) -> int:
        return self.tokenizer.special_texts()[_MARK]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VoxtralTranscriber(PromptTranscriber):
    """Asks Voxtral."""

    maker: ClassVar[str] = "Voxtral"
    places: ClassVar[tuple[str, ...]] = ("[INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[/INST]", "[TRANSCRIBE]")

    def check(self, params: TranscriptionParams) -> None:
        super().check(params)
        if params.prompt is not None:
            raise ValueError("prompt is given, and Voxtral takes no text before what it writes down; leave it out")
        if params.language is not None:
            _known_code(params.language)

    def prompt(self, params: TranscriptionParams) -> list[int]:
        known = self.tokenizer.special_texts()
        *before, behind = (known[each] for each in self.places)
        said = f"lang:{_known_code(params.language)}" if params.language is not None else ""
        start = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
        return [*start, *before, *self.tokenizer.encode(said, add_special_tokens=False), behind]


class AllWords:
    """Every token is text."""

    def push(self, token_ids: Sequence[int]) -> Sequence[int]:
        return token_ids

    def end(self) -> Sequence[int]:
        return ()


class WordsBehind:
    """The tokens behind the mark; all of them where it is not among the first."""

    def __init__(self, mark: int) -> None:
        self._mark = mark
        self._before: list[int] | None = []  # of the mark; None behind it

    def push(self, token_ids: Sequence[int]) -> Sequence[int]:
        if self._before is None:
            return token_ids
        self._before += token_ids
        place = _place_of(self._mark, self._before)
        if place is None and len(self._before) <= _MOST_BEFORE_MARK:
            return ()
        found, self._before = self._before[0 if place is None else place + 1 :], None
        return found

    def end(self) -> Sequence[int]:
        found, self._before = self._before or (), None
        return found


def _place_of(mark: int, token_ids: Sequence[int]) -> int | None:
    """The place of the mark among the first tokens."""
    return next((at for at, each in enumerate(token_ids[: _MOST_BEFORE_MARK + 1]) if each == mark), None)


def _known_code(language: str) -> str:
    """The code of a language. Raises ValueError for one that is unknown."""
    code = _code(language)
    if name_of(code) == code:
        raise ValueError(f"language is {quoted(language)}; give its code or its English name, such as 'de' or 'german'")
    return code


def _qwen_name(language: str) -> str:
    """The name of a language as Qwen writes it. Raises ValueError for one that it has not."""
    code = _code(language)
    if code not in _OF_QWEN:
        raise ValueError(f"language is {quoted(language)}; Qwen3-ASR has {', '.join(sorted(_OF_QWEN))}")
    return _OWN_NAMES.get(code, name_of(code).title())


def _code(language: str) -> str:
    said = language.strip().lower()
    return _OWN_CODES.get(said, code_of(said))
