"""An encoder, ready: weights and executables, and texts through them a window at a time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from checkpoints.fingerprint import fingerprint
from checkpoints.memory import take
from checkpoints.sentence import SentenceLayout
from ferrum_jax.cache.budget import Ledger
from ferrum_jax.config import EngineConfig
from ferrum_jax.embedding import Text
from ferrum_jax.models.bert import BertSpec
from ferrum_jax.runtime.compile import beside
from ferrum_jax.runtime.encoder import EncoderBucket, EncoderLayout, EncoderRunner, compile_encoder, lay_out_encoder
from ferrum_jax.runtime.later import Prepared
from ferrum_jax.runtime.store import ExecutableSource

Key = TypeVar("Key")

WINDOW = 1024  # texts that are looked at together, so that those of a length share steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """What an LLM over an encoder holds in place of an engine."""

    layout: EncoderLayout
    runner: EncoderRunner
    fingerprint: bytes

    @property
    def ledger(self) -> Ledger:
        return Ledger.of_weights(self.layout.model.weights_bytes)

    def run(self, texts: Iterable[Text[Key]], pooling: str) -> Iterator[tuple[Text[Key], np.ndarray, int]]:
        """(text, its vector [D] float32, not normalised, 0 tokens cached) of each, in the order in which steps end."""
        source = iter(texts)
        while window := list(itertools.islice(source, WINDOW)):
            for members, vectors in self.runner.run([text.token_ids for text in window], pooling):
                for member, vector in zip(members, vectors, strict=True):
                    yield window[member], vector, 0

    def with_weights(self, arrays: Mapping[str, Any]) -> Encoder:
        """The same executables with copies of other weights. Raises one ValueError for all that does not fit."""
        model = self.layout.model
        return _encoder(self.layout, take(arrays, model.targets, model.stretches), self.runner.executables)


def _encoder(
    layout: EncoderLayout,
    tensors: Mapping[str, jax.Array],
    executables: Prepared[EncoderBucket],
) -> Encoder:
    digest = fingerprint(layout.spec.digest_text(), layout.dtype.name, tensors, layout.model.stretches)
    weights = tuple(tensors[name] for name in layout.model.targets)
    runner = EncoderRunner(weights, executables, layout.num_shards)
    return Encoder(layout=layout, runner=runner, fingerprint=bytes.fromhex(digest))


def load_encoder(
    spec: BertSpec,
    read: Callable[..., dict[str, jax.Array]],
    config: EngineConfig,
    mesh: Mesh,
    sentence: SentenceLayout,
    source: ExecutableSource | None,
    on_progress: Callable[[str, int, int], None],
) -> Encoder:
    """Compiles every bucket while the weights load, which read(targets, stretches) gives. mesh: of config.mesh."""
    layout = lay_out_encoder(spec, config, mesh, sentence.max_seq_length)
    compile = functools.partial(
        compile_encoder,
        layout,
        source=source,
        on_done=lambda done, total: on_progress("executables", done, total),
    )
    with beside(lambda abandoned: compile(abandoned=abandoned)) as compiling:
        tensors = read(layout.model.targets, layout.model.stretches)
        return _encoder(layout, tensors, compiling.result())
