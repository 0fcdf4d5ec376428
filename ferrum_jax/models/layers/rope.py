"""Rotary positions: pairs (x[i], x[i + H/2]) of a head, or (x[2 i], x[2 i + 1]), turn by position * frequency[i].

Frequencies are NumPy constants of H/2 floats; angles are computed from the positions inside the step.
Source: Su et al. 2021 (RoPE); Chen et al. 2023 (linear); Peng et al. 2023, sections 3.2-3.4 (YaRN); the
Llama 3.1 model card (llama3); Ding et al. 2024 (longrope). Dynamic is NTK-aware scaling, as in transformers. Float32
operations stand in the order of the reference implementation, because at position 10⁵ one unit in the last place of a
frequency is 10⁻² of a radian.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ferrum_jax.models.spec import AttentionSpec, RopeSpec

_F32 = np.float32


def frequencies(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """[H'/2] float32, radians per position, of the H' dimensions of a head that turn."""
    head_dim = rope.share_dim(head_dim)
    exponents = np.arange(0, head_dim, 2, dtype=_F32) / _F32(head_dim)
    wavelengths = np.power(_F32(_theta(rope, head_dim)), exponents)  # over 2 pi
    match rope.rope_type:
        case "default" | "dynamic":
            return _F32(1) / wavelengths
        case "linear":
            return (_F32(1) / wavelengths) / _F32(rope.factor)
        case "proportional":
            num_turning = int(rope.partial_rotary_factor * head_dim // 2)
            turns = np.arange(len(wavelengths)) < num_turning
            return np.where(turns, (_F32(1) / wavelengths) / _F32(rope.factor), _F32(0))
        case "llama3":
            return _llama3(_F32(1) / wavelengths, rope)
        case "yarn":
            return _yarn(wavelengths, rope, head_dim)
        case "longrope":
            return _F32(1) / (np.array(rope.long_factor if rope.is_long else rope.short_factor, _F32) * wavelengths)
        case unknown:
            raise ValueError(f"rope_type {unknown!r} has no frequencies; add a case beside its definition in spec")


def _theta(rope: RopeSpec, head_dim: int) -> float:
    """The theta; of dynamic the one that a context of `longest` tokens has."""
    beyond = rope.longest / (rope.original_max_position_embeddings or 1) - 1
    if rope.rope_type != "dynamic" or beyond <= 0:
        return rope.rope_theta
    return min(rope.rope_theta * (1 + rope.factor * beyond) ** (head_dim / (head_dim - 2)), 3e38)  # float32 holds it


def _llama3(freqs: np.ndarray, rope: RopeSpec) -> np.ndarray:
    """Long waves are stretched by factor, short ones kept, those between blended."""
    context = rope.original_max_position_embeddings
    waves = _F32(2 * math.pi) / freqs
    span = _F32(rope.high_freq_factor - rope.low_freq_factor) or _F32(1)  # where they are equal nothing is between
    smooth = (_F32(context) / waves - _F32(rope.low_freq_factor)) / span
    blended = (_F32(1) - smooth) * freqs / _F32(rope.factor) + smooth * freqs
    stretched = np.where(waves > context / rope.low_freq_factor, freqs / _F32(rope.factor), blended)
    return np.where(waves < context / rope.high_freq_factor, freqs, stretched).astype(_F32)


def _yarn(wavelengths: np.ndarray, rope: RopeSpec, head_dim: int) -> np.ndarray:
    """Dimensions that turn often in the original context are kept, those that turn rarely are interpolated."""

    def dimension(turns: float) -> float:
        span = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(head_dim // 2, dtype=_F32) - _F32(low)) / _F32(high - low)
    kept = _F32(1) - np.clip(ramp, _F32(0), _F32(1))
    interpolated = _F32(1) / (_F32(rope.factor) * wavelengths)
    return interpolated * (_F32(1) - kept) + (_F32(1) / wavelengths) * kept


def axes_of_frequencies(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """[H'/2] int32: what each frequency turns by, 0 time, 1 row, 2 column; in turns until the latter have theirs, or in
    this order.

    Source: Wang et al. 2024 (Qwen2-VL), M-RoPE; Bai et al. 2025 (Qwen3-VL), interleaved M-RoPE.
    """
    if rope.sections_in_order:
        return np.repeat(np.arange(3, dtype=np.int32), rope.sections)
    axes = np.zeros(rope.rotary_dim(head_dim) // 2, np.int32)
    for axis, count in enumerate(rope.sections[1:], 1):
        axes[axis : 3 * count : 3] = axis
    return axes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("cos", "sin", "query_factor", "log_position"),
    meta_fields=("interleaved",),
)
@dataclasses.dataclass(frozen=True)
class Rotation:
    """The rotation of a step's q and k by their positions: cos and sin of their angles, and a factor for q alone.

    Each is [T, 1, H'/2] float32, the 1 for heads; query_factor is [T, 1, 1]. log_position: ln(1 + position), [T, 1],
    for a `LearnedTemperature`. None where a layer has no such thing.
    """

    cos: jax.Array | None = None
    sin: jax.Array | None = None
    query_factor: jax.Array | None = None
    interleaved: bool = False
    log_position: jax.Array | None = None

    def of_queries(self, q: jax.Array) -> jax.Array:  # [T, heads, H] -> the same
        """q, turned and multiplied by its factor."""
        return self.weighed(self.of_keys(q))

    def weighed(self, q: jax.Array) -> jax.Array:  # [T, heads, H] -> the same
        """q, multiplied by its factor."""
        return q if self.query_factor is None else (q.astype(jnp.float32) * self.query_factor).astype(q.dtype)

    def of_keys(self, k: jax.Array) -> jax.Array:  # [T, heads, H] -> the same
        """k, turned."""
        if self.cos is None or self.sin is None:
            return k
        return rotate(k, self.cos, self.sin, interleaved=self.interleaved)


class LearnedTemperature(nnx.Module):
    """Queries far from the start weigh sharper: q times a ln(1 + position) + b, with weights a and b of each head.

    Source: Nakanishi 2025 (Scalable-Softmax), section 2, with a bias.
    """

    def __init__(self, num_heads: int, *, dtype: jnp.dtype) -> None:
        self.scale, self.bias = nnx.Param(jnp.zeros((num_heads,), dtype)), nnx.Param(jnp.ones((num_heads,), dtype))

    def __call__(self, q: jax.Array, rotation: Rotation) -> jax.Array:  # [T, heads, H] -> the same
        assert rotation.log_position is not None, (
            "the spec of the layer's attention says that its temperature is learned"
        )
        scale, bias = (weight[...].astype(jnp.float32)[None] for weight in (self.scale, self.bias))
        factor = scale * rotation.log_position + bias  # [T, heads]
        return (q.astype(jnp.float32) * factor[:, :, None]).astype(q.dtype)


def rotation_of(positions: jax.Array, attention: AttentionSpec, learned: jax.Array | None = None) -> Rotation:
    """The Rotation of every position, shared by all layers of a step whose rope and temperature are equal.

    learned: [H'/2] float32, the weights of a rope whose frequencies are learned.
    """
    rope, temperature, factor = attention.rope, attention.temperature, None
    log_position = jnp.log1p(positions.astype(jnp.float32))[:, None] if attention.learned_temperature else None
    if temperature is not None:
        far = jnp.floor((positions + temperature.offset).astype(jnp.float32) / temperature.length)
        factor = (1 + temperature.scale * jnp.log1p(far))[:, None, None]
    if rope is None:
        return Rotation(query_factor=factor, log_position=log_position)
    assert (learned is not None) == rope.learned_frequencies, "frequencies are learned, or they are not"
    cos, sin = rotations(positions, rope, attention.head_dim, learned)
    return Rotation(cos, sin, factor, rope.interleaved, log_position)


def rotations(
    positions: jax.Array,  # [T] int32, or [3, T]: time, row and column
    rope: RopeSpec,
    head_dim: int,
    learned: jax.Array | None = None,  # [H'/2] float32
) -> tuple[jax.Array, jax.Array]:  # cos, sin: [T, 1, H'/2] float32, the 1 for heads
    """cos and sin of every position's angles."""
    turned_by = positions.astype(jnp.float32)
    turned_by = turned_by[:, None] if positions.ndim == 1 else turned_by[axes_of_frequencies(rope, head_dim)].T
    turns = frequencies(rope, head_dim)
    angles = turned_by * (turns if learned is None else turns * jnp.exp(learned))[None, :]
    factor = rope.attention_factor
    return jnp.cos(angles)[:, None, :] * factor, jnp.sin(angles)[:, None, :] * factor


def rotate(
    x: jax.Array,  # [T, heads, H]
    cos: jax.Array,  # [T, 1, H'/2] float32
    sin: jax.Array,  # [T, 1, H'/2] float32
    *,
    interleaved: bool = False,
) -> jax.Array:  # [T, heads, H], x's dtype
    """Turns each pair of a head's first H' dimensions; computed in float32. The others stay as they are.

    Interleaved pairs come out as halves: q k is the same in any order of both, and no lane is moved twice.
    """
    turning = 2 * cos.shape[-1]
    wide = x[..., :turning].astype(jnp.float32)
    left, right = (wide[..., ::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    turned = jnp.concatenate((left * cos - right * sin, right * cos + left * sin), axis=-1).astype(x.dtype)
    return turned if turning == x.shape[-1] else jnp.concatenate((turned, x[..., turning:]), axis=-1)
