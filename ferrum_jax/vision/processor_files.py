"""A checkpoint's `processor_config.json` or `preprocessor_config.json` as the processor that it describes.

Every key has a meaning here, or one of the values that change nothing; any other is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ferrum_jax.vision.image import Normalising
from ferrum_jax.vision.processors import Gemma3Images, Gemma4Images, ImageProcessor, QwenImages

FILES = ("processor_config.json", "preprocessor_config.json")
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
_BILINEAR, _BICUBIC = 2, 3  # Pillow's numbers
_FILTERS = range(6)
_AS_IT_IS = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
_MOST_OF_CHANNEL = 1e6  # of a mean or a standard deviation; neither infinity nor NaN is less
_MOST_PIXELS = 1 << 28  # that the smallest image is made larger to
_SOFT_TOKENS = (70, 140, 280, 560, 1120)  # of an image, as Gemma 4 was trained

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
    "model_input_names": (None, ["pixel_values", "image_grid_thw"], ["pixel_values", "num_crops"]),
}
_LABELS = frozenset({"image_processor_type", "feature_extractor_type", "processor_class", "auto_map"})
_COMMON = frozenset({"image_mean", "image_std", "rescale_factor", "resample", "size"})
_QWEN = frozenset({"patch_size", "temporal_patch_size", "merge_size", "min_pixels", "max_pixels"})
_SCAN = "pan_and_scan_"
_GEMMA = frozenset(
    {"do_pan_and_scan", f"{_SCAN}min_crop_size", f"{_SCAN}max_num_crops", f"{_SCAN}min_ratio_to_activate"}
) | {"image_seq_length"}
_GEMMA4 = frozenset({"patch_size", "pooling_kernel_size", "max_soft_tokens", "image_seq_length", "do_normalize"})


def read_processor(folder: str | Path) -> ImageProcessor | None:
    """The image processor of a checkpoint's folder; None where the folder has no file of one.

    Raises ValueError naming the file and all that is wrong with it.
    """
    folder = Path(folder)
    for name in FILES:
        given = _object(folder / name)
        if given is None:
            continue
        settings = given.get("image_processor", given if name == FILES[1] else {}) or {}
        if not isinstance(settings, dict):
            raise ValueError(f"{folder / name}: image_processor is {settings!r}; it must be an object")
        if not settings:
            continue
        if "image_seq_length" in given:
            settings = settings | {"image_seq_length": given["image_seq_length"]}
        tower = (_object(folder / "config.json") or {}).get("vision_config") or {}
        try:
            return processor_of(settings, tower)
        except ValueError as error:
            raise ValueError(f"{folder / name}: {error}") from error
    return None


def processor_of(settings: Mapping[str, Any], tower: Mapping[str, Any]) -> ImageProcessor:
    """The processor that a file's object describes. tower: the model's `vision_config`, which has Gemma's patch size.

    Raises ValueError for a processor that is not known, and for all keys that have no meaning here at once.
    """
    named = settings.get("image_processor_type") or settings.get("feature_extractor_type")
    kind = str(named).removesuffix("Fast").removesuffix("Pil")
    if kind not in _KINDS:
        raise ValueError(f"image_processor_type is {named!r}; known are {', '.join(sorted(_KINDS))}")
    read, own = _KINDS[kind]
    problems = [
        f"{key} is {value!r}, and no image is processed so here"
        for key, value in sorted(settings.items())
        if key not in own | _COMMON | _LABELS and not any(value == v and type(value) is type(v) for v in _values(key))
    ]
    if problems:
        raise ValueError("; ".join(problems))
    return read(settings, tower)


def _values(key: str) -> tuple[Any, ...]:
    return _HARMLESS.get(key, ())


def _qwen(settings: Mapping[str, Any], tower: Mapping[str, Any]) -> QwenImages:
    size = _size(settings, {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})
    least, most = size.pop("shortest_edge", None), size.pop("longest_edge", None)
    least, most = size.pop("min_pixels", least), size.pop("max_pixels", most)
    if settings.get("min_pixels") is not None:
        least = settings["min_pixels"]
    if settings.get("max_pixels") is not None:
        most = settings["max_pixels"]
    if size or _whole("size.shortest_edge", least) > _whole("size.longest_edge", most):
        raise ValueError(
            f"size is {settings.get('size')!r}; it must have a shortest_edge and a longest_edge that is no less, both "
            "in pixels of the whole image"
        )
    if least > _MOST_PIXELS:
        raise ValueError(
            f"size.shortest_edge is {least}, and every image would have so many pixels; give {_MOST_PIXELS} at most"
        )
    patch, merge, frames = (
        _whole(key, settings.get(key, default))
        for key, default in (("patch_size", 14), ("merge_size", 2), ("temporal_patch_size", 2))
    )
    _check_tower("patch_size", patch, tower)
    _check_tower("merge_size", merge, tower, "spatial_merge_size")
    _check_tower("temporal_patch_size", frames, tower)
    return QwenImages(
        normalising=_normalising(settings, *_CLIP),
        patch_size=patch,
        merge_size=merge,
        temporal_patch_size=frames,
        min_pixels=least,
        max_pixels=most,
        resample=_filter(settings, _BICUBIC),
    )


def _gemma(settings: Mapping[str, Any], tower: Mapping[str, Any]) -> Gemma3Images:
    size = _size(settings, {"height": 224, "width": 224})
    patch = _whole("config.json's vision_config.patch_size", tower.get("patch_size", 14))
    height, width = (_whole(f"size.{name}", size.pop(name, None)) for name in ("height", "width"))
    if size or height % patch or width % patch:
        raise ValueError(f"size is {settings.get('size')!r}; it must be a height and a width, multiples of {patch}")
    scan = settings.get("do_pan_and_scan")
    if scan not in (None, True, False):
        raise ValueError(f"do_pan_and_scan is {scan!r}; it must be true or false")
    ratio = _given(settings, f"{_SCAN}min_ratio_to_activate", 1.2)
    least = _whole(f"{_SCAN}min_crop_size", _given(settings, f"{_SCAN}min_crop_size", 256))
    most = _whole(f"{_SCAN}max_num_crops", _given(settings, f"{_SCAN}max_num_crops", 4))
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or ratio < 1:
        raise ValueError(f"{_SCAN}min_ratio_to_activate is {ratio!r}; it must be a number, 1 or more")
    if most > least:  # a crop could be empty
        raise ValueError(f"{_SCAN}max_num_crops is {most}, more than {_SCAN}min_crop_size, {least}; make it smaller")
    return Gemma3Images(
        normalising=_normalising(settings, *_HALF),
        patch_size=patch,
        height=height,
        width=width,
        tokens_per_crop=_whole("image_seq_length", _given(settings, "image_seq_length", 256)),
        resample=_filter(settings, _BILINEAR),
        pan_and_scan=scan is True,
        min_crop_size=least,
        max_crops=most,
        min_ratio=float(ratio),
    )


def _gemma4(settings: Mapping[str, Any], tower: Mapping[str, Any]) -> Gemma4Images:
    """Of `size` and `image_seq_length` no image depends, as in the reference."""
    most = _whole("max_soft_tokens", _given(settings, "max_soft_tokens", 280))
    if most not in _SOFT_TOKENS:
        raise ValueError(f"max_soft_tokens is {most}; it must be one of {list(_SOFT_TOKENS)}")
    normalises = settings.get("do_normalize")
    if normalises not in (None, True, False):
        raise ValueError(f"do_normalize is {normalises!r}; it must be true or false")
    patch, pooling = (
        _whole(key, _given(settings, key, default)) for key, default in (("patch_size", 16), ("pooling_kernel_size", 3))
    )
    _check_tower("patch_size", patch, tower)
    _check_tower("pooling_kernel_size", pooling, tower)
    return Gemma4Images(
        normalising=_normalising(
            settings if normalises else {**settings, "image_mean": None, "image_std": None}, *_AS_IT_IS
        ),
        patch_size=patch,
        pooling=pooling,
        max_tokens=most,
        resample=_filter(settings, _BICUBIC),
    )


def _check_tower(key: str, value: int, tower: Mapping[str, Any], its_key: str | None = None) -> None:
    """Raises ValueError where the tower's config has another value, which would see patches that are not there."""
    its_key = its_key or key
    if tower.get(its_key, value) != value:
        raise ValueError(
            f"{key} is {value}, and config.json's vision_config has {its_key} {tower[its_key]!r}; make them equal"
        )


_Reader = Callable[[Mapping[str, Any], Mapping[str, Any]], ImageProcessor]
_KINDS: Mapping[str, tuple[_Reader, frozenset[str]]] = {
    "Qwen2VLImageProcessor": (_qwen, _QWEN),
    "Gemma3ImageProcessor": (_gemma, _GEMMA),
    "Gemma4ImageProcessor": (_gemma4, _GEMMA4),
}


def _normalising(settings: Mapping[str, Any], mean: tuple[float, ...], std: tuple[float, ...]) -> Normalising:
    scale = _given(settings, "rescale_factor", 1 / 255)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale <= 1:
        raise ValueError(f"rescale_factor is {scale!r}; it must be a number over 0 and at most 1, such as 1 / 255")
    return Normalising(
        scale=float(scale),
        mean=_channels(settings, "image_mean", mean),
        std=_channels(settings, "image_std", std, least=1e-6),
    )


def _channels(
    settings: Mapping[str, Any], key: str, default: tuple[float, ...], least: float | None = None
) -> tuple[float, float, float]:
    values = _given(settings, key, list(default))
    fine = isinstance(values, list | tuple) and len(values) == 3
    if not fine or not all(type(value) in (int, float) and abs(value) <= _MOST_OF_CHANNEL for value in values):
        raise ValueError(f"{key} is {values!r}; it must be three numbers, one for each of red, green and blue")
    if least is not None and min(values) < least:
        raise ValueError(
            f"{key} is {values!r}; pixels are divided by it, so it must be three numbers of at least {least:g}"
        )
    red, green, blue = map(float, values)
    return red, green, blue


def _size(settings: Mapping[str, Any], default: Mapping[str, int]) -> dict[str, Any]:
    size = _given(settings, "size", dict(default))
    if not isinstance(size, Mapping):
        raise ValueError(f"size is {size!r}; it must be an object")
    return {name: value for name, value in size.items() if value is not None}


def _filter(settings: Mapping[str, Any], default: int) -> int:
    number = _given(settings, "resample", default)
    if type(number) is not int or number not in _FILTERS:
        raise ValueError(f"resample is {number!r}; it must be the number of one of Pillow's filters, 0 to 5")
    return number


def _given(settings: Mapping[str, Any], key: str, default: Any) -> Any:
    value = settings.get(key)
    return default if value is None else value


def _whole(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")
    return value


def _object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no file. Raises ValueError naming it."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}; an object was expected")
    return value
