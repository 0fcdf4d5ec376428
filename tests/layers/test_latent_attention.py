"""Latent attention against keys and values of every head, in float64, and over a pool that keeps latents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ferrum_jax.models.layers.attention import LayerContext, causal_attention
from ferrum_jax.models.layers.latent_attention import LatentAttention
from ferrum_jax.models.layers.rope import rotation_of
from ferrum_jax.models.spec import AttentionSpec, LatentSpec, MlpSpec, ModelSpec
from pallas_kernels.kv_pool import KV_DTYPES, KVPool, make_pool, pool_shape, round_trip
from pallas_kernels.paged_attention import AttentionConfig, RaggedBatch, make_schedule, paged_attention
from tests.fast_compile import FAST_COMPILE
from tests.marks import few

N, A, H, V, C, D, T = 3, 6, 4, 5, 8, 10, 21


KINDS = {  # what a family's latents and its attention have beyond DeepSeek's
    "DeepSeek": ({}, {}),
    "Ling": ({}, {"head_gate": True}),
    "A.X K2": ({"raw_queries": True}, {"gate": True}),
    "dots3": ({"rooted": True, "shared_norm": True}, {"head_gate": True}),
    "Mistral Large 4": ({"q_lora_rank": None, "norm_eps": 1e-3}, {"learned_temperature": True}),
    "Mistral Large 4, still": ({"q_lora_rank": None, "shared_key": False}, {"learned_temperature": True}),
}


def attention_of(kind: str) -> AttentionSpec:
    of_latent, of_attention = KINDS[kind]
    return AttentionSpec(
        num_attention_heads=N,
        num_key_value_heads=1,
        head_dim=H,
        v_head_dim=V,
        latent=LatentSpec(**{"kv_lora_rank": C, "qk_nope_head_dim": A, "q_lora_rank": 7} | of_latent),
        rope=None,
        query_pre_attn_scalar=A + H,
        **of_attention,
    )


def layer_of(kind: str) -> LatentAttention:
    spec = ModelSpec(
        architecture="",
        vocab_size=9,
        hidden_size=D,
        num_hidden_layers=1,
        max_position_embeddings=64,
        attention=attention_of(kind),
        mlp=MlpSpec(intermediate_size=6),
    )
    made = LatentAttention(spec, 0, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(3))
    rng = np.random.default_rng(5)
    for name in ("q", "q_a", "q_b", "kv_a", "kv_b", "o", "gate_heads"):
        if (weight := getattr(getattr(made, name, None), "weight", None)) is not None:
            weight[...] = jax.device_put(np.asarray(weight[...]) * 50)  # drawn at 0.02
    if made.temperature is not None:
        made.temperature.scale[...] = jax.device_put(rng.normal(size=N).astype(np.float32))
    return made


def expanded(layer: LatentAttention, x: np.ndarray) -> np.ndarray:
    """Keys and values of every head, and then attention, in float64."""

    def linear(name: str, y: np.ndarray) -> np.ndarray:
        return y @ np.asarray(getattr(layer, name).weight[...], np.float64).T

    def norm(y: np.ndarray) -> np.ndarray:
        return y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + layer.kv_a_norm.eps)

    latent, shared = np.split(linear("kv_a", x), [C], axis=-1)
    latent = norm(latent) * ((D / C) ** 0.5 if layer.latent_factor != 1 else 1)
    shared = shared if layer.shared_norm is None else norm(shared)
    if layer.has_query_latent:
        raw = linear("q_a", x)
        made_of = norm(raw) * ((D / 7) ** 0.5 if layer.query_factor != 1 else 1)
        q = linear("q_b", np.concatenate([made_of, raw], axis=-1) if layer.raw_queries else made_of)
    else:
        q = linear("q", x)
    q, gate = np.split(q.reshape(T, N, -1), [A + shared.shape[-1]], axis=-1)
    if layer.temperature is not None:
        scale, bias = (np.asarray(w[...], np.float64) for w in (layer.temperature.scale, layer.temperature.bias))
        q = q * (np.log(1 + np.arange(T))[:, None] * scale + bias)[:, :, None]
    both = linear("kv_b", latent).reshape(T, N, A + V)
    k = np.concatenate([both[..., :A], np.broadcast_to(shared[:, None], (T, N, shared.shape[-1]))], axis=-1)
    scores = np.einsum("tnh,snh->nts", q, k) * (A + H) ** -0.5
    scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = np.einsum("nts,snv->tnv", weights, both[..., A:])
    gate = linear("gate_heads", x)[:, :, None] if layer.gate_heads is not None else gate
    return linear("o", (out / (1 + np.exp(-gate)) if gate.size else out).reshape(T, -1))


@pytest.mark.parametrize("kind", few(KINDS, 2))
def test_the_absorbed_form_is_attention_to_the_keys_and_values_of_all_heads(kind):
    layer = layer_of(kind)
    x = np.random.default_rng(1).normal(size=(T, D)).astype(np.float32)
    rotation = rotation_of(jnp.arange(T), attention_of(kind))
    found = jax.jit(lambda x: layer(x, rotation, LayerContext()), compiler_options=FAST_COMPILE)(x)
    np.testing.assert_allclose(found, expanded(layer, x.astype(np.float64)), rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "kv_dtype", ["float32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "fp8_e4m3"))]
)
def test_a_pool_of_latents_gives_what_plain_attention_to_the_kept_latents_gives(kv_dtype):
    """Two rows in blocks of four, one that goes on after six tokens; what is not written is NaN."""
    rng, dtype = np.random.default_rng(2), KV_DTYPES[kv_dtype]
    q, c, r = (rng.normal(size=(T, n, w)).astype(np.float32) for n, w in ((N, C + H), (1, C), (1, H)))
    form = {"num_kv_heads": 1, "head_dim": C, "v_head_dim": H, "is_latent": True, "implementation": "xla"}
    shape = pool_shape(num_blocks=9, block_size=4, dtype=dtype, **form)
    pool = jax.jit(lambda: make_pool(shape, fill=np.nan))()

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def attend(q: jax.Array, c: jax.Array, r: jax.Array, pool: KVPool, batch: RaggedBatch) -> tuple[jax.Array, KVPool]:
        config = AttentionConfig.choose(num_tokens=len(q), block_size=4, decode_only=False, invariant=False)
        schedule = make_schedule(batch, num_tokens=len(q), block_size=4, config=config)
        return paged_attention(q, c, r, pool, schedule, scale=0.3)

    out = []
    for starts, counts in (((0, 0), (6, 4)), ((6, 4), (5, 6))):
        batch = RaggedBatch(
            block_tables=np.array([[1, 2, 3, 0], [6, 5, 4, 0]], np.int32),
            starts=np.array(starts, np.int32),
            counts=np.array(counts, np.int32),
            query_offsets=np.array([0, counts[0]], np.int32),
        )
        of = np.concatenate([np.arange(s, s + n) + first for s, n, first in zip(starts, counts, (0, 11), strict=True)])
        given, pool = attend(q[of], c[of], r[of], pool, batch)
        out.append((of, given))
    plain = jax.jit(
        lambda q, *new: causal_attention(0, q, *(round_trip(x, dtype) for x in new), scale=0.3, is_latent=True),
        compiler_options=FAST_COMPILE,
    )
    for row in (slice(0, 11), slice(11, 21)):
        wanted = plain(q[row], c[row], r[row])
        found = np.full((T, N, C), np.nan, np.float32)
        for of, given in out:
            found[of] = given
        np.testing.assert_allclose(found[row], wanted, rtol=0, atol=2e-5)
