"""Of the long tail, families whose experts or attention no other has; two shapes of each."""

from scripts.goldens.golden import Golden

_TURNING = {"rope_type": "default", "partial_rotary_factor": 0.334}

TAIL_MOE = {
    "mimo_v2_flash": Golden(
        seed=101,
        architecture="MiMoV2Flash",
        dtype="bfloat16",
        gain=2.0,
        config={
            "vocab_size": 156,
            "hidden_size": 40,
            "num_hidden_layers": 5,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 18,
            "v_head_dim": 10,
            "intermediate_size": 52,
            "moe_intermediate_size": 22,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "layer_types": ["full_attention", *("sliding_attention",) * 2, "full_attention", "sliding_attention"],
            "sliding_window": 37,
            "rope_parameters": {
                "full_attention": {"rope_theta": 50000.0, **_TURNING},
                "sliding_attention": {"rope_theta": 1000.0, **_TURNING},
            },
        },
    ),
    "mimo_v2_flash_grouped": Golden(
        seed=102,
        architecture="MiMoV2Flash",
        dtype="float16",
        gain=2.0,
        config={
            "vocab_size": 148,
            "hidden_size": 36,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 20,
            "v_head_dim": 28,
            "intermediate_size": 44,
            "moe_intermediate_size": 16,
            "n_routed_experts": 12,
            "num_experts_per_tok": 5,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "attention_value_scale": None,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "sliding_window": 25,
            "rope_parameters": {
                "full_attention": {"rope_theta": 10000.0, **_TURNING},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
            },
        },
    ),
}
