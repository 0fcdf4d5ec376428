"""An encoder, ready: weights and executables, and texts through them a window at a time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from checkpoints.fingerprints import Fingerprint
from checkpoints.memory import Copies
from checkpoints.sentence import SentenceLayout
from ferrum_jax.config import EngineConfig
from ferrum_jax.models.families.encoder_spec import EncoderSpec
from ferrum_jax.runtime.compile.deferred import Prepared
from ferrum_jax.runtime.compile.executable_store import ExecutableCache
from ferrum_jax.runtime.encoder_runner import EncoderRunner
from ferrum_jax.runtime.encoder_runtime import (
    EncoderBucket,
    EncoderLayout,
    compile_encoder,
    lay_out_encoder,
)
from ferrum_jax.runtime.placing.weights import read_beside, replace_weights
from ferrum_jax.runtime.pools.budget import Ledger
from ferrum_jax.tasks.classifier import Classifier
from ferrum_jax.tasks.scorer import CrossEncoderScorer, Scorer
from ferrum_jax.tasks.task import RunningRequest
from ferrum_jax.tasks.texts import Texts

WINDOW = 1024  # texts that are looked at together, so that those of a length share steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """What an LLM over an encoder holds in place of an engine."""

    layout: EncoderLayout
    runner: EncoderRunner
    fingerprint: Fingerprint
    behind: tuple[Callable[[np.ndarray], np.ndarray], ...] = ()  # of the pooled vectors of a step, [n, D] -> [n, O]
    weights_version: int = 0

    @property
    def ledger(self) -> Ledger:
        return self.layout.ledger

    @property
    def max_text_tokens(self) -> int:
        return self.layout.max_model_len

    def scorer(self, texts: Texts) -> Scorer | None:
        """How pairs become scores, of a cross-encoder."""
        activation = self.layout.spec.scorer
        if not activation:
            return None
        return CrossEncoderScorer(texts.prompts.tokenizer, activation=activation, max_tokens=self.max_text_tokens)

    def classifier(self, texts: Texts) -> Classifier | None:
        """How logits become classes, of one that has labels."""
        labels = self.layout.spec.labels
        return None if labels is None else Classifier(labels)

    def run(self, texts: Iterable[RunningRequest]) -> Iterator[tuple[RunningRequest, np.ndarray]]:
        """(text, its vector [D] float32, not normalised) of each, in the order in which steps end."""
        source = iter(texts)
        while window := list(itertools.islice(source, WINDOW)):
            for pooling in dict.fromkeys(text.request.options.pooling for text in window):
                yield from self._run([text for text in window if text.request.options.pooling == pooling], pooling)

    def _run(self, texts: Sequence[RunningRequest], pooling: str) -> Iterator[tuple[RunningRequest, np.ndarray]]:
        seconds = {i: second for i, text in enumerate(texts) if (second := text.request.options.second) is not None}
        for members, vectors in self.runner.run([text.request.token_ids for text in texts], pooling, seconds):
            for layer in self.behind:
                vectors = layer(vectors)
            for member, vector in zip(members, vectors, strict=True):
                yield texts[member], vector

    def with_weights(self, copies: Copies) -> Encoder:
        """The same executables with copies of other weights in the place of those that have one."""
        weights = replace_weights(self.layout, self.runner.weights, copies)
        runner = EncoderRunner(weights.arrays, self.runner.executables, self.layout.num_shards)
        version = self.weights_version + 1
        return dataclasses.replace(self, runner=runner, fingerprint=weights.fingerprint, weights_version=version)


def load_encoder(
    spec: EncoderSpec,
    read: Callable[..., dict[str, jax.Array]],
    config: EngineConfig,
    mesh: Mesh,
    sentence: SentenceLayout,
    executable_cache: ExecutableCache | None,
    on_progress: Callable[[str, int, int], None],
    check: Callable[[EncoderLayout, Fingerprint | None], None] = lambda layout, fingerprint: None,
    *,
    folder: Path | None = None,
) -> Encoder:
    """Compiles every bucket while the weights load, which read(targets, expansions) gives. mesh: of config.mesh.

    folder: of the checkpoint, where there is one; it has the layers behind the pooling.

    check: called with the layout before weights are read, and again with their fingerprint; may raise ValueError.
    """
    layout = lay_out_encoder(spec, config, mesh, sentence.max_seq_length)
    check(layout, None)

    def compile(abandoned: threading.Event) -> Prepared[EncoderBucket]:
        on_done = functools.partial(on_progress, "executables")
        return compile_encoder(layout, executable_cache=executable_cache, on_done=on_done, abandoned=abandoned)

    weights, executables = read_beside(layout, read, compile, functools.partial(check, layout))
    return Encoder(
        layout=layout,
        runner=EncoderRunner(weights.arrays, executables, layout.num_shards),
        fingerprint=weights.fingerprint,
        behind=() if folder is None else tuple(step.load(folder) for step in sentence.dense),
    )
