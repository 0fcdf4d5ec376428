"""The families that are served: two literal tables from architecture name, of models that generate and of encoders."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from checkpoints.formats import StoredForms
from checkpoints.rules import Rule
from ferrum_jax.layers.formed_weight import put_forms
from ferrum_jax.models import (
    arcee,
    bert,
    cohere2,
    decoder,
    deepseek,
    embedding_gemma,
    ernie,
    exaone4,
    falcon_h1,
    gemma,
    gemma4,
    gemma4_vision,
    glm4,
    gpt_oss,
    granite,
    granite_hybrid,
    hunyuan,
    lfm2,
    llama,
    llama4,
    mimo_v2_flash,
    minimax_m2,
    ministral3,
    mistral4,
    mixtral,
    modernbert,
    nemotron,
    nemotron_h,
    olmo,
    phi,
    phimoe,
    qwen,
    qwen3_5,
    qwen3_next,
    qwen3_vl,
    qwen3_vl_moe,
    recurrent,
    seed_oss,
    siglip,
    smollm3,
    starcoder2,
    text_part,
)
from ferrum_jax.models.bounds import shown
from ferrum_jax.models.encoder_spec import EncoderSpec
from ferrum_jax.models.vision_tower import PREFIX, VisionTower
from ferrum_jax.models.weight_forms import forms_of, with_made_forms, without_forms
from ferrum_jax.spec import ModelSpec, VisionSpec
from ferrum_jax.spec.stored_weight import WeightForm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How one architecture is read and built.

    model: constructed as model(spec, dtype=..., rngs=...). weight_rules: every parameter's source tensors.
    harmless: patterns of source tensors that may be left over. state_arrays: a recurrent layer's state for one row, a
    tree of `StateArray`, given the dtype of activations; of families that have such layers.
    """

    spec_from_config: Callable[[Mapping[str, Any]], ModelSpec]
    model: type[decoder.Decoder] = decoder.Decoder
    weight_rules: Callable[[ModelSpec], tuple[Rule, ...]] = decoder.weight_rules
    harmless: Callable[[ModelSpec], tuple[str, ...]] = decoder.harmless_tensors
    state_arrays: Callable[[ModelSpec, jnp.dtype], Any] = recurrent.state_arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderFamily:
    """The same of an encoder: constructed as model(spec, dtype=...), called with token ids, `TextRows` and `Shards`."""

    spec_from_config: Callable[[Mapping[str, Any]], Any]
    model: type[nnx.Module] = bert.Bert
    weight_rules: Callable[[Any], tuple[Rule, ...]] = bert.weight_rules
    harmless: Callable[[Any], tuple[str, ...]] = bert.harmless_tensors


FAMILIES: dict[str, Family] = {
    "ArceeForCausalLM": Family(spec_from_config=arcee.spec_from_config),
    "Cohere2ForCausalLM": Family(spec_from_config=cohere2.spec_from_config, weight_rules=cohere2.weight_rules),
    "DeepseekV2ForCausalLM": Family(
        spec_from_config=deepseek.v2_spec_from_config,
        weight_rules=deepseek.weight_rules,
        harmless=deepseek.harmless_tensors,
    ),
    "DeepseekV3ForCausalLM": Family(
        spec_from_config=deepseek.v3_spec_from_config,
        weight_rules=deepseek.weight_rules,
        harmless=deepseek.harmless_tensors,
    ),
    "Ernie4_5ForCausalLM": Family(spec_from_config=ernie.spec_from_config),
    "Ernie4_5_MoeForCausalLM": Family(
        spec_from_config=ernie.moe_spec_from_config, weight_rules=ernie.moe_weight_rules, harmless=ernie.moe_harmless
    ),
    "Exaone4ForCausalLM": Family(spec_from_config=exaone4.spec_from_config),
    "FalconH1ForCausalLM": Family(spec_from_config=falcon_h1.spec_from_config, weight_rules=falcon_h1.weight_rules),
    "Gemma2ForCausalLM": Family(spec_from_config=gemma.gemma2_spec_from_config),
    "Gemma3ForCausalLM": Family(spec_from_config=gemma.gemma3_spec_from_config),
    "Gemma3ForConditionalGeneration": Family(
        spec_from_config=gemma.gemma3_whole_from_config,
        weight_rules=gemma.gemma3_rules,
        harmless=gemma.gemma3_harmless,
    ),
    "Gemma4ForCausalLM": Family(
        spec_from_config=gemma4.spec_from_config,
        weight_rules=gemma4.weight_rules,
        harmless=gemma4.harmless_tensors,
    ),
    "Gemma4ForConditionalGeneration": Family(
        spec_from_config=gemma4.whole_from_config,
        weight_rules=gemma4.whole_rules,
        harmless=gemma4.whole_harmless,
    ),
    "Glm4ForCausalLM": Family(spec_from_config=glm4.spec_from_config, weight_rules=glm4.weight_rules),
    "Glm4MoeForCausalLM": Family(
        spec_from_config=glm4.moe_spec_from_config,
        weight_rules=glm4.moe_weight_rules,
        harmless=deepseek.harmless_tensors,
    ),
    "Glm4MoeLiteForCausalLM": Family(
        spec_from_config=glm4.lite_spec_from_config,
        weight_rules=deepseek.weight_rules,
        harmless=deepseek.harmless_tensors,
    ),
    "GptOssForCausalLM": Family(spec_from_config=gpt_oss.spec_from_config, weight_rules=gpt_oss.weight_rules),
    "GraniteForCausalLM": Family(spec_from_config=granite.spec_from_config),
    "GraniteMoeForCausalLM": Family(
        spec_from_config=granite.moe_spec_from_config, weight_rules=granite.moe_weight_rules
    ),
    "GraniteMoeHybridForCausalLM": Family(
        spec_from_config=granite_hybrid.spec_from_config, weight_rules=granite_hybrid.weight_rules
    ),
    "HunYuanDenseV1ForCausalLM": Family(spec_from_config=hunyuan.spec_from_config, weight_rules=hunyuan.weight_rules),
    "HunYuanMoEV1ForCausalLM": Family(spec_from_config=hunyuan.moe_spec_from_config, weight_rules=hunyuan.weight_rules),
    "KimiK25ForConditionalGeneration": Family(
        spec_from_config=deepseek.kimi_text_part_from_config,
        weight_rules=deepseek.kimi_weight_rules,
        harmless=deepseek.kimi_harmless,
    ),
    "Lfm2ForCausalLM": Family(spec_from_config=lfm2.spec_from_config, weight_rules=lfm2.weight_rules),
    "Llama4ForCausalLM": Family(spec_from_config=llama4.spec_from_config, weight_rules=llama4.weight_rules),
    "Llama4ForConditionalGeneration": Family(
        spec_from_config=llama4.text_part_from_config,
        weight_rules=llama4.whole_weight_rules,
        harmless=text_part.harmless_tensors,
    ),
    "LlamaForCausalLM": Family(spec_from_config=llama.spec_from_config),
    "MiMoV2FlashForCausalLM": Family(
        spec_from_config=mimo_v2_flash.spec_from_config,
        weight_rules=mimo_v2_flash.weight_rules,
        harmless=mimo_v2_flash.harmless_tensors,
    ),
    "MiniMaxM2ForCausalLM": Family(
        spec_from_config=minimax_m2.spec_from_config,
        weight_rules=minimax_m2.weight_rules,
        harmless=minimax_m2.harmless_tensors,
    ),
    "Ministral3ForCausalLM": Family(spec_from_config=ministral3.spec_from_config),
    "Mistral3ForConditionalGeneration": Family(
        spec_from_config=ministral3.text_part_from_config,
        weight_rules=text_part.weight_rules,
        harmless=text_part.harmless_tensors,
    ),
    "Mistral4ForCausalLM": Family(spec_from_config=mistral4.spec_from_config, weight_rules=mistral4.weight_rules),
    "MistralForCausalLM": Family(spec_from_config=llama.mistral_spec_from_config),
    "MixtralForCausalLM": Family(spec_from_config=mixtral.spec_from_config, weight_rules=mixtral.weight_rules),
    "NemotronForCausalLM": Family(spec_from_config=nemotron.spec_from_config),
    "NemotronHForCausalLM": Family(
        spec_from_config=nemotron_h.spec_from_config,
        weight_rules=nemotron_h.weight_rules,
        harmless=nemotron_h.harmless_tensors,
    ),
    "Olmo2ForCausalLM": Family(spec_from_config=olmo.olmo2_spec_from_config),
    "Olmo3ForCausalLM": Family(spec_from_config=olmo.olmo3_spec_from_config),
    "OlmoeForCausalLM": Family(spec_from_config=olmo.olmoe_spec_from_config),
    "Phi3ForCausalLM": Family(spec_from_config=phi.spec_from_config, weight_rules=phi.weight_rules),
    "PhimoeForCausalLM": Family(spec_from_config=phimoe.spec_from_config, weight_rules=phimoe.weight_rules),
    "Qwen2ForCausalLM": Family(spec_from_config=qwen.qwen2_spec_from_config),
    "Qwen2MoeForCausalLM": Family(spec_from_config=qwen.qwen2_moe_spec_from_config),
    "Qwen3ForCausalLM": Family(spec_from_config=qwen.qwen3_spec_from_config),
    "Qwen3MoeForCausalLM": Family(spec_from_config=qwen.qwen3_moe_spec_from_config),
    "Qwen3_5ForCausalLM": Family(
        spec_from_config=qwen3_5.spec_from_config,
        weight_rules=qwen3_5.weight_rules,
        harmless=qwen3_next.harmless_tensors,
    ),
    "Qwen3_5ForConditionalGeneration": Family(
        spec_from_config=qwen3_5.whole_spec_from_config,
        weight_rules=qwen3_5.whole_rules,
        harmless=qwen3_5.whole_harmless,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        spec_from_config=qwen3_5.moe_spec_from_config,
        weight_rules=qwen3_5.weight_rules,
        harmless=qwen3_next.harmless_tensors,
    ),
    "Qwen3_5MoeForConditionalGeneration": Family(
        spec_from_config=qwen3_5.moe_whole_spec_from_config,
        weight_rules=qwen3_5.whole_rules,
        harmless=qwen3_5.whole_harmless,
    ),
    "Qwen3NextForCausalLM": Family(
        spec_from_config=qwen3_next.spec_from_config,
        weight_rules=qwen3_next.weight_rules,
        harmless=qwen3_next.harmless_tensors,
    ),
    "Qwen3VLForConditionalGeneration": Family(
        spec_from_config=qwen3_vl.spec_from_config,
        weight_rules=qwen3_vl.weight_rules,
        harmless=qwen3_vl.harmless_tensors,
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        spec_from_config=qwen3_vl_moe.spec_from_config,
        weight_rules=qwen3_vl_moe.weight_rules,
        harmless=qwen3_vl.harmless_tensors,
    ),
    "SeedOssForCausalLM": Family(spec_from_config=seed_oss.spec_from_config),
    "SmolLM3ForCausalLM": Family(spec_from_config=smollm3.spec_from_config),
    "Starcoder2ForCausalLM": Family(spec_from_config=starcoder2.spec_from_config, weight_rules=starcoder2.weight_rules),
}
# Encoders make embeddings, or score pairs of texts, and generate nothing.
_BERT = EncoderFamily(spec_from_config=bert.bert_spec_from_config)
_ROBERTA = EncoderFamily(spec_from_config=bert.roberta_spec_from_config)
_MODERNBERT = EncoderFamily(
    spec_from_config=modernbert.spec_from_config,
    model=modernbert.ModernBert,
    weight_rules=modernbert.weight_rules,
    harmless=modernbert.harmless_tensors,
)
ENCODERS: dict[str, EncoderFamily] = {
    "BertForMaskedLM": _BERT,
    "BertForSequenceClassification": _BERT,
    "BertModel": _BERT,
    "Gemma3TextModel": EncoderFamily(
        spec_from_config=embedding_gemma.spec_from_config,
        model=embedding_gemma.EmbeddingGemma,
        weight_rules=embedding_gemma.weight_rules,
        harmless=embedding_gemma.harmless_tensors,
    ),
    "ModernBertForMaskedLM": _MODERNBERT,
    "ModernBertModel": _MODERNBERT,
    "RobertaForMaskedLM": _ROBERTA,
    "RobertaForSequenceClassification": _ROBERTA,
    "RobertaModel": _ROBERTA,
    "XLMRobertaForMaskedLM": _ROBERTA,
    "XLMRobertaForSequenceClassification": _ROBERTA,
    "XLMRobertaModel": _ROBERTA,
}


_SPELLINGS = {"PhiMoEForCausalLM": "PhimoeForCausalLM"}  # as published, and as in the reference implementation
# Families that are asked for and not served, by model_type, and what is missing.
NOT_SERVED = {
    "bailing_hybrid": "its recurrent layers decay each channel of a key by itself (Kimi delta attention), which is not "
    "served yet",
    "step3p7": "its layers have different numbers of query heads and limits of SwiGLU, and a gate for each head, which "
    "is not served yet",
}
_TOWERS: dict[str, type[VisionTower] | type[siglip.SiglipTower] | type[gemma4_vision.PooledTower]] = {
    "qwen": VisionTower,
    "siglip": siglip.SiglipTower,
    "gemma4": gemma4_vision.PooledTower,
}
_NOTHING_STORED = StoredForms()


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


def rules_of(spec: ModelSpec | EncoderSpec) -> tuple[tuple[Rule, ...], tuple[str, ...]]:
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
) -> Weights:
    """The weights of a config.json's model, which may be an encoder.

    has_head, stored: as in `spec_of`. weights: the forms that dense ones are given, as in `EngineConfig`.
    """
    if is_encoder(config):
        if weights != "auto":
            raise ValueError(f"weights is {weights!r}, and an encoder's weights are not quantised; leave it 'auto'")
        spec = encoder_spec_of(config)
        targets = unbind(abstract_encoder(spec, dtype))[1]
        return Weights(*rules_of(spec), targets, {})
    spec = quantised_spec(spec_of(config, has_head, stored), weights)
    return Weights(*rules_of(spec), abstract_parts(spec, dtype)[1], dict(spec.forms))


def spec_of(
    config: Mapping[str, Any], has_head: Callable[[], bool] = lambda: True, stored: StoredForms = _NOTHING_STORED
) -> ModelSpec:
    """ModelSpec of a config.json's content.

    has_head: whether the weights have what makes logits; asked where they need a matrix of their own for it. Without
    one the model makes embeddings alone, and is as one whose head is its embedding. stored: what they say of forms.
    Raises ValueError when its architecture is not supported or a key is missing or not understood.
    """
    family = family_of(_architecture(config))
    spec = family.spec_from_config(without_forms(config))
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
    whole = name.removesuffix("Model") + "ForCausalLM"  # of a base model that was saved alone
    return whole if name not in ENCODERS and whole in FAMILIES else name


def abstract_model(spec: ModelSpec, dtype: jnp.dtype | str = jnp.float32) -> decoder.Decoder:
    """The model of a spec with ShapeDtypeStructs for parameters: no memory is taken, nothing is computed."""
    family = family_of(spec.architecture)
    # Tracing the counter of rngs takes time quadratic in the number of parameters: 19 s for 48 layers of experts.
    return nnx.eval_shape(lambda: _with_forms(family.model(spec, dtype=dtype, rngs=None), spec))


def abstract_parts(spec: ModelSpec, dtype: jnp.dtype | str = jnp.float32) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The structure of a model and its parameters as structs; those of its tower, if it has one, are among the latter.

    They are traced once however often they are asked for.
    """
    graph, parameters = _abstract_parts(spec, jnp.dtype(dtype))
    return graph, parameters | abstract_tower(spec, dtype)[1]


def abstract_tower(spec: ModelSpec, dtype: jnp.dtype | str = jnp.float32) -> tuple[nnx.GraphDef | None, dict[str, Any]]:
    """`unbind` of a model's tower, with its parameters under their names in the model; nothing without a tower."""
    if spec.vision is None:
        return None, {}
    graph, parameters = _abstract_tower(spec.vision, jnp.dtype(dtype))
    return graph, {PREFIX + name: struct for name, struct in parameters.items()}


@functools.lru_cache(maxsize=4)
def _abstract_tower(vision: VisionSpec, dtype: jnp.dtype) -> tuple[nnx.GraphDef, dict[str, Any]]:
    return unbind(nnx.eval_shape(lambda: _TOWERS[vision.tower](vision, dtype=dtype)))


def without_tower(spec: ModelSpec) -> ModelSpec:
    """The spec of a model that is served for text alone."""
    return dataclasses.replace(spec, vision=None)


def for_targets(weights: Weights, config: Mapping[str, Any], targets: Iterable[str]) -> Weights:
    """The weights of a decoder's config.json as an engine takes them: without those of a tower that it leaves out."""
    if any(map(of_tower, targets)) or not any(of_tower(name) for name in weights.targets):
        return weights
    family = family_of(_architecture(config))
    text = without_tower(family.spec_from_config(without_forms(config)))
    rules = tuple(rule for rule in weights.rules if not of_tower(rule.target))
    return weights._replace(rules=rules, harmless=family.harmless(text))


def of_tower(name: str) -> bool:
    """Whether a parameter of a model is its tower's."""
    return name.startswith(PREFIX)


@functools.lru_cache(maxsize=4)
def _abstract_parts(spec: ModelSpec, dtype: jnp.dtype) -> tuple[nnx.GraphDef, dict[str, Any]]:
    return unbind(abstract_model(spec, dtype))


def _with_forms(model: decoder.Decoder, spec: ModelSpec) -> decoder.Decoder:
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
