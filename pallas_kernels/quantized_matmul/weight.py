"""A weight as codes and scales on one device, as one value.

value[.., o, i] = (code[.., o, i] - zero[.., o, g]) * scale[.., o, g]        g = i // group
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.target import Target

KINDS = ("int8", "int4", "fp8_e4m3", "mxfp4")
_PACKED = ("int4", "mxfp4")  # two codes a byte, the low half first
_MIDDLE_OF_INT4 = 8  # what its unsigned codes are less where there are no zero points


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """[.., O, I]. kind: what a code means; int4 is unsigned, mxfp4 is E2M1 with scales of E8M0 (2^(byte - 127)).

    order: input i of the codes is input order[i] of x. activations: "int8" or "fp8_e4m3", what x is rounded to before
    the product, in groups of activation_group inputs (None: all) that share a scale, each token's own, or input_scale.
    has_power_scales: each token's own scales are rounded up to powers of two.
    kernels: the TPU or GPU whose kernels multiply it; None is plain XLA.
    """

    codes: jax.Array  # [.., O, I], or [.., O, I / 2] uint8
    scales: jax.Array  # [.., O, I / group]
    zeros: jax.Array | None = None  # [.., O, I / group]
    order: jax.Array | None = None  # [.., I] int32
    input_scale: jax.Array | None = None  # [.., 1] float32
    kind: str = dataclasses.field(metadata={"static": True})
    activations: str | None = dataclasses.field(default=None, metadata={"static": True})
    activation_group: int | None = dataclasses.field(default=None, metadata={"static": True})
    has_power_scales: bool = dataclasses.field(default=False, metadata={"static": True})
    kernels: Target | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight that it stands for."""
        *lead, width = self.codes.shape
        return (*lead, width * (2 if self.kind in _PACKED else 1))

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    def at(self, expert: jax.Array) -> QuantizedWeight:
        """The weight of one expert of a stack [E, O, I]."""
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert, keepdims=False), self)


def values(weight: QuantizedWeight) -> jax.Array:
    """[.., O, I] float32: codes less their zero points, without scales. Every kind of code is exact in it."""
    if weight.kind not in KINDS:
        raise ValueError(f"kind is {weight.kind!r}; it must be one of {KINDS}")
    codes = _unpacked(weight.codes) if weight.kind in _PACKED else weight.codes
    if weight.kind == "mxfp4":
        return _e2m1(codes)
    found = codes.astype(jnp.float32)
    if weight.zeros is not None:
        return found - spread(weight.zeros.astype(jnp.float32), found.shape[-1])
    return found - _MIDDLE_OF_INT4 if weight.kind == "int4" else found


def scales(weight: QuantizedWeight) -> jax.Array:
    """[.., O, I / group] float32."""
    if weight.scales.dtype != jnp.uint8:
        return weight.scales.astype(jnp.float32)
    exponents = weight.scales.astype(jnp.uint32)
    bits = jnp.where(exponents == 0, jnp.uint32(1 << 22), exponents << 23)  # 2^-127 is subnormal
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def decode(weight: QuantizedWeight, dtype: jax.typing.DTypeLike) -> jax.Array:
    """[.., O, I]: what it stands for, computed in float32 and rounded once; inputs in the order of the codes."""
    return (values(weight) * spread(scales(weight), weight.shape[-1])).astype(dtype)


def spread(of_groups: jax.Array, num_inputs: int) -> jax.Array:  # [.., I / group] -> [.., I]
    """Each group's number for each of its inputs; one number for all is left to broadcast."""
    if of_groups.shape[-1] in (1, num_inputs):
        return of_groups
    return jnp.repeat(of_groups, num_inputs // of_groups.shape[-1], axis=-1)


def _unpacked(codes: jax.Array) -> jax.Array:  # [.., I / 2] uint8 -> [.., I] uint8
    halves = jnp.stack((codes & jnp.uint8(15), codes >> jnp.uint8(4)), axis=-1)
    return halves.reshape(*codes.shape[:-1], -1)


def _e2m1(codes: jax.Array) -> jax.Array:  # uint8 below 16 -> float32
    """Sign, two bits of exponent with bias 1, one of fraction. Source: OCP MX Specification v1.0, section 5.3.3."""
    bits = codes.astype(jnp.int32)
    exponent, fraction = bits >> 1 & 3, bits & 1
    halves = jnp.where(exponent == 0, fraction, (2 + fraction) << jnp.maximum(exponent - 1, 0))
    return jnp.where(bits >= 8, -halves, halves).astype(jnp.float32) * 0.5
