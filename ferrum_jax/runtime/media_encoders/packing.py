"""Calls of a tower: images or clips one after the other in arrays of one size, and as the tower is given them.

values: patches, or frames of sounds. places: where in its image each patch stands; of sounds, which positions attend
to each other. Segments ascend, and 0 is padding behind all others.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ferrum_jax.inputs.prompt import EncodableImage
from ferrum_jax.models.families.vision_tower import ImagePatches
from ferrum_jax.models.spec import SoundSpec, VisionSpec

_PLACES = ("rows", "columns", "heights", "widths", "segments")


def call_name(tower: VisionSpec | SoundSpec, size: int) -> str:
    """The name of a call of so many patches or frames."""
    return f"encode {size} {'frames' if isinstance(tower, SoundSpec) else 'patches'}"


def places_shape(tower: VisionSpec | SoundSpec, size: int) -> tuple[int, int]:
    """[what places say, patches or positions] of a call of so many patches or frames."""
    if isinstance(tower, VisionSpec):
        return len(_PLACES), size
    return 1, size // tower.chunk[0] * tower.places_of_chunk


def num_embeddings(tower: VisionSpec | SoundSpec, item: EncodableImage) -> int:
    """How many tokens have what the tower makes of an image or clip."""
    if isinstance(tower, VisionSpec):
        return math.prod(item.grid) // tower.patches_per_token
    return item.num_tokens


def packed(
    tower: VisionSpec | SoundSpec, size: int, items: Sequence[EncodableImage]
) -> tuple[np.ndarray, np.ndarray, list[slice]]:
    """(values, places, where each item's embeddings are among all of the call), in fresh arrays: jax reads them after
    the call has returned."""
    values = np.zeros((size, tower.patch_values), np.float32)
    places = np.zeros(places_shape(tower, size), np.int32)
    patches, tokens = tower.chunk
    found, at = [], 0
    for item, own in zip(items, _each_places(tower, items), strict=True):
        count = math.prod(item.grid)
        values[at : at + count] = item.patches
        first = at // patches * tower.places_of_chunk
        places[:, first : first + own.shape[1]] = own
        first = at // patches * tokens
        found.append(slice(first, first + num_embeddings(tower, item)))
        at += tower.patches_in_call(count)
    return values, places, found


def _each_places(tower: VisionSpec | SoundSpec, items: Sequence[EncodableImage]) -> Iterator[np.ndarray]:
    segment = 1
    for item in items:
        if isinstance(tower, VisionSpec):
            own = _places(item.grid, tower.neighbours, segment)
        else:
            own = _windows(tower, item, segment)[None]
        segment = int(own[-1, -1]) + 1
        yield own


def _places(grid: tuple[int, int, int], merge: int, segment: int) -> np.ndarray:
    """[5, patches] int32 of `_PLACES`; squares of merge x merge patches stand together."""
    frames, height, width = grid
    blocks = np.indices((height // merge, width // merge, merge, merge)).reshape(4, -1)
    rows, columns = blocks[0] * merge + blocks[2], blocks[1] * merge + blocks[3]
    one = np.stack([rows, columns, *(np.full_like(rows, value) for value in (height, width, segment))])
    return np.tile(one, frames).astype(np.int32)


def _windows(tower: SoundSpec, clip: EncodableImage, segment: int) -> np.ndarray:
    """[positions] int32: a segment for each window of a clip, and one for what fills its last chunk.

    Without windows it is [frames]: one segment.
    """
    if not tower.window_chunks:
        return np.full(math.prod(clip.grid), segment, np.int32)
    frames, positions = tower.chunk
    all_of = np.arange(math.prod(clip.grid) // frames * positions)
    windows = segment + all_of // (tower.window_chunks * positions)
    windows[clip.num_tokens :] = windows[-1] + 1
    return windows.astype(np.int32)


def given(tower: VisionSpec | SoundSpec, values: jax.Array, places: jax.Array) -> tuple[Any, ...]:
    """The arguments of a tower, of arrays that are packed so."""
    if isinstance(tower, VisionSpec):
        return (ImagePatches(pixels=values, **dict(zip(_PLACES, places, strict=True))),)
    return values, places[0]
