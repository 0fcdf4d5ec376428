"""Configs of published Gemma 4 models, and their numbers of parameters.

Source: the config.json that their authors published, without some keys that change nothing here, and with less of what
concerns images and sounds. The numbers are those of the reference implementation's text models built without memory
from the same values, and one for the scale of each layer, which is no parameter there. The model cards say 5.1B and 8B
of the E models with what sees and hears, and 25.2B and 30.7B of the text of the others.
"""

from __future__ import annotations

from typing import Any

_E2B = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": False,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "max_position_embeddings": 131072,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_attention_heads": 8,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": None,
    "use_cache": True,
    "use_double_wide_mlp": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
_E4B = _E2B | {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 7,
    "num_hidden_layers": 42,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 18,
    "use_double_wide_mlp": False,
}
_31B = _E4B | {
    "attention_k_eq_v": True,
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
}
_26B_A4B = _31B | {
    "enable_moe_block": True,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "top_k_experts": 8,
}


_SMALL_TOWER = {
    "attention_bias": False,
    "default_output_length": 280,
    "global_head_dim": 64,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "max_position_embeddings": 131072,
    "model_type": "gemma4_vision",
    "num_attention_heads": 12,
    "num_hidden_layers": 16,
    "num_key_value_heads": 12,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "standardize": False,
    "use_clipped_linears": True,
}
_TOWER = _SMALL_TOWER | {
    "global_head_dim": 72,
    "head_dim": 72,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "standardize": True,
    "use_clipped_linears": False,
}


def _whole(text: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A folder's config.json, of a model that sees images."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_token_id": 258881,
        "boa_token_id": 256000,
        "boi_token_id": 255999,
        "dtype": "bfloat16",
        "eoa_token_id": 258883,
        "eoa_token_index": 258883,
        "eoi_token_id": 258882,
        "eos_token_id": [1, 106],
        "image_token_id": 258880,
        "initializer_range": 0.02,
        "model_type": "gemma4",
        "text_config": text,
        "tie_word_embeddings": True,
        "transformers_version": "5.5.0.dev0",
        "video_token_id": 258884,
        "vision_config": _TOWER if text["hidden_size_per_layer_input"] == 0 else _SMALL_TOWER,
        "vision_soft_tokens_per_image": 280,
        **more,
    }


_SOUNDS = {"audio_config": {"hidden_size": 1024, "model_type": "gemma4_audio"}}
GEMMA4: dict[str, tuple[dict[str, Any], int]] = {
    "Gemma-4-E2B": (_whole(_E2B, **_SOUNDS), 4_797_114_083),
    "Gemma-4-26B-A4B-text": ({**_26B_A4B, "architectures": ["Gemma4ForCausalLM"]}, 25_233_141_790),
}
MORE_GEMMA4: dict[str, tuple[dict[str, Any], int]] = {
    "Gemma-4-E4B": (_whole(_E4B, **_SOUNDS), 7_632_344_554),
    "Gemma-4-26B-A4B": (_whole(_26B_A4B, audio_config=None), 25_805_936_206),
    "Gemma-4-31B": (_whole(_31B, audio_config=None), 31_273_088_876),
}
