"""A family's declaration of each architecture: how its config.json is read and its model built."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from checkpoints.rules import Rule
from ferrum_jax.models.families import decoder, recurrent, tensors
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.mtp import MtpLayers
from ferrum_jax.models.spec import ModelSpec

IN_KERNELS = "on TPUs in kernels"
ONE_TOKEN = "the layers that predict several tokens are not used"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How one architecture is read and built.

    read: the spec of a config.json; raises ValueError naming what is missing or not understood. defaults: of the
    reference's config class, where they are not those of most. respell: the config in the spelling that is read.
    model: constructed as model(spec, dtype=..., rngs=...). weight_rules: every parameter's source tensors.
    harmless: patterns of source tensors that may be left over.
    mtp: of families whose layers that predict one token more are served.
    state_arrays: a recurrent layer's state for one row, a tree of `StateArray`, given the dtype of activations; of
    families that have such layers. also: other names of the architecture. models, notes: what the documentation says.
    """

    read: Callable[[ConfigReader], ModelSpec]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    respell: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    model: type[decoder.Decoder] = decoder.Decoder
    weight_rules: Callable[[ModelSpec], tuple[Rule, ...]] = tensors.weight_rules
    harmless: Callable[[ModelSpec], tuple[str, ...]] = tensors.harmless_tensors
    state_arrays: Callable[[ModelSpec, jnp.dtype], Any] = recurrent.state_arrays
    mtp: MtpLayers | None = None
    also: tuple[str, ...] = ()
    models: str
    notes: str = ""

    def spec_from_config(self, config: Mapping[str, Any], architecture: str) -> ModelSpec:
        """ModelSpec of a config.json. Raises ValueError naming what is missing or not understood."""
        return self.read(ConfigReader(self.respell(config), self.defaults, architecture))

    def with_mtp(self, spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
        """The spec with the layers of a config.json that predict one token more.

        Raises ValueError where the family's are not served, or the config has none.
        """
        if self.mtp is None:
            raise ValueError(
                f"{spec.architecture}: the layers that predict one token more are not served for this family; choose "
                "another method of drafting"
            )
        return spec.with_mtp(self.mtp.count(config, spec.architecture))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderFamily:
    """How one architecture of an encoder is read and built.

    model: constructed as model(spec, dtype=...), called with token ids, `TextRows` and `Shards`.
    The others are as in `Family`.
    """

    spec_from_config: Callable[[Mapping[str, Any]], Any]
    model: type[nnx.Module]
    weight_rules: Callable[[Any], tuple[Rule, ...]]
    harmless: Callable[[Any], tuple[str, ...]]
    models: str
    notes: str


def with_unserved(*patterns: str) -> Callable[[ModelSpec], tuple[str, ...]]:
    """The tensors that a decoder may leave over, and those of unserved parts, such as more than one next token."""
    return lambda spec: (*tensors.harmless_tensors(spec), *(() if spec.num_mtp_layers else patterns))
