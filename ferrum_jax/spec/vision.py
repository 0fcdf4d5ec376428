"""VisionSpec: the tower that turns an image's patches into embeddings of a text model."""

from __future__ import annotations

import dataclasses

from ferrum_jax.spec.checks import check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """One tower: patches, layers that attend within an image, and mergers of merge x merge patches to an embedding.

    patch_values: floats of a patch as it is given. num_positions: of the learned square grid, which is resampled to
    each image's. deepstack: layers whose states are merged too, and added to the text model's first layers.
    out_size: of an embedding, the text model's width.

    Raises ValueError naming the field whose value cannot be.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_shape: tuple[int, int, int, int]  # channels, frames, rows, columns
    merge: int
    num_positions: int
    out_size: int
    deepstack: tuple[int, ...] = ()
    hidden_act: str = "gelu_pytorch_tanh"
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        check_positive(self, "hidden_size", "intermediate_size", "num_layers", "num_heads", "merge", "num_positions")
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ValueError(
                f"vision_config's hidden_size is {self.hidden_size} and num_heads {self.num_heads}; the size of a head "
                "must be a multiple of 4"
            )
        if self.grid_side**2 != self.num_positions:
            raise ValueError(f"num_position_embeddings is {self.num_positions}; it must be a square")
        if sorted(set(self.deepstack)) != list(self.deepstack) or not set(self.deepstack) <= set(
            range(self.num_layers)
        ):
            raise ValueError(
                f"deepstack_visual_indexes is {list(self.deepstack)}; it must name some of {self.num_layers} layers, "
                "in order"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        channels, frames, rows, columns = self.patch_shape
        return channels * frames * rows * columns

    @property
    def grid_side(self) -> int:
        return round(self.num_positions**0.5)

    @property
    def patches_per_token(self) -> int:
        return self.merge**2

    @property
    def embedding_size(self) -> int:
        """Floats of a token of an image: its embedding, and what deepstack adds to each of the first layers."""
        return (1 + len(self.deepstack)) * self.out_size
