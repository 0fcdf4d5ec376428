"""Stretches of the TPU's prefill kernel: items in straight code, and which keys of each part are looked at."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.paged_attention.tpu.prefill.config import LANES, PrefillConfig


class Span(NamedTuple):
    """Keys of a step: those below `first` each query of a part sees, those from `end` on none; between them any may."""

    first: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
    """spans: of each part of its items. ahead: of the first part that follows them."""

    items: int
    spans: tuple[Span, ...]
    ahead: Span


def every_key(config: PrefillConfig) -> Span:
    """All of a step are seen."""
    return Span(config.step_kv, config.step_kv)


def any_key(config: PrefillConfig) -> Span:
    """Each of a step may be seen or hidden."""
    return Span(0, config.step_kv)


def plain(config: PrefillConfig) -> Stretch:
    """Items in which nothing is hidden; what follows them may be of another kind."""
    spans = (every_key(config),) * (config.stretch * config.parts)
    return Stretch(items=config.stretch, spans=spans, ahead=any_key(config))


def single(config: PrefillConfig) -> Stretch:
    """An item of any kind."""
    return Stretch(items=1, spans=(any_key(config),) * config.parts, ahead=any_key(config))


def diagonal(config: PrefillConfig) -> Stretch | None:
    """All chunks of a query tile and a head where query i of the tile stands beside key i of the step.

    None where a part may see all keys of a step from the first one on, or a step is too short.

    keys ->     / . . .      = each query of the part sees them, / a mask decides, . they are left out
    parts       = / . .
      |         = = / .
      v         = = = /
    """
    parts = config.chunks * config.parts
    ends = [-(-(i + 1) * config.part_q // LANES) * LANES for i in range(parts)]
    ends[-1] = config.step_kv  # whoever ends the pipeline knows of no spans
    if config.tile_q > config.step_kv or ends[0] == config.step_kv:
        return None
    spans = tuple(Span(i * config.part_q // LANES * LANES, end) for i, end in enumerate(ends))
    return Stretch(items=config.chunks, spans=spans, ahead=spans[0])
