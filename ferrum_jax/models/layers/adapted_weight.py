"""A weight to which the rows of a step add what their adapters say."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from ferrum_jax.models.layers.formed_weight import FormedWeight, step_into
from pallas_kernels.low_rank import ExpertSlots, LowRankSlots, Pairs, add_low_rank
from pallas_kernels.quantized_matmul import QuantizedWeight

Weight = jax.Array | QuantizedWeight


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapted:
    """A weight with slots, as products take it: the weight, A and B of all slots, and which rows name them."""

    base: Weight
    slots: LowRankSlots | ExpertSlots
    pairs: Pairs

    def add(self, y: jax.Array, x: jax.Array) -> jax.Array:  # [T, O], [T, I] -> [T, O]
        """y with what the adapters of its rows make of x."""
        assert isinstance(self.slots, LowRankSlots), "experts add theirs tile by tile"
        return add_low_rank(y, x, self.slots, self.pairs)


class AdaptedWeight(nnx.Module):
    """Stands in the place of a weight in the forward of a step, and nowhere else."""

    def __init__(self, weight: nnx.Param | FormedWeight, slots: LowRankSlots | ExpertSlots, pairs: Pairs) -> None:
        self._of = functools.partial(Adapted, slots=slots, pairs=pairs)
        self._weight = weight

    def __getitem__(self, index: object) -> Adapted:
        assert index is Ellipsis, f"index is {index}; an adapted weight is taken whole, as weight[...]"
        return self._of(base=self._weight[...])


def put_adapters(model: nnx.Module, slots: Mapping[str, LowRankSlots | ExpertSlots], pairs: Pairs) -> None:
    """Has the named weights of a model add what the rows' adapters say. slots: of each weight, by its name."""
    for name, own in slots.items():
        path, _, last = name.rpartition(".")
        holder: Any = functools.reduce(step_into, path.split("."), model)
        setattr(holder, last, AdaptedWeight(getattr(holder, last), own, pairs))
