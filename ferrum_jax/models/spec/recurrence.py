"""Recurrent layers: what a row's state is made of."""

import dataclasses
import math

from ferrum_jax.models.spec.checks import check_positive, no_multiples

MULTIPLIED = ("gate", "inputs", "writes", "reads", "steps")  # of a Mamba2's projections, in the order of checkpoints


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
    def state_shape(self) -> tuple[int, int, int]:
        """Matrices of a row's state, and what q and v have of each."""
        return self.num_value_heads, self.key_head_dim, self.value_head_dim

    @property
    def output_size(self) -> int:
        """Inputs of the output projection."""
        return self.num_value_heads * self.value_head_dim

    def undivided(self, tp: int) -> list[str]:
        """Sizes that this many devices cannot divide."""
        return no_multiples(tp, linear_num_key_heads=self.num_key_heads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiDeltaSpec:
    """Kimi Delta Attention, in the layers of the cache group "state": each channel of a key decays by itself.

    head_dim: of q, k and v. conv_kernel_dim: taps of the convolution. low_rank: decays and the output's gate are made
    by two projections with head_dim values between, else by one. decay_bound: the logarithm of a decay is this times a
    sigmoid; None is minus a softplus, without a bound. flat_rates: A_log is [N] in checkpoints, else [1, 1, N, 1].

    Raises ValueError naming the field whose value cannot be.
    """

    num_heads: int
    head_dim: int
    conv_kernel_dim: int
    low_rank: bool = True
    decay_bound: float | None = None
    flat_rates: bool = True

    def __post_init__(self) -> None:
        check_positive(self, "num_heads", "head_dim")
        if self.conv_kernel_dim < 2:
            raise ValueError(f"short_conv_kernel_size is {self.conv_kernel_dim}; it must be at least 2")
        if self.decay_bound is not None and self.decay_bound >= 0:
            raise ValueError(f"the lower bound of decays is {self.decay_bound}; it must be below 0")

    @property
    def conv_channels(self) -> int:
        """Channels of the convolutions: all q, k and v."""
        return 3 * self.output_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Matrices of a row's state, and what q and v have of each."""
        return self.num_heads, self.head_dim, self.head_dim

    @property
    def output_size(self) -> int:
        """Inputs of the output projection."""
        return self.num_heads * self.head_dim

    def undivided(self, tp: int) -> list[str]:
        """Sizes that this many devices cannot divide."""
        return no_multiples(tp, linear_num_heads=self.num_heads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConvSpec:
    """Short convolutions, in the layers of the cache group "state". conv_kernel_dim: their taps."""

    conv_channels: int
    conv_kernel_dim: int

    def __post_init__(self) -> None:
        if self.conv_kernel_dim < 2:
            raise ValueError(f"conv_L_cache is {self.conv_kernel_dim}; it must be at least 2")

    @property
    def state_shape(self) -> None:
        """A row's state has no matrices."""

    @property
    def output_size(self) -> int:
        """Inputs of the output projection."""
        return self.conv_channels

    def undivided(self, tp: int) -> list[str]:
        """Sizes that this many devices cannot divide."""
        return no_multiples(tp, hidden_size=self.conv_channels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Spec:
    """Mamba2's state spaces, in the layers of the cache group "state".

    num_groups: heads of a group share the vectors that write and read their states, of state_dim values.
    conv_kernel_dim: taps of the convolution. conv_bias: whether it has a bias. norm: outputs are normed by group, after
    their gate. step_limit: the least and the largest step of time. multipliers: factors of the arrays in MULTIPLIED.
    output_multiplier: of the layer's output.

    Raises ValueError naming the field whose value cannot be.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_kernel_dim: int
    conv_bias: bool = True
    norm: bool = True
    step_limit: tuple[float, float] = (0.0, math.inf)
    multipliers: tuple[float, ...] = (1.0,) * 5
    output_multiplier: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, "num_heads", "head_dim", "state_dim", "num_groups")
        if self.num_heads % self.num_groups:
            raise ValueError(f"{self.num_heads} heads of Mamba2 are no multiple of its {self.num_groups} groups")
        if self.conv_kernel_dim < 2:
            raise ValueError(f"the convolution of Mamba2 has {self.conv_kernel_dim} taps; it must have at least 2")
        if len(self.multipliers) != len(MULTIPLIED):
            raise ValueError(f"ssm_multipliers are {len(self.multipliers)}; they must be one for each of {MULTIPLIED}")

    @property
    def output_size(self) -> int:
        """Inputs of the output projection."""
        return self.num_heads * self.head_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Heads of a row's state, what each takes in, and what writes and reads it."""
        return self.num_heads, self.head_dim, self.state_dim

    @property
    def group_size(self) -> int:
        """Values that write the states of all groups, and as many that read them."""
        return self.num_groups * self.state_dim

    def undivided(self, tp: int) -> list[str]:
        """Sizes that this many devices cannot divide. A device has whole groups, or a part of the only one."""
        reasons = no_multiples(tp, mamba_n_heads=self.num_heads)
        parted = self.num_groups % tp and (self.norm or tp % self.num_groups)
        return reasons + (no_multiples(tp, mamba_n_groups=self.num_groups) if parted and self.num_groups > 1 else [])


RecurrenceSpec = GatedDeltaSpec | KimiDeltaSpec | ShortConvSpec | Mamba2Spec
