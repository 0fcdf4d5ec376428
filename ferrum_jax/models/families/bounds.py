"""The least and the most of every number that a config.json is asked for.

They are wide: no model comes near. What a hostile or damaged file says ends here, at once and by name, and not in a
loop without end or a NaN.
"""

import json
from collections.abc import Callable, Mapping

# Keys by their least and most.
_KEYS: Mapping[tuple[float, float], str] = {
    (1, 2**24): """
        vocab_size hidden_size num_attention_heads num_key_value_heads num_global_key_value_heads
        vocab_size_per_layer_input intermediate_size type_vocab_size swa_num_attention_heads
        swa_q_lora_rank swa_kv_lora_rank gated_norm_rank
        swa_num_key_value_heads linear_num_key_heads linear_num_value_heads conv_dim conv_dim_out block_dim
        block_ff_dim block_multiple_of mamba_d_ssm mamba_n_heads mamba_num_heads mamba_n_groups n_groups
        mamba_d_state ssm_state_size q_lora_rank kv_lora_rank intermediate_size_mlp num_heads out_hidden_size
        linear_num_heads d_model encoder_attention_heads decoder_attention_heads encoder_ffn_dim decoder_ffn_dim
        output_dim output_proj_dims
    """,
    (1, 2**16): """
        head_dim global_head_dim swa_head_dim swa_v_head_dim swa_qk_nope_head_dim swa_qk_rope_head_dim
        linear_key_head_dim linear_value_head_dim linear_head_dim
        mamba_d_head mamba_head_dim n_routed_experts qk_nope_head_dim qk_rope_head_dim v_head_dim ep_size
        index_head_dim index_n_heads index_topk_blocks sparse_num_index_heads sparse_index_dim sparse_topk_blocks
        hc_mult
        n_group topk_group moe_num_experts moe_k moe_topk rotary_dim attention_head_dim mm_tokens_per_image
    """,
    (1e-6, 1e9): """
        query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping swiglu_limit swiglu_alpha hc_magnitude
        block_ffn_dim_multiplier lm_head_multiplier key_multiplier attention_in_multiplier
        attention_out_multiplier ssm_in_multiplier ssm_out_multiplier attention_multiplier attention_value_scale
        embedding_multiplier residual_multiplier logits_scaling logit_scale routed_scaling_factor
    """,
    (1, 1000): """
        num_hidden_layers sliding_window_pattern full_attention_interval global_attn_every_n_layers
        decoder_sparse_step no_rope_layer_interval moe_layer_freq moe_layer_interval depth layer_group_size
        encoder_layers decoder_layers
    """,
    (1e-6, 1e6): "low_freq_factor high_freq_factor beta_fast beta_slow attention_factor short_factor long_factor",
    (0, 2**24): """
        hidden_size_per_layer_input pad_token_id moe_intermediate_size shared_expert_intermediate_size
        moe_shared_expert_intermediate_size shared_intermediate_size num_labels shared_experts_intermediate_size
        dense_intermediate_size
    """,
    (0, 1000): """
        num_kv_shared_layers first_k_dense_replace moe_layer_start_index llama_4_scaling_beta attn_scale
        index_topk_freq index_skip_topk_offset index_local_blocks sparse_local_block sparse_init_block
        moe_layer_num_skipped num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers
    """,
    (0, 2**16): """
        top_k_experts num_experts num_local_experts num_experts_per_tok experts_per_token
        interleave_moe_layer_step
    """,
    (1, 2**10): """
        linear_conv_kernel_dim short_conv_kernel_size conv_L_cache mamba_d_conv conv_kernel mamba_expand patch_size
        group_norm_size conv_kernel_size attention_context_left
    """,
    (-1e6, -1e-6): "kda_lower_bound",
    # what keeps a norm from dividing by zero
    (1e-30, 1.0): "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon",
    # 0 where use_sliding_window is false
    (0, 2**31): "sliding_window sliding_window_size max_window_layers full_attn_mod interpolate_factor",
    (1, 16): "in_channels temporal_patch_size spatial_merge_size pooling_kernel_size num_channels",
    (1, 2**12): "num_mel_bins n_window downsample_hidden_size",
    (1, 2**22): "n_window_infer",
    (1.000001, 1e15): "global_rope_theta local_rope_theta rope_theta rope_local_base_freq swa_rope_theta",
    (1, 2**30): "max_position_embeddings floor_scale initial_context_length",
    (0, 2**10): "n_shared_experts moe_num_shared_experts num_shared_expert",
    (0.0, 1.0): "router_jitter_noise rotary_pct residual_weight",
    (0, 2**12): "attention_context_right",
    (1.0, 1e30): "gradient_clipping attention_logit_cap",
    (-1e30, -1.0): "attention_invalid_logits_value",
    (1.0, 1e6): "alpha factor",
    (1, 2**20): "num_position_embeddings position_embedding_size max_source_positions max_target_positions",
    (0.0, 1e6): "mscale mscale_all_dim",
    (2, 2**31): "local_attention",
    (0.0, 1e-3): "moe_norm_min hc_eps",
    (1, 2**17): "qk_head_dim",
    (-1, 1000): "moe_layer_end_index",
    (1, 2**31): "attention_chunk_size index_topk index_block_size sparse_block_size",
    (1e-6, 1.0): "partial_rotary_factor",
    (1, 2**14): "image_size",
    (2, 2**30): "original_max_position_embeddings",
}
BOUNDS: Mapping[str, tuple[float, float]] = {key: bounds for bounds, keys in _KEYS.items() for key in keys.split()}
MAX_LISTED = 2**16  # entries of a list
MAX_TOKEN_ID = 2**24


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
