"""A checkpoint's `processor_config.json` or `video_preprocessor_config.json` as the video processor it describes.

As of images' every key has a meaning here, or one of the values that change nothing; any other is an error that names
it. The reference resizes frames by torchvision, so of its filters two are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ferrum_jax.inputs.images.processor_files import (
    AS_IT_IS,
    BICUBIC,
    HALF,
    MOST_PIXELS,
    SOFT_TOKENS,
    check_tower,
    fields_with,
    normalising_of,
    size_of,
    tower_of,
)
from ferrum_jax.inputs.images.processors import Gemma4Images
from ferrum_jax.inputs.images.resizing import FILTERS
from ferrum_jax.inputs.images.video_processors import Gemma4Videos, QwenVideos, VideoProcessor
from ferrum_jax.io.error_text import Elsewhere
from ferrum_jax.io.error_text.known_fields import ANY, TRUTH, FieldKind, Known, require, whole
from ferrum_jax.io.files.json_files import read_optional_json

FILES = ("processor_config.json", "video_preprocessor_config.json")
_WHOLE = whole(1)
_RATE = FieldKind(
    lambda value: type(value) in (int, float) and 0 < value <= 1000, "a number over 0 and at most 1000, of frames"
)
_COUNT = FieldKind(lambda value: type(value) is int and 1 <= value <= 8192, "a whole number, 1 to 8192")
_FILTER = FieldKind(lambda value: value in FILTERS, "2 for bilinear or 3 for bicubic, as frames are resized here")

# What changes nothing, of all video processors.
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "do_sample_frames": (True,),
    "return_metadata": (True, False, None),
    "video_metadata": (None,),
    "max_image_size": ({"longest_edge": 28 * 28 * 2 * 30000}, None),  # no frame depends on it in the reference
    "max_duration": (None,),
    "model_input_names": (
        None,
        ["pixel_values_videos", "video_grid_thw"],
        ["pixel_values_videos", "video_position_ids", "num_frames_per_video"],
    ),
}
_COMMON: dict[str, Known | Elsewhere] = {name: Elsewhere(values, "") for name, values in _HARMLESS.items()}
_COMMON |= {"video_processor_type": Known(ANY), "resample": Known(_FILTER, BICUBIC)}
_QWEN = fields_with(
    _COMMON
    | {
        "patch_size": Known(_WHOLE, 16),
        "temporal_patch_size": Known(_WHOLE, 2),
        "merge_size": Known(_WHOLE, 2),
        "fps": Known(_RATE, 2),
        "num_frames": Elsewhere((None,), ""),
        "min_frames": Known(_COUNT, 4),
        "max_frames": Known(_COUNT, 768),
        "cap_pixels_per_frame": Known(TRUTH, False),
        "max_video_tokens": Known(_WHOLE, 768),
    },
    HALF,
    BICUBIC,
    {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    "video",
)
_GEMMA4 = fields_with(
    _COMMON
    | {
        "patch_size": Known(_WHOLE, 16),
        "pooling_kernel_size": Known(_WHOLE, 3),
        "max_soft_tokens": Known(_WHOLE, 70),
        "num_frames": Known(_COUNT, 32),
        "fps": Elsewhere((None,), ""),
        "do_normalize": Known(TRUTH, True),
    },
    AS_IT_IS,
    BICUBIC,
    {},
    "video",
)


def read_video_processor(folder: str | Path) -> VideoProcessor | None:
    """The video processor of a checkpoint's folder; None where it has no file of one, or one that is not known here.

    Raises ValueError naming the file and all that is wrong with it.
    """
    folder = Path(folder)
    for name in FILES:
        given = read_optional_json(folder / name)
        settings = given.get("video_processor") if name == FILES[0] else given
        if not settings:
            continue
        if not isinstance(settings, dict):
            raise ValueError(f"{folder / name}: video_processor is {settings!r}; it must be an object")
        if settings.get("video_processor_type") not in _KINDS:
            return None  # of a family whose videos are not taken
        try:
            return video_processor_of(settings, tower_of(folder))
        except ValueError as error:
            raise ValueError(f"{folder / name}: {error}") from error
    return None


def video_processor_of(settings: Mapping[str, Any], tower: Mapping[str, Any]) -> VideoProcessor:
    """The processor that a file's object describes. tower: the model's `vision_config`, with its patches' size.

    Raises ValueError for all keys that have no meaning here at once.
    """
    make, fields = _KINDS[settings["video_processor_type"]]
    return make(fields.read(settings), tower)


def _qwen(found: Mapping[str, Any], tower: Mapping[str, Any]) -> QwenVideos:
    size = size_of(found)
    least, most = (require(f"size.{edge}", size.pop(edge, None), _WHOLE) for edge in ("shortest_edge", "longest_edge"))
    if size or least > most or least > MOST_PIXELS:
        raise ValueError(
            f"size is {found['size']!r}; it must have a shortest_edge of at most {MOST_PIXELS} and a longest_edge that "
            "is no less, both in pixels of all frames"
        )
    if found["min_frames"] > found["max_frames"]:
        raise ValueError(f"min_frames is {found['min_frames']}, more than max_frames, {found['max_frames']}")
    for key, its_key in (("patch_size",) * 2, ("merge_size", "spatial_merge_size"), ("temporal_patch_size",) * 2):
        check_tower(key, found[key], tower, its_key)
    return QwenVideos(
        normalising=normalising_of(found),
        patch_size=found["patch_size"],
        merge_size=found["merge_size"],
        temporal_patch_size=found["temporal_patch_size"],
        min_pixels=least,
        max_pixels=most,
        resample=found["resample"],
        fps=float(found["fps"]),
        min_frames=found["min_frames"],
        max_frames=found["max_frames"],
        tokens_of_frame=found["max_video_tokens"] if found["cap_pixels_per_frame"] else None,
    )


def _gemma4(found: Mapping[str, Any], tower: Mapping[str, Any]) -> Gemma4Videos:
    """No frame depends on `size`, as in the reference."""
    most, (mean, std) = found["max_soft_tokens"], AS_IT_IS
    if most not in SOFT_TOKENS:
        raise ValueError(f"max_soft_tokens is {most}; it must be one of {list(SOFT_TOKENS)}")
    for key in ("patch_size", "pooling_kernel_size"):
        check_tower(key, found[key], tower, key)
    frame = Gemma4Images(
        normalising=normalising_of(found if found["do_normalize"] else {**found, "image_mean": mean, "image_std": std}),
        patch_size=found["patch_size"],
        pooling=found["pooling_kernel_size"],
        max_tokens=most,
        resample=found["resample"],
    )
    return Gemma4Videos(frame=frame, num_frames=found["num_frames"])


_KINDS: Mapping[str, tuple[Callable[[Mapping[str, Any], Mapping[str, Any]], VideoProcessor], Any]] = {
    "Qwen3VLVideoProcessor": (_qwen, _QWEN),
    "Gemma4VideoProcessor": (_gemma4, _GEMMA4),
}
