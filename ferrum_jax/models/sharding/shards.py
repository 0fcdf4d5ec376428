"""Shards: the devices that share work, and the collectives between them."""

import dataclasses

import jax
from jax.sharding import Mesh

from ferrum_jax.inputs.sizes.mesh_shape import MeshShape

DATA, TENSOR = "dp", "tp"  # the axes of a mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    """The devices along an axis of the mesh, as the program of one of them sees them; one device has no axis."""

    axis: str | None = None
    size: int = 1

    def index(self) -> jax.Array:
        """[] int32: this device's place among the shards."""
        return jax.numpy.int32(0) if self.axis is None else jax.lax.axis_index(self.axis)

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum of every device's x, on all of them."""
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def max(self, x: jax.Array) -> jax.Array:
        """The largest of every device's x, on all of them."""
        return x if self.axis is None else jax.lax.pmax(x, self.axis)

    def gather(self, x: jax.Array) -> jax.Array:  # [n, ...] -> [size * n, ...]
        """Every device's rows, one device's after the other's."""
        return x if self.axis is None else jax.lax.all_gather(x, self.axis, axis=0, tiled=True)

    def gather_columns(self, x: jax.Array) -> jax.Array:  # [n, m] -> [n, size * m]
        """Every device's columns, one device's after the other's."""
        return x if self.axis is None else jax.lax.all_gather(x, self.axis, axis=1, tiled=True)

    def sum_own(self, x: jax.Array) -> jax.Array:  # [size * n, ...] -> [n, ...]
        """This device's rows of the sum of every device's x."""
        return x if self.axis is None else jax.lax.psum_scatter(x, self.axis, scatter_dimension=0, tiled=True)

    def exchange(self, x: jax.Array) -> jax.Array:  # [size * n, m] -> [n, size * m]
        """From some columns of all rows to all columns of some rows."""
        return x if self.axis is None else jax.lax.all_to_all(x, self.axis, split_axis=0, concat_axis=1, tiled=True)

    def own(self, x: jax.Array) -> jax.Array:  # [size * n, ...] -> [n, ...]
        """This device's rows of what all of them have."""
        if self.axis is None:
            return x
        count = x.shape[0] // self.size
        return jax.lax.dynamic_slice_in_dim(x, self.index() * count, count)


WHOLE = Shards()


def shards_of(mesh: Mesh) -> Shards:
    """The devices that share the work of a step's layers."""
    return _along(mesh, TENSOR)


def expert_shards_of(mesh: Mesh, shape: MeshShape) -> Shards:
    """The data shards whose tokens go to the experts together; alone where each has all experts."""
    return _along(mesh, DATA) if shape.has_experts_once else WHOLE


def _along(mesh: Mesh, axis: str) -> Shards:
    size = mesh.shape[axis]
    return WHOLE if size == 1 else Shards(axis=axis, size=size)
