"""Families with recurrent layers, after Qwen3-Next, which has experts too."""

from __future__ import annotations

from scripts.goldens.golden import Golden

_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}

RECURRENT: dict[str, Golden] = {
    "qwen3_5": Golden(
        seed=91,
        architecture="Qwen3_5",
        dtype="bfloat16",
        norm_mean=0.0,
        gain=1.6,
        config={
            "vocab_size": 190,
            "hidden_size": 40,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "intermediate_size": 56,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 14,
            "rope_parameters": {
                "rope_theta": 10000000.0,
                "rope_type": "default",
                "partial_rotary_factor": 0.25,
                "mrope_section": [1, 1, 1],
                "mrope_interleaved": True,
            },
        },
    ),
    "qwen3_5_moe": Golden(
        seed=92,
        architecture="Qwen3_5Moe",
        dtype="bfloat16",
        norm_mean=0.0,
        gain=1.6,
        config={
            "vocab_size": 182,
            "hidden_size": 36,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "moe_intermediate_size": 18,
            "shared_expert_intermediate_size": 22,
            "num_experts": 12,
            "num_experts_per_tok": 5,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        },
    ),
}
