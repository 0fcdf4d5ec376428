"""What the config.json of some families comes to: windows, ropes and their positions, scales, and what cannot be."""

import dataclasses

import jax
import numpy as np
import pytest

from checkpoints.rules import as_stored, expand, match
from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.families.registry import (
    abstract_parts,
    family_of,
    spec_of,
    weights_of,
)
from ferrum_jax.models.layers.rope import frequencies
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.models.spec import CacheGroup, Kept, RopeSpec
from ferrum_jax.runtime.settled import settle
from scripts.published import PUBLISHED, config_of
from tests.models.tiny import TINY, TINY_NEXT
from tests.rows import rows_beside

GEMMA2_2B = config_of("Gemma-2-2B")
GEMMA2_27B = config_of("Gemma-2-27B")
GEMMA3_1B = config_of("Gemma-3-1B")
GEMMA3_4B = config_of("Gemma-3-4B")
GPT_OSS_20B = config_of("gpt-oss-20b")
LLAMA32_1B = config_of("Llama-3.2-1B")
MISTRAL_7B_01 = config_of("Mistral-7B-v0.1")
PHI3_MINI_4K = config_of("Phi-3-mini-4k")
QWEN3_06B = config_of("Qwen3-0.6B")
QWEN3_30B_A3B = config_of("Qwen3-30B-A3B")
QWEN25_05B = config_of("Qwen2.5-0.5B")


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


@pytest.mark.parametrize(("groups", "message"), rows_beside(__file__)["cache groups that cannot be are refused"])
def test_cache_groups_that_cannot_be_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        made = tuple(CacheGroup(kind=kind, layers=tuple(layers), window=window) for kind, layers, window in groups)
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


def test_soft_caps_and_the_scale_of_queries_and_embeddings_are_gemmas():
    spec = spec_of(GEMMA2_27B)
    assert (spec.attention.attn_logit_softcapping, spec.final_logit_softcapping) == (50.0, 30.0)
    assert (spec.attention.scale, spec.embedding_scale) == (144**-0.5, 4608**0.5)
    silent = {key: value for key, value in GEMMA2_27B.items() if "softcapping" not in key}
    assert spec_of(silent) == spec, "the reference's defaults"
    assert spec_of(GEMMA2_27B | {"attn_logit_softcapping": None}).attention.attn_logit_softcapping is None


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


def test_one_cache_group_holds_all_layers():
    assert spec_of(TINY).cache_groups == (CacheGroup(kind="full", layers=(0, 1)),)


def test_gpt_oss_names_one_thing_twice_and_both_must_agree():
    spec = spec_of(GPT_OSS_20B)
    assert "dtype" not in {key.removeprefix("torch_") for key in GPT_OSS_20B} and spec.dtype == "bfloat16"
    assert spec_of(GPT_OSS_20B | {"dtype": "float32"}).dtype == "float32"
    assert [(group.kind, len(group.layers), group.window) for group in spec.cache_groups] == [
        ("full", 12, None),
        ("window", 12, 128),
    ]
    rope = spec.attention.rope
    assert spec.window_of(0) == 128 and rope.truncate is False and rope.attention_factor > 1.3
    assert spec_of({key: x for key, x in GPT_OSS_20B.items() if key not in ("layer_types", "sliding_window")}) == spec


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
    assert spec_of(PHI3_MINI_4K).window_of(0) == 2047


def test_mimo_v2_flash_is_read_in_the_published_spelling_and_in_the_references():
    config = PUBLISHED["MiMo-V2-Flash"][0]
    spec = spec_of(config)
    far, near = spec.attention, spec.attention_of(1)
    assert (far.kept, near.kept) == (Kept(4, 192, 128), Kept(8, 192, 128))
    assert not far.sinks and near.sinks and spec.window_of(0) is None and spec.window_of(1) == 129
    assert (far.rope.rope_theta, near.rope.rope_theta, near.rope.rotary_dim(192)) == (5e6, 1e4, 64)
    assert spec.experts.layers == tuple(range(1, 48)) and not spec.experts.shared_intermediate_size
    published = (*("hybrid_layer_pattern", "moe_layer_freq", "layernorm_epsilon", "sliding_window_size"),)
    published += ("partial_rotary_factor", "rope_theta", "swa_rope_theta", "sliding_window")
    assert spec_of({key: value for key, value in config.items() if key not in published}) == spec
    assert spec_of(config | {"attention_value_scale": None}).attention.output_multiplier == 1


def test_dots3_is_read_in_the_published_spelling_and_in_the_references():
    config = PUBLISHED["dots3-note-prev"][0]
    spec = spec_of(config)
    far, near = spec.attention, spec.attention_of(2)
    assert (spec.window_of(1), spec.window_of(2), near.indexer) == (None, 512, None)
    assert (far.num_attention_heads, far.kept) == (128, (1, 512, 64, True, 128))
    assert (near.num_attention_heads, near.kept) == (64, (1, 1024, 64, True, 0))
    assert (far.rope.rope_theta, near.rope.rope_theta) == (8e7, 5e4)
    windowed = [layer for layer in range(46) if layer > 1 and layer % 4 != 1]
    sizes = {"num_attention_heads": 64, "num_key_value_heads": 64, "kv_lora_rank": 1024, "qk_nope_head_dim": 192}
    kinds = ["sliding_attention" if layer in windowed else "indexed_attention" for layer in range(46)]
    ropes = {
        kind: {"rope_theta": theta} for kind, theta in zip(("indexed_attention", kinds[2]), (8e7, 5e4), strict=True)
    }
    canonical = {
        key: x for key, x in config.items() if not key.startswith("swa_") and key not in ("use_dsa", "rope_theta")
    }
    canonical |= {"per_layer_config": {f"{layer:02}": sizes for layer in windowed}, "layer_types": kinds}
    assert spec_of(canonical | {"rope_parameters": ropes}) == spec


def test_layers_of_mistral_large_4_borrow_latents_of_their_kind_and_share_indexers():
    config = config_of("Mistral-Large-4-1T-A52B")
    said = {"kv_source_layers": [*range(70), 68, 67], "indexer_types": ["full"] * 70 + ["shared"] * 2}
    text = config["text_config"] | {"no_rope_layers": [1, 0, 1, 0] * 18} | said
    said["kv_source_layers"][69] = 67
    with pytest.raises(ValueError, match="69 has latents of 67 and an indexer of its own"):
        spec_of(config | {"text_config": text})
    said["kv_source_layers"][69] = 69
    spec = spec_of(config | {"text_config": text})
    assert spec.borrowed == ((70, 68), (71, 67)) and spec.kv_groups[0].layers == tuple(range(70))
    turning, still = spec.attention_of(70), spec.attention_of(71)
    assert turning.kept == still.kept and turning.indexer.shared and still.indexer.shared
    assert (turning.rope.rope_type, still.rope, still.latent.qk_nope_head_dim) == ("yarn", None, 128)


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


LLAMA3_8B = config_of("Llama-3-8B")
QWEN35_35B_A3B = config_of("Qwen3.5-35B-A3B")

DYNAMIC = LLAMA3_8B | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}


def test_a_dynamic_rope_takes_the_theta_of_the_longest_context_that_an_engine_has():
    """As transformers does for a text of that length; up to the trained length it is the plain rope."""
    spec = spec_of(DYNAMIC)
    plain, long = spec.fitted(8192).attention.rope, spec.fitted(32768).attention.rope
    np.testing.assert_array_equal(frequencies(plain, 128), frequencies(RopeSpec(rope_theta=5e5), 128))
    assert frequencies(long, 128)[-1] == pytest.approx(5e5 ** (-126 / 128) / 13, rel=1e-5)  # 4 * 4 - 3
    assert spec.fitted(100).digest_text() == spec.fitted(8192).digest_text() != spec.fitted(8193).digest_text()
    assert spec_of(DYNAMIC | {"rope_scaling": {"rope_type": "dynamic", "factor": 4}}) == spec


def test_a_context_may_be_as_long_as_the_factor_of_a_dynamic_rope_says():
    mesh = make_mesh(MeshShape(), jax.devices("cpu")[:1])
    assert settle(spec_of(DYNAMIC), EngineConfig(), mesh).limits.max_model_len == 8192
    for config, longest in ((DYNAMIC, 32768), (LLAMA3_8B, 8192)):
        settle(spec_of(config), EngineConfig(max_model_len=longest), mesh)
        with pytest.raises(
            ValueError, match=f"max_model_len is {longest + 1}, more than the model's {longest} positions"
        ):
            settle(spec_of(config), EngineConfig(max_model_len=longest + 1), mesh)


def test_of_an_odd_number_of_turning_dimensions_the_last_ones_pair_turns_too():
    """As in transformers: heads of 84 with 0.75 turn 64 dimensions, by exponents of 63."""
    odd = PHI3_MINI_4K | {"hidden_size": 32 * 84, "partial_rotary_factor": 0.75}
    rope = spec_of(odd).attention.rope
    assert rope.rotary_dim(84) == 64
    np.testing.assert_allclose(frequencies(rope, 84), [1e4 ** (-i / 63) for i in range(0, 64, 2)], rtol=1e-6)


def test_a_width_of_dense_layers_changes_nothing_where_there_are_none():
    text = QWEN35_35B_A3B["text_config"]
    wider = QWEN35_35B_A3B | {"text_config": text | {"intermediate_size": 5632}}
    assert spec_of(wider) == spec_of(QWEN35_35B_A3B)


KIMI, LING = spec_of(config_of("Kimi-Linear-48B-A3B")), spec_of(config_of("Ling-3.0-flash"))


def test_layers_of_kimi_linear_are_counted_from_one():
    assert KIMI.attention_layers == (3, 7, 11, 15, 19, 23, 26)
    assert KIMI.attention.rope is None and KIMI.routed_layers == tuple(range(1, 27))


def test_the_last_layer_of_each_group_of_ling_attends():
    assert LING.attention_layers == tuple(range(5, 42, 6)) and LING.attention.head_gate


def test_the_last_experts_of_ling_have_limits_of_two_sizes():
    assert LING.experts is not None
    found = {layer: LING.experts.limits_of(layer) for layer in (33, 34, 35, 39, 40, 41)}
    assert found == {33: (0, 0), 34: (0, 5), 35: (4, 5), 39: (4, 5), 40: (4, 7), 41: (4, 7)}


@pytest.mark.parametrize(
    ("spec", "target", "authors", "saved"),
    [
        (KIMI, "layers.0.mlp.up.weight", "layers.0.mlp.up_proj", "layers.0.block_sparse_moe.up_proj"),
        (LING, "layers.0.attention.o.weight", "layers.0.attention.o_proj", "layers.0.attention.dense"),
    ],
    ids=["Kimi Linear", "Ling"],
)
def test_tensors_have_the_names_of_the_authors_or_of_the_reference_implementation(spec, target, authors, saved):
    rules = family_of(spec.architecture).weight_rules(spec)
    for name in (authors, saved):
        (source,) = expand(as_stored(rules, [f"model.{name}.weight"]))[target]
        assert source.name == f"model.{name}.weight"


QWEN3_NEXT = config_of("Qwen3-Next-80B-A3B")


def test_every_fourth_layer_has_attention_unless_layer_types_says_otherwise():
    spec = spec_of(QWEN3_NEXT)
    assert spec.kv_groups == (CacheGroup(kind="full", layers=tuple(range(3, 48, 4))),)
    assert spec.state_layers == tuple(i for i in range(48) if i % 4 != 3)
    kinds = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    assert spec_of(TINY_NEXT | {"layer_types": kinds}).state_layers == (0, 3)


def test_layers_that_predict_several_tokens_may_be_left_over_and_nothing_else():
    rules, harmless, targets, _ = weights_of(TINY_NEXT)
    shapes = {name: target.shape for name, target in targets.items()}
    sources = {}
    for rule in rules:
        for target, names in rule.expand():
            shape = shapes[target][1:] if rule.experts else shapes[target]
            sources |= {source.name: shape for source in names}
    assert set(match(rules, harmless, sources | {"mtp.fc.weight": (8, 16)}, shapes)) == set(targets)
    with pytest.raises(ValueError, match=r"model\.mtp\.weight \[3\] is left over"):
        match(rules, harmless, sources | {"model.mtp.weight": (3,)}, shapes)
