"""Llama4ForCausalLM, and the text part of Llama4ForConditionalGeneration: Scout and Maverick; MobileLLM-R1.

Three of four layers turn neighbours together, norm q and k afterwards, and see their own chunk of the context alone;
the fourth knows no positions, sees all, and its queries weigh sharper far from the start. Each token goes to one
expert, which is given the token times the sigmoid of its logit, and to a shared one. MobileLLM has neither experts nor
chunks.
Source: Meta 2025 (Llama 4); Nakanishi 2025 (temperature); keys as in Hugging Face's Llama4TextConfig.
"""

from checkpoints.rules import Rule
from ferrum_jax.models.families import plain, tensors
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader, cache_groups
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.rope_reader import rope_from
from ferrum_jax.models.families.text_part import text_part_of
from ferrum_jax.models.spec import ExpertsSpec, ModelSpec, QkNorm, Temperature

# Keys of Llama4ForConditionalGeneration that concern images alone.
_OF_IMAGES = ("vision_config", "boi_token_index", "eoi_token_index", "image_token_index", "image_token_id")
_BLOCK = "feed_forward"


def _spec(reader: ConfigReader) -> ModelSpec:
    num_layers = reader.require("num_hidden_layers")
    reader.leave("for_llm_compression", "for_llm_compressor")  # which the reference does not read
    turns = plain.layers_that_turn(reader)
    norm = QkNorm(after_rope=True, has_weight=False) if reader.flag("use_qk_norm", True) else None
    rope = rope_from(reader, interleaved=True)
    attention = plain.attention_from(reader, biases="attention_bias", qk_norm=norm, rope=rope)
    still = (not turn for turn in turns)
    kinds = reader.get("layer_types", ["chunked_attention" if turn else "full_attention" for turn in turns])
    chunk = reader.nullable("attention_chunk_size", 8192)
    return plain.spec_from(
        reader,
        attention=attention,
        other_attention=plain.still_where(still, attention, qk_norm=None, temperature=_temperature(reader)),
        mlp=plain.mlp_from(reader, intermediate_size=reader.get("intermediate_size_mlp", 16384)),
        experts=_experts(reader, num_layers),
        cache_groups=cache_groups(kinds, num_layers, chunk, "chunked_attention"),
    )


def _temperature(reader: ConfigReader) -> Temperature | None:
    is_tuned, scale = reader.get("attn_temperature_tuning", None), float(reader.get("attn_scale", 0.1))
    length = reader.get("floor_scale", 8192)
    return None if is_tuned is not None and not is_tuned else Temperature(scale=scale, length=length, offset=1)


def _experts(reader: ConfigReader, num_layers: int) -> ExpertsSpec | None:
    """Experts of the layers that moe_layers names, or of every nth; an empty list is none."""
    step = reader.get("interleave_moe_layer_step", 1)
    layers = tuple(reader.get("moe_layers", []) or range(max(step, 1) - 1, num_layers, max(step, 1)))
    if not all(type(layer) is int and 0 <= layer < num_layers for layer in layers):
        raise ValueError(f"moe_layers is {shown(list(layers))}; it must name layers of {num_layers}")
    width = reader.require("intermediate_size")
    if reader.config.get("moe_layers") == []:
        reader.leave("num_local_experts", "num_experts_per_tok")
        return None
    shared = {"shared_intermediate_size": width, "shared_gate": False}
    count = reader.require("num_local_experts")
    return plain.experts_from(reader, count, layers=layers, scoring="sigmoid", weighs_inputs=True, **shared)


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Experts are stacked, [E, in, out], gate by up."""
    stack = f"{_BLOCK}.experts"
    stacked = tensors.stacked_expert_rules(
        spec.experts, f"{stack}.gate_up_proj", f"{stack}.down_proj", router=f"{_BLOCK}.router.weight", transposed=True
    )
    shared = () if spec.experts is None else tensors.shared_expert_rules(spec.experts, f"{_BLOCK}.shared_expert")
    return (
        *tensors.frame_rules(spec),
        *tensors.attention_rules(spec),
        *(rule.renamed(lambda name: name.replace(".mlp.", f".{_BLOCK}.")) for rule in tensors.mlp_rules(spec)),
        *stacked,
        *shared,
    )


_TEXT = Family(
    read=_spec,
    defaults={
        "max_position_embeddings": 4096 * 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
    },
    weight_rules=_rules,
    models="MobileLLM-R1, and Llama 4 text saved alone",
    notes="chunked attention",
)
FAMILIES = {
    "Llama4ForCausalLM": _TEXT,
    "Llama4ForConditionalGeneration": text_part_of(
        _TEXT,
        _OF_IMAGES,
        models="Llama 4 Scout, Maverick",
        notes="its text part; images are refused; chunked attention",
    ),
}
