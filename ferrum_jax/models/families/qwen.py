"""Qwen2ForCausalLM, Qwen2MoeForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM: Llama's decoder with few differences.

Qwen2 has biases on q, k and v. Qwen3 has none by default, but norms on the heads of q and k. Qwen3-MoE
replaces the MLP of most layers by experts. Qwen2-MoE has both biases and experts, and one more expert for all tokens.
Source: Yang et al. 2024 (Qwen2), Yang et al. 2025 (Qwen3); keys as in Hugging Face's configs.
"""

from typing import Any

from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader, window_within
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import attention_from, spec_from, windows_of
from ferrum_jax.models.spec import CacheGroup, ExpertsSpec, ModelSpec, QkNorm


def _qwen2(reader: ConfigReader) -> ModelSpec:
    reader.only(use_mrope=False)  # Qwen2.5's base models have this key
    return spec_from(reader, attention=attention_from(reader, bias=True), cache_groups=_behind(reader))


def _qwen3(reader: ConfigReader) -> ModelSpec:
    attention = attention_from(reader, biases="attention_bias", qk_norm=QkNorm())
    return spec_from(reader, attention=attention, cache_groups=_behind(reader))


def _qwen3_moe(reader: ConfigReader) -> ModelSpec:
    reader.only(qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0)  # Qwen3-Coder has these keys
    reader.leave("max_window_layers")
    return spec_from(
        reader,
        attention=attention_from(reader, biases="attention_bias", qk_norm=QkNorm()),
        experts=experts_of(reader),
        cache_groups=_windows(reader, [True] * reader.require("num_hidden_layers")),
    )


def _qwen2_moe(reader: ConfigReader) -> ModelSpec:
    first = reader.get("max_window_layers", 28)  # every second layer before it has a window
    shared = reader.get("shared_expert_intermediate_size", 5632)
    return spec_from(
        reader,
        attention=attention_from(reader, bias=reader.flag("qkv_bias", True)),
        experts=experts_of(reader, shared_intermediate_size=shared),
        cache_groups=_windows(reader, [i < first and i % 2 == 0 for i in range(reader.require("num_hidden_layers"))]),
    )


def experts_of(reader: ConfigReader, *, other_count: str = "num_local_experts", **sizes: Any) -> ExpertsSpec | None:
    """The experts of the layers that have them, None where no layer does.

    Layer i has experts when (i + 1) is a multiple of decoder_sparse_step and i is not in mlp_only_layers.
    other_count: the key that says how many, where num_experts does not.
    """
    step = reader.get("decoder_sparse_step", 1)
    dense = reader.get("mlp_only_layers", [])
    if any(type(layer) is not int for layer in dense):
        raise ValueError(f"mlp_only_layers is {shown(dense)}; it must be a list of layers")
    dense = set(dense)
    layers = tuple(i for i in range(reader.require("num_hidden_layers")) if (i + 1) % step == 0 and i not in dense)
    read: dict[str, Any] = {
        "num_experts": reader.get("num_experts", reader.get(other_count, 128) if other_count else 128),
        "num_experts_per_tok": reader.get("num_experts_per_tok", 8),
        "intermediate_size": reader.get("moe_intermediate_size", 768),
        "norm_topk_prob": reader.flag("norm_topk_prob"),
    }
    return ExpertsSpec(layers=layers, **read | sizes) if layers else None


def _behind(reader: ConfigReader) -> tuple[CacheGroup, ...]:
    """Windows from max_window_layers on."""
    first = reader.get("max_window_layers", 28)
    return _windows(reader, [i >= first for i in range(reader.require("num_hidden_layers"))])


def _windows(reader: ConfigReader, is_windowed: list[bool]) -> tuple[CacheGroup, ...]:
    """If windows are enabled, layer_types says which layers have one, or else is_windowed.

    A window as long as the longest context counts as none.
    """
    enabled, window = reader.flag("use_sliding_window"), window_within(reader)
    kinds = ["sliding_attention" if enabled and windowed else "full_attention" for windowed in is_windowed]
    return windows_of(reader, reader.get("layer_types", kinds), window if enabled else None)


_DEFAULTS = {"max_position_embeddings": 32768, "sliding_window": 4096}
_WINDOWS = "also with sliding windows"
QWEN3 = Family(read=_qwen3, defaults=_DEFAULTS | {"head_dim": 128}, models="Qwen3 dense", notes=_WINDOWS)
QWEN3_MOE = Family(
    read=_qwen3_moe, defaults=_DEFAULTS, models="Qwen3 mixture of experts", notes="cost follows the routed tokens"
)
FAMILIES = {
    "Qwen2ForCausalLM": Family(read=_qwen2, defaults=_DEFAULTS, models="Qwen2, Qwen2.5", notes=_WINDOWS),
    "Qwen2MoeForCausalLM": Family(
        read=_qwen2_moe,
        defaults=_DEFAULTS | {"num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
        models="Qwen1.5-MoE, Qwen2-57B-A14B",
    ),
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
}
