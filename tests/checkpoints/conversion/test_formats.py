"""Readers of quantised weights: packing orders against vectors made by hand, and what is refused by name."""

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.formats import join, scheme_of
from checkpoints.formats.written import shapes_of

NAME = "model.layers.0.mlp.down_proj"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": False}
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": True}
W8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [2, 4]}


def ct(weights=W4, *, targets=("Linear",), activations=None, **others):
    groups = {"group_0": {"targets": list(targets), "weights": weights, "input_activations": activations}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"], **others}


def joined(config, **tensors):
    return join(
        {f"{NAME}.{end}": np.asarray(x) for end, x in tensors.items()},
        scheme_of({"quantization_config": config, "torch_dtype": "float16"}),
    )[f"{NAME}.weight"]


def word(*nibbles: int) -> int:
    """Eight codes, the first in the lowest bits, as a signed word."""
    return int(np.uint32(sum(code << 4 * k for k, code in enumerate(nibbles))).astype(np.int32))


def halves(*values: float) -> np.ndarray:
    return np.asarray(values, np.float16)


def test_awq_packs_outputs_in_the_order_0_2_4_6_1_3_5_7():
    nibbles = (0, 2, 4, 6, 1, 3, 5, 7)  # output o has code o + row, so nibble k holds that of output nibbles[k]
    rows = [word(*((n + i) % 16 for n in nibbles)) for i in range(8)]
    weight = joined(
        AWQ,
        qweight=np.array(rows, np.int32)[:, None],
        qzeros=np.array([[word(*([3] * 8))]], np.int32),
        scales=np.arange(1, 9, dtype=np.float16)[None],
    )
    expected = [[((o + i) % 16 - 3) * (o + 1) for i in range(8)] for o in range(8)]
    np.testing.assert_array_equal(np.asarray(weight), expected)
    np.testing.assert_array_equal(np.asarray(weight[slice(3, 7, 2),]), np.array(expected)[3:7:2])


@pytest.mark.parametrize("version, stored", [("gptq", 2), ("gptq_v2", 3)])
def test_gptq_packs_inputs_and_zero_points_along_outputs_which_v1_has_less_one(version, stored):
    weight = joined(
        GPTQ | {"checkpoint_format": version},
        qweight=np.array([[word(*((i + o) % 16 for i in range(8))) for o in range(8)]], np.int32),
        qzeros=np.array([[word(*([stored] * 8))]], np.int32),
        scales=np.arange(1, 9, dtype=np.float16)[None],
        g_idx=np.zeros(8, np.int32),
    )
    np.testing.assert_array_equal(
        np.asarray(weight), [[((i + o) % 16 - 3) * (o + 1) for i in range(8)] for o in range(8)]
    )


def test_gptq_with_desc_act_gives_an_order_of_inputs():
    g_idx = np.array([1, 0] * 8, np.int32)
    weight = joined(
        GPTQ | {"desc_act": True, "sym": True, "checkpoint_format": "gptq_v2"},
        qweight=np.array([[word(*range(8))] * 8, [word(*range(8, 16))] * 8], np.int32),
        qzeros=np.array([[word(*([8] * 8))]] * 2, np.int32),
        scales=np.stack((np.full(8, 1, np.float16), np.full(8, 10, np.float16))),
        g_idx=g_idx,
    )
    assert np.asarray(weight.leaf("order")).tolist() == [*range(1, 16, 2), *range(0, 16, 2)]
    np.testing.assert_array_equal(np.asarray(weight)[0], [(i - 8) * (10 if i % 2 == 0 else 1) for i in range(16)])


def test_compressed_tensors_packs_inputs_lowest_first_each_plus_eight():
    packed = {"weight_packed": np.array([[word(*range(8))]], np.int32), "weight_shape": np.array([1, 8])}
    weight = joined(ct(), **packed, weight_scale=halves(0.5)[:, None])
    np.testing.assert_array_equal(np.asarray(weight), [[(i - 8) / 2 for i in range(8)]])
    assert np.asarray(weight.leaf("codes")).tolist() == [[0x10, 0x32, 0x54, 0x76]]


def test_unpacked_zero_points_are_signed_as_codes_are():
    """As compressed-tensors wrote them at first, beside codes that it packed."""
    asymmetric = ct(W4 | {"symmetric": False})
    given = {
        "weight_packed": np.array([[word(*range(8))]], np.int32),
        "weight_shape": np.array([1, 8]),
        "weight_scale": halves(2)[:, None],
    }
    weight = joined(asymmetric, **given, weight_zero_point=np.array([[-3]], np.int8))
    np.testing.assert_array_equal(np.asarray(weight), [[2 * (i - 8 + 3) for i in range(8)]])
    for wrong, message in (
        (np.array([[9]], np.int8), r"weight_zero_point is 9 at \[0, 0\]; with 4 bits it is -8 to 7"),
        (np.array([[1.5]], np.float32), "weight_zero_point is float32; zero points are whole numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            np.asarray(joined(asymmetric, **given, weight_zero_point=wrong))


def test_codes_of_four_bits_may_have_a_byte_each_as_w4a8_is_published():
    codes, scale = np.arange(-8, 8, dtype=np.int8)[None], halves(0.5, 2)[None]
    w4a8 = ct(activations={"num_bits": 8, "strategy": "token", "dynamic": True}, format="int-quantized")
    weight = joined(w4a8, weight=codes, weight_scale=scale)
    assert (weight.form.kind, weight.form.activations) == ("int4", "int8")
    np.testing.assert_array_equal(np.asarray(weight), codes * np.repeat(scale, 8))
    with pytest.raises(ValueError, match=r"down_proj.weight is 8 at \[0, 3\]; with 4 bits it is -8 to 7"):
        np.asarray(joined(w4a8, weight=np.array([[0, 1, 2, 8, 0, 0, 0, 0]], np.int8), weight_scale=halves(1)[:, None]))


def test_a_scale_of_a_block_is_that_of_each_of_its_outputs():
    codes, scales = np.ones((3, 8), jnp.float8_e4m3fn), np.array([[1, 2], [3, 4]], np.float32)
    weight = joined(FP8, weight=codes, weight_scale_inv=scales)
    np.testing.assert_array_equal(np.asarray(weight), np.repeat(scales, [2, 1], axis=0).repeat(4, axis=1))


@pytest.mark.parametrize("dtype", [np.float32, jnp.float8_e8m0fnu])
def test_ue8m0_scales_stay_and_scales_of_activations_are_powers_of_two(dtype):
    scales = np.array([[0.5, 2]], dtype)
    weight = joined(FP8 | {"scale_fmt": "ue8m0"}, weight=np.ones((2, 8), jnp.float8_e4m3fn), weight_scale_inv=scales)
    assert weight.form.has_power_scales and not scheme_of({"quantization_config": FP8}).form_of(NAME).has_power_scales
    np.testing.assert_array_equal(np.asarray(weight), [[0.5] * 4 + [2] * 4] * 2)
    with pytest.raises(ValueError, match="scales that are powers of two, which compressed-tensors has no word for"):
        shapes_of(f"{NAME}.weight", weight.form, (2, 8))


FOUR = {
    "weight_packed": np.zeros((2, 2), np.int32),
    "weight_shape": np.array([2, 16]),
    "weight_scale": np.ones((2, 2), np.float16),
}
GPTQ_TENSORS = {
    "qweight": np.zeros((2, 8), np.int32),
    "qzeros": np.zeros((2, 1), np.int32),
    "scales": np.ones((2, 8), np.float16),
    "g_idx": np.repeat(np.arange(2, dtype=np.int32), 8),
}
ONE_GROUP = GPTQ_TENSORS | {end: GPTQ_TENSORS[end][:1] for end in ("qzeros", "scales")}
AWQ_TENSORS = {
    "qweight": np.zeros((8, 1), np.int32),
    "qzeros": np.zeros((1, 1), np.int32),
    "scales": np.ones((1, 8), np.float16),
}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (ct(), FOUR | {"weight_scale": halves(1, 0, 1, 1).reshape(2, 2)}, r"weight_scale is 0.0 at \[0, 1\]; a"),
        (ct(), FOUR | {"weight_scale": halves(1, 1, np.nan, 1).reshape(2, 2)}, r"weight_scale is nan at \[1, 0\]"),
        (ct(), FOUR | {"weight_scale": halves(1, 1, 1, np.inf).reshape(2, 2)}, r"weight_scale is inf at \[1, 1\]"),
        (ct(), FOUR | {"weight_scale": halves(-2, 1, 1, 1).reshape(2, 2)}, r"weight_scale is -2.0 at \[0, 0\]"),
        (ct(), FOUR | {"weight_scale": np.ones((2, 3), np.float16)}, r"weight_scale is \[2, 3\]; the scales"),
        (ct(), FOUR | {"weight_shape": np.array([2, 24])}, r"weight_shape is int64 \[2, 24\], which contradicts"),
        (ct(), FOUR | {"weight_shape": np.array([[2], [16]])}, r"weight_shape is int64 \[2, 16\], which contradicts"),
        (ct(), FOUR | {"weight_shape": np.array(2)}, r"weight_shape is int64 \[2\], which contradicts"),
        (ct(), FOUR | {"weight_shape": np.array([2.0, 16.0])}, "weight_shape is float64"),
        (ct(), FOUR | {"weight_scale": halves(1)}, r"weight_scale is \[1\]; the scales of a weight \[2, 16\]"),
        (ct(), FOUR | {"weight_scale": np.ones((2, 2), np.uint8)}, "weight_scale is uint8; a scale is a float"),
        (ct(), FOUR | {"weight_scale": np.full((2, 2), 1e-60)}, "weight_scale is float64, and its scales are not the"),
        (ct(), {k: v for k, v in FOUR.items() if k != "weight_shape"}, "weight_shape is missing"),
        (ct(), FOUR | {"weight": np.ones((2, 16), np.float16)}, "has .weight and .weight_packed"),
        (ct(), FOUR | {"weight_g_idx": np.zeros(16, np.int32)}, "weight_g_idx is there, and config.json says nothing"),
        (ct(W8), {"weight": np.ones((2, 4)), "weight_scale": np.ones((2, 1))}, r"down_proj.weight is float64 \[2, 4\]"),
        (ct(ignore=[NAME]), FOUR, "is of a quantised weight, and config.json says that .*down_proj is dense"),
        (GPTQ, GPTQ_TENSORS | {"g_idx": np.full(16, 2, np.int32)}, "g_idx is 2 at 0; there are groups 0 to 1"),
        (GPTQ, GPTQ_TENSORS | {"g_idx": np.zeros(16, np.int32)}, "g_idx puts 16 inputs into group 0; each"),
        (GPTQ, GPTQ_TENSORS | {"g_idx": np.tile([1, 0], 8)}, "g_idx orders the inputs, and config.json"),
        (GPTQ | {"sym": True}, GPTQ_TENSORS, "qzeros has 1; config.json says sym, with which it is 8"),
        (GPTQ, GPTQ_TENSORS | {"g_idx": GPTQ_TENSORS["g_idx"] * 1.0}, "g_idx is float64; groups are whole numbers"),
        (GPTQ | {"group_size": -1}, ONE_GROUP | {"g_idx": np.arange(16)}, "g_idx is 1 at 1; there are groups 0 to 0"),
        (GPTQ, GPTQ_TENSORS | {"qzeros": np.zeros((2, 1), np.float32)}, "qzeros is float32; codes are packed in int32"),
        (AWQ, AWQ_TENSORS | {"qzeros": np.zeros((1, 1), np.int64)}, "qzeros is int64; codes are packed in int32"),
        (AWQ, AWQ_TENSORS | {"scales": np.ones((1, 8), np.int32)}, "scales is int32; a scale is a float"),
        (GPTQ, {k: v for k, v in GPTQ_TENSORS.items() if k != "scales"}, "scales is missing beside"),
        (AWQ, {"qweight": np.zeros((8, 1)), "qzeros": np.zeros(1), "scales": np.zeros(1)}, "qweight is float64"),
        (
            FP8,
            {"weight": np.full((2, 4), np.nan, jnp.float8_e4m3fn), "weight_scale_inv": np.ones((1, 1), np.float32)},
            r"down_proj.weight is NaN at \[0, 0\]; a weight must be a number",
        ),
    ],
)  # fmt: skip
def test_tensors_that_contradict_one_another_or_config_json_are_refused_by_name(config, tensors, message):
    with pytest.raises(ValueError, match=message):
        np.asarray(joined(config, **tensors))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ct(W4 | {"num_bits": 3}), "3 bits of type int"),
        (ct(W4 | {"num_bits": 4, "type": "float"}), "4 bits of type float"),
        (ct(format="marlin-24"), "format = 'marlin-24'"),
        (ct(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (ct(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (ct(transform_config={"a": 1}), "transform_config"),
        (ct(W4 | {"group_size": 1}), "group_size = 1"),
        (ct(targets=("re:(",)), "names layers by"),
        (ct(odd=1), "odd = 1"),
        (AWQ | {"bits": 3}, "awq of 3 bits with bits = 3"),
        (GPTQ | {"bits": 2}, "gptq of 2 bits with bits = 2"),
        (GPTQ | {"sym": "true"}, "gptq of 4 bits with sym = 'true'"),
        (
            GPTQ | {"checkpoint_format": "gptq_v2", "format": "gptq"},
            "= 'gptq_v2' and format = 'gptq'",
        ),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        (FP8 | {"scale_fmt": "ue4m3"}, "scale_fmt = 'ue4m3'"),
        ({"quant_method": "bitsandbytes"}, "says bitsandbytes"),
        ({"quant_method": "gguf"}, "says gguf"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        scheme_of({"quantization_config": config})


def test_two_descriptions_of_quantised_weights_that_differ_are_refused():
    assert scheme_of({"quantization_config": GPTQ, "compression_config": dict(GPTQ)}) is not None
    with pytest.raises(ValueError, match="two things, in quantization_config and compression_config; keep one"):
        scheme_of({"quantization_config": GPTQ, "compression_config": AWQ})
