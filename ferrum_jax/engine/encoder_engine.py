"""EncoderEngine: the engine of an encoder, which makes a vector of each text and generates nothing.

    add ─► waiting ─► a window of at most WINDOW texts, by pooling and length ─► one bucket step after the other

A window is looked at together, so that texts of one length share steps; the texts that come meanwhile wait for the
next. One step is in flight while the next is packed.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ferrum_jax.core.delta import Beside, Delta
from ferrum_jax.core.metrics import ReuseMetrics
from ferrum_jax.core.request_options import NO_OPTIONS, RequestOptions
from ferrum_jax.engine.core import EngineCore
from ferrum_jax.runtime.encoder_runner import EncoderRunner, VectorsInFlight, WholeText
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.tasks.task import ONE_TOKEN, generates_nothing

WINDOW = 1024  # texts that are looked at together
_NO_REUSE = ReuseMetrics(enabled=False, block_size=0, kv_dtype="none")


class EncoderEngine(EngineCore):
    """An `EngineCore` whose requests are whole texts; the last delta of each has its `embedding`, not normalised.

    name: of the architecture. poolings: that requests may ask for. behind: layers behind the pooling, [n, D] -> [n, O].
    """

    def __init__(
        self,
        *,
        runner: EncoderRunner,
        name: str,
        poolings: Sequence[str],
        max_text_tokens: int,
        behind: Sequence[Callable[[np.ndarray], np.ndarray]] = (),
        weights_version: int = 0,
    ) -> None:
        self.runner = runner
        self.weights_version = weights_version
        self._name, self._poolings, self._max_text_tokens, self._behind = name, poolings, max_text_tokens, behind
        self._ids = itertools.count()
        self._open: dict[int, WholeText] = {}  # all that have not ended
        self._waiting: deque[WholeText] = deque()
        self._window: deque[list[WholeText]] = deque()  # texts that may share a step; those that were aborted too
        self._in_flight: deque[VectorsInFlight] = deque()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._open)

    # -- in ------------------------------------------------------------------------------------------

    def add(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, options: RequestOptions = NO_OPTIONS
    ) -> int:
        """Queues a text and returns its id. prompt_token_ids: of the model's vocabulary.

        Raises ValueError for a request of anything but a vector, and for a text that the model cannot read.
        """
        if not options.embeds or options.scores is not None or (sampling is not ONE_TOKEN and sampling != ONE_TOKEN):
            raise ValueError(generates_nothing(self._name, "is an encoder"))
        if options.pooling not in self._poolings:
            known = " and ".join(map(repr, self._poolings))
            raise ValueError(f"pooling is {options.pooling!r}; this model has {known}")
        if not 1 <= len(prompt_token_ids) <= self._max_text_tokens:
            raise ValueError(
                f"the text has {len(prompt_token_ids)} tokens; it must have 1 to {self._max_text_tokens}: shorten it"
            )
        text = WholeText(next(self._ids), prompt_token_ids, options.pooling, options.second)
        self._open[text.id] = text
        self._waiting.append(text)
        return text.id

    def abort(self, submission_id: int) -> None:
        self._open.pop(submission_id, None)

    def renew(self, weights: tuple[jax.Array, ...], fingerprint: bytes, version: int) -> None:
        self.runner.weights, self.weights_version = weights, version

    # -- one step ------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Packs and dispatches the next step, and gives the vectors of the one before it."""
        texts = self._next_texts()
        if not texts:
            return self._commit()
        step, left = self.runner.dispatch(texts)
        if left:
            self._window.appendleft(left)
        self._in_flight.append(step)
        return self._commit() if len(self._in_flight) > 1 else []

    def _next_texts(self) -> list[WholeText]:
        """Texts that may share the next step; none where nothing is left but what is in flight."""
        while self._window or self._waiting:
            if not self._window:
                self._open_window()
                continue
            texts = [text for text in self._window.popleft() if text.id in self._open]
            if texts:
                return texts
        return []

    def _open_window(self) -> None:
        """Takes the texts that wait, in order; in a window poolings stand as they came, and lengths rise in each."""
        groups: dict[str, dict[int, list[WholeText]]] = {}
        for _ in range(min(WINDOW, len(self._waiting))):
            text = self._waiting.popleft()
            groups.setdefault(text.pooling, {}).setdefault(self.runner.length_of(len(text.token_ids)), []).append(text)
        self._window.extend(texts for lengths in groups.values() for _, texts in sorted(lengths.items()))

    def _commit(self) -> list[Delta]:
        """The deltas of the oldest step in flight."""
        if not self._in_flight:
            return []
        step = self._in_flight.popleft()
        vectors = step.fetch()
        for layer in self._behind:
            vectors = layer(vectors)
        return [
            self._last(text, "stop", vector)
            for text, vector in zip(step.texts, vectors, strict=True)
            if self._open.pop(text.id, None) is not None
        ]

    def _last(self, text: WholeText, finish_reason: str, vector: np.ndarray | None = None) -> Delta:
        return Delta(
            id=text.id,
            choice=0,
            token_ids=[],
            logprobs=None,
            finish_reason=finish_reason,
            stop_reason=None,
            is_last=True,
            num_cached_tokens=0,
            prompt_logprobs=None,
            times_us=[],
            beside=Beside(weights_version=self.weights_version, embedding=vector),
        )

    def settle(self) -> list[Delta]:
        deltas: list[Delta] = []
        while self._in_flight:
            deltas += self._commit()
        return deltas

    def abort_all(self) -> list[Delta]:
        deltas = self.settle() + [self._last(text, "abort") for text in self._open.values()]
        self._open.clear()
        return deltas

    # -- how it goes ---------------------------------------------------------------------------------

    def counts(self) -> dict[str, Any]:
        return _NO_REUSE.snapshot()

    def live(self) -> dict[str, Any]:
        running = sum(len(step.texts) for step in self._in_flight)
        return {"num_running": running, "num_waiting": max(len(self._open) - running, 0), "recent_steps": []}

    def close(self) -> None:
        """Drops what waits and what is in flight; the weights are its model's."""
        for texts in (self._open, self._waiting, self._window, self._in_flight):
            texts.clear()
