"""Transcription: what is said in a sound, made of the answers to its windows.

Times come in pairs of tokens, the beginning and the end of a part, counted from the beginning of its window. A part
without its end, which a window may have as its last, ends with the window.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from ferrum_jax.asked.transcription_params import TranscriptionParams
from ferrum_jax.outputs import CompletionOutput, Transcription, TranscriptionSegment
from ferrum_jax.text.stream import TextStream
from ferrum_jax.text.tokenizer import Tokenizer
from ferrum_jax.transcribing.generation_file import WhisperTokens
from ferrum_jax.transcribing.windows import SoundWindow, Transcriber

SECONDS_PER_STEP = 0.02  # from one time to the next


def transcription_of(
    transcriber: Transcriber,
    windows: Sequence[SoundWindow],
    answers: Sequence[CompletionOutput],
    params: TranscriptionParams,
) -> Transcription:
    """The transcription of a sound. answers: to its windows, in their order."""
    tokens, tokenizer = transcriber.tokens, transcriber.tokenizer
    found = [
        _Answer(tokens, tokenizer, answer, window, params) for answer, window in zip(answers, windows, strict=True)
    ]
    segments: list[TranscriptionSegment] = []
    for place, answer in enumerate(answers):
        segments += segments_of(transcriber, windows[place], answer, params, first_id=len(segments))
    (language, _), *_ = Counter(each.language for each in found).most_common(1)
    return Transcription(
        text="".join(each.text for each in found).strip(),
        language=language,
        task=params.task,
        duration_s=windows[-1].end_s,
        segments=tuple(segments),
        token_ids=tuple(token for each in found for token in each.token_ids),
        avg_logprob=_mean([value for each in found for value in each.logprobs]),
        is_cut=any(answer.finish_reason == "length" for answer in answers),
    )


def segments_of(
    transcriber: Transcriber,
    window: SoundWindow,
    answer: CompletionOutput,
    params: TranscriptionParams,
    *,
    first_id: int,
) -> list[TranscriptionSegment]:
    """The parts of one window, numbered from `first_id` on; none where no times were asked for."""
    if not params.timestamps:
        return []
    found = _Answer(transcriber.tokens, transcriber.tokenizer, answer, window, params).segments()
    return [dataclasses.replace(part, id=first_id + place) for place, part in enumerate(found)]


class _Answer:
    """The tokens of one window."""

    def __init__(
        self,
        tokens: WhisperTokens,
        tokenizer: Tokenizer,
        answer: CompletionOutput,
        window: SoundWindow,
        params: TranscriptionParams,
    ) -> None:
        _, rules = tokens.asked(params)
        leading = rules.num_leading
        self._tokens, self._tokenizer, self._window = tokens, tokenizer, window
        self.token_ids = answer.token_ids[leading:]
        self.logprobs = [
            entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs or (), strict=False)
        ][leading:]
        codes = {token: code for code, token in tokens.languages.items()}
        given = "en" if params.language is None else tokens.language_code(params.language)
        self.language = codes.get(answer.token_ids[0], given) if leading and answer.token_ids else given

    @property
    def text(self) -> str:
        return self._text_of(self.token_ids)

    def _text_of(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode([token for token in token_ids if token < self._tokens.end])

    def segments(self) -> list[TranscriptionSegment]:
        """Its parts, in their order; parts without a text are left out."""
        found: list[TranscriptionSegment] = []
        begun: int | None = None  # the place of the time, or of the word, that begins a part
        for place, token in enumerate(self.token_ids):
            if begun is None:
                begun = place
            elif token >= self._tokens.times_from:
                is_end = self._has_text(begun, place)
                found += [self._segment(begun, place + 1)] if is_end else []
                begun = None if is_end else place
        if begun is not None and self._has_text(begun, len(self.token_ids)):
            found.append(self._segment(begun, len(self.token_ids)))
        return [each for each in found if each.text.strip()]

    def _has_text(self, begun: int, end: int) -> bool:
        return any(token < self._tokens.end for token in self.token_ids[begun:end])

    def _segment(self, begun: int, end: int) -> TranscriptionSegment:
        """That of tokens [begun, end)."""
        own, window, first = self.token_ids[begun:end], self._window, self._tokens.times_from
        start_s = self._time(own[0]) if own[0] >= first else window.start_s
        return TranscriptionSegment(
            id=0,
            start_s=start_s,
            end_s=self._time(own[-1]) if own[-1] >= first else max(start_s, window.end_s),
            text=self._text_of(own),
            token_ids=tuple(own),
            avg_logprob=_mean(self.logprobs[begun:end]),
        )

    def _time(self, token: int) -> float:
        return round(self._window.start_s + (token - self._tokens.times_from) * SECONDS_PER_STEP, 2)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


class GrowingText:
    """The text of a sound while its windows are answered, in their order. What it gives is never taken back.

    All that it gives is `Transcription.text`: it begins and ends with no space.
    """

    def __init__(self, tokens: WhisperTokens, tokenizer: Tokenizer, num_leading: int) -> None:
        self._tokens, self._tokenizer, self._num_leading = tokens, tokenizer, num_leading
        self._stream = TextStream(tokenizer)
        self._num_skipped = 0
        self._has_begun = False
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """What is certain of the text after the next tokens of a window."""
        for token in token_ids:
            if self._num_skipped < self._num_leading:
                self._num_skipped += 1
            elif token < self._tokens.end:
                self._stream.push(token)
        return self._given(self._stream.take())

    def end_window(self) -> str:
        """What is certain after the last token of a window; the next tokens are the next one's."""
        self._stream.flush()
        new = self._given(self._stream.take())
        self._stream, self._num_skipped = TextStream(self._tokenizer), 0
        return new

    def _given(self, new: str) -> str:
        """New text without spaces at the beginning, and with those at its end held back."""
        text = self._held + new
        text = text if self._has_begun else text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._has_begun = self._has_begun or bool(kept)
        return kept
