"""The least and the most of every number that a config.json is asked for.

They are wide: no model comes near. What a hostile or damaged file says ends here, at once and by name, and not in a
loop without end or a NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

_SIZE = (1, 2**24)  # of a vocabulary, a width, a number of heads
_POSITIONS = (1, 2**30)
_LAYERS = (1, 1000)
_SMALL = (1e-30, 1.0)  # what keeps a norm from dividing by zero
_THETA = (1.000001, 1e15)
_CAP = (1e-6, 1e9)
_FACTOR = (1e-6, 1e6)
BOUNDS: Mapping[str, tuple[float, float]] = {
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _SIZE,
    "num_key_value_heads": _SIZE,
    "head_dim": (1, 2**16),
    "global_head_dim": (1, 2**16),
    "num_global_key_value_heads": _SIZE,
    "hidden_size_per_layer_input": (0, 2**24),
    "vocab_size_per_layer_input": _SIZE,
    "num_kv_shared_layers": (0, 1000),
    "top_k_experts": (0, 2**16),
    "intermediate_size": _SIZE,
    "max_position_embeddings": _POSITIONS,
    "rms_norm_eps": _SMALL,
    "layer_norm_eps": _SMALL,
    "type_vocab_size": _SIZE,
    "pad_token_id": (0, 2**24),
    "sliding_window": (0, 2**31),  # 0 where use_sliding_window is false
    "sliding_window_size": (0, 2**31),
    "sliding_window_pattern": _LAYERS,
    "swa_num_attention_heads": _SIZE,
    "swa_num_key_value_heads": _SIZE,
    "swa_head_dim": (1, 2**16),
    "swa_v_head_dim": (1, 2**16),
    "max_window_layers": (0, 2**31),
    "full_attention_interval": _LAYERS,
    "global_attn_every_n_layers": _LAYERS,
    "local_attention": (2, 2**31),
    "global_rope_theta": _THETA,
    "local_rope_theta": _THETA,
    "decoder_sparse_step": _LAYERS,
    "query_pre_attn_scalar": _CAP,
    "attn_logit_softcapping": _CAP,
    "final_logit_softcapping": _CAP,
    "num_experts": (0, 2**16),
    "num_local_experts": (0, 2**16),
    "num_experts_per_tok": (0, 2**16),
    "experts_per_token": (0, 2**16),
    "moe_intermediate_size": (0, 2**24),
    "shared_expert_intermediate_size": (0, 2**24),
    "swiglu_limit": _CAP,
    "swiglu_alpha": _CAP,
    "linear_num_key_heads": _SIZE,
    "linear_num_value_heads": _SIZE,
    "linear_key_head_dim": (1, 2**16),
    "linear_value_head_dim": (1, 2**16),
    "linear_conv_kernel_dim": (1, 2**10),
    "conv_dim": _SIZE,
    "conv_dim_out": _SIZE,
    "conv_L_cache": (1, 2**10),
    "block_dim": _SIZE,
    "block_ff_dim": _SIZE,
    "block_multiple_of": _SIZE,
    "block_ffn_dim_multiplier": _CAP,
    "mamba_d_ssm": _SIZE,
    "mamba_n_heads": _SIZE,
    "mamba_num_heads": _SIZE,
    "mamba_d_head": (1, 2**16),
    "mamba_head_dim": (1, 2**16),
    "mamba_n_groups": _SIZE,
    "n_groups": _SIZE,
    "mamba_d_state": _SIZE,
    "ssm_state_size": _SIZE,
    "mamba_d_conv": (1, 2**10),
    "conv_kernel": (1, 2**10),
    "mamba_expand": (1, 2**10),
    "moe_shared_expert_intermediate_size": (0, 2**24),
    "layer_norm_epsilon": _SMALL,
    "lm_head_multiplier": _CAP,
    "key_multiplier": _CAP,
    "attention_in_multiplier": _CAP,
    "attention_out_multiplier": _CAP,
    "ssm_in_multiplier": _CAP,
    "ssm_out_multiplier": _CAP,
    "norm_eps": _SMALL,
    "norm_epsilon": _SMALL,
    "moe_norm_min": (0.0, 1e-3),
    "attention_multiplier": _CAP,
    "attention_value_scale": _CAP,
    "router_jitter_noise": (0.0, 1.0),
    "embedding_multiplier": _CAP,
    "residual_multiplier": _CAP,
    "logits_scaling": _CAP,
    "logit_scale": _CAP,
    "routed_scaling_factor": _CAP,
    "no_rope_layer_interval": _LAYERS,
    "first_k_dense_replace": (0, 1000),
    "n_routed_experts": (1, 2**16),
    "q_lora_rank": _SIZE,
    "kv_lora_rank": _SIZE,
    "qk_nope_head_dim": (1, 2**16),
    "qk_rope_head_dim": (1, 2**16),
    "v_head_dim": (1, 2**16),
    "qk_head_dim": (1, 2**17),
    "moe_layer_freq": (1, 1000),
    "ep_size": (1, 2**16),
    "n_shared_experts": (0, 2**10),
    "n_group": (1, 2**16),
    "topk_group": (1, 2**16),
    "moe_layer_start_index": (0, 1000),
    "moe_layer_end_index": (-1, 1000),
    "moe_layer_interval": _LAYERS,
    "moe_num_experts": (1, 2**16),
    "moe_num_shared_experts": (0, 2**10),
    "moe_k": (1, 2**16),
    "moe_topk": (1, 2**16),
    "num_shared_expert": (0, 2**10),
    "rotary_dim": (1, 2**16),
    "llama_4_scaling_beta": (0.0, 1e3),
    "attn_scale": (0.0, 1e3),
    "floor_scale": _POSITIONS,
    "attention_chunk_size": (1, 2**31),
    "intermediate_size_mlp": _SIZE,
    "interleave_moe_layer_step": (0, 2**16),  # 0 where no layer has experts
    "alpha": (1.0, 1e6),
    "attention_head_dim": (1, 2**16),
    "rotary_pct": (0.0, 1.0),
    "shared_intermediate_size": (0, 2**24),
    "moe_layer_num_skipped": (0, 1000),
    "initial_context_length": _POSITIONS,
    "full_attn_mod": (0, 2**31),
    "interpolate_factor": (0, 2**31),
    "rope_theta": _THETA,
    "rope_local_base_freq": _THETA,
    "partial_rotary_factor": (1e-6, 1.0),
    # of vision_config
    "depth": _LAYERS,
    "num_heads": _SIZE,
    "in_channels": (1, 16),
    "patch_size": (1, 2**10),
    "temporal_patch_size": (1, 16),
    "spatial_merge_size": (1, 16),
    "pooling_kernel_size": (1, 16),
    "num_position_embeddings": (1, 2**20),
    "position_embedding_size": (1, 2**20),
    "out_hidden_size": _SIZE,
    "num_channels": (1, 16),
    "image_size": (1, 2**14),
    "mm_tokens_per_image": (1, 2**16),
    # of rope_scaling and rope_parameters
    "factor": (1.0, 1e6),
    "original_max_position_embeddings": (2, 2**30),
    "low_freq_factor": _FACTOR,
    "high_freq_factor": _FACTOR,
    "beta_fast": _FACTOR,
    "beta_slow": _FACTOR,
    "attention_factor": _FACTOR,
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
    "short_factor": _FACTOR,
    "long_factor": _FACTOR,
}
MOST_LISTED = 2**16  # entries of a list
MOST_TOKEN_ID = 2**24


def check_number(key: str, value: object) -> None:
    """Raises ValueError where the value of a key is not a number within its BOUNDS."""
    assert key in BOUNDS, f"{key} is read as a number and has no BOUNDS"
    low, high = BOUNDS[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:  # NaN is refused too
        raise ValueError(f"{key} is {shown(value)}; it must be a number from {low:g} to {high:g}")


def _json(value: object) -> str:
    return json.dumps(value, default=repr)


def shown(value: object, spell: Callable[[object], str] = _json) -> str:
    """The value in a message, cut where it is long."""
    if isinstance(value, int) and not -(10**40) < value < 10**40:
        return f"a whole number of {value.bit_length()} bits"
    try:
        text = spell(value)
    except (RecursionError, ValueError):
        text = f"a {type(value).__name__} that is too deep or too large to show"
    return text if len(text) <= 200 else f"{text[:200]}.."
