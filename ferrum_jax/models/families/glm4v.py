"""Glm4vForConditionalGeneration and Glm4vMoeForConditionalGeneration: GLM-4 or GLM-4.5 that sees images by a tower.

    x = norm(patch(pixels)) + positions resampled to the grid;  per layer as in Pixtral's tower
    y = gelu(norm(project(merge(norm(x), of merge x merge neighbours))));  embedding = down(act(gate y) * up y)

Rotary positions turn by time, row and column, whose frequencies stand one after the other. Tokens of an image attend to
the past alone, as text does. Neighbours that are merged stand together, as the processor gives them.
Source: GLM-V Team 2025 (GLM-4.1V-Thinking and GLM-4.5V); keys and defaults as in Hugging Face's configs.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from checkpoints.rules import Rule
from ferrum_jax.models.families import glm4, tensors
from ferrum_jax.models.families.config_reader import ConfigReader, axial_tower_readers
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.pixtral import EPS, GatedTowerLayer, through_layers
from ferrum_jax.models.families.qwen3_vl import with_sections
from ferrum_jax.models.families.text_part import text_part_from, with_towers
from ferrum_jax.models.families.vision_tower import PREFIX, ImagePatches, PatchProjection, rotation_by_halves
from ferrum_jax.models.layers.embedding import Embedding
from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.layers.mlp import activation_of
from ferrum_jax.models.layers.norm import LayerNorm, RMSNorm
from ferrum_jax.models.spec import ModelSpec, VisionSpec

# Keys beside `text_config` that say how images and videos stand in a prompt; the processor reads them.
_OF_IMAGES = (
    *("vision_config", "image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id"),
    *("video_start_token_id", "video_end_token_id"),
)
_TOWER = "model.visual."
_SECTIONS = [8, 12, 12]
_CUBIC = -0.75  # the kernel's slope, as in the reference


class GlmMerger(nnx.Module):
    """merge x merge neighbours to one state, by the product of a convolution, and to an embedding by a gated MLP."""

    def __init__(self, spec: VisionSpec, *, dtype: jnp.dtype) -> None:
        D, out = spec.hidden_size, spec.out_size
        self.act = activation_of(spec.hidden_act)
        self.norm = RMSNorm(D, eps=EPS, dtype=dtype)
        self.convolution = nnx.Param(jnp.zeros((out, D, spec.merge, spec.merge), dtype))
        self.convolution_bias = nnx.Param(jnp.zeros((out,), dtype))
        self.project = Linear(out, out, dtype=dtype, rngs=None)
        self.projected_norm = LayerNorm(out, eps=EPS, dtype=dtype)
        self.gate, self.up = (Linear(out, spec.intermediate_size, dtype=dtype, rngs=None) for _ in range(2))
        self.down = Linear(spec.intermediate_size, out, dtype=dtype, rngs=None)

    def __call__(self, x: jax.Array) -> jax.Array:  # [t, D] -> [t / merge², out]
        weight = self.convolution[...]
        neighbours = jnp.swapaxes(self.norm(x).reshape(-1, weight.shape[2] * weight.shape[3], x.shape[1]), 1, 2)
        flat = weight.reshape(len(weight), -1)
        merged = neighbours.reshape(len(neighbours), -1) @ flat.T + self.convolution_bias[...][None, :]
        y = jax.nn.gelu(self.projected_norm(self.project(merged)), approximate=False)
        return self.down(self.act(self.gate(y)) * self.up(y))


class GlmTower(nnx.Module):
    """A whole tower; its weights are zeros until others are bound."""

    def __init__(self, spec: VisionSpec, *, dtype: jnp.dtype | str = jnp.float32) -> None:
        dtype, D = jnp.dtype(dtype), spec.hidden_size
        self.spec = spec
        self.patch = PatchProjection(spec, dtype=dtype)
        self.patch_norm = RMSNorm(D, eps=EPS, dtype=dtype)
        self.positions = Embedding(spec.num_positions, D, dtype=dtype, rngs=None)
        self.layers = nnx.List([GatedTowerLayer(spec, spec.out_size, dtype=dtype) for _ in range(spec.num_layers)])
        self.merger = GlmMerger(spec, dtype=dtype)

    def __call__(self, patches: ImagePatches) -> jax.Array:  # [T / merge², out]
        return through_layers(patches, self.spec.patches_per_token, self._start, self.layers, self.merger)

    def _start(self, patches: ImagePatches) -> tuple[jax.Array, ...]:  # x [t, D], cos and sin [t, 1, H/2]
        x = self.patch_norm(self.patch(patches.pixels))
        return x + self._positions(patches).astype(x.dtype), *rotation_by_halves(self.spec, patches)

    def _positions(self, patches: ImagePatches) -> jax.Array:  # [T, D] in the weights' dtype
        """The learned grid, resampled by cubics so that middles of patches fall on those of the image's."""
        side, table = self.spec.grid_side, self.positions.weight[...]
        rows, columns = _taps(patches.rows, patches.heights, side), _taps(patches.columns, patches.widths, side)

        def of_row(row: jax.Array) -> jax.Array:  # in float32 what was taken, not the whole table
            taken = ((jnp.take(table, row * side + c, axis=0, mode="clip"), share) for c, share in columns)
            return sum(states.astype(jnp.float32) * share[:, None] for states, share in taken)  # type: ignore[return-value]

        whole = sum(of_row(row) * share[:, None] for row, share in rows)
        return jnp.asarray(whole).astype(table.dtype)


def _taps(places: jax.Array, sizes: jax.Array, side: int) -> list[tuple[jax.Array, jax.Array]]:
    """The four places of an axis of the learned grid, and the share of each; beyond the edge its last place stands.

    Source: Keys 1981 (cubic convolution).
    """
    scaled = (places.astype(jnp.float32) + 0.5) / jnp.maximum(sizes, 1).astype(jnp.float32) * 2 - 1
    at = ((scaled + 1) * side - 1) / 2
    low = jnp.floor(at)
    past = at - low
    shares = _outer(past + 1), _inner(past), _inner(1 - past), _outer(2 - past)
    return [(jnp.clip(low.astype(jnp.int32) + step, 0, side - 1), share) for step, share in enumerate(shares, start=-1)]


def _inner(x: jax.Array) -> jax.Array:  # the kernel up to 1
    return ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1


def _outer(x: jax.Array) -> jax.Array:  # from 1 to 2
    return ((_CUBIC * x - 5 * _CUBIC) * x + 8 * _CUBIC) * x - 4 * _CUBIC


def _spec(text: Family, reader: ConfigReader) -> ModelSpec:
    turned = dataclasses.replace(text, read=functools.partial(_text, text))
    spec, config = text_part_from(reader, _OF_IMAGES, turned), reader.config.get("vision_config")
    return dataclasses.replace(spec, vision=vision_spec_from(config, spec.hidden_size))


def _text(text: Family, reader: ConfigReader) -> ModelSpec:
    """The text model, whose rotary positions get sections."""
    config, sections = dict(reader.config), _SECTIONS
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), Mapping):
            config[key] = rope = dict(config[key])
            sections = ConfigReader({"mrope_section": rope.pop("mrope_section", None)}).get("mrope_section", sections)
    spec = text.spec_from_config(config, reader.architecture)
    return with_sections(spec, sections, in_order=True)


def vision_spec_from(config: object, width: int) -> VisionSpec:
    """VisionSpec of a `vision_config`. width: of the text model, which must be the tower's.

    Raises ValueError naming what is missing or not understood.
    """
    reader, rope = axial_tower_readers(config)
    reader.only(rms_norm_eps=EPS, attention_bias=False)
    reader.leave("hidden_dropout_prob")  # of training
    image, patch = reader.alike("image_size", 336), reader.alike("patch_size", 14)
    if image < patch:
        raise ValueError(f"vision_config has image_size {image} and patch_size {patch}; an image has a patch or more")
    spec = VisionSpec(
        tower="glm4v",
        hidden_size=reader.get("hidden_size", 1536),
        intermediate_size=reader.get("intermediate_size", 13696),
        num_layers=reader.get("depth", 24),
        num_heads=reader.get("num_heads", 12),
        patch_shape=(reader.get("in_channels", 3), reader.alike("temporal_patch_size", 2), patch, patch),
        merge=reader.get("spatial_merge_size", 2),
        num_positions=(image // patch) ** 2,
        out_size=reader.get("out_hidden_size", 4096),
        hidden_act=reader.get("hidden_act", "silu"),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
    )
    reader.finish()
    rope.finish()
    if spec.out_size != width:
        raise ValueError(f"vision_config's out_hidden_size is {spec.out_size}, and the text's hidden_size is {width}")
    return spec


def tower_rules(spec: VisionSpec) -> tuple[Rule, ...]:
    """Every parameter of a tower, under PREFIX, and the Hugging Face tensor it comes from."""
    D, layers, weight, both = spec.hidden_size, tuple(range(spec.num_layers)), tensors.WEIGHT, tensors.WEIGHT_AND_BIAS
    source, target = f"{_TOWER}blocks.{{i}}.", f"{PREFIX}layers.{{i}}."
    inside = {"norm1": "attention_norm", "attn.proj": "o", "norm2": "mlp_norm"}
    inside |= {f"mlp.{part}_proj": part for part in ("gate", "up", "down")}
    around = {"post_conv_layernorm": "patch_norm", "embeddings.position_embedding": "positions"}
    around |= {"post_layernorm": "merger.norm", "merger.proj": "merger.project"}
    around |= {f"merger.{part}_proj": f"merger.{part}" for part in ("gate", "up", "down")}
    of_convolution = {"downsample.weight": "merger.convolution", "downsample.bias": "merger.convolution_bias"}
    return (
        *tensors.named_rules(_TOWER, PREFIX, {"patch_embed.proj": "patch"}, parts=both),
        *tensors.named_rules(_TOWER, PREFIX, around, parts=weight),
        *tensors.named_rules(_TOWER, PREFIX, {"merger.post_projection_norm": "merger.projected_norm"}, parts=both),
        *tensors.named_rules(_TOWER, PREFIX, of_convolution),
        *tensors.named_rules(source, target, inside, layers, weight),
        *(
            Rule(source=f"{source}attn.qkv.weight", target=f"{target}{name}.weight", layers=layers, part=part)
            for name, part in tensors.in_turn(dict.fromkeys("qkv", D)).items()
        ),
    )


def _over(text: Family, *, models: str, **defaults: object) -> Family:
    """The family whose text model this is, with the defaults of its part's config class."""
    part = dataclasses.replace(text, defaults=defaults, mtp=None)
    return with_towers(
        part,
        functools.partial(_spec, part),
        tower_rules,
        of_tower=(_TOWER + "*",),
        models=models,
        notes="[with images](../guides/images.md); videos are refused",
    )


FAMILIES = {
    "Glm4vForConditionalGeneration": dataclasses.replace(
        _over(
            glm4.FAMILIES["Glm4ForCausalLM"],
            models="GLM-4.1V, GLM-4.6V-Flash",
            max_position_embeddings=32768,
            num_key_value_heads=2,
            partial_rotary_factor=1.0,
            attention_bias=True,
            rms_norm_eps=1e-5,
        ),
        also=("Glm46VForConditionalGeneration",),
    ),
    "Glm4vMoeForConditionalGeneration": _over(
        glm4.FAMILIES["Glm4MoeForCausalLM"],
        models="GLM-4.5V, GLM-4.6V",
        max_position_embeddings=65536,
        num_key_value_heads=8,
        partial_rotary_factor=0.5,
        attention_bias=True,
        rms_norm_eps=1e-5,
        first_k_dense_replace=1,
        n_routed_experts=128,
        moe_intermediate_size=1408,
    ),
}
