"""Loading: weights and executables side by side, from a model's source and its layout.

`Loaded` is all that is slow to make; any number of engines are built from it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import threading
from collections.abc import Callable

import jax
import numpy as np

from checkpoints import Adapter, read_adapter
from checkpoints.fingerprints import Fingerprint
from checkpoints.memory import Copies
from checkpoints.placement import stored_targets, weight_shapes
from ferrum_jax.engine.startup.model_source import ModelSource
from ferrum_jax.models.families import registry
from ferrum_jax.runtime.block_copies import BlockCopies
from ferrum_jax.runtime.compile.executable_store import ExecutableCache, ExecutableStore
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.placing.weights import read_beside, replace_weights
from ferrum_jax.runtime.pools.budget import Ledger
from ferrum_jax.runtime.programs import Executables, compile_all
from ferrum_jax.tasks.classifier import Classifier
from ferrum_jax.tasks.logit_scorer import LogitScorer, TokenLogits, ids_of, score_of_tokens
from ferrum_jax.tasks.scorer import Scorer
from ferrum_jax.tasks.texts import Texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """Everything that is slow to make: weights on the device and executables. Engines are made from it.

    weights_s: seconds of reading them. weights_version: how often they were updated.
    """

    layout: Layout
    weights: tuple[jax.Array, ...]
    executables: Executables
    copies: BlockCopies
    fingerprint: Fingerprint
    end_ids: frozenset[int]
    weights_s: float = 0.0
    weights_version: int = 0
    update_salt: bytes = b""

    @property
    def cache_fingerprint(self) -> bytes:
        """The beginning of cached prefixes' keys: the fingerprint, and updates that its sample of weights may not show.

        The salt is of this object alone: two programs that updated parts of their weights differently share nothing.
        """
        if not self.weights_version:
            return self.fingerprint.digest
        content = self.fingerprint.digest + self.update_salt + self.weights_version.to_bytes(8, "little")
        return hashlib.blake2b(content, digest_size=16).digest()

    @property
    def ledger(self) -> Ledger:
        return self.layout.ledger

    @property
    def max_text_tokens(self) -> int:
        """Tokens of the longest text that can become a vector: the one that a step draws after it is never computed."""
        return self.layout.max_model_len

    @property
    def max_requests(self) -> int:
        """How many requests are taken from a source at once, so that a million of them do not fill memory.

        Two for each row of all shards.
        """
        return 2 * self.layout.max_num_seqs * self.layout.num_shards

    def scorer(self, texts: Texts) -> Scorer | None:
        """How pairs become scores, by logits of the tokens that the config or the checkpoint names; None without any.

        Raises ValueError for tokens that the model does not have.
        """
        tokens, tokenizer = texts.score_tokens, texts.prompts.tokenizer
        asked = texts.sentence.logit_score if tokens is None else score_of_tokens(tokens, tokenizer)
        if asked is None:
            return None
        if texts.vectors_only or max(ids_of(asked)) >= texts.vocab_size:
            raise ValueError(
                f"pairs are scored by logits of the tokens {ids_of(asked)}, which this model does not have"
            )
        weights = dict(zip(self.layout.targets, self.weights, strict=True))
        logits = TokenLogits.of(self.layout.spec, weights, ids_of(asked))
        return LogitScorer.of(asked, texts.sentence, tokenizer, texts.prompts.chat, logits, self.max_text_tokens)

    def classifier(self, texts: Texts) -> Classifier | None:
        """How vectors become classes, of a checkpoint with a head for these."""
        return texts.classifier

    def checksum(self) -> str:
        """A digest of every bit of the weights, in hexadecimal, an array in host memory at a time."""
        digest = hashlib.blake2b(digest_size=16)
        for array in self.weights:
            value = np.asarray(array)
            digest.update(f"{value.dtype}{value.shape}".encode())
            digest.update(np.ascontiguousarray(value).view(np.uint8).data)
        return digest.hexdigest()

    def with_weights(self, copies: Copies) -> Loaded:
        """These executables with copies of new weights, whose old ones are freed."""
        weights = replace_weights(self.layout, self.weights, copies)
        return dataclasses.replace(
            self,
            weights=weights.arrays,
            fingerprint=weights.fingerprint,
            weights_version=self.weights_version + 1,
            update_salt=self.update_salt or os.urandom(16),
        )


def load(
    model: ModelSource,
    layout: Layout,
    executable_cache: ExecutableCache | None,
    on_progress: Callable[[str, int, int], None],
    on_fingerprint: Callable[[Fingerprint], None] = lambda fingerprint: None,
    first: ExecutableStore | None = None,
) -> Loaded:
    """Compiles every bucket while the weights load, and no more of them once the weights have failed.

    on_fingerprint: called as soon as the weights are known; what it raises ends the compiling too.
    """

    def compile(abandoned: threading.Event) -> Executables:
        return compile_all(
            layout,
            executable_cache=executable_cache,
            first=first,
            on_done=functools.partial(on_progress, "executables"),
            abandoned=abandoned,
        )

    weights, executables = read_beside(layout, model.read, compile, on_fingerprint)
    return Loaded(
        layout=layout,
        weights=weights.arrays,
        executables=executables,
        copies=BlockCopies(layout, executable_cache),
        fingerprint=weights.fingerprint,
        end_ids=model.end_ids | frozenset(layout.spec.eos_token_ids),
        weights_s=weights.read_s,
    )


def adapter_reader(layout: Layout | None) -> Callable[[str], Adapter]:
    """Reads adapters of a layout's model, by path. Raises ValueError for what does not fit it."""

    def read(path: str) -> Adapter:
        assert layout is not None and layout.adapters is not None, "there are slots where an adapter is read"
        rules = registry.family_of(layout.spec.architecture).weight_rules(layout.spec)
        stored = stored_targets(layout.targets, layout.model.expansions)
        return read_adapter(path, rules=rules, weights=weight_shapes(stored), max_rank=layout.adapters.rank)

    return read
