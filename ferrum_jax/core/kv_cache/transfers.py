"""Transfers: what the next plan moves on the device beside computing its rows."""

import dataclasses

from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.core.plan import Copy


@dataclasses.dataclass(kw_only=True, slots=True)
class Transfers:
    """Copies of blocks, and prompt slots to read and write; every id in them has a holder until the plan is made.

    Afterwards the order of steps protects them: a new owner writes the id only in a later step.
    """

    spills: tuple[Copy, ...] = ()
    loads: tuple[Copy, ...] = ()
    copies_before: list[Copy] = dataclasses.field(default_factory=list)
    copies_after: list[Copy] = dataclasses.field(default_factory=list)
    sources: dict[int, int] = dataclasses.field(default_factory=dict)  # row slot -> prompt slot it samples from
    targets: dict[int, int] = dataclasses.field(default_factory=dict)  # row slot -> prompt slot that keeps its state
    held: list[tuple[IdPool, int]] = dataclasses.field(default_factory=list)

    def release(self) -> None:
        """The plan is made."""
        for pool, id in self.held:
            pool.release((id,))
        self.held.clear()
