"""The tower of Gemma 4: patches of an image of any size, pooled by squares and projected to the text model.

    x = patch(2 pixels - 1) + across[column] + down[row]
    per layer:  x += norm(attention(norm(x)));  x += norm(mlp(norm(x)))
    embedding = project(norm(mean of merge x merge neighbours of x, times the root of D))

Patches of several images lie one after the other and attend within their own. Neighbours that are pooled stand
together, as the processor gives them. Half of a head is turned by the column, half by the row. Where the checkpoint
has bounds, the inputs and outputs of products are cut to them; where it has a mean and a scale, pooled states are
standardised.
Source: Gemma Team 2026 (Gemma 4).
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.rules import Rule
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader, part_reader
from ferrum_jax.models.families.vision_tower import PREFIX, ImagePatches
from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.layers.mlp import activation_of
from ferrum_jax.models.layers.norm import RMSNorm, unit_rms
from ferrum_jax.models.layers.rope import rotate
from ferrum_jax.models.layers.segment_attention import segment_attention
from ferrum_jax.models.spec import SoundSpec, VisionSpec

_EPS = 1e-6
_TOWER, _PROJECTION = "model.vision_tower.", "model.embed_vision.embedding_projection.weight"
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
Turns = tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]  # cos and sin by column, and by row


class ClippedLinear(nnx.Module):
    """W x without a bias; where it has bounds, its input and output are cut to them."""

    def __init__(self, in_size: int, out_size: int, spec: VisionSpec | SoundSpec, *, dtype: jnp.dtype) -> None:
        self.linear = Linear(in_size, out_size, dtype=dtype, rngs=None)
        self.is_clipped = spec.clipped
        if spec.clipped:
            self.input_min, self.output_min = (nnx.Param(jnp.full((), -jnp.inf, dtype)) for _ in range(2))
            self.input_max, self.output_max = (nnx.Param(jnp.full((), jnp.inf, dtype)) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:  # [T, in] -> [T, out]
        if not self.is_clipped:
            return self.linear(x)
        y = self.linear(jnp.clip(x, self.input_min[...], self.input_max[...]))
        return jnp.clip(y, self.output_min[...], self.output_max[...])


class PooledTowerLayer(nnx.Module):
    """Attention both ways and a gated MLP, each between two norms and before a residual."""

    def __init__(self, spec: VisionSpec, *, dtype: jnp.dtype) -> None:
        D, F = spec.hidden_size, spec.intermediate_size
        self.num_heads = spec.num_heads
        self.act = activation_of(spec.hidden_act)
        self.attention_norm, self.attention_out_norm = norm_of_tower(D, dtype), norm_of_tower(D, dtype)
        self.mlp_norm, self.mlp_out_norm = norm_of_tower(D, dtype), norm_of_tower(D, dtype)
        self.q_norm, self.k_norm = norm_of_tower(spec.head_dim, dtype), norm_of_tower(spec.head_dim, dtype)
        self.q, self.k, self.v, self.o = (ClippedLinear(D, D, spec, dtype=dtype) for _ in range(4))
        self.gate, self.up = (ClippedLinear(D, F, spec, dtype=dtype) for _ in range(2))
        self.down = ClippedLinear(F, D, spec, dtype=dtype)

    def __call__(self, x: jax.Array, turns: Turns, segments: jax.Array) -> jax.Array:  # [T, D] -> the same
        x = x + self.attention_out_norm(self._attention(self.attention_norm(x), turns, segments))
        normed = self.mlp_norm(x)
        return x + self.mlp_out_norm(self.down(self.act(self.gate(normed)) * self.up(normed)))

    def _attention(self, x: jax.Array, turns: Turns, segments: jax.Array) -> jax.Array:  # [T, D] -> the same
        q, k, v = (part(x).reshape(len(x), self.num_heads, -1) for part in (self.q, self.k, self.v))
        q, k = _turned(self.q_norm(q), turns), _turned(self.k_norm(k), turns)
        return self.o(segment_attention(q, k, unit_rms(v, _EPS), segments, scale=1.0).reshape(x.shape))


class PooledTower(nnx.Module):
    """A whole tower; its weights are zeros until others are bound."""

    def __init__(self, spec: VisionSpec, *, dtype: jnp.dtype | str = jnp.float32) -> None:
        dtype = jnp.dtype(dtype)
        self.spec = spec
        self.pixels = Linear(spec.patch_values, spec.hidden_size, dtype=dtype, rngs=None)
        self.positions = nnx.Param(jnp.zeros((2, spec.num_positions, spec.hidden_size), dtype))
        self.layers = nnx.List([PooledTowerLayer(spec, dtype=dtype) for _ in range(spec.num_layers)])
        if spec.standardized:
            self.std_bias = nnx.Param(jnp.zeros((spec.hidden_size,), dtype))
            self.std_scale = nnx.Param(jnp.zeros((spec.hidden_size,), dtype))
        self.projection = Linear(spec.hidden_size, spec.out_size, dtype=dtype, rngs=None)

    def __call__(self, patches: ImagePatches) -> jax.Array:  # [T / merge², out]
        across, down = self.positions[...][0], self.positions[...][1]
        x = self._patches(patches.pixels)
        x = (
            x
            + jnp.take(across, patches.columns, axis=0, mode="clip")
            + jnp.take(down, patches.rows, axis=0, mode="clip")
        )
        turns = _turn(self.spec, patches.columns), _turn(self.spec, patches.rows)
        for layer in self.layers:
            x = layer(x, turns, patches.segments)
        return self.projection(unit_rms(self._pooled(x), _EPS))

    def _patches(self, pixels: jax.Array) -> jax.Array:  # [T, (channel, y, x)] -> [T, D]
        """The checkpoint's weight has a patch's values by y, x and channel."""
        values = pixels.reshape(-1, *self.spec.patch_shape).transpose(0, 2, 3, 1).reshape(pixels.shape)
        return self.pixels((2 * (values - 0.5)).astype(self.positions.dtype))

    def _pooled(self, x: jax.Array) -> jax.Array:  # [T, D] -> [T / merge², D]
        D = x.shape[1]
        means = jnp.mean(x.astype(jnp.float32).reshape(-1, self.spec.patches_per_token, D), axis=1).astype(x.dtype)
        wide = means.astype(jnp.float32) * D**0.5
        if self.spec.standardized:
            bias, scale = (part[...].astype(jnp.float32)[None] for part in (self.std_bias, self.std_scale))
            wide = (wide - bias) * scale
        return wide.astype(x.dtype)


def norm_of_tower(size: int, dtype: jnp.dtype) -> RMSNorm:
    return RMSNorm(size, eps=_EPS, rounds_once=True, dtype=dtype)


def _turn(spec: VisionSpec, places: jax.Array) -> tuple[jax.Array, jax.Array]:  # [T] -> [T, 1, H/4] each
    half = spec.head_dim // 2
    exponents = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    frequencies = np.float32(1) / np.power(np.float32(spec.rope_theta), exponents)
    angles = places.astype(jnp.float32)[:, None, None] * frequencies[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def _turned(x: jax.Array, turns: Turns) -> jax.Array:  # [T, N, H] -> the same
    halves = zip(jnp.split(x, 2, axis=-1), turns, strict=True)
    return jnp.concatenate([rotate(half, cos, sin) for half, (cos, sin) in halves], axis=-1)


def vision_spec_from(config: object, width: int, *, windows_see_whole: bool) -> VisionSpec:
    """VisionSpec of a `vision_config`. width: of the text model. windows_see_whole: as in the spec.

    Raises ValueError naming what is missing or not understood.
    """
    reader = part_reader(config, "vision_config")
    rope = ConfigReader(reader.get("rope_parameters", {}))
    reader.only(rms_norm_eps=_EPS, attention_bias=False)
    if rope.get("rope_type", "axial") not in ("axial", "default"):  # the older spelling of the same
        raise ValueError(f"vision_config's rope_type is {shown(rope.get('rope_type', 'axial'))}; it must be 'axial'")
    hidden_size, num_heads = reader.get("hidden_size", 768), reader.get("num_attention_heads", 12)
    reader.leave(*_UNREAD)
    patch = reader.get("patch_size", 16)
    spec = VisionSpec(
        tower="gemma4",
        hidden_size=hidden_size,
        intermediate_size=reader.get("intermediate_size", 3072),
        num_layers=reader.get("num_hidden_layers", 16),
        num_heads=num_heads,
        patch_shape=(3, patch, patch),
        merge=reader.get("pooling_kernel_size", 3),
        num_positions=reader.get("position_embedding_size", 10240),
        out_size=width,
        hidden_act=reader.get("hidden_activation", "gelu_pytorch_tanh"),
        rope_theta=float(rope.get("rope_theta", 100.0)),
        clipped=bool(reader.get("use_clipped_linears", False)),
        standardized=bool(reader.get("standardize", False)),
        windows_see_whole=windows_see_whole,
    )
    kv_heads, head_dim = reader.get("num_key_value_heads", 12), reader.get("head_dim", 64)
    if kv_heads != num_heads or head_dim != spec.head_dim:
        raise ValueError(
            f"vision_config has {num_heads} heads, num_key_value_heads {kv_heads} and head_dim {head_dim}; there must "
            f"be as many of keys and values, and head_dim must be hidden_size / num_attention_heads, {spec.head_dim}"
        )
    reader.finish()
    rope.finish()
    return spec


# Keys that no image's embeddings depend on.
_UNREAD = ("max_position_embeddings", "default_output_length", "global_head_dim")


def tower_rules(spec: VisionSpec) -> tuple[Rule, ...]:
    """Every parameter of a tower, under PREFIX, and the Hugging Face tensor it comes from."""
    layers = tuple(range(spec.num_layers))
    norms = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_out_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
        "self_attn.q_norm": "q_norm",
        "self_attn.k_norm": "k_norm",
    }
    products = {f"self_attn.{part}_proj": part for part in "qkvo"}
    products |= {f"mlp.{part}_proj": part for part in ("gate", "up", "down")}
    of_products = ("linear.weight", *(BOUNDS if spec.clipped else ()))
    inside = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in norms.items()}
    inside |= {f"{theirs}.{part}": f"{ours}.{part}" for theirs, ours in products.items() for part in of_products}
    around = {"patch_embedder.input_proj.weight": "pixels.weight"}
    around |= {"patch_embedder.position_embedding_table": "positions"}
    if spec.standardized:
        around |= {"std_bias": "std_bias", "std_scale": "std_scale"}
    return (
        *tensors.named_rules(_TOWER, PREFIX, around),
        *tensors.named_rules("", PREFIX, {_PROJECTION: "projection.weight"}),
        *tensors.named_rules(f"{_TOWER}encoder.layers.{{i}}.", f"{PREFIX}layers.{{i}}.", inside, layers),
    )
