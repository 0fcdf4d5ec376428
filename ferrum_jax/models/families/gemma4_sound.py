"""The encoder of Gemma 4's sounds: a conformer whose positions hear a short stretch before them, and nothing behind.

    x = project(frames, halved twice by convolutions)
    per layer:  x += mlp(x) / 2;  x += norm(attention(norm(x)));  x += project(act(norm(taps(gate(norm(x))))))
                x = norm(x + mlp(x) / 2)
    embedding = project(norm(project(x)))

A position attends to itself and the 11 before it, by what they are and by how far they lie back, and its taps weigh
itself and 4 before it. Clips lie one after the other and hear nothing of each other. All is computed tile by tile, each
with what it needs of the tile before it, and tiles of padding are not.
Source: Zhang et al. 2023 (USM); Gulati et al. 2020 (Conformer); Dai et al. 2019 (Transformer-XL), section 3.3.
"""

import itertools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from checkpoints.rules import Rule
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import part_reader
from ferrum_jax.models.families.gemma4_vision import BOUNDS, ClippedLinear, norm_of_tower
from ferrum_jax.models.families.qwen3_asr import HalvingConvolution, sines
from ferrum_jax.models.families.whisper import PREFIX
from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.layers.mlp import activation_of
from ferrum_jax.models.layers.norm import LayerNorm, unit_rms
from ferrum_jax.models.layers.segment_attention import in_tiles, map_tiles, num_real_tiles, tile_of
from ferrum_jax.models.spec import SoundSpec

_EPS = 1e-6
_WINDOW = 12  # positions that one attends to
_TAPS = 5
_FRAMES = 4  # of a position
_CAP = 50.0  # of scores, before the softmax
_LARGEST = 1e10  # that values between the parts of a layer may be
_MASKED = -1e30
_MAX_CHANNELS = 1 << 12  # of a convolution
_TOWER, _PROJECTION = "model.audio_tower.", "model.embed_audio.embedding_projection.weight"


class HalfStep(nnx.Module):
    """x + norm(mlp(norm(x))) / 2."""

    def __init__(self, spec: SoundSpec, *, dtype: jnp.dtype) -> None:
        D, F = spec.hidden_size, spec.intermediate_size
        self.act = activation_of(spec.hidden_act)
        self.norm, self.out_norm = norm_of_tower(D, dtype), norm_of_tower(D, dtype)
        self.up, self.down = ClippedLinear(D, F, spec, dtype=dtype), ClippedLinear(F, D, spec, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:  # [t, D] -> the same
        found = self.down(self.act(self.up(self.norm(_cut(x)))))
        return x + self.out_norm(_cut(found)) * 0.5


class ConformerLayer(nnx.Module):
    """Half an MLP, attention to the positions before, taps, and half an MLP."""

    def __init__(self, spec: SoundSpec, *, dtype: jnp.dtype) -> None:
        D, H = spec.hidden_size, spec.head_dim
        self.num_heads = spec.num_heads
        self.act = activation_of(spec.hidden_act)
        self.first, self.second = HalfStep(spec, dtype=dtype), HalfStep(spec, dtype=dtype)
        self.attention_norm, self.attention_out_norm = norm_of_tower(D, dtype), norm_of_tower(D, dtype)
        self.q, self.k, self.v, self.o = (ClippedLinear(D, D, spec, dtype=dtype) for _ in range(4))
        self.distances = Linear(D, D, dtype=dtype, rngs=None)
        self.head_scale = nnx.Param(jnp.zeros((H,), dtype))
        self.gate_norm, self.taps_norm, self.norm = (norm_of_tower(D, dtype) for _ in range(3))
        self.gated = ClippedLinear(D, 2 * D, spec, dtype=dtype)
        self.taps = nnx.Param(jnp.zeros((D, 1, _TAPS), dtype))
        self.mixed = ClippedLinear(D, D, spec, dtype=dtype)

    def __call__(self, x: jax.Array, segments: jax.Array) -> jax.Array:  # [tiles, t, D], [tiles, t] -> [tiles, t, D]
        count = num_real_tiles(segments)
        x, q, k, v = map_tiles(self._heads, count, x)
        k, v, theirs = (_with_end(part, _WINDOW) for part in (k, v, segments))
        x, gated = map_tiles(self._attended, count, x, q, k, v, segments, theirs)
        gated, theirs = (_with_end(part, _TAPS - 1) for part in (gated, segments))
        return map_tiles(self._mixed, count, x, gated, segments, theirs)

    def _heads(self, x: jax.Array) -> tuple[jax.Array, ...]:  # [t, D] -> the same, and q, k, v [t, N, H] float32
        x = self.first(x)
        normed = self.attention_norm(_cut(x))
        heads = [
            part(normed).astype(jnp.float32).reshape(len(x), self.num_heads, -1) for part in (self.q, self.k, self.v)
        ]
        scale = jax.nn.softplus(self.head_scale[...].astype(jnp.float32)) / (
            math.log(2) * math.sqrt(heads[0].shape[-1])
        )
        return x, heads[0] * scale[None, None], heads[1] * (math.log1p(math.e) / math.log(2)), heads[2]

    def _attended(
        self,
        x: jax.Array,  # [t, D]
        q: jax.Array,  # [t, N, H]
        k: jax.Array,  # [window + t, N, H]
        v: jax.Array,  # [window + t, N, H]
        segments: jax.Array,  # [t]
        theirs: jax.Array,  # [window + t]
    ) -> tuple[jax.Array, jax.Array]:  # [t, D] each: x, and what the taps weigh
        places = jnp.asarray(sines(_WINDOW, x.shape[1])[::-1], x.dtype)  # the farthest first
        far = self.distances(places).astype(jnp.float32).reshape(_WINDOW, self.num_heads, -1)
        found = windowed_attention(q, k, v, far, segments, theirs).reshape(x.shape).astype(x.dtype)
        x = x + self.attention_out_norm(_cut(self.o(found)))
        values, gates = jnp.split(self.gated(self.gate_norm(x)), 2, axis=-1)
        return x, values * jax.nn.sigmoid(gates)

    def _mixed(
        self, x: jax.Array, gated: jax.Array, segments: jax.Array, theirs: jax.Array
    ) -> jax.Array:  # [t, D], [taps - 1 + t, D], [t], [taps - 1 + t] -> [t, D]
        taps, tapped = self.taps[...].astype(jnp.float32), jnp.zeros(x.shape, jnp.float32)
        for i in range(_TAPS):
            own = theirs[i : i + len(x)] == segments
            tapped += jnp.where(own[:, None], gated[i : i + len(x)].astype(jnp.float32) * taps[None, :, 0, i], 0)
        x = x + self.mixed(self.act(self.taps_norm(_cut(tapped.astype(x.dtype)))))
        return self.norm(_cut(self.second(x)))


def windowed_attention(
    q: jax.Array,  # [t, N, H] float32
    k: jax.Array,  # [window + t, N, H] float32, those of the tile behind those before it
    v: jax.Array,  # [window + t, N, H] float32
    far: jax.Array,  # [window, N, H] float32, what a query meets by distance, the farthest first
    segments: jax.Array,  # [t] int32
    theirs: jax.Array,  # [window + t] int32, of keys
) -> jax.Array:  # [t, N, H] float32
    """softmax(cap tanh(q (k + far) / cap)) v over a query's own position and those of its segment before it.

    Queries go by stretches of a window, which meet the keys of their own and of the one before:

        keys    0 1 2 3 | 4 5 6 7        of a window of 4; a query meets the four marked, and `far` in this order
        query 4 . x x x | x . . .
        query 5 . . x x | x x . .
    """
    W = len(far)
    stretches = q.reshape(-1, W, *q.shape[1:])
    k, v, theirs = (
        jnp.concatenate([a[:-W].reshape(-1, W, *a.shape[1:]), a[W:].reshape(-1, W, *a.shape[1:])], 1)
        for a in (k, v, theirs)
    )
    by_distance = jnp.einsum("cqnh,dnh->cnqd", stretches, far)
    # Rows of 2W + 1, read as rows of 2W: each is shifted by one more than the row above.
    rows = jnp.pad(by_distance, ((0, 0), (0, 0), (0, 0), (1, W))).reshape(*by_distance.shape[:2], -1)
    shifted = rows[..., : 2 * W * W].reshape(*by_distance.shape[:3], 2 * W)
    scores = _CAP * jnp.tanh((jnp.einsum("cqnh,cknh->cnqk", stretches, k) + shifted) / _CAP)
    distance = W + jnp.arange(W)[:, None] - jnp.arange(2 * W)[None, :]
    met = ((distance >= 0) & (distance < W))[None] & (segments.reshape(-1, W, 1) == theirs[:, None, :])
    weights = jax.nn.softmax(jnp.where(met[:, None], scores, _MASKED), axis=-1)
    return jnp.einsum("cnqk,cknh->cqnh", weights, v).reshape(q.shape)


class ConformerEncoder(nnx.Module):
    """A whole encoder with its projector; its weights are zeros until others are bound."""

    def __init__(self, spec: SoundSpec, *, dtype: jnp.dtype | str = jnp.float32) -> None:
        dtype, D, channels = jnp.dtype(dtype), spec.hidden_size, (1, spec.num_mels, spec.conv_channels)
        pairs = list(itertools.pairwise(channels))
        self.convolutions = nnx.List([HalvingConvolution(*pair, bias=False, dtype=dtype) for pair in pairs])
        self.convolution_norms = nnx.List([LayerNorm(out, eps=_EPS, bias=False, dtype=dtype) for _, out in pairs])
        self.convolved = Linear(spec.num_mels // 4 * spec.conv_channels, D, dtype=dtype, rngs=None)
        self.layers = nnx.List([ConformerLayer(spec, dtype=dtype) for _ in range(spec.num_layers)])
        self.states = Linear(D, spec.state_size, bias=True, dtype=dtype, rngs=None)
        self.projection = Linear(spec.state_size, spec.out_size, dtype=dtype, rngs=None)

    def __call__(
        self,
        frames: jax.Array,  # [frames, mels], zeros between clips and behind them
        segments: jax.Array,  # [frames] int32: those of a clip have the same, 0 where there is none
    ) -> jax.Array:  # [frames / 4, out]
        T = len(segments) // _FRAMES
        tile = tile_of(T, _WINDOW)
        frames, of_frames = (in_tiles(x, _FRAMES * tile) for x in (frames, segments))
        tiles = of_frames[:, ::_FRAMES]
        count = num_real_tiles(tiles)
        x = map_tiles(self._start, count, *(_with_end(part, _FRAMES) for part in (frames, of_frames)))
        for layer in self.layers:
            x = layer(x, tiles)
        found = map_tiles(self._projected, count, x)
        return found.reshape(-1, found.shape[-1])[:T]

    def _start(self, frames: jax.Array, segments: jax.Array) -> jax.Array:  # [4 + 4t, mels], [4 + 4t] -> [t, D]
        """Frames outside of clips are silent for the second convolution too."""
        x = frames[None, None]
        for convolution, norm in zip(self.convolutions, self.convolution_norms, strict=True):
            x = jnp.where((segments > 0)[None, None, :, None], x, 0)
            x = jnp.moveaxis(jax.nn.relu(norm(jnp.moveaxis(convolution(x), 1, -1))), -1, 1)
            segments = segments[::2]
        x = jnp.moveaxis(x[0], 0, -1)[1:]  # [t, mels / 4, channels]
        return self.convolved(x.reshape(len(x), -1))

    def _projected(self, x: jax.Array) -> jax.Array:  # [t, D] -> [t, out]
        return self.projection(unit_rms(self.states(x), _EPS))


def _cut(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -_LARGEST, _LARGEST)


def _with_end(x: jax.Array, count: int) -> jax.Array:  # [tiles, t, ...] -> [tiles, count + t, ...]
    """Each tile behind the end of the one before it; zeros before the first."""
    ends = jnp.pad(x[:-1, -count:], ((1, 0), *[(0, 0)] * (x.ndim - 1)))
    return jnp.concatenate([ends, x], axis=1)


def sound_spec_from(config: object, width: int) -> SoundSpec:
    """SoundSpec of an `audio_config`. width: of the text model. Raises ValueError naming what is not understood."""
    reader = part_reader(config, "audio_config")
    reader.only(rms_norm_eps=_EPS, conv_kernel_size=_TAPS, residual_weight=0.5, gradient_clipping=_LARGEST)
    reader.only(attention_chunk_size=_WINDOW, attention_context_left=_WINDOW + 1, attention_context_right=0)
    reader.only(attention_logit_cap=_CAP, attention_invalid_logits_value=-1e9)
    channels = reader.get("subsampling_conv_channels", [128, 32])
    if len(channels) != 2 or not all(type(c) is int and 1 <= c <= _MAX_CHANNELS for c in channels) or channels[0] % 4:
        raise ValueError(
            f"subsampling_conv_channels is {shown(channels)}; it must be two numbers, 1 to {_MAX_CHANNELS}, the "
            "first as many as there are mels, a multiple of 4"
        )
    hidden_size = reader.get("hidden_size", 1024)
    spec = SoundSpec(
        tower="gemma4_sound",
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_layers=reader.get("num_hidden_layers", 12),
        num_heads=reader.get("num_attention_heads", 8),
        num_mels=channels[0],
        num_positions=1,
        out_size=width,
        chunk_frames=_FRAMES,
        conv_channels=channels[1],
        state_size=reader.get("output_proj_dims", 1536),
        clipped=bool(reader.get("use_clipped_linears", True)),
        hidden_act=reader.get("hidden_act", "silu"),
    )
    reader.finish()
    if hidden_size % 2 or hidden_size < 4:
        raise ValueError(
            f"audio_config's hidden_size is {hidden_size}; it must be even, 4 or more, for sines and cosines"
        )
    return spec


def tower_rules(spec: SoundSpec) -> tuple[Rule, ...]:
    """Every parameter of an encoder, under PREFIX, and the Hugging Face tensor it comes from."""
    weights = {
        "self_attn.relative_k_proj": "distances",
        "norm_pre_attn": "attention_norm",
        "norm_post_attn": "attention_out_norm",
        "lconv1d.pre_layer_norm": "gate_norm",
        "lconv1d.conv_norm": "taps_norm",
        "norm_out": "norm",
    }
    products = {f"self_attn.{part}_proj": part for part in "qkv"} | {"self_attn.post": "o"}
    products |= {"lconv1d.linear_start": "gated", "lconv1d.linear_end": "mixed"}
    for theirs, ours in (("feed_forward1", "first"), ("feed_forward2", "second")):
        products |= {f"{theirs}.ffw_layer_1": f"{ours}.up", f"{theirs}.ffw_layer_2": f"{ours}.down"}
        weights |= {f"{theirs}.pre_layer_norm": f"{ours}.norm", f"{theirs}.post_layer_norm": f"{ours}.out_norm"}
    inside = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in weights.items()}
    inside |= {"self_attn.per_dim_scale": "head_scale", "lconv1d.depthwise_conv1d.weight": "taps"}
    of_products = ("linear.weight", *(BOUNDS if spec.clipped else ()))
    inside |= {f"{theirs}.{part}": f"{ours}.{part}" for theirs, ours in products.items() for part in of_products}
    start = {f"layer{i}.conv.weight": f"convolutions.{i}.weight" for i in range(2)}
    start |= {f"layer{i}.norm.weight": f"convolution_norms.{i}.weight" for i in range(2)}
    start |= {"input_proj_linear.weight": "convolved.weight"}
    return (
        *tensors.named_rules(f"{_TOWER}subsample_conv_projection.", PREFIX, start),
        *tensors.named_rules(f"{_TOWER}layers.{{i}}.", f"{PREFIX}layers.{{i}}.", inside, tuple(range(spec.num_layers))),
        *tensors.named_rules(_TOWER, PREFIX, {"output_proj": "states"}, parts=tensors.WEIGHT_AND_BIAS),
        *tensors.named_rules("", PREFIX, {_PROJECTION: "projection.weight"}),
    )
