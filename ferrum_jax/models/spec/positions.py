"""How a token's position enters attention: rotary positions, and a temperature of queries."""

from __future__ import annotations

import dataclasses

from ferrum_jax.models.spec.checks import check_positive

ROPE_TYPES = ("default", "linear", "proportional", "dynamic", "llama3", "yarn", "longrope")
_ODD = ("default", "linear", "dynamic", "llama3")  # types in which a half pair turns with one that does not


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary positions. Fields beyond the first three are read by the types in brackets.

    partial_rotary_factor: of a head's dimensions, how many turn: the first ones. interleaved: neighbours turn together,
    not the first half with the second. A proportional one pairs values over the whole head, and turns the first pairs.
    sections: of a model that sees images, how many frequencies turn by a token's time, row and column; they take turns,
    or stand one after the other where sections_in_order. Empty where all turn by its position.
    factor [linear, proportional, dynamic, llama3, yarn]: how many times longer contexts may be than in training.
    longest [dynamic]: the context that frequencies are for; one of the original length or less leaves them as they are.
    original_max_position_embeddings [dynamic, llama3, yarn, longrope]. low_freq_factor, high_freq_factor [llama3].
    beta_fast, beta_slow, truncate [yarn]: which frequencies are interpolated.
    attention_factor [yarn, longrope]: scales cos and sin, complete here (inferred where it was not given).
    short_factor, long_factor [longrope]: what each frequency is divided by; the long ones hold where is_long.
    learned_frequencies: each is multiplied by e to the power of a weight of the model.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    is_long: bool = False
    longest: int = 0
    sections: tuple[int, ...] = ()
    sections_in_order: bool = False
    learned_frequencies: bool = False

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type is {self.rope_type!r}; supported are {ROPE_TYPES}")
        if self.rope_theta <= 1 or self.factor < 1:
            raise ValueError(f"rope_theta is {self.rope_theta} and factor {self.factor}; they must be > 1 and >= 1")
        if self.rope_type == "llama3" and self.low_freq_factor > self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor is {self.low_freq_factor}, more than high_freq_factor, {self.high_freq_factor}"
            )
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(f"partial_rotary_factor is {self.partial_rotary_factor}; it must be in (0, 1]")

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's dimensions turn, or have a pair that does; always an even number."""
        return 2 * ((self.share_dim(head_dim) + 1) // 2)

    def share_dim(self, head_dim: int) -> int:
        """How many dimensions of a head the config says; of an odd number the last one's pair turns too."""
        return head_dim if self.rope_type == "proportional" else int(head_dim * self.partial_rotary_factor)

    def check(self, head_dim: int) -> None:
        """Raises ValueError where heads of this size cannot be turned so."""
        dim = self.rotary_dim(head_dim)
        if not 0 < dim <= head_dim or (self.share_dim(head_dim) % 2 and self.rope_type not in _ODD):
            raise ValueError(
                f"head_dim is {head_dim}, and {self.share_dim(head_dim)} of its dimensions turn; rotary positions of "
                f"type {self.rope_type!r} need an even number"
            )
        if self.rope_type == "dynamic" and self.share_dim(head_dim) < 3:
            raise ValueError(f"head_dim is {head_dim}; rotary positions of type 'dynamic' stretch 3 dimensions or more")
        if self.rope_type == "longrope" and {len(self.short_factor), len(self.long_factor)} != {dim // 2}:
            raise ValueError(
                f"longrope has {len(self.short_factor)} short and {len(self.long_factor)} long factors; half of the "
                f"dimensions that turn are {dim // 2}"
            )
        if self.sections and (len(self.sections) != 3 or sum(self.sections) != dim // 2 or min(self.sections) < 0):
            raise ValueError(
                f"mrope_section is {list(self.sections)}; it must be three numbers that make {dim // 2}, half of the "
                "dimensions that turn"
            )

    def fitted(self, max_model_len: int) -> RopeSpec:
        """The rope of an engine whose longest context is this: keys in a cache cannot follow a context that grows.

        Longrope takes one list of factors, dynamic one theta.
        """
        original = self.original_max_position_embeddings
        if self.rope_type == "dynamic":
            return dataclasses.replace(self, longest=max(max_model_len, original))
        return dataclasses.replace(self, is_long=max_model_len > original) if self.rope_type == "longrope" else self

    def most_positions(self, max_position_embeddings: int) -> int:
        """The longest context that the rope is made for, given that of the config."""
        return int(max_position_embeddings * self.factor) if self.rope_type == "dynamic" else max_position_embeddings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temperature:
    """Queries far from the start weigh sharper: q times 1 + scale * ln(1 + floor((position + offset) / length))."""

    scale: float
    length: int
    offset: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "length")
