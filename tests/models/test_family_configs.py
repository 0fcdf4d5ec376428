"""What the config.json of some families comes to: windows, ropes, scales, and what cannot be."""

from __future__ import annotations

import dataclasses

import pytest

from ferrum_jax.models.registry import (
    abstract_model,
    abstract_parts,
    spec_of,
)
from ferrum_jax.spec import CacheGroup, RopeSpec
from scripts.published import PUBLISHED, config_of

GEMMA2_2B = config_of("Gemma-2-2B")
GEMMA2_27B = config_of("Gemma-2-27B")
GEMMA3_1B = config_of("Gemma-3-1B")
GEMMA3_4B = config_of("Gemma-3-4B")
GEMMA3_270M = config_of("Gemma-3-270M")
GPT_OSS_20B = config_of("gpt-oss-20b")
LLAMA3_8B = config_of("Llama-3-8B")
LLAMA32_1B = config_of("Llama-3.2-1B")
MISTRAL_7B_01 = config_of("Mistral-7B-v0.1")
PHI3_MINI_4K = config_of("Phi-3-mini-4k")
QWEN3_06B = config_of("Qwen3-0.6B")
QWEN3_30B_A3B = config_of("Qwen3-30B-A3B")
QWEN25_05B = config_of("Qwen2.5-0.5B")

TINY = QWEN3_06B | {
    "vocab_size": 40,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "head_dim": 8,
    "num_key_value_heads": 3,
    "intermediate_size": 20,
}


@pytest.mark.parametrize(("config", "num_full"), [(QWEN25_05B, 5), (QWEN3_06B, 5), (QWEN3_30B_A3B, 0)])
def test_layers_with_a_sliding_window_are_a_cache_group_of_their_own(config, num_full):
    windowed = config | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 5}
    layers = tuple(range(config["num_hidden_layers"]))
    full = CacheGroup(kind="full", layers=layers[:num_full])
    window = CacheGroup(kind="window", layers=layers[num_full:], window=4096)
    assert spec_of(windowed).cache_groups == ((full, window) if num_full else (window,))
    assert [spec_of(windowed).window_of(layer) for layer in layers] == [None] * num_full + [4096] * len(window.layers)


def test_layer_types_say_which_layers_have_a_window():
    kinds = ["sliding_attention", "full_attention"] * 14
    spec = spec_of(QWEN3_06B | {"use_sliding_window": True, "sliding_window": 100, "layer_types": kinds})
    assert [group.layers for group in spec.cache_groups] == [tuple(range(1, 28, 2)), tuple(range(0, 28, 2))]
    with pytest.raises(ValueError, match="layer_types names 2 layers, and num_hidden_layers is 28"):
        spec_of(QWEN3_06B | {"layer_types": kinds[:2]})
    with pytest.raises(ValueError, match=r"layer_types has \['linear_attention'\]; known are"):
        spec_of(QWEN3_06B | {"layer_types": ["linear_attention"] * 28})


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([("full", (0, 2), None)], r"cache_groups hold layers \[0, 2\]; they must hold each of 2 once at most"),
        ([("full", (0, 1), None), ("window", (1,), 7)], r"hold layers \[0, 1, 1\]; they must hold each of 2 once"),
        ([("full", (0, 1), 7)], "a cache group of kind 'full' has window 7"),
        ([("window", (0, 1), None)], "a cache group of kind 'window' has window None"),
        ([("window", (0, 1), 0)], "a cache group of kind 'window' has window 0"),
        ([("state", (0,), None), ("full", (1,), None)], "'state' must come once at most, last, and not alone"),
        ([("state", (0, 1), None)], "'state' must come once at most, last, and not alone"),
    ],
)
def test_cache_groups_that_cannot_be_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        made = tuple(CacheGroup(kind=kind, layers=layers, window=window) for kind, layers, window in groups)
        dataclasses.replace(spec_of(TINY), cache_groups=made)


def test_layers_of_a_group_keep_alike_and_borrow_only_earlier_blocks():
    spec = spec_of(TINY)
    full = CacheGroup(kind="full", layers=(0,))
    lent = dataclasses.replace(spec, cache_groups=(full,), borrowed=((1, 0),))
    assert lent.attention_layers == (0, 1) and lent.window_of(1) is None and lent.lender_of(1) == 0
    none = dataclasses.replace(spec, cache_groups=(full,))
    assert none.attention_layers == (0,), "a layer without a cache"
    for borrowed in ((1, 1), (0, 0), (2, 0)):
        with pytest.raises(ValueError, match=f"layer {borrowed[0]} borrows from {borrowed[1]}; it must be an earlier"):
            dataclasses.replace(spec, cache_groups=(full,), borrowed=(borrowed,))
    other = dataclasses.replace(spec.attention, v_head_dim=14)
    with pytest.raises(ValueError, match=r"layers \[0, 1\] are one cache group and keep .* \(KV heads, sizes of"):
        dataclasses.replace(spec, other_attention=(((1,), other),))
    assert lent.digest_text() != spec.digest_text() and "v_head_dim" not in lent.digest_text()


@pytest.mark.parametrize("config", [QWEN25_05B, QWEN3_06B, QWEN3_30B_A3B])
def test_a_window_as_long_as_the_longest_context_is_none(config):
    longest = config["max_position_embeddings"]
    assert spec_of(config | {"use_sliding_window": True, "sliding_window": longest}) == spec_of(config)


def test_mistral_has_a_window_in_all_layers_or_in_none():
    layers = tuple(range(32))
    assert spec_of(MISTRAL_7B_01).cache_groups == (CacheGroup(kind="window", layers=layers, window=4096),)
    absent = {key: value for key, value in MISTRAL_7B_01.items() if key != "sliding_window"}
    assert spec_of(absent) == spec_of(MISTRAL_7B_01), "the reference's default"
    for none in (None, 32768):
        assert spec_of(MISTRAL_7B_01 | {"sliding_window": none}).cache_groups == (
            CacheGroup(kind="full", layers=layers),
        )


def test_gemma_alternates_windows_and_full_attention():
    two, three = spec_of(GEMMA2_2B), spec_of(GEMMA3_1B)
    assert [two.window_of(layer) for layer in range(4)] == [4096, None] * 2
    assert [three.window_of(layer) for layer in range(12)] == ([512] * 5 + [None]) * 2
    named = {key: value for key, value in GEMMA3_1B.items() if key != "sliding_window_pattern"}
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 5
    assert spec_of(named | {"layer_types": kinds[:26]}) == three


def test_gemma_3_turns_windowed_layers_at_their_own_frequencies():
    spec = spec_of(GEMMA3_4B)
    far, near = RopeSpec(rope_type="linear", rope_theta=1e6, factor=8.0), RopeSpec(rope_theta=1e4)
    assert [spec.attention_of(layer).rope for layer in range(7)] == [*[near] * 5, far, near]
    new = {key: value for key, value in GEMMA3_4B.items() if not key.startswith("rope_")}
    kinds = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    kinds["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    assert spec_of(new | {"rope_parameters": kinds}) == spec
    assert spec_of(new).attention.rope == RopeSpec(rope_theta=1e6), "the reference's default"
    always = spec_of(GEMMA3_4B | {"sliding_window": 131072})
    assert always.attention_of(0).rope == near, "also where the window is as long as any context"
    with pytest.raises(ValueError, match=r"rope_parameters has \['default'\]; known are"):
        spec_of(new | {"rope_parameters": {"default": {}}})


def test_soft_caps_and_the_scale_of_queries_and_embeddings_are_gemmas():
    spec = spec_of(GEMMA2_27B)
    assert (spec.attention.attn_logit_softcapping, spec.final_logit_softcapping) == (50.0, 30.0)
    assert (spec.attention.scale, spec.embedding_scale) == (144**-0.5, 4608**0.5)
    silent = {key: value for key, value in GEMMA2_27B.items() if "softcapping" not in key}
    assert spec_of(silent) == spec, "the reference's defaults"
    assert spec_of(GEMMA2_27B | {"attn_logit_softcapping": None}).attention.attn_logit_softcapping is None
    with pytest.raises(ValueError, match="final_logit_softcapping is -1; it must be a number"):
        spec_of(GEMMA2_27B | {"final_logit_softcapping": -1})
    with pytest.raises(ValueError, match="Gemma 3 does not cap the logits of attention"):
        spec_of(GEMMA3_1B | {"attn_logit_softcapping": 50.0})
    with pytest.raises(ValueError, match="use_bidirectional_attention is true"):
        spec_of(GEMMA3_270M | {"use_bidirectional_attention": True})


def test_a_window_that_is_not_named_is_the_references_and_null_is_none():
    for config in (QWEN25_05B, QWEN3_06B, QWEN3_30B_A3B):
        silent = {key: x for key, x in config.items() if key not in ("sliding_window", "max_window_layers")}
        windowed = silent | {"use_sliding_window": True, "num_hidden_layers": 30}
        assert spec_of(windowed).cache_groups[-1].window == 4096
        assert spec_of(windowed | {"sliding_window": None}).cache_groups[-1].window is None
    assert [group.kind for group in spec_of(GPT_OSS_20B | {"sliding_window": None}).cache_groups] == ["full"]


def test_a_window_only_behind_the_last_layer_is_no_window():
    config = QWEN25_05B | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 24}
    assert spec_of(config) == spec_of(QWEN25_05B)


def test_qwen3_without_head_dim_has_128_and_qwen2_divides():
    config = {key: value for key, value in TINY.items() if key not in ("head_dim", "attention_bias")}
    assert spec_of(config).attention.head_dim == 128
    assert spec_of(config | {"architectures": ["Qwen2ForCausalLM"]}).attention.head_dim == 2


def test_sparse_layers_follow_the_step_and_the_list():
    sparse = spec_of(QWEN3_30B_A3B | {"decoder_sparse_step": 3, "mlp_only_layers": [5, 8]}).moe_layers
    assert sparse == tuple(i for i in range(2, 48, 3) if i not in (5, 8))


def test_both_spellings_of_rope_give_one_spec():
    new = {key: value for key, value in LLAMA32_1B.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": 500000.0, **LLAMA32_1B["rope_scaling"]}
    assert spec_of(new) == spec_of(LLAMA32_1B)
    assert spec_of(new).attention.rope.original_max_position_embeddings == 8192


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("linear", "rope_scaling is 'linear'; it must be an object whose rope_type is one of"),
        ({"type": "mrope", "factor": 2.0}, "of type 'mrope'; supported are"),
        ({"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}, r"not understood: \['mrope_section'\]"),
        ({"rope_type": "linear"}, r"lacks \['factor'\]"),
        ({"rope_type": "llama3", "factor": 8.0}, r"lacks \['high_freq_factor', 'low_freq_factor'\]"),
        ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5"),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5; this architecture turns whole heads",
        ),
    ],
)
def test_rope_scaling_that_is_not_understood_is_refused(scaling, message: str):
    with pytest.raises(ValueError, match=message):
        spec_of(LLAMA3_8B | {"rope_scaling": scaling})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 4}, "num_attention_heads is 6, no multiple of num_key_value_heads, 4"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rms_norm_eps": 1e-6, "hidden_act": "tanhshrink"}, "hidden_act is 'tanhshrink'; supported are"),
    ],
)
def test_values_that_cannot_be_are_refused(change, message: str):
    with pytest.raises(ValueError, match=message):
        abstract_model(spec_of(TINY | change))


def test_more_experts_per_token_than_experts_is_refused():
    with pytest.raises(ValueError, match="num_experts_per_tok is 129 of 128 experts"):
        spec_of(QWEN3_30B_A3B | {"num_experts_per_tok": 129})


def test_the_digest_text_is_canonical_and_blind_to_dtype_and_end_tokens():
    text = spec_of(TINY).digest_text()
    assert (
        text == spec_of(dict(reversed(TINY.items())) | {"torch_dtype": "float16", "eos_token_id": [1, 2]}).digest_text()
    )
    assert text != spec_of(TINY | {"rms_norm_eps": 1e-5}).digest_text()


def test_end_tokens_and_dtype_come_from_the_config():
    spec = spec_of(LLAMA32_1B)
    assert (spec.eos_token_ids, spec.dtype) == ((128001, 128008, 128009), "bfloat16")
    assert spec_of(TINY | {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_size": "40"}, 'vocab_size is "40"; it must be a whole number'),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5; it must be a whole number"),
        ({"head_dim": True}, "head_dim is true; it must be a whole number"),
        ({"rms_norm_eps": "x"}, 'rms_norm_eps is "x"; it must be a number'),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings is "false"; it must be true or false'),
        ({"rope_theta": "1e6"}, 'rope_theta is "1e6"; it must be a number'),
        ({"hidden_act": 3}, "hidden_act is 3; it must be a string"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be a token id or a list of them"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id is \[1, -1\]"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": -4, "use_sliding_window": True}, "window is -4"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_key(wrong, message):
    with pytest.raises(ValueError, match=message):
        spec_of(TINY | wrong)


def test_one_cache_group_holds_all_layers():
    assert spec_of(TINY).cache_groups == (CacheGroup(kind="full", layers=(0, 1)),)


def test_gpt_oss_names_one_thing_twice_and_both_must_agree():
    spec = spec_of(GPT_OSS_20B)
    assert [(group.kind, len(group.layers), group.window) for group in spec.cache_groups] == [
        ("full", 12, None),
        ("window", 12, 128),
    ]
    rope = spec.attention.rope
    assert spec.window_of(0) == 128 and rope.truncate is False and rope.attention_factor > 1.3
    assert spec_of({key: x for key, x in GPT_OSS_20B.items() if key not in ("layer_types", "sliding_window")}) == spec
    for change, message in (
        ({"experts_per_token": 8}, "experts_per_token is 8 and num_experts_per_tok 4; they must be equal"),
        ({"initial_context_length": 8192}, "initial_context_length is 8192 and original_max_position_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; this architecture has its own clamped SwiGLU"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "says gptq of 4 bits, which is not supported yet; .*; of this architecture mxfp4 is",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            spec_of(GPT_OSS_20B | change)


def test_longrope_takes_the_long_factors_beyond_the_original_context():
    scaling = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    config = PHI3_MINI_4K | {"max_position_embeddings": 131072, "sliding_window": 262144, "rope_scaling": scaling}
    spec = spec_of(config)
    assert spec.attention.rope.is_long and spec.window_of(0) is None
    assert spec.attention.rope.attention_factor == pytest.approx(1.190238, abs=1e-6)  # sqrt(1 + ln 32 / ln 4096)
    assert [spec.fitted(longest).attention.rope.is_long for longest in (4096, 4097)] == [False, True]
    assert spec.fitted(4096).digest_text() != spec.digest_text() == spec.fitted(5000).digest_text()
    for kind in ("su", "yarn"):
        assert spec_of(config | {"rope_scaling": scaling | {"type": kind}}) == spec
    with pytest.raises(ValueError, match="47 short and 48 long factors; half of the dimensions that turn are 48"):
        spec_of(config | {"rope_scaling": scaling | {"short_factor": [1.0] * 47}})
    with pytest.raises(ValueError, match=r"lacks \['long_factor'\]"):
        spec_of(config | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48}})
    for key, value in (("attention_bias", True), ("lm_head_bias", True), ("full_attn_mod", 2)):
        with pytest.raises(ValueError, match=f"{key} is {str(value).lower()}; of this architecture it must be"):
            spec_of(config | {key: value})
    assert spec_of(PHI3_MINI_4K).window_of(0) == 2047


def test_mimo_v2_flash_is_read_in_the_published_spelling_and_in_the_references():
    config = PUBLISHED["MiMo-V2-Flash"][0]
    spec = spec_of(config)
    far, near = spec.attention, spec.attention_of(1)
    assert (far.kept, near.kept) == ((4, 192, 128, False), (8, 192, 128, False))
    assert not far.sinks and near.sinks and spec.window_of(0) is None and spec.window_of(1) == 129
    assert (far.rope.rope_theta, near.rope.rope_theta, near.rope.rotary_dim(192)) == (5e6, 1e4, 64)
    assert spec.experts.layers == tuple(range(1, 48)) and not spec.experts.shared_intermediate_size
    published = (*("hybrid_layer_pattern", "moe_layer_freq", "layernorm_epsilon", "sliding_window_size"),)
    published += ("partial_rotary_factor", "rope_theta", "swa_rope_theta", "sliding_window")
    assert spec_of({key: value for key, value in config.items() if key not in published}) == spec
    assert spec_of(config | {"attention_value_scale": None}).attention.output_multiplier == 1
    for change, message in (
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads is 4; of this architecture it must be 8"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias is true"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1; of this architecture it must be 0"),
        ({"moe_layer_freq": [0, 1]}, "it must name 'dense' or 'sparse' for each of 48 layers"),
        ({"sliding_window_size": "128"}, 'sliding_window_size is "128"; it must be a number'),
        ({"attention_value_scale": 0}, "attention_value_scale is 0; it must be a number"),
    ):
        with pytest.raises(ValueError, match=message):
            spec_of(config | change)


def test_phi35_moe_is_read_with_one_mscale_and_a_head_with_a_bias():
    config = PUBLISHED["Phi-3.5-MoE"][0]
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    mscales = {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}
    scaling = {"type": "longrope", "original_max_position_embeddings": 4096, **factors, **mscales}
    spec = spec_of(config | {"architectures": ["PhiMoEForCausalLM"], "rope_scaling": scaling})
    assert spec_of(config | {"rope_scaling": scaling}) == spec
    assert spec.attention.rope.attention_factor == mscales["long_mscale"] and spec.attention.rope.is_long
    assert not spec.fitted(4096).attention.rope.is_long and spec.window_of(0) is None
    assert spec.experts.rivals_within == 0.02 and "head.bias" in abstract_parts(spec)[1]
    without_head = spec_of(config, has_head=lambda: False)
    assert without_head.tie_word_embeddings and not without_head.head_bias
    for change, message in (
        ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4; of this architecture it must be 2"),
        ({"rope_scaling": scaling | {"long_mscale": 1.3}}, "long_mscale 1.3 of the rope; they must be one number"),
        ({"tie_word_embeddings": True}, "lm_head_bias and tie_word_embeddings are true"),
    ):
        with pytest.raises(ValueError, match=message):
            spec_of(config | change)
