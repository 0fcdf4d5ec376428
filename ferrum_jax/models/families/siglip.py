"""The tower of Gemma 3: a SigLIP encoder of square images of one size, pooled and projected to the text model.

    x = patch(pixels) + positions;  per layer:  x += attention(norm(x));  x += mlp(norm(x))
    embedding = project(norm(mean of merge x merge neighbours of norm(x)))

A call has whole images, one after the other, each with its patches row by row.
Source: Zhai et al. 2023 (SigLIP); Gemma Team 2025 (Gemma 3).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from checkpoints.rules import TOWER as _ENCODER
from checkpoints.rules import Rule, TensorSlice
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.config_reader import part_reader
from ferrum_jax.models.families.vision_tower import PREFIX, ImagePatches, PatchProjection
from ferrum_jax.models.layers.bidirectional_layer import BidirectionalLayer
from ferrum_jax.models.layers.embedding import Embedding
from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.layers.norm import LayerNorm, RMSNorm
from ferrum_jax.models.layers.segment_attention import segment_attention
from ferrum_jax.models.spec import VisionSpec

_EPS = 1e-6
_PROJECTOR = "multi_modal_projector."
HARMLESS = ("vision_tower.*head.*", "vision_tower.*position_ids")  # of SigLIP's own pooling, which nobody calls


class SiglipLayer(BidirectionalLayer):
    """A layer whose patches attend to those of their image."""

    def __call__(self, x: jax.Array, segments: jax.Array) -> jax.Array:  # [T, D], [T] -> [T, D]
        q, k, v = self.heads(x)
        return self.mixed(x, segment_attention(q, k, v, segments))


class SiglipTower(nnx.Module):
    """A whole tower; its weights are zeros until others are bound."""

    def __init__(self, spec: VisionSpec, *, dtype: jnp.dtype | str = jnp.float32) -> None:
        dtype = jnp.dtype(dtype)
        self.spec = spec
        self.convolution = PatchProjection(spec, dtype=dtype)
        self.positions = Embedding(spec.num_positions, spec.hidden_size, dtype=dtype, rngs=None)
        self.layers = nnx.List([SiglipLayer(spec, eps=_EPS, dtype=dtype) for _ in range(spec.num_layers)])
        self.norm = LayerNorm(spec.hidden_size, eps=_EPS, dtype=dtype)
        self.pooled_norm = RMSNorm(spec.hidden_size, eps=_EPS, zero_centred=True, dtype=dtype)
        self.projection = Linear(spec.hidden_size, spec.out_size, dtype=dtype, rngs=None)

    def __call__(self, patches: ImagePatches) -> jax.Array:  # [T / merge², out]
        place = patches.rows * self.spec.grid_side + patches.columns
        x = self.convolution(patches.pixels) + jnp.take(self.positions.weight[...], place, axis=0, mode="clip")
        for layer in self.layers:
            x = layer(x, patches.segments)
        return self.projection(self.pooled_norm(self._pooled(self.norm(x))))

    def _pooled(self, x: jax.Array) -> jax.Array:  # [T, D] -> [T / merge², D]
        merge, D = self.spec.merge, x.shape[1]
        side = self.spec.grid_side // merge
        squares = x.astype(jnp.float32).reshape(-1, side, merge, side, merge, D)
        return jnp.mean(squares, axis=(2, 4)).reshape(-1, D).astype(x.dtype)


def vision_spec_from(config: object, width: int, tokens: int) -> VisionSpec:
    """VisionSpec of a `vision_config`. width: of the text model. tokens: of an image.

    Raises ValueError naming what is missing or not understood.
    """
    reader = part_reader(config, "vision_config")
    image, patch = reader.alike("image_size", 224), reader.alike("patch_size", 16)
    reader.get("vision_use_head", True)  # which Gemma 3 never calls
    side, token_side = image // patch, round(tokens**0.5)
    if token_side**2 != tokens or side % token_side or image % patch:
        raise ValueError(
            f"mm_tokens_per_image is {tokens}, and vision_config has image_size {image} and patch_size {patch}; tokens "
            "must be a square whose side divides that of the patches"
        )
    spec = VisionSpec(
        hidden_size=reader.get("hidden_size", 768),
        intermediate_size=reader.get("intermediate_size", 3072),
        num_layers=reader.get("num_hidden_layers", 12),
        num_heads=reader.get("num_attention_heads", 12),
        patch_shape=(reader.get("num_channels", 3), patch, patch),
        merge=side // token_side,
        num_positions=side**2,
        out_size=width,
        hidden_act=reader.get("hidden_act", "gelu_pytorch_tanh"),
        tower="siglip",
    )
    if reader.get("layer_norm_eps", _EPS) != _EPS:
        raise ValueError(f"vision_config's layer_norm_eps is {reader.get('layer_norm_eps', _EPS)}; it must be {_EPS}")
    reader.finish()
    return spec


def tower_rules(spec: VisionSpec) -> tuple[Rule, ...]:
    """Every parameter of a tower, under PREFIX, and the Hugging Face tensor it comes from."""
    inside = {
        "layer_norm1": "attention_norm",
        "self_attn.q_proj": "q",
        "self_attn.k_proj": "k",
        "self_attn.v_proj": "v",
        "self_attn.out_proj": "o",
        "layer_norm2": "mlp_norm",
        "mlp.fc1": "up",
        "mlp.fc2": "down",
    }
    around = {"embeddings.patch_embedding": "convolution", "post_layernorm": "norm"}
    layers, weight, both = tuple(range(spec.num_layers)), tensors.WEIGHT, tensors.WEIGHT_AND_BIAS
    transposed = TensorSlice(transposed=True)
    return (
        *tensors.named_rules(_ENCODER, PREFIX, around, parts=both),
        *tensors.named_rules(_ENCODER, PREFIX, {"embeddings.position_embedding": "positions"}, parts=weight),
        *tensors.named_rules(f"{_ENCODER}encoder.layers.{{i}}.", f"{PREFIX}layers.{{i}}.", inside, layers, both),
        *tensors.named_rules(_PROJECTOR, PREFIX, {"mm_soft_emb_norm": "pooled_norm"}, parts=weight),
        Rule(source=f"{_PROJECTOR}mm_input_projection_weight", target=f"{PREFIX}projection.weight", part=transposed),
    )
