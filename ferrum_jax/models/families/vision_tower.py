"""The tower of Qwen3-VL: patches of images to embeddings of the text model.

    x = patch(pixels) + positions resampled to the grid;  per layer:  x += attention(norm(x));  x += mlp(norm(x))
    embedding = merger(x), of merge x merge neighbours;  beside it one merger more for each deepstack layer's x

Patches of several images lie one after the other and attend within their own (`ImagePatches.segments`). Neighbours that
are merged stand together, as the processor gives them. All is computed tile by tile, and tiles of padding are not.
Source: Bai et al. 2025 (Qwen3-VL).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.rules import Rule
from ferrum_jax.models.families import tensors
from ferrum_jax.models.layers.bidirectional_layer import BidirectionalLayer, heads_first, in_real_tiles
from ferrum_jax.models.layers.embedding import Embedding
from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.layers.norm import LayerNorm
from ferrum_jax.models.layers.rope import rotate
from ferrum_jax.models.layers.segment_attention import in_tiles, map_tiles, num_real_tiles, tile_of
from ferrum_jax.models.spec import VisionSpec

PREFIX = "vision."  # of the tower's parameters among those of its model
_EPS = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ImagePatches:
    """Patches of some images, padded. Rows and columns count patches; heights and widths are their image's."""

    pixels: jax.Array  # [T, patch_values] float32
    rows: jax.Array  # [T] int32
    columns: jax.Array  # [T] int32
    heights: jax.Array  # [T] int32
    widths: jax.Array  # [T] int32
    segments: jax.Array  # [T] int32, 0 for padding


class TowerLayer(BidirectionalLayer):
    """A layer whose queries and keys turn by their place."""

    def __call__(
        self,
        x: jax.Array,  # [tiles, t, D]
        cos: jax.Array,  # [tiles, t, 1, H/2]
        sin: jax.Array,  # [tiles, t, 1, H/2]
        segments: jax.Array,  # [tiles, t]
    ) -> jax.Array:  # [tiles, t, D]
        return in_real_tiles(self._turned, self.mixed, x, segments, cos, sin)

    def _turned(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, ...]:  # q, k, v [N, t, H]
        q, k, v = self.heads(x)
        return heads_first((rotate(q, cos, sin), rotate(k, cos, sin), v))


class PatchMerger(nnx.Module):
    """merge x merge neighbours to one embedding. norms_whole: the norm is of the neighbours together."""

    def __init__(self, spec: VisionSpec, *, norms_whole: bool, dtype: jnp.dtype) -> None:
        self.width = spec.hidden_size * spec.patches_per_token
        self.norm = LayerNorm(self.width if norms_whole else spec.hidden_size, eps=_EPS, dtype=dtype)
        self.norms_whole = norms_whole
        self.up = Linear(self.width, self.width, bias=True, dtype=dtype, rngs=None)
        self.down = Linear(self.width, spec.out_size, bias=True, dtype=dtype, rngs=None)

    def __call__(self, x: jax.Array) -> jax.Array:  # [T, D] -> [T / merge², out]
        x = self.norm(x.reshape(-1, self.width)) if self.norms_whole else self.norm(x).reshape(-1, self.width)
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


class PatchProjection(nnx.Module):
    """Pixels of a patch to its first state; the weight as the checkpoint has it, that of a convolution."""

    def __init__(self, spec: VisionSpec, *, bias: bool = True, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((spec.hidden_size, *spec.patch_shape), dtype))
        self.bias = nnx.Param(jnp.zeros((spec.hidden_size,), dtype)) if bias else None

    def __call__(self, pixels: jax.Array) -> jax.Array:  # [T, patch_values] -> [T, D]
        weight = self.weight[...].reshape(self.weight.shape[0], -1)
        x = pixels.astype(weight.dtype) @ weight.T
        return x if self.bias is None else x + self.bias[...][None, :]


class VisionTower(nnx.Module):
    """A whole tower; its weights are zeros until others are bound."""

    def __init__(self, spec: VisionSpec, *, dtype: jnp.dtype | str = jnp.float32) -> None:
        dtype = jnp.dtype(dtype)
        self.spec = spec
        self.patch = PatchProjection(spec, dtype=dtype)
        self.positions = Embedding(spec.num_positions, spec.hidden_size, dtype=dtype, rngs=None)
        self.layers = nnx.List([TowerLayer(spec, eps=_EPS, fused=True, dtype=dtype) for _ in range(spec.num_layers)])
        self.merger = PatchMerger(spec, norms_whole=False, dtype=dtype)
        self.deep = nnx.List([PatchMerger(spec, norms_whole=True, dtype=dtype) for _ in spec.deepstack])

    def __call__(self, patches: ImagePatches) -> jax.Array:  # [T / merge², (1 + deepstack) * out]
        T, per_token = len(patches.segments), self.spec.patches_per_token
        tile = tile_of(T, per_token)  # what is merged lies in one tile
        tiles = jax.tree.map(lambda x: in_tiles(x, tile), patches)
        count = num_real_tiles(tiles.segments)
        x, cos, sin = map_tiles(self._start, count, tiles)
        deep = []
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, tiles.segments)
            if i in self.spec.deepstack:
                deep.append(map_tiles(self.deep[len(deep)], count, x))
        merged = jnp.concatenate([map_tiles(self.merger, count, x), *deep], axis=-1)
        return merged.reshape(-1, merged.shape[-1])[: T // per_token]

    def _start(self, patches: ImagePatches) -> tuple[jax.Array, ...]:  # x [t, D], cos and sin [t, 1, H/2]
        x = self.patch(patches.pixels)
        return x + self._positions(patches).astype(x.dtype), *rotation_by_halves(self.spec, patches)

    def _positions(self, patches: ImagePatches) -> jax.Array:  # [T, D] float32
        """The learned grid, resampled bilinearly so that corners fall on corners."""
        side, table = self.spec.grid_side, self.positions.weight[...]

        def states(place: jax.Array) -> jax.Array:  # in float32 what was taken, not the whole table
            return jnp.take(table, place, axis=0, mode="clip").astype(jnp.float32)

        def axis(place: jax.Array, size: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
            at = place.astype(jnp.float32) * ((side - 1) / jnp.maximum(size - 1, 1).astype(jnp.float32))
            low = jnp.clip(jnp.floor(at).astype(jnp.int32), 0, side - 1)
            share = at - low.astype(jnp.float32)
            return (low, 1 - share), (jnp.minimum(low + 1, side - 1), share)

        tops, lefts = axis(patches.rows, patches.heights), axis(patches.columns, patches.widths)
        return sum(
            (states(r * side + c) * (a * b)[:, None] for r, a in tops for c, b in lefts),
            start=jnp.zeros((len(patches.rows), table.shape[1]), jnp.float32),
        )


def rotation_by_halves(spec: VisionSpec, patches: ImagePatches) -> tuple[jax.Array, jax.Array]:  # [T, 1, H/2] each
    """The first half of a head's pairs turns by the row, the second by the column."""
    half = spec.head_dim // 2
    exponents = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    frequencies = np.float32(1) / np.power(np.float32(spec.rope_theta), exponents)
    places = jnp.stack([patches.rows, patches.columns], axis=1).astype(jnp.float32)  # [T, 2]
    angles = (places[:, :, None] * frequencies[None, None, :]).reshape(len(places), 1, half)
    return jnp.cos(angles), jnp.sin(angles)


def tower_rules(spec: VisionSpec, source: str) -> tuple[Rule, ...]:
    """Every parameter of a tower, under PREFIX, and the Hugging Face tensor it comes from. source: their prefix."""
    both, layers, deep = tensors.WEIGHT_AND_BIAS, tuple(range(spec.num_layers)), tuple(range(len(spec.deepstack)))
    inside = {
        "norm1": "attention_norm",
        "attn.qkv": "qkv",
        "attn.proj": "o",
        "norm2": "mlp_norm",
        "mlp.linear_fc1": "up",
        "mlp.linear_fc2": "down",
    }
    merger = {"norm": "norm", "linear_fc1": "up", "linear_fc2": "down"}
    around = {"patch_embed.proj": "patch"} | {f"merger.{theirs}": f"merger.{ours}" for theirs, ours in merger.items()}
    return (
        *tensors.named_rules(source, PREFIX, around, parts=both),
        *tensors.named_rules(source, PREFIX, {"pos_embed": "positions"}, parts=tensors.WEIGHT),
        *tensors.named_rules(f"{source}blocks.{{i}}.", f"{PREFIX}layers.{{i}}.", inside, layers, both),
        *tensors.named_rules(f"{source}deepstack_merger_list.{{i}}.", f"{PREFIX}deep.{{i}}.", merger, deep, both),
    )
