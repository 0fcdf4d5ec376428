"""Loading an encoder: weights and executables side by side, as `load.py` loads a model that generates."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from checkpoints.fingerprints import Fingerprint
from checkpoints.memory import Copies
from checkpoints.sentence import SentenceLayout
from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.encoder_engine import WINDOW, EncoderEngine
from ferrum_jax.models.families.encoder_spec import EncoderSpec
from ferrum_jax.runtime.compile.deferred import Prepared
from ferrum_jax.runtime.compile.executable_store import ExecutableCache
from ferrum_jax.runtime.encoder_runner import EncoderRunner
from ferrum_jax.runtime.encoder_runtime import (
    POOLINGS,
    EncoderBucket,
    EncoderLayout,
    compile_encoder,
    lay_out_encoder,
)
from ferrum_jax.runtime.placing.weights import read_beside, replace_weights
from ferrum_jax.tasks.classifier import Classifier
from ferrum_jax.tasks.scorer import CrossEncoderScorer, Scorer
from ferrum_jax.tasks.texts import Texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedEncoder:
    """Weights and executables of an encoder, as `Loaded` has those of a model that generates.

    behind: layers behind the pooling, of the vectors of a step, [n, D] -> [n, O].
    """

    layout: EncoderLayout
    weights: tuple[jax.Array, ...]
    executables: Prepared[EncoderBucket]
    fingerprint: Fingerprint
    behind: tuple[Callable[[np.ndarray], np.ndarray], ...] = ()
    weights_version: int = 0

    @property
    def cache_fingerprint(self) -> bytes:
        """The digest of the weights: an encoder caches nothing that other weights could hit."""
        return self.fingerprint.digest

    @property
    def max_text_tokens(self) -> int:
        return self.layout.max_model_len

    @property
    def max_requests(self) -> int:
        """Two windows: while one runs, the next is read."""
        return 2 * WINDOW

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

    def with_weights(self, copies: Copies) -> LoadedEncoder:
        """These executables with copies of new weights."""
        weights = replace_weights(self.layout, self.weights, copies)
        return dataclasses.replace(
            self, weights=weights.arrays, fingerprint=weights.fingerprint, weights_version=self.weights_version + 1
        )


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
) -> LoadedEncoder:
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
    return LoadedEncoder(
        layout=layout,
        weights=weights.arrays,
        executables=executables,
        fingerprint=weights.fingerprint,
        behind=() if folder is None else tuple(step.load(folder) for step in sentence.dense),
    )


def build_encoder_engine(loaded: LoadedEncoder, *_: object, **__: object) -> EncoderEngine:
    """A fresh engine. The other arguments of `build_engine` concern models that generate."""
    spec = loaded.layout.spec
    return EncoderEngine(
        runner=EncoderRunner(loaded.weights, loaded.executables, loaded.layout.num_shards),
        name=spec.architecture,
        poolings=("cls",) if spec.labels else POOLINGS,
        max_text_tokens=loaded.max_text_tokens,
        behind=loaded.behind,
        weights_version=loaded.weights_version,
    )
