"""VisionSpec: the tower that turns an image's patches into embeddings of a text model."""

import dataclasses
import math

from ferrum_jax.models.spec.checks import check_positive

TOWERS = ("qwen", "siglip", "gemma4", "pixtral", "glm4v")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """One tower: patches, layers that attend within an image, and merge x merge patches made one embedding.

    tower: "qwen" or "glm4v", for images of any size, whose tokens attend to the past alone as text does; "siglip", for
    those of one square grid, whose tokens attend to all of their image; "gemma4", for images of any size; or "pixtral",
    for those of any size, whose tokens stand in rows with a token of text between.
    windows_see_whole: tokens attend to all of their image in layers with a window, in others as text does.
    patch_values: floats of a patch as it is given. num_positions: of the learned square grid, which is resampled to
    each image's; of "gemma4" of a row and of a column, each learned; of "pixtral" 0, for none are. clipped: products
    have bounds of their inputs and outputs. standardized: pooled states have a mean and a scale. deepstack: layers
    whose states are merged too, and added to the text model's first layers.
    out_size: of an embedding, the text model's width.

    Raises ValueError naming the field whose value cannot be.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_shape: tuple[int, ...]  # channels, frames where there are some, rows, columns
    merge: int
    num_positions: int = 0
    out_size: int
    deepstack: tuple[int, ...] = ()
    hidden_act: str = "gelu_pytorch_tanh"
    rope_theta: float = 10000.0
    tower: str = "qwen"
    clipped: bool = False
    standardized: bool = False
    windows_see_whole: bool = False

    def __post_init__(self) -> None:
        assert self.tower in TOWERS, f"tower is {self.tower!r}; known are {TOWERS}"
        learned = () if self.tower == "pixtral" else ("num_positions",)
        check_positive(self, "hidden_size", "intermediate_size", "num_layers", "num_heads", "merge", *learned)
        turns = self.tower != "siglip"
        if self.hidden_size % self.num_heads or (turns and self.head_dim % 4):
            raise ValueError(
                f"vision_config's hidden_size is {self.hidden_size} and num_heads {self.num_heads}; the size of a head "
                f"must be a {'multiple of 4' if turns else 'whole number'}"
            )
        if self.tower != "gemma4" and self.grid_side**2 != self.num_positions:
            raise ValueError(f"num_position_embeddings is {self.num_positions}; it must be a square")
        if self.tower == "siglip" and self.grid_side % self.merge:
            raise ValueError(
                f"an image has {self.grid_side} x {self.grid_side} patches; the side must be a multiple of "
                f"{self.merge}, the side of those that are pooled to one token"
            )
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
        return math.prod(self.patch_shape)

    @property
    def grid_side(self) -> int:
        return round(self.num_positions**0.5)

    @property
    def patches_per_token(self) -> int:
        return self.merge**2

    @property
    def chunk(self) -> tuple[int, int]:
        """The fewest patches that are encoded together, and the tokens that they become."""
        return self.patches_per_token, 1

    @property
    def places_of_chunk(self) -> int:
        """Places by which a call says where patches stand: one for each."""
        return self.patches_per_token

    def patches_in_call(self, count: int) -> int:
        """Patches of a call that an image of `count` takes."""
        return count

    @property
    def grid_of_all(self) -> tuple[int, int, int] | None:
        """Frames, rows and columns of each image's patches, where all have the same."""
        return (1, self.grid_side, self.grid_side) if self.tower == "siglip" else None

    @property
    def patches_of_all(self) -> int | None:
        """Patches of each image, where all have as many."""
        return self.num_positions if self.tower == "siglip" else None

    @property
    def tokens_of_all(self) -> int | None:
        """Tokens of each image, where all have as many."""
        return None if self.patches_of_all is None else self.patches_of_all // self.patches_per_token

    @property
    def sees_both_ways(self) -> bool:
        """Whether a token of an image attends to all of its image, so that a chunk may not end inside one."""
        return self.tower == "siglip" or self.windows_see_whole

    def sees_whole(self, window: int | None) -> bool:
        """Whether it does so in layers with this window, None of one that attends to all."""
        return self.tower == "siglip" or (self.windows_see_whole and window is not None)

    @property
    def breaks_rows(self) -> bool:
        """Whether a token of text stands between two rows of an image's."""
        return self.tower == "pixtral"

    @property
    def neighbours(self) -> int:
        """Side of the squares of patches that stand together as they are given; 1 where they stand row by row."""
        return 1 if self.tower == "siglip" else self.merge

    @property
    def embedding_size(self) -> int:
        """Floats of a token of an image: its embedding, and what deepstack adds to each of the first layers."""
        return (1 + len(self.deepstack)) * self.out_size
