"""Many sounds, each read in a thread while others run, and their transcriptions as they are ready."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np

from ferrum_jax.core.outputs import RequestOutput, Transcription
from ferrum_jax.inputs.audio.sound_sources import is_array_with_rate
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.inputs.prompt import Prompt
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.tasks.transcription.heard_sound import HeardSound
from ferrum_jax.tasks.transcription.transcriber import Transcriber

Key = TypeVar("Key", bound=Hashable)
READ_AHEAD = 2  # sounds; the features of an hour are 115 MB, and its waveform 230

Requests = Iterable[tuple[Key, Any, TranscriptionParams]]
Asked = Iterator[tuple[tuple[Key, int], Prompt, SamplingParams]]
Run = Callable[[Asked], Generator[tuple[Any, RequestOutput | ValueError], None, None]]  # as LLM.as_completed


def listed_sounds(given: Any) -> list[Any]:
    """One sound or many as a list of them. Raises ValueError for what is neither."""
    if isinstance(given, str | bytes | bytearray | memoryview | os.PathLike) or is_array_with_rate(given):
        return [given]
    if isinstance(given, np.ndarray) or not isinstance(given, Iterable):
        raise ValueError(
            f"sounds is a {type(given).__name__}; give bytes, a pathlib.Path, a URL, an array with its rate as in "
            "(samples, 16000), or a list of these"
        )
    return list(given)


def transcribe_all(
    transcriber: Transcriber, requests: Requests[Key], run: Run
) -> Generator[tuple[Key, Transcription | ValueError], None, None]:
    """(key, transcription) of each sound in the order in which they are ready; a refused one gives its ValueError."""
    begun: _Begun[Key] = _Begun(transcriber)
    with contextlib.closing(run(begun.windows(requests))) as outputs:
        for (key, place), output in outputs:
            yield from begun.refused()
            begun.put(key, place, output)
            yield from begun.ended()
    yield from begun.refused()


class _Begun(Generic[Key]):
    """Sounds whose windows run."""

    def __init__(self, transcriber: Transcriber) -> None:
        self._transcriber = transcriber
        self._heard: dict[Key, HeardSound] = {}
        self._answers: dict[Key, dict[int, RequestOutput | ValueError]] = {}
        self._refused: list[tuple[Key, ValueError]] = []
        self._whole: list[Key] = []

    def windows(self, requests: Requests[Key]) -> Asked:
        """The request of each window. A sound that cannot be read is noted, and has none."""
        for key, reading in self._read_ahead(requests):
            try:
                heard = reading.result()
            except ValueError as error:
                self._refused.append((key, error))
                continue
            self._heard[key], self._answers[key] = heard, {}
            for place, request in enumerate(heard.requests):
                yield (key, place), request.prompt, request.sampling

    def _read_ahead(self, requests: Requests[Key]) -> Iterator[tuple[Key, Future[HeardSound]]]:
        """The sounds, a few of them ahead."""
        ahead: deque[tuple[Key, Future[HeardSound]]] = deque()
        pool = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="ferrum-sounds")
        try:
            for key, sound, params in requests:
                ahead.append((key, pool.submit(HeardSound.of, self._transcriber, sound, params)))
                if len(ahead) > READ_AHEAD:
                    yield ahead.popleft()
            while ahead:
                yield ahead.popleft()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def refused(self) -> Iterator[tuple[Key, ValueError]]:
        """Sounds that were refused since this was last asked."""
        while self._refused:
            yield self._refused.pop(0)

    def put(self, key: Key, place: int, output: RequestOutput | ValueError) -> None:
        """Notes the answer to a window."""
        answers = self._answers[key]
        answers[place] = output
        if len(answers) == len(self._heard[key].windows):
            self._whole.append(key)

    def ended(self) -> Iterator[tuple[Key, Transcription | ValueError]]:
        """Sounds whose last window is answered; they are forgotten."""
        while self._whole:
            key = self._whole.pop(0)
            heard, answers = self._heard.pop(key), self._answers.pop(key)
            found = [answers[place] for place in range(len(heard.windows))]
            error = next((answer for answer in found if isinstance(answer, ValueError)), None)
            choices = [answer.outputs[0] for answer in found if isinstance(answer, RequestOutput)]
            yield key, error or heard.transcription(choices)
