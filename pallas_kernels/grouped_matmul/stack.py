"""The experts' weights on one device, as one value."""

import dataclasses

import jax

from pallas_kernels.low_rank import ExpertSlots
from pallas_kernels.quantized_matmul import QuantizedWeight
from pallas_kernels.target import Target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertAdapters:
    """Low-rank products of adapters beside each matrix. slots: of each token, 0 for none."""

    gate: ExpertSlots | None
    up: ExpertSlots
    down: ExpertSlots
    slots: jax.Array  # [T] int32

    @property
    def num_slots(self) -> int:
        return self.up.a.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertStack:
    """Experts first_expert to first_expert + E - 1 of num_experts (None: E), in the layout of checkpoints.

    Matrices are arrays, or codes with scales; gate is None of experts without one. biases: added to what gate, up and
    down give. adapters: likewise, by token. kernels: whose kernels multiply matrices that are arrays, None for XLA.
    """

    gate: jax.Array | QuantizedWeight | None  # [E, F, D]
    up: jax.Array | QuantizedWeight  # [E, F, D]
    down: jax.Array | QuantizedWeight  # [E, D, F]
    biases: tuple[jax.Array, jax.Array, jax.Array] | None = None  # [E, F], [E, F], [E, D]
    adapters: ExpertAdapters | None = None
    first_expert: jax.Array | int = 0
    num_experts: int | None = dataclasses.field(default=None, metadata={"static": True})
    kernels: Target | None = dataclasses.field(default=None, metadata={"static": True})
