"""Which states the TPU's kernel of recurrences takes, and in how many turns: pure functions of shapes."""

from collections.abc import Sequence

from pallas_kernels.row_recurrence.heads_tile import BLOCK

_LANES, _SUBLANES = 128, 8
_MAX_BYTES = 2**21  # of states in one transfer; four are in VMEM at once
TILE_BYTES = 2**20  # likewise, where many tokens change them at once


def turns_of_row(state: Sequence[int], num_groups: int, most_bytes: int = _MAX_BYTES) -> int:
    """Transfers of a row's states (N, ...) float32: the fewest of equal heads that lie within groups, or hold whole
    ones."""
    N, (size, lanes) = state[0], state[1:]
    fits = [n for n in range(1, N + 1) if N % n == 0 and (num_groups % n == 0 or n % num_groups == 0)]
    return next((n for n in fits if 4 * N // n * size * lanes <= most_bytes), N)


def refusals(state: Sequence[int]) -> list[str]:
    """Why the kernel does not take states (N, ...) of a row, [] where it does."""
    _, size, lanes = state
    if size % _SUBLANES or lanes % _LANES:
        return [f"states of {size} by {lanes} are no multiples of {_SUBLANES} by {_LANES}"]
    if 4 * size * lanes > _MAX_BYTES:
        return [f"a state of {size} by {lanes} has more than {_MAX_BYTES} bytes"]
    return []


def takes_tiles(tile: int, num_tokens: int, ranks: Sequence[int]) -> bool:
    """Whether the kernel takes tiles of several tokens. ranks: of what heads have, 3 where each channel decays."""
    return tile % BLOCK == 0 and tile & (tile - 1) == 0 and tile <= num_tokens and max(ranks) == 2


def state_class(state: Sequence[int], *, by_channel: bool = False) -> str:
    """The class of states (N, ...) of a row, as verdicts name it. by_channel: each channel decays by itself."""
    return f"{state[1]} by {state[2]}{' by channel' if by_channel else ''}"


def check_states(state: Sequence[int]) -> None:
    """Raises ValueError for states (N, ...) of a row that the kernel does not take."""
    if reasons := refusals(state):
        raise ValueError(f"{'; '.join(reasons)}: the kernel does not take them; take implementation 'xla'")
