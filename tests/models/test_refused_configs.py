"""What the readers of config.json refuse: a published config with one change, and what the sentence says of it."""

import json
import math
from typing import Any

import pytest

from ferrum_jax.models.families.registry import FAMILIES, abstract_model, encoder_spec_of, spec_of
from scripts.published import config_of
from tests.models.tiny import TINY, TINY_NEXT
from tests.support import GOLDENS

BERT = json.loads((GOLDENS / "encoders" / "bert" / "config.json").read_text())
CONFIGS: dict[str, dict[str, Any]] = {"tiny": TINY, "tiny next": TINY_NEXT, "bert": BERT}
ROPE = config_of("Llama-3.2-1B")["rope_scaling"]
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
LONG_PHI = {"max_position_embeddings": 131072, "sliding_window": 262144, "rope_scaling": LONGROPE}
PHI_128K = config_of("Phi-3-mini-128k")["rope_scaling"]
ODD_PHI = {"hidden_size": 32 * 84, "partial_rotary_factor": 0.75}
MSCALES = {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}
PHIMOE_ROPE = {"type": "longrope", "original_max_position_embeddings": 4096, **MSCALES}
PHIMOE_ROPE |= {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
LARGE = config_of("Mistral-Large-4-1T-A52B")["text_config"]
NEGATIVE = {"layer_types": ["sliding_attention"] * 2, "sliding_window": -4, "use_sliding_window": True}
ABSENT = object()
REFUSED = {
    "tiny": [
        ({"num_key_value_heads": 4}, "num_attention_heads is 6, no multiple of num_key_value_heads, 4"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "40"}, 'vocab_size is "40"; it must be a whole number'),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5; it must be a whole number"),
        ({"head_dim": True}, "head_dim is true; it must be a whole number"),
        ({"rms_norm_eps": "x"}, 'rms_norm_eps is "x"; it must be a number'),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings is "false"; it must be true or false'),
        ({"rope_theta": "1e6"}, 'rope_theta is "1e6"; it must be a number'),
        ({"hidden_act": 3}, "hidden_act is 3; it must be a string"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be a token id or a list of them"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id is \[1, -1\]"),
        (NEGATIVE, "window is -4"),
    ],
    "Qwen3-0.6B": [
        ({"layer_types": ["full_attention"] * 2}, "layer_types names 2 layers, and num_hidden_layers is 28"),
        ({"layer_types": ["linear_attention"] * 28}, r"layer_types has \['linear_attention'\]; known are"),
    ],
    "Qwen3-30B-A3B": [
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129 of 128 experts"),
        ({"mlp_only_layers": [1] * 100_000}, "mlp_only_layers has 100000 entries"),
    ],
    "tiny next": [
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types is .*'full_attention', 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "for each of 4 layers"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads is 24, no multiple of linear_num_key_heads, 16"),
        ({"partial_rotary_factor": 0.05}, "head_dim is 16, and 0 of its dimensions turn"),
        ({"layer_types": ["linear_attention"] * 4}, "cache_groups are .*'state' must come once at most"),
    ],
    "DeepSeek-V3.2": [
        ({"index_topk": 0}, "index_topk is 0; it must be a number from 1 to"),
        ({"index_head_dim": 32}, "qk_rope_head_dim is 64 and index_head_dim 32; the former must fit into it"),
        (
            {"mlp_layer_types": ["dense", "sparse"]},
            r"mlp_layer_types is \[\"dense\", \"sparse\"\]; it must name .* of 61",
        ),
        ({"q_lora_rank": None}, "q_lora_rank is null; the queries of an indexer are made of the latent of queries"),
        ({"layer_types": ["full_attention"]}, r"layer_types is \[\"full_attention\"\]; of this architecture"),
    ],
    "GLM-5.2": [
        (
            {"indexer_types": ["full", "shared"]},
            r"indexer_types is \[\"full\", \"shared\"\], and must name .* of 78 layers",
        ),
        ({"index_topk_pattern": "SF" * 39}, r'index_topk_pattern is "SFSF.*, and must say .*full. of the first'),
        ({"index_topk_pattern": 5}, "index_topk_pattern is 5, and must name one of"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "index_topk_freq and index_skip_topk_offset must say"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave is false; of this architecture it must be true"),
    ],
    "Kimi-Linear-48B-A3B": [
        ({"mla_use_nope": False}, "mla_use_nope is false; of this architecture it must be true"),
        ({"linear_attn_config": {"kda_layers": [0, 1, 2]}}, r"kda_layers \[0, 1, 2\]; together they must name each"),
        ({"linear_attn_config": {"gate_lower_bound": -5.0}}, r"does not understand: gate_lower_bound = -5\.0"),
    ],
    "Ling-3.0-flash": [
        ({"no_kda_lora": False}, "no_kda_lora is false; of this architecture it must be true"),
        ({"num_hidden_layers": 40}, "num_hidden_layers is 40, no multiple of layer_group_size, 6"),
        ({"expert_swiglu_limit_list": [4]}, r"expert_swiglu_limit_list is \[4\]; it must be a number, 0 or more"),
        ({"kda_lower_bound": 0.5}, "kda_lower_bound is 0.5; it must be a number from -1e"),
    ],
    "Llama-3-8B": [
        ({"architectures": ["GPT2LMHeadModel"]}, f"'GPT2LMHeadModel'; supported are \\['{min(FAMILIES)}', "),
        ({"architectures": ABSENT}, "must name one of"),
        ({"architectures": 3}, "architectures is 3; it must name one of"),
        ({"hidden_size": ABSENT}, "no 'hidden_size'"),
        ({"hidden_size": 10**400}, "hidden_size is a whole number of 1329 bits"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be a number from 1 to 1000"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is NaN"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0"),
        ({"rope_theta": math.inf}, "rope_theta is Infinity"),
        ({"eos_token_id": 10**12}, "eos_token_id is 1000000000000; it must be a token id"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object whose rope_type is one of"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "of type 'mrope'; supported are"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}},
            r"not understood: \['mrope_section'\]",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, r"lacks \['factor'\]"),
        ({"rope_scaling": {"type": "dynamic"}}, r"lacks \['factor'\]"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"lacks \['high_freq_factor', 'low_freq_factor'\]"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor is 0.5"),
        (
            {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5; this architecture turns whole heads",
        ),
        ({"rope_scaling": ROPE | {"low_freq_factor": 4.5}}, "more than high_freq_factor"),
        ({"rope_scaling": ROPE | {"factor": math.nan}}, "factor is NaN"),
    ],
    "SmolLM2-135M": [({"rope_interleaved": True}, "rope_interleaved is true; of this architecture it must be")],
    "Qwen2.5-0.5B-base": [({"use_mrope": True}, "use_mrope is true; of this architecture it must be")],
    "Qwen3-Coder-480B-A35B": [
        ({"qkv_bias": True}, "qkv_bias is true; of this architecture it must be"),
        ({"use_qk_norm": False}, "use_qk_norm is false; of this architecture it must be"),
        (
            {"shared_expert_intermediate_size": 512},
            "shared_expert_intermediate_size is 512; of this architecture it mu",
        ),
    ],
    "Gemma-2-27B": [({"final_logit_softcapping": -1}, "final_logit_softcapping is -1; it must be a number")],
    "Gemma-3-1B": [({"attn_logit_softcapping": 50.0}, "Gemma 3 does not cap the logits of attention")],
    "Gemma-3-270M": [({"use_bidirectional_attention": True}, "use_bidirectional_attention is true")],
    "Gemma-3-4B": [
        (
            {"rope_theta": ABSENT, "rope_local_base_freq": ABSENT, "rope_scaling": ABSENT}
            | {"rope_parameters": {"default": {}}},
            r"rope_parameters has \['default'\]; known are",
        )
    ],
    "gpt-oss-20b": [
        ({"experts_per_token": 8}, "experts_per_token is 8 and num_experts_per_tok 4; they must be equal"),
        ({"initial_context_length": 8192}, "initial_context_length is 8192 and original_max_position_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; this architecture has its own clamped SwiGLU"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "says gptq of 4 bits, which is not supported yet; .*; of this architecture mxfp4 is",
        ),
    ],
    "Phi-3-mini-4k": [
        (
            LONG_PHI | {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 47}},
            "47 short and 48 long factors; half of the dimensions that turn are 48",
        ),
        (
            LONG_PHI | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48}},
            r"lacks \['long_factor'\]",
        ),
        (LONG_PHI | {"attention_bias": True}, "attention_bias is true; of this architecture it must be"),
        (LONG_PHI | {"lm_head_bias": True}, "lm_head_bias is true; of this architecture it must be"),
        (LONG_PHI | {"full_attn_mod": 2}, "full_attn_mod is 2; of this architecture it must be"),
        (
            ODD_PHI | {"hidden_size": 32 * 83, "partial_rotary_factor": 1.0},
            "head_dim is 83, and 83 of its dimensions turn",
        ),
        (ODD_PHI | {"rope_scaling": PHI_128K}, "63 of its dimensions turn; .* of type 'longrope' need an"),
    ],
    "Phi-3-mini-128k": [
        ({"rope_scaling": PHI_128K | {"short_factor": [math.nan] * 48}}, "short_factor is NaN"),
    ],
    "MiMo-V2-Flash": [
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads is 4; of this architecture it must be 8"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias is true"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1; of this architecture it must be 0"),
        ({"moe_layer_freq": [0, 1]}, "it must name 'dense' or 'sparse' for each of 48 layers"),
        ({"sliding_window_size": "128"}, 'sliding_window_size is "128"; it must be a number'),
        ({"attention_value_scale": 0}, "attention_value_scale is 0; it must be a number"),
    ],
    "Mistral-Large-4-1T-A52B": [
        (
            {"text_config": LARGE | {"kv_source_layers": [*range(71), 70]}},
            "71 attends to the latents of 70; that must be the last layer before it that lends, of those with posit",
        ),
        (
            {"text_config": LARGE | {"kv_source_layers": [0, 0, *range(2, 72)]}},
            "1 has latents of 0 and an indexer of its own; a cache of an indexer's keys alone is not served",
        ),
    ],
    "dots3-note-prev": [
        ({"use_dsa": False}, "use_dsa is false; of this architecture it must be"),
        ({"per_layer_config": {"2": {"head_dim": 192}}}, "per_layer_config is .*; it must give the layers of layer_t"),
    ],
    "Phi-3.5-MoE": [
        ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4; of this architecture it must be 2"),
        (
            {"rope_scaling": PHIMOE_ROPE | {"long_mscale": 1.3}},
            "long_mscale 1.3 of the rope; they must be one number",
        ),
        ({"tie_word_embeddings": True}, "lm_head_bias and tie_word_embeddings are true"),
    ],
    "bert": [
        ({"hidden_act": "swish"}, "hidden_act is 'swish'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is true"),
        ({"colour": 1}, "colour = 1"),
        ({"num_attention_heads": 5}, "no multiple of 5 heads"),
    ],
}
ROWS = [(name, change, said) for name, rows in REFUSED.items() for change, said in rows]


@pytest.mark.parametrize(("name", "change", "said"), ROWS, ids=[f"{n}-{said[:40]}" for n, _, said in ROWS])
def test_a_config_that_cannot_be_is_refused_by_key_and_value(name: str, change: dict[str, Any], said: str) -> None:
    config = (CONFIGS[name] if name in CONFIGS else config_of(name)) | change
    config = {key: value for key, value in config.items() if value is not ABSENT}
    read = encoder_spec_of if name == "bert" else spec_of
    with pytest.raises(ValueError, match=said):
        read(config)


def test_an_activation_that_there_is_not_is_refused_where_the_model_is_made():
    with pytest.raises(ValueError, match="hidden_act is 'tanhshrink'; supported are"):
        abstract_model(spec_of(TINY | {"hidden_act": "tanhshrink"}))
