"""ModelSource: what a model is, and where its weights are read from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx

from checkpoints import Checkpoint, Expansion
from checkpoints.memory import take
from ferrum_jax.models.families import registry
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.runtime.encoder_runtime import POOLINGS
from ferrum_jax.tasks.classifier import HEAD, Classifier, head_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model's description and the source of its weights.

    read(targets, expansions): {parameter: array} with exactly the shapes, dtypes and shardings of targets; see
    `checkpoints.Checkpoint.load`. folder: of tokenizer, chat template and the like, or None.
    headless: of a decoder's weights without what makes logits of tokens. classifier: what it has in place of that.
    end_ids: tokens that end a text beside those that the spec names. generation: what generation_config.json says.
    """

    spec: registry.AnySpec
    read: Callable[..., dict[str, jax.Array]]
    folder: Path | None = None
    headless: bool = False
    classifier: Classifier | None = None
    end_ids: frozenset[int] = frozenset()
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, *, mtp: bool = False) -> ModelSource:
        """mtp: with a decoder's layers that predict one token more.

        Raises ValueError for a config.json that is not understood, and for mtp where no such layers are served.
        """
        encodes = registry.is_encoder(checkpoint.config)
        stored = checkpoint.stored_forms
        weights = registry.weights_of(checkpoint.config, has_head=lambda: checkpoint.has_head, stored=stored, mtp=mtp)

        def read(
            targets: Mapping[str, jax.ShapeDtypeStruct], expansions: Mapping[str, Expansion] = MappingProxyType({})
        ) -> dict[str, jax.Array]:
            own = weights if encodes else registry.for_targets(weights, checkpoint.config, targets)
            harmless = own.harmless if classifier is None else (*own.harmless, f"{HEAD}*")
            return checkpoint.load(rules=own.rules, harmless=harmless, targets=targets, expansions=expansions)

        spec = None if encodes else registry.spec_of(checkpoint.config, lambda: checkpoint.has_head, stored, mtp=mtp)
        classifier = None if spec is None else head_of(checkpoint, spec.hidden_size)
        as_said = spec is None or spec.tie_word_embeddings == registry.spec_of(checkpoint.config).tie_word_embeddings
        return cls(
            classifier=classifier,
            spec=spec or registry.encoder_spec_of(checkpoint.config),
            headless=classifier is not None or not (as_said or checkpoint.says_tied),
            read=read,
            folder=checkpoint.path,
            end_ids=frozenset() if spec is None else _end_ids(checkpoint.generation_config, spec),
            generation={} if encodes else checkpoint.generation_config,
        )

    @property
    def poolings(self) -> Sequence[str]:
        """How its texts can become vectors, the usual way first; none of a model that scores pairs alone."""
        if isinstance(self.spec, ModelSpec):
            return ("last",)
        return () if self.spec.labels else POOLINGS

    @property
    def reads_whole(self) -> bool:
        """Whether each text runs whole, in one step, and becomes a vector: of an encoder."""
        return not isinstance(self.spec, ModelSpec)

    @property
    def vectors_only(self) -> str:
        """Why it generates nothing; "" of a model that generates."""
        if self.reads_whole:
            return "is an encoder"
        if self.headless:
            return "has no head here (tie_word_embeddings is false in config.json, and there is no lm_head.weight)"
        return ""

    @property
    def hears_beside(self) -> bool:
        """Whether its layers attend to a sound that no token of a prompt stands for."""
        return isinstance(self.spec, ModelSpec) and self.spec.sound is not None and self.spec.sound.is_read_across

    @property
    def hears_in_prompts(self) -> bool:
        """Whether tokens of a prompt stand for sounds."""
        return isinstance(self.spec, ModelSpec) and self.spec.sound is not None and self.spec.embeds_media

    @property
    def sees_images(self) -> bool:
        return isinstance(self.spec, ModelSpec) and self.spec.vision is not None

    def for_text(self) -> ModelSource:
        """The text model alone, without a tower."""
        if not isinstance(self.spec, ModelSpec):
            return self
        return dataclasses.replace(self, spec=registry.without_tower(self.spec))

    @classmethod
    def of_model(cls, model: nnx.Module) -> ModelSource:
        """Raises ValueError for a module that is none of our models."""
        spec = getattr(model, "spec", None)
        if not isinstance(spec, registry.AnySpec):
            raise ValueError(f"the model is a {type(model).__name__}; it must be one of ferrum_jax.models.families")
        arrays = registry.parameters_of(model)

        def read(
            targets: Mapping[str, jax.ShapeDtypeStruct], expansions: Mapping[str, Expansion] = MappingProxyType({})
        ) -> dict[str, jax.Array]:
            return take(arrays, targets, expansions, cast=True)

        return cls(spec=spec, read=read)


def _end_ids(generation_config: Mapping[str, Any], spec: ModelSpec) -> frozenset[int]:
    """End ids of generation_config.json. Raises ValueError for any, of config.json too, that the model cannot draw."""
    try:
        found = frozenset(ConfigReader(generation_config).token_ids("eos_token_id"))
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from error
    for source, ids in (("config.json", spec.eos_token_ids), ("generation_config.json", found)):
        beyond = sorted(i for i in ids if i >= spec.vocab_size)
        if beyond:
            raise ValueError(
                f"{source}'s eos_token_id names {beyond}, and the model's token ids are 0 to {spec.vocab_size - 1}: no "
                "text would end by it; correct it"
            )
    return found
