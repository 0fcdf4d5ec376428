"""Configs of published models.

Source: the config.json that each model's authors published with its weights, read where a comment says so from a copy.
Left out, for no source shows their values in full: Phi-3-medium-128k (its lists of factors), Llama 1, Qwen2-0.5B, -1.5B
and -72B, Ministral-8B. Refused, for attention in two chunks is not served: Qwen2.5-7B-1M and -14B-1M.
"""

import json
import pathlib

from tests.models.published_gemma4 import GEMMA4, MORE_GEMMA4
from tests.models.published_images import IMAGES, MORE_IMAGES
from tests.models.published_latent import LATENT, MORE_LATENT
from tests.models.published_recurrent import MORE_RECURRENT, RECURRENT
from tests.models.published_sizes import SIZES
from tests.models.published_tail import MORE_TAIL, TAIL

LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
}
LLAMA32_1B = LLAMA3_8B | {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 8192,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "eos_token_id": [128001, 128008, 128009],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "attention_dropout": 0.0,
    "eos_token_id": 151645,
}
QWEN25_05B = QWEN | {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "sliding_window": 32768,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "tie_word_embeddings": True,
}
QWEN3_06B = QWEN | {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "tie_word_embeddings": True,
    "sliding_window": None,
    "attention_bias": False,
}
QWEN3_30B_A3B = QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "router_aux_loss_coef": 0.001,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32000,
}
# As in mistral-community/Mixtral-8x22B-v0.1, the weights' first home.
MIXTRAL_8X22B = MIXTRAL_8X7B | {
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "max_position_embeddings": 65536,
    "num_attention_heads": 48,
    "num_hidden_layers": 56,
    "router_aux_loss_coef": 0.001,
}
# Qwen/Qwen3-Next-80B-A3B-Instruct; the values of its layers as in the copy of its config.json in guoziyu415/kv-zoo on
# GitHub, configs/qwen3-next-80b-a3b.json
QWEN3_NEXT_80B_A3B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# Source: huggingface.co/Open-Orca/Mistral-7B-OpenOrca, made from mistralai/Mistral-7B-v0.1 with two tokens more
MISTRAL_7B_01 = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
# Source: github.com/Lightning-AI/litgpt, litgpt/config.py, which names mistralai/Mistral-7B-Instruct-v0.2
MISTRAL_7B_02 = MISTRAL_7B_01 | {"rope_theta": 1000000.0, "sliding_window": None}
# Source: huggingface.co/mistralai/Mistral-7B-Instruct-v0.3
MISTRAL_7B_03 = MISTRAL_7B_01 | {
    "vocab_size": 32768,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "attention_dropout": 0.0,
}
# Source: huggingface.co/yuyouyu/Mistral-Nemo-BD-RP, trained from mistralai/Mistral-Nemo-Instruct-2407
MISTRAL_NEMO = MISTRAL_7B_03 | {
    "vocab_size": 131072,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "head_dim": 128,
    "max_position_embeddings": 1024000,
}
# Source: huggingface.co/minchyeom/letta, trained from mistralai/Mistral-Small-Instruct-2409
MISTRAL_SMALL_2409 = MISTRAL_7B_03 | {
    "hidden_size": 6144,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
    "head_dim": 128,
    "intermediate_size": 16384,
}
# Source: huggingface.co/unsloth/Mistral-Small-24B-Instruct-2501-GGUF
MISTRAL_SMALL_2501 = MISTRAL_NEMO | {
    "intermediate_size": 32768,
    "max_position_embeddings": 32768,
    "rope_theta": 100000000.0,
}
# Source: huggingface.co/IntervitensInc/Mistral-Large-Instruct-2407-chatml
MISTRAL_LARGE_2407 = MISTRAL_7B_03 | {
    "hidden_size": 12288,
    "num_hidden_layers": 88,
    "num_attention_heads": 96,
    "intermediate_size": 28672,
}
# Source: github.com/Lightning-AI/litgpt, litgpt/config.py, which names mistralai/Mistral-Large-Instruct-2411
MISTRAL_LARGE_2411 = MISTRAL_LARGE_2407
# Source: huggingface.co/kemura/gemma-2b-sql-finetuned, trained from google/gemma-2-2b
GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "vocab_size": 256000,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "attention_bias": False,
    "cache_implementation": "hybrid",
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# Source: huggingface.co/ashercn97/blanked-v011, made from google/gemma-2-9b
GEMMA2_9B = GEMMA2_2B | {
    "hidden_size": 3584,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "sliding_window_size": 4096,
}
# Source: github.com/google/gemma_pytorch, gemma/config.py, get_config_for_27b
GEMMA2_27B = GEMMA2_2B | {
    "hidden_size": 4608,
    "num_hidden_layers": 46,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "intermediate_size": 36864,
    "query_pre_attn_scalar": 144,
}
# Source: huggingface.co/CodeAtCMU/gemma-3-1b-pt_full_sft_code_data_120K_replace_variables, from google/gemma-3-1b-pt
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262144,
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 6912,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_bias": False,
    "cache_implementation": "hybrid",
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# Source: huggingface.co/Codingstark/gemma3-270m-leetcode, trained from google/gemma-3-270m-it
GEMMA3_270M = {key: value for key, value in GEMMA3_1B.items() if key != "sliding_window_pattern"} | {
    "_sliding_window_pattern": 6,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "hidden_size": 640,
    "num_hidden_layers": 18,
    "intermediate_size": 2048,
    "use_bidirectional_attention": False,
}
# Source: huggingface.co/Creekside/gemma-3, the text part of google/gemma-3-4b-it
GEMMA3_4B = GEMMA3_1B | {
    "vocab_size": 262208,
    "hidden_size": 2560,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 10240,
    "max_position_embeddings": 131072,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
# Source: huggingface.co/OpenPipe/gemma-3-12b-it-text-only, the text part of google/gemma-3-12b-it
GEMMA3_12B = GEMMA3_4B | {
    "hidden_size": 3840,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 15360,
}
# Source: huggingface.co/harmonicdata/Gemma3-SD-v0.2, trained from google/gemma-3-12b-it
GEMMA3_12B_IMAGES = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
        "vocab_size": 262208,
    },
    "torch_dtype": "bfloat16",
}
# Source: github.com/google/gemma_pytorch, gemma/config.py, get_config_for_27b_v3; vocabulary of the other sizes
GEMMA3_27B = GEMMA3_4B | {
    "hidden_size": 5376,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "intermediate_size": 21504,
    "query_pre_attn_scalar": 168,
}
# As in a copy of openai/gpt-oss-20b, EchoCog/gpt-oss-20b on GitHub; quant_method is that of the published weights.
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
# What differs: as in the copy of openai/gpt-oss-120b's config.json in guoziyu415/kv-zoo on GitHub,
# configs/gpt-oss-120b.json, and in table 1 of the model card of gpt-oss.
GPT_OSS_120B = GPT_OSS_20B | {
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}
# As in NVIDIA/TensorRT-LLM's test of this model.
PHI3_MINI_4K = {
    "_name_or_path": "Phi-3-mini-4k-instruct",
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.2",
    "use_cache": True,
    "vocab_size": 32064,
}
# As in abhibambhaniya/GenZ-LLM-Analyzer on GitHub, its configuration of microsoft/Phi-3-medium-4k-instruct.
PHI3_MEDIUM_4K = PHI3_MINI_4K | {
    "_name_or_path": "Phi-3-medium-4k-instruct",
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
}
# As in sdpython/onnx-diagnostic on GitHub, hub_data_cached_configs.py, their lists of factors in longrope.json; that of
# Phi-3.5-mini in NVIDIA/Fuser's benchmark of it as well.
_FACTORS = json.loads((pathlib.Path(__file__).parent / "longrope.json").read_text())
PHI3_MINI_128K = PHI3_MINI_4K | {
    "_name_or_path": "Phi-3-mini-128k-instruct",
    "max_position_embeddings": 131072,
    "rope_scaling": {"type": "longrope", **_FACTORS["Phi-3-mini-128k"]},
    "sliding_window": 262144,
}
PHI35_MINI = PHI3_MINI_128K | {
    "_name_or_path": "Phi-3.5-mini-instruct",
    "rope_scaling": {"type": "longrope", **_FACTORS["Phi-3.5-mini"]},
}
PHI4_MINI_REASONING = {
    key: value for key, value in PHI3_MINI_128K.items() if key not in ("_name_or_path", "auto_map")
} | {
    "bos_token_id": 199999,
    "eos_token_id": 199999,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "pad_token_id": 199999,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", **_FACTORS["Phi-4-mini"]},
    "tie_word_embeddings": True,
    "transformers_version": "4.50.0",
    "vocab_size": 200064,
}
# As in a copy of microsoft/phi-4, mehmetcc/pal on GitHub, phi-4/config.json.
PHI4 = PHI3_MINI_4K | {
    "_name_or_path": "microsoft/phi-4",
    "auto_map": {},
    "bos_token_id": 100257,
    "eos_token_id": 100257,
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "max_position_embeddings": 16384,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "original_max_position_embeddings": 16384,
    "pad_token_id": 100257,
    "rope_theta": 250000,
    "sliding_window": 16384,
    "transformers_version": "4.47.0",
    "vocab_size": 100352,
}
PUBLISHED = {
    "Gemma-2-2B": (GEMMA2_2B, 2_614_341_888),
    "Gemma-2-9B": (GEMMA2_9B, 9_241_705_984),
    "Gemma-2-27B": (GEMMA2_27B, 27_227_128_320),
    "Gemma-3-270M": (GEMMA3_270M, 268_098_176),
    "Gemma-3-1B": (GEMMA3_1B, 999_885_952),
    "Gemma-3-4B": (GEMMA3_4B, 3_880_263_168),
    "Gemma-3-12B": (GEMMA3_12B, 11_766_034_176),
    "Gemma-3-12B-images": (GEMMA3_12B_IMAGES, 11_766_034_176),
    "Gemma-3-27B": (GEMMA3_27B, 27_009_346_304),
    "Llama-3-8B": (LLAMA3_8B, 8_030_261_248),
    "Llama-3.2-1B": (LLAMA32_1B, 1_235_814_400),
    "Mistral-7B-v0.1": (MISTRAL_7B_01, 7_241_732_096),
    "Mistral-7B-v0.3": (MISTRAL_7B_03, 7_248_023_552),
    "Mistral-Nemo-2407": (MISTRAL_NEMO, 12_247_782_400),
    "Mistral-Small-2409": (MISTRAL_SMALL_2409, 22_247_282_688),
    "Mistral-Small-2501": (MISTRAL_SMALL_2501, 23_572_403_200),
    "Mistral-Large-2407": (MISTRAL_LARGE_2407, 122_610_069_504),
    "Qwen2.5-0.5B": (QWEN25_05B, 494_032_768),
    "Qwen3-0.6B": (QWEN3_06B, 596_049_920),
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46_702_792_704),
    "Mixtral-8x22B": (MIXTRAL_8X22B, 140_620_634_112),
    "Phi-3-mini-4k": (PHI3_MINI_4K, 3_821_079_552),
    "Phi-3-mini-128k": (PHI3_MINI_128K, 3_821_079_552),
    "Phi-3.5-mini": (PHI35_MINI, 3_821_079_552),
    "Phi-4-mini-reasoning": (PHI4_MINI_REASONING, 3_836_021_760),
    "Phi-4": (PHI4, 14_659_507_200),
    "gpt-oss-20b": (GPT_OSS_20B, 20_914_757_184),
    "gpt-oss-120b": (GPT_OSS_120B, 116_829_156_672),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30_532_122_624),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT_80B_A3B, 79_674_391_296),
}
_BASES = {
    "Llama-2": {key: value for key, value in LLAMA3_8B.items() if key != "rope_theta"} | {"eos_token_id": 2},
    "Llama-3": LLAMA3_8B,
    "Llama-3.1": LLAMA3_8B | {"rope_scaling": LLAMA32_1B["rope_scaling"] | {"factor": 8.0}},
    "Llama-3.2": LLAMA32_1B,
    "Phi-4": PHI4,
    "Qwen2.5": QWEN25_05B,
    "Qwen3": QWEN3_06B,
    "Qwen3-MoE": QWEN3_30B_A3B,
}
# Sizes that differ from those above in a few values alone.
MORE = {
    "Mistral-7B-v0.2": (MISTRAL_7B_02, 7_241_732_096),
    "Mistral-Large-2411": (MISTRAL_LARGE_2411, 122_610_069_504),
    "Phi-3-medium-4k": (PHI3_MEDIUM_4K, 13_960_238_080),
    **{name: (_BASES[base] | values, count) for name, (base, values, count) in SIZES.items()},
    **MORE_TAIL,
    **MORE_GEMMA4,
    **MORE_LATENT,
    **MORE_RECURRENT,
    **MORE_IMAGES,
}

# One size of each family with its own table for logits or without: others differ in numbers alone. Of the long
# tail, one with a parallel block, one whose layers differ and one with latent attention.
KINDS = (
    *{
        (config["architectures"][0], config.get("tie_word_embeddings")): name for name, (config, _) in PUBLISHED.items()
    }.values(),
    *("Command-R7B", "SmolLM3-3B", "DeepSeek-V2-Lite"),
)
PUBLISHED |= TAIL | GEMMA4 | LATENT | RECURRENT | IMAGES
