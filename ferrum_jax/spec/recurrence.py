"""Recurrent layers: what a row's state is made of."""

from __future__ import annotations

import dataclasses

from ferrum_jax.spec.checks import no_multiples


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """Gated DeltaNets, in the layers of the cache group "state". conv_kernel_dim: taps of the convolution.

    grouped: two projections whose rows stand by key head; else one for each of what they make.

    Raises ValueError naming the field whose value cannot be.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    grouped: bool = True

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads is {self.num_value_heads}, no multiple of linear_num_key_heads, "
                f"{self.num_key_heads}"
            )

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: all q, k and v."""
        return 2 * self.num_key_heads * self.key_head_dim + self.output_size

    @property
    def output_size(self) -> int:
        """What the output projection is given."""
        return self.num_value_heads * self.value_head_dim

    def undivided(self, tp: int) -> list[str]:
        """What this many devices cannot share, with its size."""
        return no_multiples(tp, linear_num_key_heads=self.num_key_heads)
