"""The tower of Mistral 3: patches of an image of any size, merged by squares and projected to the text model.

    x = norm(patch(pixels));  per layer:  x += attention(norm(x));  x += down(act(gate norm(x)) * up norm(x))
    embedding = down(gelu(up(merge(norm(x), of merge x merge neighbours))))

Patches of several images lie one after the other and attend within their own. Neighbours that are merged stand
together, as the processor gives them. A head's pairs turn by the row in its first half and by the column in its
second, with every other frequency each. All is computed tile by tile, and tiles of padding are not.
Source: Agrawal et al. 2024 (Pixtral 12B); Mistral AI 2025 (Mistral Small 3.1).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.rules import Rule
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader, axial_tower_readers
from ferrum_jax.models.families.vision_tower import PREFIX, ImagePatches, PatchProjection, TowerLayer
from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.layers.mlp import activation_of
from ferrum_jax.models.layers.norm import RMSNorm
from ferrum_jax.models.layers.segment_attention import in_tiles, map_tiles, num_real_tiles, tile_of
from ferrum_jax.models.spec import ModelSpec, VisionSpec

EPS = 1e-5
_TOWER, _PROJECTOR = "vision_tower.", "multi_modal_projector."


class GatedTowerLayer(TowerLayer):
    """Attention both ways and a gated MLP, each behind a norm and before a residual; no product has a bias.

    F: width of the MLP.
    """

    def __init__(self, spec: VisionSpec, F: int, *, dtype: jnp.dtype) -> None:
        D = spec.hidden_size
        self.num_heads = spec.num_heads
        self.act = activation_of(spec.hidden_act)
        self.attention_norm = RMSNorm(D, eps=EPS, dtype=dtype)
        self.q, self.k, self.v, self.o = (Linear(D, D, dtype=dtype, rngs=None) for _ in range(4))
        self.mlp_norm = RMSNorm(D, eps=EPS, dtype=dtype)
        self.gate, self.up = (Linear(D, F, dtype=dtype, rngs=None) for _ in range(2))
        self.down = Linear(F, D, dtype=dtype, rngs=None)

    def heads(self, x: jax.Array) -> tuple[jax.Array, ...]:  # [t, D] -> q, k, v [t, N, H]
        normed = self.attention_norm(x)
        return tuple(part(normed).reshape(len(x), self.num_heads, -1) for part in (self.q, self.k, self.v))

    def mixed(self, x: jax.Array, attended: jax.Array) -> jax.Array:  # [t, D], [t, N, H] -> [t, D]
        x = x + self.o(attended.reshape(x.shape))
        normed = self.mlp_norm(x)
        return x + self.down(self.act(self.gate(normed)) * self.up(normed))


def through_layers(
    patches: ImagePatches,
    per_token: int,
    start: Callable[[ImagePatches], tuple[jax.Array, ...]],
    layers: Iterable[Callable[..., jax.Array]],
    end: Callable[[jax.Array], jax.Array],
) -> jax.Array:  # [T / per_token, out]
    """A tower's output, tile by tile: start gives x, cos and sin, and end merges per_token neighbours."""
    T = len(patches.segments)
    tile = tile_of(T, per_token)  # what is merged lies in one tile
    tiles = jax.tree.map(lambda x: in_tiles(x, tile), patches)
    count = num_real_tiles(tiles.segments)
    x, cos, sin = map_tiles(start, count, tiles)
    for layer in layers:
        x = layer(x, cos, sin, tiles.segments)
    found = map_tiles(end, count, x)
    return found.reshape(-1, found.shape[-1])[: T // per_token]


class PixtralTower(nnx.Module):
    """A whole tower; its weights are zeros until others are bound."""

    def __init__(self, spec: VisionSpec, *, dtype: jnp.dtype | str = jnp.float32) -> None:
        dtype, D = jnp.dtype(dtype), spec.hidden_size
        self.spec = spec
        self.convolution = PatchProjection(spec, bias=False, dtype=dtype)
        self.patch_norm = RMSNorm(D, eps=EPS, dtype=dtype)
        width = spec.intermediate_size
        self.layers = nnx.List([GatedTowerLayer(spec, width, dtype=dtype) for _ in range(spec.num_layers)])
        self.norm = RMSNorm(D, eps=EPS, dtype=dtype)
        self.merge = Linear(D * spec.patches_per_token, D, dtype=dtype, rngs=None)
        self.up = Linear(D, spec.out_size, dtype=dtype, rngs=None)
        self.down = Linear(spec.out_size, spec.out_size, dtype=dtype, rngs=None)

    def __call__(self, patches: ImagePatches) -> jax.Array:  # [T / merge², out]
        return through_layers(patches, self.spec.patches_per_token, self._start, self.layers, self._projected)

    def _start(self, patches: ImagePatches) -> tuple[jax.Array, ...]:  # x [t, D], cos and sin [t, 1, H/2]
        return self.patch_norm(self.convolution(patches.pixels)), *_rotation(self.spec, patches)

    def _projected(self, x: jax.Array) -> jax.Array:  # [t, D] -> [t / merge², out]
        """The checkpoint's merging weight has the values of neighbours by width, then by neighbour."""
        D = x.shape[1]
        neighbours = jnp.swapaxes(self.norm(x).reshape(-1, self.spec.patches_per_token, D), 1, 2)
        merged = self.merge(neighbours.reshape(-1, D * self.spec.patches_per_token))
        return self.down(jax.nn.gelu(self.up(merged), approximate=False))


def _rotation(spec: VisionSpec, patches: ImagePatches) -> tuple[jax.Array, jax.Array]:  # [T, 1, H/2] each
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    frequencies = np.float32(1) / np.power(np.float32(spec.rope_theta), exponents)
    angles = [
        place.astype(jnp.float32)[:, None, None] * of_axis[None, None, :]
        for place, of_axis in ((patches.rows, frequencies[::2]), (patches.columns, frequencies[1::2]))
    ]
    turned = jnp.concatenate(angles, axis=-1)
    return jnp.cos(turned), jnp.sin(turned)


def with_tower(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """The spec with the tower of a config.json's `vision_config`; without one as it is.

    Raises ValueError naming what is missing or not understood.
    """
    if not config.get("vision_config"):
        return spec
    whole = ConfigReader(config)
    whole.only(projector_hidden_act="gelu", multimodal_projector_bias=False)
    if whole.get("vision_feature_layer", None) not in (None, -1):
        raise ValueError(
            f"vision_feature_layer is {shown(whole.get('vision_feature_layer', None))}; it must be -1, the last layer"
        )
    if spec.norm.eps != EPS:
        raise ValueError(f"rms_norm_eps is {spec.norm.eps:g}; of a model with this tower it must be {EPS:g}")
    merge = whole.get("spatial_merge_size", 2)
    return dataclasses.replace(spec, vision=vision_spec_from(config["vision_config"], spec.hidden_size, merge))


def vision_spec_from(config: object, width: int, merge: int) -> VisionSpec:
    """VisionSpec of a `vision_config`. width: of the text model. merge: patches of a side of a token.

    Raises ValueError naming what is missing or not understood.
    """
    reader, rope = axial_tower_readers(config)
    reader.leave("image_size", "vocab_size")  # no image's embeddings depend on them
    patch = reader.alike("patch_size", 16)
    spec = VisionSpec(
        tower="pixtral",
        hidden_size=reader.get("hidden_size", 1024),
        intermediate_size=reader.get("intermediate_size", 4096),
        num_layers=reader.get("num_hidden_layers", 24),
        num_heads=reader.get("num_attention_heads", 16),
        patch_shape=(reader.get("num_channels", 3), patch, patch),
        merge=merge,
        out_size=width,
        hidden_act=reader.get("hidden_act", "gelu"),
        rope_theta=float(rope.get("rope_theta", reader.get("rope_theta", 10000.0))),
    )
    if (head_dim := reader.get("head_dim", spec.head_dim)) != spec.head_dim:
        raise ValueError(
            f"vision_config's head_dim is {head_dim}; it must be hidden_size / num_attention_heads, {spec.head_dim}"
        )
    reader.finish()
    rope.finish()
    return spec


def tower_rules(spec: VisionSpec) -> tuple[Rule, ...]:
    """Every parameter of a tower, under PREFIX, and the Hugging Face tensor it comes from."""
    inside = {"attention_norm": "attention_norm", "ffn_norm": "mlp_norm"}
    inside |= {f"attention.{part}_proj": part for part in "qkvo"}
    inside |= {f"feed_forward.{part}_proj": part for part in ("gate", "up", "down")}
    around = {"patch_conv": "convolution", "ln_pre": "patch_norm"}
    joining = {"norm": "norm", "patch_merger.merging_layer": "merge", "linear_1": "up", "linear_2": "down"}
    layers, weight = tuple(range(spec.num_layers)), tensors.WEIGHT
    return (
        *tensors.named_rules(_TOWER, PREFIX, around, parts=weight),
        *tensors.named_rules(f"{_TOWER}transformer.layers.{{i}}.", f"{PREFIX}layers.{{i}}.", inside, layers, weight),
        *tensors.named_rules(_PROJECTOR, PREFIX, joining, parts=weight),
    )
