"""SoundSpec: the encoder that turns log-mel frames of a sound into what a text model reads."""

import dataclasses

from ferrum_jax.io.ints import round_up
from ferrum_jax.models.spec.checks import check_positive

TOWERS = ("whisper", "qwen_sound", "voxtral", "gemma4_sound")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoundSpec:
    """One encoder: frames, convolutions that make them fewer, and layers that attend both ways.

    tower: "whisper", whose windows are as long for every clip, so that what a clip lacks is silence; "voxtral", for
    clips of several such windows; "qwen_sound", for clips of any length, which are cut in chunks that convolutions
    see alone, and whose positions attend to those of their window; or "gemma4_sound", whose positions attend to a few
    before them.
    num_positions: of a window, or of a chunk, after the convolutions. num_mels: values of a frame.
    num_readers: layers of the text model that attend to the encoder's states, the "cross" group; the encoder makes
    their keys and values, once for a clip. Without one, tokens of a prompt have the states as their embeddings.
    chunk_frames: of a chunk; window_chunks: chunks of a window; conv_channels: of the convolutions; all 0 of "whisper".
    "gemma4_sound" has as chunks the frames of a position, no windows, and conv_channels in the second of two
    convolutions; the first has one for each mel.
    stacked: positions that make one token; 1 but of "voxtral". state_size: of a state as it is projected to the text
    model's width, 0 where it is as in layers. clipped: products have bounds of their inputs and outputs.
    out_size: the text model's width.

    Raises ValueError naming the field whose value cannot be.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_mels: int
    num_positions: int
    num_readers: int = 0
    out_size: int
    chunk_frames: int = 0
    window_chunks: int = 0
    conv_channels: int = 0
    stacked: int = 1
    state_size: int = 0
    clipped: bool = False
    hidden_act: str = "gelu"
    tower: str = "whisper"

    def __post_init__(self) -> None:
        assert self.tower in TOWERS, f"tower is {self.tower!r}; known are {TOWERS}"
        chunked = {"whisper": (), "gemma4_sound": ("chunk_frames", "state_size")}
        check_positive(self, "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_mels", "num_positions")
        check_positive(self, *chunked.get(self.tower, ("chunk_frames", "window_chunks", "stacked")))
        check_positive(self, *(("conv_channels",) if self.tower in ("qwen_sound", "gemma4_sound") else ()))
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"d_model is {self.hidden_size} and encoder_attention_heads {self.num_heads}; heads must divide it"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Floats of a frame as it is given."""
        return self.num_mels

    @property
    def chunk(self) -> tuple[int, int]:
        """Frames that are encoded together, and the tokens that they become; the last chunk's may be fewer."""
        return (self.chunk_frames, self.num_positions // self.stacked) if self.chunk_frames else (2, 1)

    @property
    def places_of_chunk(self) -> int:
        """Places that say what of a chunk is a clip's: its tokens, or its frames where one may end early."""
        return self.chunk_frames if self.tower == "gemma4_sound" else self.chunk[1]

    def patches_in_call(self, count: int) -> int:
        """Frames of a call that a clip of `count` takes: whole chunks, with silence that keeps it from the next."""
        return round_up(count + 2, self.chunk_frames) if self.tower == "gemma4_sound" else count

    @property
    def window_frames(self) -> int:
        """Frames of a window."""
        return self.chunk_frames * self.window_chunks or self.num_positions * 2

    @property
    def patches_of_all(self) -> int | None:
        """Frames of each clip, where all have as many."""
        return None if self.chunk_frames else self.window_frames

    @property
    def tokens_of_all(self) -> int | None:
        """Positions of each clip, where all have as many."""
        return None if self.chunk_frames else self.num_positions

    @property
    def grid_of_all(self) -> tuple[int, int, int] | None:
        """Frames of each clip as a grid, as `VisionSpec` has one of patches."""
        return None if self.patches_of_all is None else (1, self.patches_of_all, 1)

    @property
    def embedding_size(self) -> int:
        """Floats of a token of a clip."""
        return self.out_size

    @property
    def is_read_across(self) -> bool:
        """Whether layers attend to a clip beside their row's tokens; no token of the prompt stands for it."""
        return self.num_readers > 0

    @property
    def merge(self) -> int:
        return 1

    @property
    def sees_both_ways(self) -> bool:
        """No token of a prompt sees what is behind it."""
        return False

    @property
    def breaks_rows(self) -> bool:
        return False
