"""Transcription: what is said in a sound, made of the answers to its windows, whole or while they come."""

import dataclasses
import unicodedata
from collections import Counter
from collections.abc import Sequence

from ferrum_jax.core.outputs import CompletionOutput, Transcription, TranscriptionSegment
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.tasks.transcription.transcriber import SoundWindow, Transcriber, mean
from ferrum_jax.text.stream import TextStream

_UNSPACED = ("THAI", "LAO", "KHMER", "MYANMAR")  # scripts of narrow letters whose words have no space between them


def transcription_of(
    transcriber: Transcriber,
    windows: Sequence[SoundWindow],
    answers: Sequence[CompletionOutput],
    params: TranscriptionParams,
) -> Transcription:
    """The transcription of a sound. answers: to its windows, in their order."""
    found = [transcriber.answer(window, each, params) for window, each in zip(windows, answers, strict=True)]
    text = GrowingText(transcriber, params)
    languages = Counter(each.language for each in found if each.language is not None)
    segments: list[TranscriptionSegment] = []
    for each in found:
        segments += numbered(each.segments, first_id=len(segments))
    return Transcription(
        text="".join(text.push(answer.token_ids) + text.end_window() for answer in answers),
        language=languages.most_common(1)[0][0] if languages else None,
        task=params.task,
        duration_s=windows[-1].end_s,
        segments=tuple(segments),
        token_ids=tuple(token for each in found for token in each.token_ids),
        avg_logprob=mean([value for each in found for value in each.logprobs]),
        is_cut=any(answer.finish_reason == "length" for answer in answers),
    )


def numbered(segments: Sequence[TranscriptionSegment], *, first_id: int) -> list[TranscriptionSegment]:
    """The parts of a window, numbered from `first_id` on."""
    return [dataclasses.replace(part, id=first_id + place) for place, part in enumerate(segments)]


class GrowingText:
    """The text of a sound while its windows are answered, in their order. What it gives is never taken back.

    All that it gives is `Transcription.text`: it begins and ends with no space.
    """

    def __init__(self, transcriber: Transcriber, params: TranscriptionParams) -> None:
        self._transcriber, self._params = transcriber, params
        self._last = ""  # character that was given
        self._begin()

    def _begin(self) -> None:
        """A window."""
        self._stream = TextStream(self._transcriber.tokenizer)
        self._words = self._transcriber.words(self._params)
        self._held = ""  # spaces that may be the end of it all
        self._has_begun = self._transcriber.spaced and bool(self._last)

    def push(self, token_ids: Sequence[int]) -> str:
        """What is certain of the text after the next tokens of a window."""
        for token in self._words.push(token_ids):
            self._stream.push(token)
        return self._given(self._stream.take())

    def end_window(self) -> str:
        """What is certain after the last token of a window; the next tokens are the next one's."""
        for token in self._words.end():
            self._stream.push(token)
        self._stream.flush()
        new = self._given(self._stream.take())
        held = self._held if self._transcriber.spaced else ""
        self._begin()
        self._held = held
        return new

    def _given(self, new: str) -> str:
        """New text without spaces at the beginning, and with those at its end held back."""
        text = self._held + new
        text = text if self._has_begun else text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if not kept:
            return ""
        gap = "" if self._has_begun else gap_between(self._last, kept)
        self._has_begun, self._last = True, kept[-1]
        return gap + kept


def gap_between(before: str, after: str) -> str:
    """What stands between two texts that have no space there: one, and nothing in scripts that write none."""
    return " " if before and after and not (_unspaced(before[-1]) or _unspaced(after[0])) else ""


def _unspaced(character: str) -> bool:
    wide = unicodedata.east_asian_width(character) in ("W", "F") and not "\uac00" <= character <= "\ud7a3"
    return wide or unicodedata.name(character, "").startswith(_UNSPACED)
