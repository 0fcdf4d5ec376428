"""SoundSpec: the encoder that turns log-mel frames of a sound into what a text model reads."""

from __future__ import annotations

import dataclasses

from ferrum_jax.spec.checks import check_positive

TOWERS = ("whisper",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoundSpec:
    """One encoder: frames, convolutions that halve their number, and layers that attend to all of a window.

    A window is as long for every clip; what a clip lacks is silence. num_positions: of a window, after the
    convolutions. num_mels: values of a frame. num_readers: layers of the text model that attend to the encoder's
    states, the "cross" group; the encoder makes their keys and values, once for a clip. out_size: the text model's
    width.

    Raises ValueError naming the field whose value cannot be.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_mels: int
    num_positions: int
    num_readers: int
    out_size: int
    hidden_act: str = "gelu"
    tower: str = "whisper"

    def __post_init__(self) -> None:
        assert self.tower in TOWERS, f"tower is {self.tower!r}; known are {TOWERS}"
        check_positive(self, "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_mels", "num_positions")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"d_model is {self.hidden_size} and encoder_attention_heads {self.num_heads}; heads must divide it"
            )

    @property
    def patch_values(self) -> int:
        """Floats of a frame as it is given."""
        return self.num_mels

    @property
    def patches_per_token(self) -> int:
        """Frames of a position."""
        return 2

    @property
    def patches_of_all(self) -> int:
        """Frames of each window."""
        return self.num_positions * self.patches_per_token

    @property
    def tokens_of_all(self) -> int:
        """Positions of each window."""
        return self.num_positions

    @property
    def grid_of_all(self) -> tuple[int, int, int]:
        """Frames of each window as a grid, as `VisionSpec` has one of patches."""
        return 1, self.patches_of_all, 1

    @property
    def is_read_across(self) -> bool:
        """Whether layers attend to a clip beside their row's tokens; no token of the prompt stands for it."""
        return self.num_readers > 0

    @property
    def neighbours(self) -> int:
        """Frames stand one after the other."""
        return 1

    @property
    def merge(self) -> int:
        return 1

    @property
    def sees_both_ways(self) -> bool:
        """No token of a prompt sees what is behind it."""
        return False

    def sees_whole(self, window: int | None) -> bool:
        return False

    @property
    def breaks_rows(self) -> bool:
        return False
