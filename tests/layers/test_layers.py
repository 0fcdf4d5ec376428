"""Every layer against its float64 oracle, inputs rounded to the working dtype first; strict dtypes and ranks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ferrum_jax.models import spec as specs
from ferrum_jax.models.layers.attention import Attention, ForwardContext, LayerContext, causal_attention
from ferrum_jax.models.layers.embedding import Embedding
from ferrum_jax.models.layers.hyper_connections import HyperConnection, StreamSum
from ferrum_jax.models.layers.linear import Linear, project
from ferrum_jax.models.layers.mlp import ACTIVATIONS, MLP
from ferrum_jax.models.layers.moe import MoE
from ferrum_jax.models.layers.norm import GatedNorm, RMSNorm
from ferrum_jax.models.layers.recurrent.gated_delta import KimiDelta
from ferrum_jax.models.layers.rope import frequencies, rotate, rotation_of, rotations
from pallas_kernels.grouped_matmul import oracle as grouped_matmul
from pallas_kernels.tolerance import TOLERANCE
from tests.fast_compile import FAST_COMPILE
from tests.oracles import layers as oracle

DTYPES = ("float32", "bfloat16")
SPEC = specs.ModelSpec(
    architecture="Qwen3MoeForCausalLM",
    vocab_size=37,
    hidden_size=20,
    num_hidden_layers=1,
    max_position_embeddings=4096,
    attention=specs.AttentionSpec(
        num_attention_heads=6, num_key_value_heads=3, head_dim=10, bias=True, output_bias=True, qk_norm=specs.QkNorm()
    ),
    mlp=specs.MlpSpec(intermediate_size=28, bias=True),
)
EXPERTS = specs.ExpertsSpec(layers=(0,), num_experts=7, num_experts_per_tok=2, intermediate_size=12)

_PARTS = {
    "experts": ("gate", "up", "down"),
    "shared": ("gate.weight", "up.weight", "down.weight"),
}


def draw(seed: int, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> tuple[jax.Array, np.ndarray]:
    """(array in dtype, the same numbers in float64)."""
    x = np.random.default_rng(seed).normal(0, scale, shape).astype(np.dtype(dtype))
    return jax.device_put(x), x.astype(np.float64)


def fill(module: nnx.Module, dtype: str) -> dict[str, np.ndarray]:
    """Gives every parameter values of size 1 / sqrt(its inputs), norms around 1; returns them in float64."""
    found = {}
    for seed, (path, parameter) in enumerate(nnx.to_flat_state(nnx.state(module, nnx.Param))):
        name = ".".join(map(str, path))
        value, wide = draw(seed, parameter.shape, dtype, 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
        if "norm" in name or (name == "weight" and parameter.ndim == 1):
            value = jax.device_put((np.asarray(value, np.float32) + 1).astype(value.dtype))
            wide = np.asarray(value, np.float64)
        found[name] = wide
        nnx.update(module, nnx.from_flat_state([(path, nnx.Param(value))]))
    return found


jitted = functools.partial(jax.jit, compiler_options=FAST_COMPILE)


def assert_close(found: jax.Array, wanted: np.ndarray, dtype: str) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 17, 40])
def test_linear_adds_its_bias_for_any_number_of_rows(num_tokens: int, dtype: str):
    layer = Linear(20, 12, bias=True, dtype=jnp.dtype(dtype), rngs=None)
    weights = fill(layer, dtype)
    weights["bias"] = np.asarray(layer.bias[...], np.float64)
    x, wide = draw(1, (num_tokens, 20), dtype)
    found = jitted(layer.__call__)(x)
    assert_close(found, oracle.linear(wide, weights["weight"], weights["bias"]), dtype)
    assert found.dtype == dtype


def test_linear_rounds_the_sum_of_product_and_bias_once():
    layer = Linear(64, 256, bias=True, dtype=jnp.dtype("bfloat16"), rngs=None)
    weights = fill(layer, "bfloat16")
    x, wide = draw(1, (40, 64), "bfloat16")
    wanted = oracle.linear(wide, weights["weight"], np.asarray(layer.bias[...], np.float64))
    found = np.asarray(jitted(layer.__call__)(x), np.float64)
    assert np.all(np.abs(found - wanted) <= 2**-8 * np.abs(wanted) + 1e-5)


def test_the_order_of_the_dot_survives_compilation_on_the_cpu_for_a_few_rows():
    def compiled(num_tokens: int) -> str:
        x, weight = jax.ShapeDtypeStruct((num_tokens, 64), "float32"), jax.ShapeDtypeStruct((96, 64), "float32")
        return jax.jit(project).lower(x, weight).compile().as_text()

    assert "f32[96,8]" in compiled(8)  # [O, T]
    assert "f32[96,40]" not in compiled(40)


def test_projections_of_bfloat16_to_float32_are_not_rounded_between():
    x, wide = draw(3, (5, 300), "bfloat16")
    weight, wide_weight = draw(4, (11, 300), "bfloat16")
    found = jitted(functools.partial(project, out_dtype=jnp.float32))(x, weight)
    np.testing.assert_allclose(np.asarray(found, np.float64), wide @ wide_weight.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_takes_rows_and_scores_them_in_float32(dtype: str):
    layer = Embedding(37, 20, dtype=jnp.dtype(dtype), rngs=None)
    table = fill(layer, dtype)["weight"]
    np.testing.assert_array_equal(np.asarray(layer(jnp.asarray([3, 36, 0])), np.float64), table[[3, 36, 0]])
    x, wide = draw(1, (4, 20), dtype)
    assert layer.attend(x).dtype == jnp.float32
    assert_close(layer.attend(x), wide @ table.T, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scaled_embedding_scales_vectors_and_not_scores(dtype: str):
    layer = Embedding(37, 20, scale=20**0.5, dtype=jnp.dtype(dtype), rngs=None)
    table = fill(layer, dtype)["weight"]
    scale = float(jnp.asarray(20**0.5, dtype))  # 4.47 in bfloat16, as the reference multiplies
    assert_close(layer(jnp.asarray([3, 36, 0])), table[[3, 36, 0]] * scale, dtype)
    x, wide = draw(1, (4, 20), dtype)
    assert_close(layer.attend(x), wide @ table.T, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 20), (4, 3, 20)])
def test_norm_has_float32_statistics(shape: tuple[int, ...], dtype: str):
    layer = RMSNorm(20, eps=1e-5, dtype=jnp.dtype(dtype))
    weight = fill(layer, dtype)["weight"]
    x, wide = draw(1, shape, dtype, 30.0)
    assert_close(layer(x), oracle.rms_norm(wide, weight, 1e-5), dtype)
    centred = RMSNorm(20, eps=1e-5, zero_centred=True, dtype=jnp.dtype(dtype))
    assert_close(centred(x), oracle.rms_norm(wide, np.ones(20), 1e-5), dtype)
    nnx.update(centred, nnx.state(layer))
    assert_close(centred(x), oracle.rms_norm(wide, 1 + weight, 1e-5), dtype)


def test_a_gated_norm_multiplies_by_a_gate_that_its_own_values_make():
    layer = GatedNorm(20, specs.NormSpec(eps=1e-5, gate_rank=6), dtype=jnp.dtype("float32"), rngs=None)
    w = fill(layer, "float32")
    x, wide = draw(1, (5, 20), "float32")
    normed = oracle.rms_norm(wide, w["weight"], 1e-5)
    hidden = oracle.linear(normed, w["down.weight"], 0.0)
    gate = oracle.linear(hidden / (1 + np.exp(-hidden)), w["up.weight"], 0.0)
    assert_close(jitted(layer)(x), normed / (1 + np.exp(-gate)), "float32")


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_activations_are_those_of_their_names(name: str):
    functions = {"silu": oracle.silu, "gelu": oracle.gelu, "gelu_pytorch_tanh": oracle.gelu_tanh}
    x, wide = draw(1, (50,), "float32", 3.0)
    assert_close(ACTIVATIONS[name](x), functions.get(name, lambda x: np.maximum(x, 0))(wide), "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_mlp_gates_before_it_projects_down(dtype: str):
    layer = MLP(SPEC.hidden_size, SPEC.mlp, dtype=jnp.dtype(dtype), rngs=None)
    w = fill(layer, dtype)
    x, wide = draw(1, (9, 20), dtype)
    gate = oracle.silu(oracle.linear(wide, w["gate.weight"], w["gate.bias"]))
    inner = gate * oracle.linear(wide, w["up.weight"], w["up.bias"])
    assert_close(
        jitted(lambda x: layer(x, LayerContext()))(x), oracle.linear(inner, w["down.weight"], w["down.bias"]), dtype
    )


@pytest.mark.parametrize(
    ("rope", "wanted"),
    [
        (specs.RopeSpec(rope_theta=5e5), [5e5 ** (-i / 16) for i in range(0, 16, 2)]),
        (specs.RopeSpec(rope_type="linear", factor=4.0), [1e4 ** (-i / 16) / 4 for i in range(0, 16, 2)]),
        (
            specs.RopeSpec(rope_type="dynamic", factor=4.0, original_max_position_embeddings=2048).fitted(8192),
            oracle.dynamic_frequencies(16, 1e4, 4.0, 8192, 2048),
        ),
        (
            specs.RopeSpec(rope_type="dynamic", factor=4.0, original_max_position_embeddings=2048).fitted(100),
            [1e4 ** (-i / 16) for i in range(0, 16, 2)],
        ),
        (specs.RopeSpec(partial_rotary_factor=0.9), [1e4 ** (-i / 14) for i in range(0, 14, 2)]),
        (
            specs.RopeSpec(partial_rotary_factor=0.95),
            [1e4 ** (-i / 15) for i in range(0, 16, 2)],
        ),  # 8 pairs of 15 dimensions
        (
            specs.RopeSpec(rope_type="llama3", rope_theta=5e5, factor=8.0, original_max_position_embeddings=8192),
            oracle.llama3_frequencies(16, 5e5, 8.0, 1.0, 4.0, 8192),
        ),
        (
            specs.RopeSpec(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768),
            oracle.yarn_frequencies(16, 1e6, 4.0, 32, 1, 32768),
        ),
        (
            specs.RopeSpec(rope_type="longrope", short_factor=(1, 1.1, 1.2, 2, 3, 4, 5, 6), long_factor=(2,) * 8),
            oracle.longrope_frequencies(16, 1e4, [1, 1.1, 1.2, 2, 3, 4, 5, 6]),
        ),
        (
            specs.RopeSpec(
                rope_type="longrope", short_factor=(1,) * 8, long_factor=(1, 2, 4, 5, 6, 7, 8, 9), is_long=True
            ),
            oracle.longrope_frequencies(16, 1e4, [1, 2, 4, 5, 6, 7, 8, 9]),
        ),
    ],
    ids=lambda value: getattr(value, "rope_type", ""),
)
def test_frequencies_of_every_rope_type_follow_their_definition(rope: specs.RopeSpec, wanted: list[float]):
    found = frequencies(rope, 16)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_turned_by_their_absolute_position(dtype: str):
    rope = specs.RopeSpec(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.2)
    positions = np.array([0, 1, 7, 300], np.int32)
    x, wide = draw(1, (4, 3, 10), dtype)
    cos, sin = jitted(lambda at: rotations(at, rope, 10))(positions)
    wanted = oracle.rotate(wide, positions, frequencies(rope, 10).astype(np.float64), 1.2)
    found = jitted(rotate)(x, cos, sin)
    assert found.dtype == dtype
    # an angle of 300 radians in float32 is known to 300 * 2^-24 = 2e-5
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=TOLERANCE[dtype]["atol"] * 5)


def test_a_partial_rotation_turns_a_heads_first_dimensions_and_leaves_the_others():
    x = np.random.default_rng(3).standard_normal((5, 3, 16)).astype(np.float32)
    positions = np.array([0, 1, 7, 40, 1000], np.int32)
    part, whole = specs.RopeSpec(partial_rotary_factor=0.5), specs.RopeSpec()

    @functools.partial(jax.jit, static_argnums=1)
    def turned(x: jax.Array, rope: specs.RopeSpec) -> jax.Array:
        return rotate(x, *rotations(jnp.asarray(positions), rope, x.shape[-1]))

    found = np.asarray(turned(x, part))
    np.testing.assert_array_equal(found[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(found[..., :8], turned(x[..., :8], whole))


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (1, None), (4, None), (4, 0.7)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_causal_attention_sees_the_past_alone_or_its_window(dtype: str, window: int | None, soft_cap: float | None):
    (q, wide_q), (k, wide_k), (v, wide_v) = (draw(i, (9, n, 10), dtype) for i, n in enumerate((6, 3, 3)))
    expected = oracle.causal_attention(wide_q, wide_k, wide_v, 0.3, window, soft_cap)
    attend = jitted(functools.partial(causal_attention, 0, scale=0.3, window=window, soft_cap=soft_cap))
    assert_close(attend(q, k, v), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_takes_weight_from_every_query_of_its_head(dtype: str):
    (q, wide_q), (k, wide_k), (v, wide_v) = (draw(i, (9, n, 10), dtype) for i, n in enumerate((6, 3, 3)))
    sinks, wide_sinks = draw(7, (6,), dtype, 2.0)
    expected = oracle.causal_attention(wide_q, wide_k, wide_v, 0.3, 4, sinks=wide_sinks)
    attend = jitted(functools.partial(causal_attention, 0, scale=0.3, window=4))
    assert_close(attend(q, k, v, sinks=sinks), expected, dtype)


@pytest.mark.parametrize("qk_norm", [specs.QkNorm(), None])
def test_attention_norms_heads_before_it_turns_them(qk_norm: specs.QkNorm | None):
    spec = dataclasses.replace(SPEC, attention=dataclasses.replace(SPEC.attention, qk_norm=qk_norm))
    layer = Attention(spec, 0, dtype=jnp.dtype("float32"), rngs=None)
    w = fill(layer, "float32")
    x, wide = draw(1, (8, 20), "float32")
    positions = np.arange(8) + 5

    def heads(name: str) -> np.ndarray:
        y = oracle.linear(wide, w[f"{name}.weight"], w[f"{name}.bias"]).reshape(8, -1, 10)
        return oracle.rms_norm(y, w[f"{name}_norm.weight"], 1e-6) if qk_norm and name != "v" else y

    turn = functools.partial(oracle.rotate, positions=positions, frequencies=1e4 ** (-np.arange(0, 10, 2) / 10))
    attended = oracle.causal_attention(turn(heads("q")), turn(heads("k")), heads("v"), 10**-0.5).reshape(8, -1)
    rotation = rotation_of(jnp.asarray(positions, jnp.int32), spec.attention)
    wanted = oracle.linear(attended, w["o.weight"], w["o.bias"])
    assert_close(jitted(lambda x: layer(x, rotation, LayerContext()))(x), wanted, "float32")


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_experts_are_weighted_by_the_router(num_tokens: int, norm_topk_prob: bool):
    experts = dataclasses.replace(EXPERTS, norm_topk_prob=norm_topk_prob)
    layer = MoE(SPEC.hidden_size, experts, SPEC.mlp, dtype=jnp.dtype("float32"), rngs=None)
    w = fill(layer, "float32")
    x, wide = draw(1, (num_tokens, 20), "float32")
    ids, weights = oracle.route(wide, w["router.weight"], 2, norm_topk_prob)
    found_ids, found_weights = jitted(layer.route)(x)
    np.testing.assert_array_equal(found_ids, ids)
    assert_close(found_weights, weights, "float32")
    experts = (w["experts.gate"], w["experts.up"], w["experts.down"])
    wanted = grouped_matmul.expert_mlp(wide, ids, weights, *experts)
    assert_close(jitted(lambda x: layer(x, LayerContext()))(x), wanted, "float32")


@pytest.mark.parametrize(("zero_outside", "chosen"), [(False, [0, 1]), (True, [0, 2])])
def test_experts_outside_the_chosen_groups_stand_below_all_others_or_at_zero(zero_outside: bool, chosen: list[int]):
    grouped = {"num_experts": 6, "scoring": "sigmoid", "corrected": True, "num_groups": 3, "num_chosen_groups": 1}
    experts = dataclasses.replace(EXPERTS, **grouped, zero_outside=zero_outside)
    layer = MoE(SPEC.hidden_size, experts, SPEC.mlp, dtype=jnp.dtype("float32"), rngs=None)  # scores are 0.5
    layer.correction[...] = jnp.array([2.0, -2.0, -1.0, -1.0, -1.0, -1.0])
    ids, weights = jitted(layer.route)(draw(1, (3, 20), "float32")[0])
    np.testing.assert_array_equal(ids, [chosen] * 3)
    np.testing.assert_array_equal(weights, np.full((3, 2), 0.5))


@pytest.mark.parametrize("within", [0.02, 0.5, 1.5])
def test_experts_are_weighed_among_their_rivals(within: float):
    experts = dataclasses.replace(EXPERTS, rivals_within=within)
    layer = MoE(SPEC.hidden_size, experts, SPEC.mlp, dtype=jnp.dtype("float32"), rngs=None)
    w = fill(layer, "float32")
    x, wide = draw(1, (33, 20), "float32")
    ids, weights = oracle.route_among_rivals(wide, w["router.weight"], 2, within)
    found_ids, found_weights = jitted(layer.route)(x)
    np.testing.assert_array_equal(found_ids, ids)
    assert_close(found_weights, weights, "float32")
    assert np.any(weights < 1)


def test_experts_with_biases_and_a_clamped_gate():
    biased = dataclasses.replace(EXPERTS, norm_topk_prob=True, bias=True)
    mlp = dataclasses.replace(SPEC.mlp, swiglu_limit=0.4, swiglu_alpha=1.5)
    layer = MoE(SPEC.hidden_size, biased, mlp, dtype=jnp.dtype("float32"), rngs=None)
    w = fill(layer, "float32")
    x, wide = draw(1, (33, 20), "float32")
    ids, weights = oracle.route(wide, w["router.weight"], 2, True, w["router.bias"])
    experts = [w[f"experts.{name}"] for name in ("gate", "up", "down")]
    biases = tuple(w[f"experts.{name}_bias"] for name in ("gate", "up", "down"))
    gated = functools.partial(oracle.clamped_swiglu, limit=0.4, alpha=1.5)
    wanted = grouped_matmul.expert_mlp(wide, ids, weights, *experts, biases, gated)
    assert_close(jitted(lambda x: layer(x, LayerContext()))(x), wanted, "float32")


def test_experts_and_the_shared_one_have_limits_of_their_own():
    spec = dataclasses.replace(EXPERTS, shared_intermediate_size=10, shared_gate=False)
    mlp = dataclasses.replace(SPEC.mlp, bias=False)
    layer = MoE(SPEC.hidden_size, spec, mlp, limits=(0.3, 0.2), dtype=jnp.dtype("float32"), rngs=None)
    w = fill(layer, "float32")
    x, wide = draw(1, (33, 20), "float32")
    experts, shared = ([w[f"{of}.{name}"] for name in names] for of, names in _PARTS.items())
    wanted = grouped_matmul.expert_mlp(
        wide, *oracle.route(wide, w["router.weight"], 2, False), *experts, None, limited(0.3)
    )
    inner = limited(0.2)(oracle.linear(wide, shared[0]), oracle.linear(wide, shared[1]))
    found = jitted(lambda x: layer(x, LayerContext()))(x)
    assert_close(found, wanted + oracle.linear(inner, shared[2]), "float32")


def limited(limit: float) -> functools.partial:
    return functools.partial(oracle.limited_gate, limit=limit)


def test_padding_goes_to_no_expert():
    biased = dataclasses.replace(EXPERTS, bias=True)
    layer = MoE(SPEC.hidden_size, biased, SPEC.mlp, dtype=jnp.dtype("float32"), rngs=None)
    fill(layer, "float32")
    x, _ = draw(1, (9, 20), "float32")
    is_token = np.arange(9) % 4 < 3
    run = jitted(lambda x, m: layer(x, LayerContext(is_token=m)))
    padded, full = (np.asarray(run(x, mask)) for mask in (is_token, is_token | True))
    assert not np.any(padded[~is_token]) and np.all(full)
    np.testing.assert_array_equal(padded[is_token], full[is_token])


def test_the_observer_sees_what_it_is_shown_and_nobody_else_is_called():
    seen = {}
    ForwardContext(observe=seen.__setitem__).show("embed", jnp.zeros(3))
    ForwardContext().show("embed", jnp.ones(3))
    assert list(seen) == ["embed"]
    np.testing.assert_array_equal(seen["embed"], np.zeros(3))


LOW_RANK = specs.KimiDeltaSpec(num_heads=3, head_dim=8, conv_kernel_dim=4, flat_rates=False)
BOUNDED = specs.KimiDeltaSpec(num_heads=2, head_dim=12, conv_kernel_dim=3, low_rank=False, decay_bound=-5.0)


@pytest.mark.parametrize("own", [LOW_RANK, BOUNDED], ids=["low rank", "bounded"])
def test_the_layer_is_its_definition_token_by_token(own: specs.KimiDeltaSpec):
    """70 tokens: more than a tile."""
    spec = dataclasses.replace(
        SPEC,
        num_hidden_layers=2,
        recurrence=own,
        cache_groups=(specs.CacheGroup(kind="full", layers=(0,)), specs.CacheGroup(kind="state", layers=(1,))),
    )
    layer = KimiDelta(spec, 1, dtype=jnp.dtype("float32"), rngs=None)
    w = fill(layer, "float32")
    x, wide = draw(1, (70, spec.hidden_size), "float32")
    found = jitted(lambda x: layer(x, None, LayerContext()))(x)
    assert_close(found, oracle.kimi_delta(wide, w, own.decay_bound, spec.norm.eps), "float32")


def test_rates_and_biases_of_decays_are_float32_beside_weights_in_bfloat16():
    spec = dataclasses.replace(SPEC, recurrence=BOUNDED)
    layer = KimiDelta(spec, 0, dtype=jnp.dtype("bfloat16"), rngs=None)
    assert layer.a_log is not None and layer.a_log[...].dtype == layer.dt_bias[...].dtype == jnp.float32
    x, _ = draw(1, (5, spec.hidden_size), "bfloat16")
    assert jitted(lambda x: layer(x, None, LayerContext()))(x).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_heads", 0, "num_heads is 0"),
        ("conv_kernel_dim", 1, "short_conv_kernel_size is 1; it must be at least 2"),
        ("decay_bound", 0.0, "the lower bound of decays is 0.0; it must be below 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(field: str, value: float, said: str):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(LOW_RANK, **{field: value})


STREAMS, NORM, D = specs.StreamsSpec(num_streams=3, magnitude=1.5, eps=0.01), specs.NormSpec(eps=1e-3), 5


def _drawn(kind: type[StreamSum]) -> StreamSum:
    rng = np.random.default_rng(7)
    layer = kind(STREAMS, D, NORM, rngs=nnx.Rngs(0))
    for name in ("mix", "base", "scale"):
        old = getattr(layer, name)
        setattr(layer, name, nnx.Param(jnp.asarray(rng.normal(0, 0.7, old.shape), jnp.float32)))
    return layer


def _shares(layer: StreamSum, x: np.ndarray) -> np.ndarray:  # [S, D] -> [kinds, S]
    mix, base, scale = (np.asarray(part[...], np.float64) for part in (layer.mix, layer.base, layer.scale))
    flat = x.reshape(-1)
    logits = (mix @ flat / np.sqrt(np.mean(flat**2) + NORM.eps)).reshape(len(scale), -1)
    return 1 / (1 + np.exp(-(logits * scale[:, None] + base.reshape(len(scale), -1))))


@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_a_half_is_given_a_sum_of_streams_and_adds_to_each_by_its_own_weight(tokens):
    layer, rng = _drawn(HyperConnection), np.random.default_rng(1)
    assert isinstance(layer, HyperConnection)
    x, out = rng.normal(0, 2, (tokens, 3, D)).astype(np.float32), rng.normal(0, 1, (tokens, D)).astype(np.float32)
    given, weights = layer.given(jnp.asarray(x))
    after = layer.added(jnp.asarray(x), jnp.asarray(out), weights)
    for t, streams in enumerate(x.astype(np.float64)):
        read, write = _shares(layer, streams)
        np.testing.assert_allclose(given[t], (read + 0.01) @ streams, rtol=2e-5, atol=2e-5)
        expected = streams + (1.5 * write + 0.01)[:, None] * out[t]
        np.testing.assert_allclose(after[t], expected, rtol=2e-5, atol=2e-5)


def test_behind_the_last_layer_the_streams_are_summed():
    layer, x = _drawn(StreamSum), np.random.default_rng(2).normal(0, 2, (6, 3, D)).astype(np.float32)
    got = np.asarray(layer(jnp.asarray(x)))
    for t, streams in enumerate(x.astype(np.float64)):
        np.testing.assert_allclose(got[t], (_shares(layer, streams)[0] + 0.01) @ streams, rtol=2e-5, atol=2e-5)


def test_weights_and_sums_are_float32_where_streams_are_bfloat16():
    layer = _drawn(HyperConnection)
    assert isinstance(layer, HyperConnection)
    x = jnp.asarray(np.random.default_rng(3).normal(0, 2, (4, 3, D)), jnp.bfloat16)
    given, weights = layer.given(x)
    wide, same = layer.given(x.astype(jnp.float32))
    assert (given.dtype, weights.dtype, layer.mix[...].dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    np.testing.assert_array_equal(weights, same)
    np.testing.assert_array_equal(given, wide.astype(jnp.bfloat16))
