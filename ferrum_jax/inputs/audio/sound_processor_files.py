"""A checkpoint's `processor_config.json` or `preprocessor_config.json` as the processor of sounds that it describes.

Every key has a meaning here, or one of the values that change nothing; any other is an error that names it.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ferrum_jax.inputs.audio.features import Gemma4Sounds, QwenSounds, SoundProcessor, VoxtralSounds, WhisperSounds
from ferrum_jax.io.error_text import Elsewhere
from ferrum_jax.io.error_text.known_fields import ANY, TRUTH, FieldKind, Fields, Known, whole
from ferrum_jax.io.files.json_files import read_optional_json

FILES = ("processor_config.json", "preprocessor_config.json")
_MAX_VALUES = 1 << 26  # of a window's features
_MAX_TRANSFORM = 1 << 16  # samples of a frame
_OUTSIDE = ("audio_seq_length", "audio_ms_per_token")  # of a processor, beside its part for sounds
_IMAGES = "image_processor_type"
# Keys of an image processor that stands in one object with a sound's
_OF_IMAGES = (
    *("image_mean", "image_std", "max_pixels", "min_pixels", "merge_size", "patch_size", "temporal_patch_size", "size"),
    *("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "resample", "rescale_factor", _IMAGES),
)

# key -> values that change nothing
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "padding_side": ("right", None),
    "padding_value": (0, 0.0, None),
    "dither": (0, 0.0, None),
    "return_attention_mask": (True, False, None),
    "return_tensors": (None,),
    "do_normalize": (False, None),
    "model_input_names": (None, ["input_features"], ["input_features", "input_features_mask"]),
}
_LABELS = ("feature_extractor_type", "processor_class", "auto_map")
_COUNT = whole(1)


def _number(least: float, most: float) -> FieldKind:
    return FieldKind(
        lambda value: type(value) in (int, float) and least <= value <= most, f"a number, {least:g} to {most:g}"
    )


def _whole(least: int, most: int) -> FieldKind:
    return FieldKind(lambda value: type(value) is int and least <= value <= most, f"a whole number, {least} to {most}")


def _fields(own: Mapping[str, Known | Elsewhere], mels: int) -> Fields:
    """The keys of a processor: its own, and those that all have. mels: by default."""
    table: dict[str, Known | Elsewhere] = {name: Elsewhere(values, "") for name, values in _HARMLESS.items()}
    table |= {name: Known(ANY) for name in _LABELS}
    table |= {"feature_size": Known(_whole(1, 1024), mels), "sampling_rate": Known(_whole(1000, 384_000), 16_000)}
    return Fields({**table, **own}, refused="{name} is {value}, and no sound is processed so here")


_OF_WINDOWS = {
    "hop_length": Known(_COUNT, 160),
    "n_fft": Known(_whole(2, _MAX_TRANSFORM), 400),
    "chunk_length": Known(_whole(1, 3600), 30),
    "n_samples": Known(ANY),
    "nb_max_frames": Known(ANY),
    "mel_filters": Known(ANY),  # old files have them; they follow from the sizes
}
_WHISPER = _fields(_OF_WINDOWS, 80)
_QWEN = _fields({**_OF_WINDOWS, "n_window": Known(_COUNT, 50), "min_length": Known(whole(0), 8000)}, 128)
_GEMMA4 = _fields(
    {
        "frame_length_ms": Known(_number(1, 1000), 20.0),
        "hop_length_ms": Known(_number(1, 1000), 10.0),
        "min_frequency": Known(_number(0, 192_000), 0.0),
        "max_frequency": Known(_number(1, 192_000), 8000.0),
        "mel_floor": Known(_number(1e-30, 1e6), 1e-3),
        "fft_overdrive": Known(TRUTH, False),
        "frame_length": Known(ANY),
        "hop_length": Known(ANY),
        "fft_length": Known(ANY),
        "audio_seq_length": Known(_COUNT, 750),
        "audio_ms_per_token": Elsewhere((40, None), ""),
        "preemphasis": Elsewhere((0, 0.0, None), ""),
        "preemphasis_htk_flavor": Known(TRUTH, True),
        "input_scale_factor": Elsewhere((1, 1.0, None), ""),
        "per_bin_mean": Elsewhere((None,), ""),
        "per_bin_stddev": Elsewhere((None,), ""),
    },
    128,
)


def read_sound_processor(folder: str | Path) -> SoundProcessor | None:
    """The processor of sounds of a checkpoint's folder; None where the folder has no file of one.

    Raises ValueError naming the file and all that is wrong with it.
    """
    folder = Path(folder)
    for name in FILES:
        given = read_optional_json(folder / name)
        settings = given.get("feature_extractor", given if "feature_extractor_type" in given else {}) or {}
        if not isinstance(settings, dict):
            raise ValueError(f"{folder / name}: feature_extractor is {settings!r}; it must be an object")
        if not settings:
            continue
        outside = {key: given[key] for key in (*_OUTSIDE, "processor_class") if key in given}
        try:
            return sound_processor_of(outside | settings)
        except ValueError as error:
            raise ValueError(f"{folder / name}: {error}") from error
    return None


def sound_processor_of(settings: Mapping[str, Any]) -> SoundProcessor:
    """The processor that a file's object describes, by its `feature_extractor_type` and its `processor_class`.

    Raises ValueError for a processor that is not known, and for all keys that have no meaning here at once.
    """
    if settings.get(_IMAGES):
        settings = {name: value for name, value in settings.items() if name not in _OF_IMAGES}
    kind, user = str(settings.get("feature_extractor_type")), settings.get("processor_class")
    if kind == "WhisperFeatureExtractor":
        if not isinstance(user, str | None) or user not in _OF_WHISPER:
            known = ", ".join(sorted(filter(None, _OF_WHISPER)))
            raise ValueError(f"processor_class is {user!r}, and feature_extractor_type {kind!r}; known are {known}")
        return _OF_WHISPER[user](_WHISPER.read(settings))
    if kind not in _KINDS:
        known = ", ".join(sorted([*_KINDS, "WhisperFeatureExtractor"]))
        raise ValueError(f"feature_extractor_type is {kind!r}; known are {known}")
    make, fields = _KINDS[kind]
    return make(fields.read(settings))


def _windows(found: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of Whisper's windows. Raises ValueError for those that contradict each other or are too large."""
    sizes = {name: found[name] for name in ("feature_size", "sampling_rate", "hop_length", "n_fft", "chunk_length")}
    samples = found["chunk_length"] * found["sampling_rate"]
    _check_size(samples // found["hop_length"], sizes)
    if found["n_fft"] >= samples:
        raise ValueError(f"n_fft is {found['n_fft']}, and a window has {samples} samples; make it smaller")
    _check_same(found, n_samples=samples, nb_max_frames=samples // found["hop_length"])
    return sizes


def _voxtral(found: Mapping[str, Any]) -> VoxtralSounds:
    sizes = _windows(found)
    if (sizes["chunk_length"], sizes["sampling_rate"], sizes["hop_length"]) != (30, 16_000, 160):
        raise ValueError(f"Voxtral's windows are 30 s of 3000 frames at 16,000 samples a second, and not {sizes}")
    return VoxtralSounds(**sizes)


def _qwen(found: Mapping[str, Any]) -> QwenSounds:
    if found["n_window"] != 50:
        raise ValueError(f"n_window is {found['n_window']}; tokens are counted for 50 alone")
    return QwenSounds(**_windows(found), min_samples=found["min_length"])


def _gemma4(found: Mapping[str, Any]) -> Gemma4Sounds:
    rate = found["sampling_rate"]
    frame, hop = (round(rate * found[f"{name}_length_ms"] / 1000.0) for name in ("frame", "hop"))
    transform = 2 ** math.ceil(math.log2(frame)) * (2 if found["fft_overdrive"] else 1)
    _check_same(found, frame_length=frame, hop_length=hop, fft_length=transform)
    if transform > _MAX_TRANSFORM:
        raise ValueError(f"frames have {frame} samples; at most {_MAX_TRANSFORM} are taken")
    if found["min_frequency"] >= found["max_frequency"]:
        raise ValueError(f"min_frequency is {found['min_frequency']}; it must be less than max_frequency")
    return Gemma4Sounds(
        feature_size=found["feature_size"],
        sampling_rate=rate,
        frame_length=frame,
        hop_length=hop,
        fft_length=transform,
        min_frequency=float(found["min_frequency"]),
        max_frequency=float(found["max_frequency"]),
        mel_floor=float(found["mel_floor"]),
        max_tokens=found["audio_seq_length"],
    )


_OF_WHISPER: Mapping[str | None, Callable[[Mapping[str, Any]], SoundProcessor]] = {
    None: lambda found: WhisperSounds(**_windows(found)),
    "WhisperProcessor": lambda found: WhisperSounds(**_windows(found)),
    "VoxtralProcessor": _voxtral,
    "Qwen3ASRProcessor": lambda found: QwenSounds(**_windows(found)),
    "Qwen3OmniMoeProcessor": lambda found: QwenSounds(**_windows(found), min_samples=0),
}
_KINDS: Mapping[str, tuple[Callable[[Mapping[str, Any]], SoundProcessor], Fields]] = {
    "Qwen3ASRFeatureExtractor": (_qwen, _QWEN),
    "Gemma4AudioFeatureExtractor": (_gemma4, _GEMMA4),
}


def _check_size(frames: int, sizes: Mapping[str, int]) -> None:
    if not 1 <= frames <= _MAX_VALUES // sizes["feature_size"]:
        raise ValueError(
            f"chunk_length, sampling_rate and hop_length make {frames:,} frames of {sizes['feature_size']} values; a "
            f"window has at least one and at most {_MAX_VALUES:,} values"
        )


def _check_same(found: Mapping[str, Any], **computed: int) -> None:
    """Raises ValueError for a size that does not follow from the others, as it does in the reference."""
    for name, value in computed.items():
        if found[name] not in (None, value):
            raise ValueError(f"{name} is {found[name]!r}, and the other sizes make {value}; make them agree")
