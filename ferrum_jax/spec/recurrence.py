"""Recurrent layers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """Gated DeltaNets, in the layers of the cache group "state". conv_kernel_dim: taps of the convolution.

    Raises ValueError naming the field whose value cannot be.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads is {self.num_value_heads}, no multiple of linear_num_key_heads, "
                f"{self.num_key_heads}"
            )

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: all q, k and v."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim
