"""HeardSound: a sound cut in windows whose features are made, their requests, and what becomes of their answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ferrum_jax.core.outputs import CompletionOutput, RequestOutput, Transcription, TranscriptionSegment
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.inputs.audio.waveform import Look, do_not_look
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.inputs.prompt import Prompt
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.tasks.task import EngineRequest, Task, succeeded
from ferrum_jax.tasks.transcription.transcriber import SoundWindow, Transcriber, WindowRequest
from ferrum_jax.tasks.transcription.transcription import GrowingText, numbered, transcription_of


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HeardSound:
    """One sound. requests: of its windows, in their order."""

    transcriber: Transcriber
    params: TranscriptionParams
    windows: Sequence[SoundWindow]
    requests: Sequence[WindowRequest]

    @classmethod
    def of(
        cls, transcriber: Transcriber, sound: Any, params: TranscriptionParams, look: Look = do_not_look
    ) -> HeardSound:
        """Reads, decodes and processes a sound: seconds of work for a long one, so done in a thread.

        Raises ValueError for what is not a sound that can be read, and for what the model cannot do.
        """
        transcriber.check(params)  # refuses before anything is read
        windows = transcriber.windows(transcriber.waveform(sound, look), look)
        requests = transcriber.requests(windows, params)
        return cls(transcriber=transcriber, params=params, windows=windows, requests=requests)

    def transcription(self, answers: Sequence[CompletionOutput]) -> Transcription:
        """answers: to its windows, in their order."""
        return transcription_of(self.transcriber, self.windows, answers, self.params)

    def task(
        self,
        request: Callable[[Prompt, SamplingParams, RequestOptions], EngineRequest],
        key: object = "",
        priority: int = 0,
    ) -> Task[Transcription]:
        """The sound's transcription. request: makes what the engine takes of a prompt. key: seeds its windows."""

        def finish(outputs: Sequence[RequestOutput]) -> Transcription:
            return self.transcription([succeeded(output).outputs[0] for output in outputs])

        return Task(
            [
                request(window.prompt, window.sampling, RequestOptions(key=str((key, place)), priority=priority))
                for place, window in enumerate(self.requests)
            ],
            finish,
        )

    def segments(self, place: int, answer: CompletionOutput, *, first_id: int) -> list[TranscriptionSegment]:
        """The parts of the window at `place`, numbered from `first_id` on, where times are asked for."""
        found = self.transcriber.answer(self.windows[place], answer, self.params)
        return numbered(found.segments, first_id=first_id)

    def growing(self) -> GrowingText:
        """Its text while the windows are answered."""
        return GrowingText(self.transcriber, self.params)
