"""The families that are served, of models that generate and of encoders: a list of the modules that declare them."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from checkpoints.formats import StoredForms, without_forms
from checkpoints.rules import Rule
from checkpoints.stored_weight import WeightForm
from ferrum_jax.models.families import (
    gemma4_sound,
    gemma4_vision,
    glm4v,
    pixtral,
    qwen3_asr,
    siglip,
    vision_tower,
    voxtral,
    whisper,
)
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.decoder import Decoder
from ferrum_jax.models.families.encoder_spec import EncoderSpec
from ferrum_jax.models.families.family import EncoderFamily, Family
from ferrum_jax.models.families.vision_tower import VisionTower
from ferrum_jax.models.families.weight_forms import forms_of, with_made_forms
from ferrum_jax.models.layers.formed_weight import put_forms
from ferrum_jax.models.spec import ModelSpec, SoundSpec, VisionSpec

# The files of families, in the order of the documentation.
_FAMILIES = """
    arcee axk2
    bailing_hybrid
    cohere2
    deepseek dots3
    ernie exaone4
    falcon_h1
    gemma gemma4 glm4 glm4v glm5 gpt_oss granite
    hunyuan hy_v4
    kimi_linear
    lfm2 llama llama4
    mimo_v2_flash minimax_m2 minimax_m3 ministral3 mistral mistral4 mistral_large4
    nemotron nemotron_h
    olmo
    phi
    qwen qwen3_5 qwen3_asr qwen3_vl
    seed_oss smollm3 starcoder2
    voxtral whisper
""".split()  # noqa: SIM905
# Those of encoders, which make embeddings or score pairs of texts, and generate nothing.
_ENCODERS = ("bert", "embedding_gemma", "modernbert")


def _declared(files: Iterable[str], name: str) -> dict[str, Any]:
    tables = (getattr(importlib.import_module(f"ferrum_jax.models.families.{file}"), name) for file in files)
    return {architecture: family for table in tables for architecture, family in table.items()}


FAMILIES: dict[str, Family] = _declared(_FAMILIES, "FAMILIES")
ENCODERS: dict[str, EncoderFamily] = dict(sorted(_declared(_ENCODERS, "ENCODERS").items()))
_SPELLINGS = {spelling: name for name, family in FAMILIES.items() for spelling in family.also}
# Families that are asked for and not served, by model_type, and what is missing.
NOT_SERVED = {
    "step3p7": "its layers have different numbers of query heads and limits of SwiGLU, and a gate for each head, which "
    "is not served yet",
}
_TOWERS: dict[str, Callable[..., nnx.Module]] = {
    "qwen": VisionTower,
    "siglip": siglip.SiglipTower,
    "gemma4": gemma4_vision.PooledTower,
    "glm4v": glm4v.GlmTower,
    "pixtral": pixtral.PixtralTower,
    "whisper": whisper.WhisperEncoder,
    "qwen_sound": qwen3_asr.ChunkedEncoder,
    "voxtral": voxtral.WindowedEncoder,
    "gemma4_sound": gemma4_sound.ConformerEncoder,
}
_NOTHING_STORED = StoredForms()
AnySpec = ModelSpec | EncoderSpec  # of a model that is served


class Weights(NamedTuple):
    """Which tensors make which parameters: a family's rules, what may be left over, and the parameters as structs.

    forms: of parameters that are not dense.
    """

    rules: tuple[Rule, ...]
    harmless: tuple[str, ...]
    targets: dict[str, jax.ShapeDtypeStruct]
    forms: dict[str, WeightForm]


def family_of(architecture: str) -> Family:
    """The Family of an architecture's name. Raises ValueError naming those that are known."""
    if architecture not in FAMILIES:
        raise ValueError(f"architecture is {architecture!r}; supported are {sorted(FAMILIES)}")
    return FAMILIES[architecture]


def is_encoder(config: Mapping[str, Any]) -> bool:
    """True of a config.json that describes an encoder. Raises ValueError unless it names one architecture."""
    return _architecture(config) in ENCODERS


def encoder_spec_of(config: Mapping[str, Any]) -> EncoderSpec:
    """EncoderSpec of an encoder's config.json; raises ValueError as `spec_of` does."""
    return ENCODERS[_architecture(config)].spec_from_config(config)


def abstract_encoder(spec: EncoderSpec, dtype: jnp.dtype | str = jnp.float32) -> nnx.Module:
    """The encoder of a spec with ShapeDtypeStructs for parameters."""
    model: Any = ENCODERS[spec.architecture].model
    return nnx.eval_shape(lambda: model(spec, dtype=dtype))


def rules_of(spec: AnySpec) -> tuple[tuple[Rule, ...], tuple[str, ...]]:
    """Rules of a model's weights, and patterns of tensors that may be left over."""
    family = ENCODERS[spec.architecture] if isinstance(spec, EncoderSpec) else family_of(spec.architecture)
    return family.weight_rules(spec), family.harmless(spec)  # type: ignore[arg-type]


def weights_of(
    config: Mapping[str, Any],
    dtype: jnp.dtype | str = jnp.float32,
    *,
    has_head: Callable[[], bool] = lambda: True,
    stored: StoredForms = _NOTHING_STORED,
    weights: str = "auto",
    mtp: bool = False,
) -> Weights:
    """The weights of a config.json's model, which may be an encoder.

    has_head, stored, mtp: as in `spec_of`. weights: the forms that dense ones are given, as in `EngineConfig`.
    """
    if is_encoder(config):
        if weights != "auto":
            raise ValueError(f"weights is {weights!r}, and an encoder's weights are not quantised; leave it 'auto'")
        spec = encoder_spec_of(config)
        targets = unbind(abstract_encoder(spec, dtype))[1]
        return Weights(*rules_of(spec), targets, {})
    spec = quantised_spec(spec_of(config, has_head, stored, mtp=mtp), weights)
    return Weights(*rules_of(spec), abstract_parts(spec, dtype)[1], dict(spec.forms))


def spec_of(
    config: Mapping[str, Any],
    has_head: Callable[[], bool] = lambda: True,
    stored: StoredForms = _NOTHING_STORED,
    *,
    mtp: bool = False,
) -> ModelSpec:
    """ModelSpec of a config.json's content.

    has_head: whether the weights have what makes logits; asked where they need a matrix of their own for it. Without
    one the model makes embeddings alone, and is as one whose head is its embedding. stored: what they say of forms.
    mtp: the layers that predict one token more are taken too.
    Raises ValueError when its architecture is not supported or a key is missing or not understood, and for mtp where
    the model has no such layers that are served.
    """
    architecture = _architecture(config)
    family = family_of(architecture)
    spec = family.spec_from_config(without_forms(config), architecture)
    spec = family.with_mtp(spec, config) if mtp else spec
    if not spec.tie_word_embeddings and not has_head():
        spec = dataclasses.replace(spec, tie_word_embeddings=True, head_bias=False)
    return dataclasses.replace(spec, forms=forms_of(family.weight_rules(spec), config, stored))


def quantised_spec(spec: ModelSpec, weights: str) -> ModelSpec:
    """The spec with the forms that `EngineConfig.weights` asks for. Raises ValueError where it has others."""
    return with_made_forms(spec, family_of(spec.architecture).weight_rules(spec), weights)


def _architecture(config: Mapping[str, Any]) -> str:
    missing = NOT_SERVED.get(str(config.get("model_type")))
    if missing is not None:
        raise ValueError(f"model_type is {config['model_type']!r}: {missing}")
    architectures, known = config.get("architectures") or [], sorted(FAMILIES) + sorted(ENCODERS)
    if not isinstance(architectures, list | tuple) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise ValueError(f"config.json's architectures is {shown(architectures, repr)}; it must name one of {known}")
    name = _SPELLINGS.get(architectures[0], architectures[0])
    if name in ENCODERS:
        return name
    ends = ("ForSequenceClassification", "ForRewardModel", "Model")  # with another head; saved without one
    whole = next((name.removesuffix(end) + "ForCausalLM" for end in ends if name.endswith(end)), name)
    return whole if whole in FAMILIES else name


def abstract_model(spec: ModelSpec, dtype: jnp.dtype | str = jnp.float32) -> Decoder:
    """The model of a spec with ShapeDtypeStructs for parameters: no memory is taken, nothing is computed."""
    family = family_of(spec.architecture)
    # Tracing the counter of rngs takes time quadratic in the number of parameters: 19 s for 48 layers of experts.
    return nnx.eval_shape(lambda: _with_forms(family.model(spec, dtype=dtype, rngs=None), spec))


def abstract_parts(spec: ModelSpec, dtype: jnp.dtype | str = jnp.float32) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The structure of a model and its parameters as structs; those of its towers are among the latter.

    They are traced once however often they are asked for.
    """
    graph, parameters = _abstract_parts(spec, jnp.dtype(dtype))
    for tower in spec.towers:
        parameters = parameters | abstract_tower(tower, dtype)[1]
    return graph, dict(parameters)


def abstract_tower(
    tower: VisionSpec | SoundSpec, dtype: jnp.dtype | str = jnp.float32
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """`unbind` of a model's tower, with its parameters under their names in the model."""
    graph, parameters = _abstract_tower(tower, jnp.dtype(dtype))
    return graph, {prefix_of(tower) + name: struct for name, struct in parameters.items()}


@functools.lru_cache(maxsize=4)
def _abstract_tower(tower: VisionSpec | SoundSpec, dtype: jnp.dtype) -> tuple[nnx.GraphDef, dict[str, Any]]:
    return unbind(nnx.eval_shape(lambda: _TOWERS[tower.tower](tower, dtype=dtype)))


def prefix_of(tower: VisionSpec | SoundSpec) -> str:
    """The prefix of a tower's parameters among those of its model."""
    return vision_tower.PREFIX if isinstance(tower, VisionSpec) else whisper.PREFIX


def without_tower(spec: ModelSpec) -> ModelSpec:
    """The spec of a model that is served for text alone, where it can be."""
    return dataclasses.replace(spec, vision=None, sound=None) if spec.embeds_media else spec


def for_targets(weights: Weights, config: Mapping[str, Any], targets: Iterable[str]) -> Weights:
    """The weights of a decoder's config.json as an engine takes them: without those of a tower that it leaves out."""
    if any(map(of_tower, targets)) or not any(of_tower(name) for name in weights.targets):
        return weights
    architecture = _architecture(config)
    family = family_of(architecture)
    text = without_tower(family.spec_from_config(without_forms(config), architecture))
    rules = tuple(rule for rule in weights.rules if not of_tower(rule.target))
    return weights._replace(rules=rules, harmless=family.harmless(text))


def of_tower(name: str) -> bool:
    """Whether a parameter of a model is its tower's."""
    return name.startswith((vision_tower.PREFIX, whisper.PREFIX))


@functools.lru_cache(maxsize=4)
def _abstract_parts(spec: ModelSpec, dtype: jnp.dtype) -> tuple[nnx.GraphDef, dict[str, Any]]:
    return unbind(abstract_model(spec, dtype))


def _with_forms(model: Decoder, spec: ModelSpec) -> Decoder:
    put_forms(model, spec.forms)
    return model


def state_arrays(spec: ModelSpec, dtype: jnp.dtype) -> Any:
    """A recurrent layer's state for one row, a tree of `StateArray`; of a spec without such layers an empty tree."""
    return family_of(spec.architecture).state_arrays(spec, dtype) if spec.state_layers else ()


def unbind(model: nnx.Module) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """(structure, {dotted path: parameter}) of a model; parameters are arrays, or structs if it is abstract.

    The structure is hashable and holds no array, so it may be closed over by a jitted function.
    """
    graph, state = nnx.split(model)
    return graph, {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def parameters_of(state: nnx.Module | nnx.State | Mapping[Any, Any]) -> dict[str, Any]:
    """{dotted path: array} of a model, of its state, or of (nested) mappings of arrays."""
    if isinstance(state, nnx.Module):
        return unbind(state)[1]
    pure = nnx.to_pure_dict(state) if isinstance(state, nnx.State) else state
    found: dict[str, Any] = {}
    for key, value in pure.items():
        nested = parameters_of(value) if isinstance(value, Mapping) else {"": value}
        found |= {f"{key}.{path}" if path else str(key): array for path, array in nested.items()}
    return found


def bind(graph: nnx.GraphDef, parameters: Mapping[str, jax.Array]) -> Any:
    """The model of a structure with these parameters. Inside a jitted function it costs nothing at run time."""
    pairs = [(tuple(_step(s) for s in path.split(".")), nnx.Param(x)) for path, x in parameters.items()]
    return nnx.merge(graph, nnx.from_flat_state(pairs))


def _step(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
