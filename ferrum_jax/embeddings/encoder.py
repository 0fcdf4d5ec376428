"""An encoder, ready: weights and executables, and texts through them a window at a time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from checkpoints.memory import Copies
from checkpoints.sentence import SentenceLayout
from ferrum_jax.config import EngineConfig
from ferrum_jax.embeddings.embedder import Text
from ferrum_jax.embeddings.encoder_runner import EncoderRunner
from ferrum_jax.embeddings.encoder_runtime import (
    EncoderBucket,
    EncoderLayout,
    compile_encoder,
    lay_out_encoder,
)
from ferrum_jax.executables.deferred import Prepared
from ferrum_jax.executables.executable_store import ExecutableCache
from ferrum_jax.models.encoder_spec import EncoderSpec
from ferrum_jax.pools.budget import Ledger
from ferrum_jax.runtime.weights import PlacedWeights, read_beside, replace_weights

Key = TypeVar("Key")

WINDOW = 1024  # texts that are looked at together, so that those of a length share steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """What an LLM over an encoder holds in place of an engine."""

    layout: EncoderLayout
    runner: EncoderRunner
    fingerprint: bytes
    behind: tuple[Callable[[np.ndarray], np.ndarray], ...] = ()  # of the pooled vectors of a step, [n, D] -> [n, O]
    weights_version: int = 0

    @property
    def ledger(self) -> Ledger:
        return Ledger.of_weights(self.layout.model.weights_bytes)

    def run(self, texts: Iterable[Text[Key]]) -> Iterator[tuple[Text[Key], np.ndarray, int]]:
        """(text, its vector [D] float32, not normalised, 0 tokens cached) of each, in the order in which steps end."""
        source = iter(texts)
        while window := list(itertools.islice(source, WINDOW)):
            for pooling in dict.fromkeys(text.pooling for text in window):
                yield from self._run([text for text in window if text.pooling == pooling], pooling)

    def _run(self, texts: Sequence[Text[Key]], pooling: str) -> Iterator[tuple[Text[Key], np.ndarray, int]]:
        seconds = {i: text.second for i, text in enumerate(texts) if text.second is not None}
        for members, vectors in self.runner.run([text.token_ids for text in texts], pooling, seconds):
            for layer in self.behind:
                vectors = layer(vectors)
            for member, vector in zip(members, vectors, strict=True):
                yield texts[member], vector, 0

    def with_weights(self, copies: Copies) -> Encoder:
        """The same executables with copies of other weights in the place of those that have one."""
        weights = replace_weights(self.layout, self.runner.weights, copies)
        made = _encoder(self.layout, weights, self.runner.executables)
        return dataclasses.replace(made, behind=self.behind, weights_version=self.weights_version + 1)


def _encoder(layout: EncoderLayout, weights: PlacedWeights, executables: Prepared[EncoderBucket]) -> Encoder:
    runner = EncoderRunner(weights.arrays, executables, layout.num_shards)
    return Encoder(layout=layout, runner=runner, fingerprint=weights.fingerprint)


def load_encoder(
    spec: EncoderSpec,
    read: Callable[..., dict[str, jax.Array]],
    config: EngineConfig,
    mesh: Mesh,
    sentence: SentenceLayout,
    executable_cache: ExecutableCache | None,
    on_progress: Callable[[str, int, int], None],
    check: Callable[[EncoderLayout, bytes | None], None] = lambda layout, fingerprint: None,
) -> Encoder:
    """Compiles every bucket while the weights load, which read(targets, expansions) gives. mesh: of config.mesh.

    check: called with the layout before weights are read, and again with their fingerprint; may raise ValueError.
    """
    layout = lay_out_encoder(spec, config, mesh, sentence.max_seq_length)
    check(layout, None)

    def compile(abandoned: threading.Event) -> Prepared[EncoderBucket]:
        on_done = functools.partial(on_progress, "executables")
        return compile_encoder(layout, executable_cache=executable_cache, on_done=on_done, abandoned=abandoned)

    return _encoder(layout, *read_beside(layout, read, compile, functools.partial(check, layout)))
