"""Configs of published models with recurrent layers, after Qwen3-Next, and their numbers of parameters.

Source: the config.json that each model's authors published, without some keys that change nothing here. The numbers are
those of the reference implementation built without memory from the same values, without towers, whose configs are
left out, and the layers that predict several tokens.
"""

from __future__ import annotations

from typing import Any

_QWEN35_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17408,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "use_cache": True,
    "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}


def _qwen35(is_tied: bool = False, of_experts: bool = False, **sizes: Any) -> dict[str, Any]:
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(sizes["num_hidden_layers"])]
    text = _QWEN35_TEXT | sizes | {"layer_types": kinds, "tie_word_embeddings": is_tied}
    if of_experts:
        del text["intermediate_size"], text["mlp_only_layers"]
        text |= {"model_type": "qwen3_5_moe_text", "output_router_logits": False, "router_aux_loss_coef": 0.001}
    return {
        "architectures": [f"Qwen3_5{'Moe' if of_experts else ''}ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5_moe" if of_experts else "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": is_tied,
        "video_token_id": 248057,
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


def _text_alone(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """As a text model that was trained on is saved."""
    return config["text_config"] | {"architectures": [architecture]}


QWEN35_08B = _qwen35(
    is_tied=True,
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=24,
    num_attention_heads=8,
    num_key_value_heads=2,
    linear_num_value_heads=16,
)
QWEN35_2B = _qwen35(
    is_tied=True,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=24,
    num_attention_heads=8,
    num_key_value_heads=2,
    linear_num_value_heads=16,
)
QWEN35_9B = _qwen35(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=32,
    num_attention_heads=16,
    linear_num_value_heads=32,
)
QWEN35_27B = _qwen35(num_hidden_layers=64)
QWEN35_35B_A3B = _qwen35(
    of_experts=True,
    hidden_size=2048,
    num_hidden_layers=40,
    num_attention_heads=16,
    num_key_value_heads=2,
    linear_num_value_heads=32,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
)
QWEN35_397B_A17B = _qwen35(
    of_experts=True,
    hidden_size=4096,
    num_hidden_layers=60,
    num_attention_heads=32,
    num_key_value_heads=2,
    linear_num_value_heads=64,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=1024,
    shared_expert_intermediate_size=1024,
)
RECURRENT: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3.5-2B": (QWEN35_2B, 1_881_825_088),
    "Qwen3.5-9B-text": (_text_alone(QWEN35_9B, "Qwen3_5ForCausalLM"), 8_953_803_264),
    "Qwen3.5-35B-A3B": (QWEN35_35B_A3B, 34_660_610_688),
    "Qwen3.5-35B-A3B-text": (_text_alone(QWEN35_35B_A3B, "Qwen3_5MoeForCausalLM"), 34_660_610_688),
}
MORE_RECURRENT: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3.5-0.8B": (QWEN35_08B, 752_393_024),
    "Qwen3.5-9B": (QWEN35_9B, 8_953_803_264),
    "Qwen3.5-27B": (QWEN35_27B, 26_895_998_464),
    "Qwen3.5-397B-A17B": (QWEN35_397B_A17B, 396_346_350_336),
}
