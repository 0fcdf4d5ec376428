"""The kernels' specialisation and tiles: a pure function of shapes and target."""

from __future__ import annotations

import dataclasses
import math

from pallas_kernels.target import Target

LANES = 128
_FEW_ROWS, _FEW_MASKED_ROWS = 128, 256  # above, weights are decoded beside products of many rows
_ROWS = 16  # of a bfloat16 tile
_MAX_ROWS = 512
_FEW_ROWS_INPUTS, _MANY_ROWS_INPUTS = 2048, 4096  # of one product
_MANY_ROWS_OUT = 1024
_TILE_WEIGHTS = 2**22  # of straight code: about 2,500 bundles
_VMEM_SHARE = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductForm:
    """How a weight's codes are multiplied.

    middle: the zero point of all codes, 0 for none. native: the matrix unit multiplies E4M3; without it, it takes
    such floats with another bias and multiplies bfloat16. has_zeros: zero points of each group's own.
    """

    kind: str
    num_inputs: int
    num_groups: int
    middle: float
    has_zeros: bool
    native: bool

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.num_inputs // self.num_groups

    @property
    def is_packed(self) -> bool:
        """Two codes a byte."""
        return self.kind in ("int4", "mxfp4")

    @property
    def is_decoded(self) -> bool:
        """Whether products of many rows need weights that are decoded."""
        return self.num_groups > 1 or self.middle != 0 or self.has_zeros or self.is_packed

    @property
    def unit(self) -> float:
        """A code's value over the number that the matrix unit takes for it."""
        of_e4m3 = {"int4": 2.0**9, "mxfp4": 2.0**6}.get(self.kind, 1.0)
        return of_e4m3 if self.native or not self.is_packed else 16 * of_e4m3


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewRows:
    """How a product of few rows is cut.

    num_rows: of x, filled up. inputs: of one product of the matrix unit, a chunk. tile_out: outputs whose codes are
    one transfer. part_out: outputs whose sums are in registers.
    """

    num_rows: int
    inputs: int
    tile_out: int
    part_out: int
    vmem_limit_bytes: int

    @classmethod
    def choose(cls, num_rows: int, num_outputs: int, form: ProductForm, target: Target) -> FewRows:
        """The tiles that were counted best: straight code as long as compiling it allows."""
        assert target.vmem_bytes is not None and target.mxu_columns is not None, "a TPU target has both"
        rows = -(-num_rows // _ROWS) * _ROWS
        tile = LANES
        while tile < 1024 and _wastes_little(num_outputs, 2 * tile) and 2 * tile * form.num_inputs <= _TILE_WEIGHTS:
            tile *= 2
        return cls(
            num_rows=rows,
            inputs=_chunk_inputs(rows, form, target.mxu_columns),
            tile_out=tile,
            # fewer outputs than the matrix unit has columns leave the rest idle: twice the time of 128 rows
            part_out=min(tile, 2 * LANES if rows <= 64 or target.mxu_columns > LANES else LANES),
            vmem_limit_bytes=int(target.vmem_bytes * _VMEM_SHARE),
        )


def _wastes_little(num_outputs: int, tile: int) -> bool:
    """Whether tiles of outputs cover no more than a tenth beyond the last of them."""
    return -(-num_outputs // tile) * tile <= 1.1 * num_outputs


def are_few(num_rows: int, form: ProductForm, target: Target) -> bool:
    """Whether so many rows are multiplied with codes, each once for every group of a chunk."""
    assert target.mxu_columns is not None, "a TPU target has it"
    copies = 1 if form.num_groups == 1 else _chunk_inputs(num_rows, form, target.mxu_columns) // form.group
    return num_rows <= _FEW_ROWS and copies * num_rows <= _FEW_MASKED_ROWS


def _chunk_inputs(num_rows: int, form: ProductForm, mxu: int) -> int:
    """As deep as the matrix unit where scales differ along the inputs, else many.

    More than the group of a matrix unit of 128 is right for few rows alone: each of them is multiplied once a group.
    """
    if form.num_groups == 1:
        return max(n for n in range(256, _FEW_ROWS_INPUTS + 1, 256) if form.num_inputs % n == 0)
    is_shallow = mxu == LANES and (num_rows > _ROWS or not form.is_packed)
    return LANES if is_shallow else 2 * LANES


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManyRows:
    """How a product of many rows is cut. tile_out: outputs whose codes are one transfer.

    part_out, inputs: of one step, whose weights are decoded together.
    """

    tile_rows: int
    tile_out: int
    part_out: int
    inputs: int
    vmem_limit_bytes: int

    @classmethod
    def choose(cls, num_rows: int, num_outputs: int, form: ProductForm, target: Target) -> ManyRows:
        """The most rows that half of VMEM holds twice."""
        assert target.vmem_bytes is not None, "a TPU target has it"
        limit = int(target.vmem_bytes * _VMEM_SHARE)
        rows = _MAX_ROWS
        while rows > LANES and (rows >= 2 * num_rows or rows * form.num_inputs * 4 > limit // 2):
            rows //= 2
        part = math.gcd(num_outputs, 2 * LANES)
        tile = part
        while (
            form.is_decoded
            and tile < _MANY_ROWS_OUT
            and num_outputs % (2 * tile) == 0
            and tile * form.num_inputs <= _TILE_WEIGHTS
        ):
            tile *= 2
        return cls(
            tile_rows=rows,
            tile_out=tile,
            part_out=part,
            inputs=max(n for n in range(256, _MANY_ROWS_INPUTS + 1, 256) if form.num_inputs % n == 0),
            vmem_limit_bytes=limit,
        )
