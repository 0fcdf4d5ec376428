"""A checkpoint's processor_config.json, preprocessor_config.json and video_preprocessor_config.json, as processors.

Every key has a meaning here, or one of the values that change nothing; any other is an error that names it. The
reference resizes a video's frames by torchvision, so of its filters two are known.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ferrum_jax.inputs.images import processors
from ferrum_jax.inputs.images.image import Normalising
from ferrum_jax.inputs.images.resizing import FILTERS
from ferrum_jax.io.error_text import Elsewhere
from ferrum_jax.io.error_text.known_fields import ANY, OBJECT, TRUTH, FieldKind, Fields, Known, number, require, whole
from ferrum_jax.io.files.json_files import read_optional_json

FILES = ("processor_config.json", "preprocessor_config.json")
_CLIP = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_HALF = [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]
_BILINEAR, _BICUBIC = 2, 3  # Pillow's numbers
_AS_IT_IS = [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]
_MAX_OF_CHANNEL = 1e6  # of a mean or a standard deviation; neither infinity nor NaN is less
_MIN_STD = 1e-6
_MAX_PIXELS = 1 << 28  # that the smallest image is made larger to
_OF_WHOLE = ("spatial_merge_size",)  # of a tower, and beside its config
_SOFT_TOKENS = (70, 140, 280, 560, 1120)  # of an image, as Gemma 4 was trained
_PIXEL_INPUTS = tuple(["pixel_values", more] for more in ("image_grid_thw", "num_crops", "image_sizes"))

# key -> values that change nothing
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "do_convert_rgb": (True, None),
    "do_center_crop": (False, None),
    "do_pad": (False, None),
    "crop_size": (None,),
    "pad_size": (None,),
    "data_format": ("channels_first", None),
    "input_data_format": (None,),
    "return_tensors": (None,),
    "device": (None,),
    "disable_grouping": (None, True, False),
    "default_to_square": (True, False, None),
    "model_input_names": (None, *_PIXEL_INPUTS),
}
_LABELS = ("image_processor_type", "feature_extractor_type", "processor_class", "auto_map")
_WHOLE = whole(1)
_SCALE = FieldKind(
    lambda value: type(value) in (int, float) and 0 < value <= 1, "a number over 0 and at most 1, such as 1 / 255"
)
_CHANNELS = FieldKind(
    lambda value: (
        isinstance(value, list | tuple)
        and len(value) == 3
        and all(type(each) in (int, float) and abs(each) <= _MAX_OF_CHANNEL for each in value)
    ),
    "three numbers, one for each of red, green and blue",
)
_FILTER = FieldKind(
    lambda value: type(value) is int and 0 <= value < 6, "the number of one of Pillow's filters, 0 to 5"
)

_VIDEO_FILES = ("processor_config.json", "video_preprocessor_config.json")
_RATE = FieldKind(
    lambda value: type(value) in (int, float) and 0 < value <= 1000, "a number over 0 and at most 1000, of frames"
)
_COUNT = FieldKind(lambda value: type(value) is int and 1 <= value <= 8192, "a whole number, 1 to 8192")
_VIDEO_FILTER = FieldKind(lambda value: value in FILTERS, "2 for bilinear or 3 for bicubic, as frames are resized here")
# What changes nothing, of all video processors.
_HARMLESS_OF_VIDEOS: Mapping[str, tuple[Any, ...]] = {
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
_OF_VIDEOS: dict[str, Known | Elsewhere] = {name: Elsewhere(values, "") for name, values in _HARMLESS_OF_VIDEOS.items()}


def _fields_with(
    own: Mapping[str, Known | Elsewhere],
    normalising: tuple[list[float], list[float]],
    resample: int,
    size: Mapping[str, int],
    noun: str = "image",
) -> Fields:
    """The keys of a processor: its own, and with these defaults those that all have."""
    mean, std = normalising
    table: dict[str, Known | Elsewhere] = {name: Elsewhere(values, "") for name, values in _HARMLESS.items()}
    table |= {name: Known(ANY) for name in _LABELS}
    table |= {"image_mean": Known(_CHANNELS, mean), "image_std": Known(_CHANNELS, std), "size": Known(OBJECT, size)}
    table |= {"rescale_factor": Known(_SCALE, 1 / 255), "resample": Known(_FILTER, resample), **own}
    return Fields(table, refused=f"{{name}} is {{value}}, and no {noun} is processed so here")


_SCAN = "pan_and_scan_"
_OF_FRAMES = {
    "patch_size": Known(_WHOLE, 14),
    "temporal_patch_size": Known(_WHOLE, 2),
    "merge_size": Known(_WHOLE, 2),
    "min_pixels": Known(ANY),
    "max_pixels": Known(ANY),
}
_QWEN = _fields_with(_OF_FRAMES, _CLIP, _BICUBIC, {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})
_GLM = _fields_with(_OF_FRAMES, _CLIP, _BICUBIC, {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000})
_GEMMA3 = _fields_with(
    {
        "do_pan_and_scan": Known(TRUTH, False),
        f"{_SCAN}min_crop_size": Known(_WHOLE, 256),
        f"{_SCAN}max_num_crops": Known(_WHOLE, 4),
        f"{_SCAN}min_ratio_to_activate": Known(number(1), 1.2),
        "image_seq_length": Known(_WHOLE, 256),
    },
    _HALF,
    _BILINEAR,
    {"height": 224, "width": 224},
)
_GEMMA4 = _fields_with(
    {
        "patch_size": Known(_WHOLE, 16),
        "pooling_kernel_size": Known(_WHOLE, 3),
        "max_soft_tokens": Known(_WHOLE, 280),
        "image_seq_length": Known(ANY),
        "do_normalize": Known(TRUTH, False),
    },
    _AS_IT_IS,
    _BICUBIC,
    {},
)
_PIXTRAL = _fields_with({"patch_size": Known(ANY), "do_pad": Known(ANY)}, _CLIP, _BICUBIC, {"longest_edge": 1024})


def read_processor(folder: str | Path) -> processors.ImageProcessor | None:
    """The image processor of a checkpoint's folder; None where the folder has no file of one.

    Raises ValueError naming the file and all that is wrong with it.
    """
    folder = Path(folder)
    for name in FILES:
        given = read_optional_json(folder / name)
        settings = given.get("image_processor", given if name == FILES[1] else {}) or {}
        if not isinstance(settings, dict):
            raise ValueError(f"{folder / name}: image_processor is {settings!r}; it must be an object")
        if not settings:
            continue
        if "image_seq_length" in given:
            settings = settings | {"image_seq_length": given["image_seq_length"]}
        try:
            return processor_of(settings, _tower_of(folder))
        except ValueError as error:
            raise ValueError(f"{folder / name}: {error}") from error
    return None


def _tower_of(folder: Path) -> dict[str, Any]:
    """The tower's part of a folder's config.json, with the tower's keys that stand beside it."""
    config = read_optional_json(folder / "config.json")
    return {key: config[key] for key in _OF_WHOLE if key in config} | (config.get("vision_config") or {})


def processor_of(settings: Mapping[str, Any], tower: Mapping[str, Any]) -> processors.ImageProcessor:
    """The processor that a file's object describes. tower: the model's `vision_config`, with its patches' size.

    Raises ValueError for a processor that is not known, and for all keys that have no meaning here at once.
    """
    named = settings.get("image_processor_type") or settings.get("feature_extractor_type")
    kind = str(named).removesuffix("Fast").removesuffix("Pil")
    if kind not in _KINDS:
        raise ValueError(f"image_processor_type is {named!r}; known are {', '.join(sorted(_KINDS))}")
    make, fields = _KINDS[kind]
    return make(fields.read(settings), tower)


def _qwen(found: Mapping[str, Any], tower: Mapping[str, Any]) -> processors.QwenImages:
    size = _size_of(found)
    edges = [size.pop(edge, None) for edge in ("shortest_edge", "longest_edge")]
    least, most = (size.pop(name, edge) for name, edge in zip(("min_pixels", "max_pixels"), edges, strict=True))
    least = least if found["min_pixels"] is None else found["min_pixels"]
    most = most if found["max_pixels"] is None else found["max_pixels"]
    if size or require("size.shortest_edge", least, _WHOLE) > require("size.longest_edge", most, _WHOLE):
        raise ValueError(
            f"size is {found['size']!r}; it must have a shortest_edge and a longest_edge that is no less, both "
            "in pixels of the whole image"
        )
    if least > _MAX_PIXELS:
        raise ValueError(
            f"size.shortest_edge is {least}, and every image would have so many pixels; give {_MAX_PIXELS} at most"
        )
    return processors.QwenImages(**_patches(found, tower, least, most))


def _glm(found: Mapping[str, Any], tower: Mapping[str, Any]) -> processors.GlmImages:
    """Bounds count the pixels of all frames that a patch has."""
    own = _qwen(found, tower)
    least, most = (edge / own.temporal_patch_size for edge in (own.min_pixels, own.max_pixels))
    return processors.GlmImages(**{**vars(own), "min_pixels": least, "max_pixels": most})


def _gemma3(found: Mapping[str, Any], tower: Mapping[str, Any]) -> processors.Gemma3Images:
    size = _size_of(found)
    patch = require("config.json's vision_config.patch_size", tower.get("patch_size", 14), _WHOLE)
    height, width = (require(f"size.{name}", size.pop(name, None), _WHOLE) for name in ("height", "width"))
    if size or height % patch or width % patch:
        raise ValueError(f"size is {found['size']!r}; it must be a height and a width, multiples of {patch}")
    least, most = found[f"{_SCAN}min_crop_size"], found[f"{_SCAN}max_num_crops"]
    if most > least:  # a crop could be empty
        raise ValueError(f"{_SCAN}max_num_crops is {most}, more than {_SCAN}min_crop_size, {least}; make it smaller")
    return processors.Gemma3Images(
        normalising=_normalising(found),
        patch_size=patch,
        height=height,
        width=width,
        tokens_per_crop=found["image_seq_length"],
        resample=found["resample"],
        pan_and_scan=found["do_pan_and_scan"],
        min_crop_size=least,
        max_crops=most,
        min_ratio=float(found[f"{_SCAN}min_ratio_to_activate"]),
    )


def _gemma4(found: Mapping[str, Any], tower: Mapping[str, Any]) -> processors.Gemma4Images:
    """No image depends on `size` and `image_seq_length`, as in the reference."""
    most = found["max_soft_tokens"]
    if most not in _SOFT_TOKENS:
        raise ValueError(f"max_soft_tokens is {most}; it must be one of {list(_SOFT_TOKENS)}")
    for key in ("patch_size", "pooling_kernel_size"):
        _check_tower(key, found[key], tower, key)
    mean, std = _AS_IT_IS
    return processors.Gemma4Images(
        normalising=_normalising(found if found["do_normalize"] else {**found, "image_mean": mean, "image_std": std}),
        patch_size=found["patch_size"],
        pooling=found["pooling_kernel_size"],
        max_tokens=most,
        resample=found["resample"],
    )


def _pixtral(found: Mapping[str, Any], tower: Mapping[str, Any]) -> processors.PixtralImages:
    """No image depends on `patch_size` and `do_pad`, as in the reference: the tower says the size of its patches."""
    size = _size_of(found)
    longest = require("size.longest_edge", size.pop("longest_edge", None), _WHOLE)
    if size:
        raise ValueError(f"size is {found['size']!r}; it must have a longest_edge alone, in pixels of a side")
    patch, merge = (
        require(f"config.json's {key}", tower.get(key, default), _WHOLE)
        for key, default in (("patch_size", 16), ("spatial_merge_size", 2))
    )
    return processors.PixtralImages(
        normalising=_normalising(found),
        patch_size=patch,
        merge_size=merge,
        longest_edge=longest,
        resample=found["resample"],
    )


def _patches(found: Mapping[str, Any], tower: Mapping[str, Any], least: float, most: float) -> dict[str, Any]:
    """The fields of Qwen's processors. Raises ValueError where the tower has other patches."""
    for key, its_key in (("patch_size",) * 2, ("merge_size", "spatial_merge_size"), ("temporal_patch_size",) * 2):
        _check_tower(key, found[key], tower, its_key)
    own = {key: found[key] for key in ("patch_size", "merge_size", "temporal_patch_size", "resample")}
    return {**own, "normalising": _normalising(found), "min_pixels": least, "max_pixels": most}


def _check_tower(key: str, value: int, tower: Mapping[str, Any], its_key: str) -> None:
    """Raises ValueError where the tower's config has another value, which would see patches that are not there."""
    if tower.get(its_key, value) != value:
        raise ValueError(
            f"{key} is {value}, and config.json's vision_config has {its_key} {tower[its_key]!r}; make them equal"
        )


_Make = Callable[[Mapping[str, Any], Mapping[str, Any]], processors.ImageProcessor]
_KINDS: Mapping[str, tuple[_Make, Fields]] = {
    "Qwen2VLImageProcessor": (_qwen, _QWEN),
    "Glm4vImageProcessor": (_glm, _GLM),
    "Glm46VImageProcessor": (_glm, _GLM),
    "Gemma3ImageProcessor": (_gemma3, _GEMMA3),
    "Gemma4ImageProcessor": (_gemma4, _GEMMA4),
    "PixtralImageProcessor": (_pixtral, _PIXTRAL),
}


def _normalising(found: Mapping[str, Any]) -> Normalising:
    std = found["image_std"]
    if min(std) < _MIN_STD:
        raise ValueError(
            f"image_std is {std!r}; pixels are divided by it, so it must be three numbers of at least {_MIN_STD:g}"
        )
    mean, std = (tuple(map(float, found[key])) for key in ("image_mean", "image_std"))
    return Normalising(scale=float(found["rescale_factor"]), mean=mean, std=std)  # type: ignore[arg-type]


def _size_of(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found["size"].items() if value is not None}


_OF_VIDEOS |= {"video_processor_type": Known(ANY), "resample": Known(_VIDEO_FILTER, _BICUBIC)}
_QWEN_VIDEOS = _fields_with(
    _OF_VIDEOS
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
    _HALF,
    _BICUBIC,
    {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    "video",
)
_GEMMA4_VIDEOS = _fields_with(
    _OF_VIDEOS
    | {
        "patch_size": Known(_WHOLE, 16),
        "pooling_kernel_size": Known(_WHOLE, 3),
        "max_soft_tokens": Known(_WHOLE, 70),
        "num_frames": Known(_COUNT, 32),
        "fps": Elsewhere((None,), ""),
        "do_normalize": Known(TRUTH, True),
    },
    _AS_IT_IS,
    _BICUBIC,
    {},
    "video",
)


def read_video_processor(folder: str | Path) -> processors.VideoProcessor | None:
    """The video processor of a checkpoint's folder; None where it has no file of one, or one that is not known here.

    Raises ValueError naming the file and all that is wrong with it.
    """
    folder = Path(folder)
    for name in _VIDEO_FILES:
        given = read_optional_json(folder / name)
        settings = given.get("video_processor") if name == _VIDEO_FILES[0] else given
        if not settings:
            continue
        if not isinstance(settings, dict):
            raise ValueError(f"{folder / name}: video_processor is {settings!r}; it must be an object")
        if settings.get("video_processor_type") not in _VIDEO_KINDS:
            return None  # of a family whose videos are not taken
        try:
            return video_processor_of(settings, _tower_of(folder))
        except ValueError as error:
            raise ValueError(f"{folder / name}: {error}") from error
    return None


def video_processor_of(settings: Mapping[str, Any], tower: Mapping[str, Any]) -> processors.VideoProcessor:
    """The processor that a file's object describes. tower: the model's `vision_config`, with its patches' size.

    Raises ValueError for all keys that have no meaning here at once.
    """
    make, fields = _VIDEO_KINDS[settings["video_processor_type"]]
    return make(fields.read(settings), tower)


def _qwen_videos(found: Mapping[str, Any], tower: Mapping[str, Any]) -> processors.QwenVideos:
    size = _size_of(found)
    least, most = (require(f"size.{edge}", size.pop(edge, None), _WHOLE) for edge in ("shortest_edge", "longest_edge"))
    if size or least > most or least > _MAX_PIXELS:
        raise ValueError(
            f"size is {found['size']!r}; it must have a shortest_edge of at most {_MAX_PIXELS} and a longest_edge that "
            "is no less, both in pixels of all frames"
        )
    if found["min_frames"] > found["max_frames"]:
        raise ValueError(f"min_frames is {found['min_frames']}, more than max_frames, {found['max_frames']}")
    return processors.QwenVideos(
        **_patches(found, tower, least, most),
        fps=float(found["fps"]),
        min_frames=found["min_frames"],
        max_frames=found["max_frames"],
        tokens_of_frame=found["max_video_tokens"] if found["cap_pixels_per_frame"] else None,
    )


_VIDEO_KINDS: Mapping[str, tuple[Callable[[Mapping[str, Any], Mapping[str, Any]], processors.VideoProcessor], Any]] = {
    "Qwen3VLVideoProcessor": (_qwen_videos, _QWEN_VIDEOS),
    "Gemma4VideoProcessor": (
        lambda found, tower: processors.Gemma4Videos(frame=_gemma4(found, tower), num_frames=found["num_frames"]),
        _GEMMA4_VIDEOS,
    ),
}
