"""ProductTiles of the GPU's products: pure functions of shapes and Target.

A program holds one multiprocessor for the whole launch, with one warpgroup that fetches and `consumers` that decode
and multiply. Outputs are the rows of a product, so that codes are decoded into registers, where wgmma takes its left
operand from; tokens are its columns.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from pallas_kernels.target import Target

PART = 64  # outputs of a wgmma
QUARTER_BYTES = 16  # of a row of codes, that a thread loads at once; four threads share a row
COLUMNS = (8, 16, 32, 64, 128)  # tokens of a tile
_PACKED = ("int4", "mxfp4")
_SPARE = 4096  # barriers, alignment and the compiler's own scratch
_MIN_STAGES, _MAX_STAGES = 4, 8
_STAGE_INPUTS = 256
_SHARED_ROWS = 64  # of a tile; more tokens keep two consumers' wgmma busy, and take registers that four do not have
_SAVED_BY_PARTS = 1.1
_DIVIDED_ROWS = 64  # more tokens: partial sums would cross memory for longer than programs idle


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodesForm:
    """The kernel's specialisation to a weight. num_groups: of inputs that share a scale."""

    kind: str
    num_inputs: int
    num_groups: int
    has_zeros: bool

    @property
    def is_packed(self) -> bool:
        return self.kind in _PACKED

    @property
    def codes_per_byte(self) -> int:
        return 2 if self.is_packed else 1

    @property
    def quarter(self) -> int:
        """Inputs that a thread decodes at once."""
        return QUARTER_BYTES * self.codes_per_byte

    @property
    def chunk(self) -> int:
        """Inputs of four threads that share a row."""
        return 4 * self.quarter

    @property
    def group(self) -> int:
        return self.num_inputs // self.num_groups

    @property
    def has_scales(self) -> bool:
        """Whether codes are scaled in registers; else their sums are."""
        return self.num_groups > 1

    @property
    def groups_of_chunk(self) -> int:
        return max(1, self.chunk // self.group)

    @property
    def unit(self) -> float:
        """The factor of sums: decoded bits lie 2^-64 below the value, within the range of any scale."""
        return 1.0 if self.kind == "int8" else 2.0**64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductTiles:
    """consumers: warpgroups that multiply, each `parts` times 64 outputs. tile_rows: tokens. tile_in: a stage's inputs.

    sharers: consumers of the same outputs, which share the chunks of a stage. is_divided: programs share the inputs of
    a tile, and their partial sums are added afterwards.
    """

    consumers: int
    sharers: int
    parts: int
    tile_rows: int
    tile_in: int
    stages: int
    programs: int
    is_divided: bool
    smem_bytes: int

    @property
    def tile_out(self) -> int:
        return self.consumers // self.sharers * self.parts * PART

    @classmethod
    def choose(
        cls, num_rows: int, num_outputs: int, form: CodesForm, target: Target, **named: int | bool
    ) -> ProductTiles:
        """The tiles for num_rows tokens. named: fields that are given. Raises ValueError for a target without cores."""
        if target.num_cores is None or target.smem_bytes is None:
            raise ValueError(f"target is {target.generation!r}, which states no multiprocessors; take a Hopper GPU")
        tile_rows = int(named.get("tile_rows", next((n for n in COLUMNS if n >= num_rows), COLUMNS[-1])))
        row_tiles, room = -(-num_rows // tile_rows), target.smem_bytes - _SPARE
        parts = int(named.get("parts", _parts(row_tiles, num_outputs, target.num_cores) if tile_rows == 128 else 1))
        columns = next(n for n in (2, 3, 1) if num_outputs % (n * parts * PART) == 0)
        chunks = math.gcd(form.num_inputs // form.chunk, _STAGE_INPUTS // form.chunk)
        stage_of = functools.partial(stage_bytes, columns * parts * PART, tile_rows, form=form)
        while chunks > 1 and room < _MIN_STAGES * stage_of(chunks * form.chunk):
            chunks //= 2
        tile_in = int(named.get("tile_in", chunks * form.chunk))
        most = _SHARED_ROWS if columns < 3 else _SHARED_ROWS // 2  # six consumers have fewer registers than four
        sharers = int(named.get("sharers", 1 if tile_rows > most or tile_in // form.chunk % 2 else 2))
        consumers = int(named.get("consumers", columns * sharers))
        tile_out = consumers // sharers * parts * PART
        shared = (sharers - 1) * tile_out * tile_rows * 4
        stage = stage_bytes(tile_out, tile_rows, tile_in, form)
        stages = int(named.get("stages", min(_MAX_STAGES, (room - shared) // stage)))
        tiles = row_tiles * (num_outputs // tile_out)
        fills = _fills(tiles, target.num_cores)
        return cls(
            consumers=consumers,
            sharers=sharers,
            parts=parts,
            tile_rows=tile_rows,
            tile_in=tile_in,
            stages=stages,
            programs=min(target.num_cores, tiles * form.num_inputs // tile_in),
            is_divided=bool(named.get("is_divided", num_rows <= _DIVIDED_ROWS and fills < 0.8)),
            smem_bytes=_SPARE + shared + stages * stage,
        )


def _parts(row_tiles: int, num_outputs: int, num_cores: int) -> int:
    """Two where tiles of 256 outputs fill the chip about as well as of 128: tokens then cross L2 half as often."""
    once, twice = (row_tiles * (num_outputs // (2 * parts * PART)) for parts in (1, 2))
    fit = num_outputs % (4 * PART) == 0
    return 2 if fit and _SAVED_BY_PARTS * _fills(twice, num_cores) >= _fills(once, num_cores) else 1


def _fills(tiles: int, num_cores: int) -> float:
    """The share of the chip that is busy while each of its programs takes whole tiles."""
    return tiles / (-(-tiles // num_cores) * num_cores)


def stage_bytes(tile_out: int, tile_rows: int, tile_in: int, form: CodesForm) -> int:
    """Shared memory of a stage: codes, and tokens in bfloat16."""
    return tile_out * tile_in // form.codes_per_byte + tile_rows * tile_in * 2
