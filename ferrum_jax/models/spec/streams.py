"""Several residuals of a token in place of one."""

from __future__ import annotations

import dataclasses

from ferrum_jax.models.spec.checks import check_above_zero, check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamsSpec:
    """Hyper-connections: each token has num_streams residuals, which a half of a layer reads and adds to by weights.

    magnitude: what a half gives is added with up to this weight. eps: of each weight beside its sigmoid.
    """

    num_streams: int
    magnitude: float
    eps: float

    def __post_init__(self) -> None:
        check_positive(self, "num_streams")
        check_above_zero(self, "magnitude")
