"""Configs of published models that see images, towers included in the numbers.

Source: the config.json that the authors published with the weights; parameters are counted by transformers.
"""

from __future__ import annotations

from typing import Any


def _qwen3_vl(text: dict[str, int], vision: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "tie_word_embeddings": tied,
            "use_cache": True,
            "vocab_size": 151936,
            **text,
        },
        "tie_word_embeddings": tied,
        "video_token_id": 151656,
        "vision_config": {
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "initializer_range": 0.02,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **vision,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }


def _text(hidden_size: int, num_hidden_layers: int, num_attention_heads: int, intermediate_size: int) -> dict[str, int]:
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "intermediate_size": intermediate_size,
    }


_SMALL_TOWER = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "deepstack_visual_indexes": [5, 11, 17],
}
_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
QWEN3_VL_2B = _qwen3_vl(_text(2048, 28, 16, 6144), _SMALL_TOWER, tied=True)


def _with_experts(config: dict[str, Any]) -> dict[str, Any]:
    experts = {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
    }
    return config | {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "text_config": config["text_config"] | experts,
        "vision_config": config["vision_config"] | {"model_type": "qwen3_vl_moe"},
    }


def _gemma3(text: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            "vocab_size": 262208,
            **text,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }


GEMMA3_4B_IMAGES = _gemma3({"hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240})
IMAGES = {
    "Qwen3-VL-2B": (QWEN3_VL_2B, 2_127_532_032),
    "Gemma-3-4B-images": (GEMMA3_4B_IMAGES, 4_300_079_472),
}
MORE_IMAGES = {
    "Qwen3-VL-4B": (_qwen3_vl(_text(2560, 36, 32, 9728), _SMALL_TOWER, tied=True), 4_437_815_808),
    "Qwen3-VL-8B": (_qwen3_vl(_text(4096, 36, 32, 12288), _TOWER, tied=False), 8_767_123_696),
    "Qwen3-VL-30B-A3B": (_with_experts(_qwen3_vl(_text(2048, 48, 32, 6144), _TOWER, tied=False)), 31_070_754_032),
    "Qwen3-VL-32B": (_qwen3_vl(_text(5120, 64, 64, 25600), _TOWER, tied=False), 33_357_390_064),
}
