"""The sound of a container, decoded by FFmpeg. Runs in a child alone, since a hostile file may crash or hang it.

FFmpeg is told what the container is and sees its bytes and nothing else: it probes nothing, opens no file that the
container names, and no protocol. It decodes the first stream of sound and no other.
"""

import contextlib
import importlib
import io
import json
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av  # pyright: ignore[reportMissingImports]
import numpy as np

from ferrum_jax.inputs.audio.waveform import SaidLength, SoundBounds, SoundRefused, Waveform, library

_FORMATS = {"MP4": "mp4", "WEBM": "matroska", "AAC": "aac"}  # FFmpeg's names
_DECODERS = ("aac", "alac", "flac", "mp3float", "mp3", "opus", "libopus", "vorbis", "ac3", "eac3", "pcm_s16le")
_CLOCK = re.compile(r"(\d{1,4}):(\d\d):(\d\d(?:\.\d{1,9})?)")  # of Matroska's streams
_MAX_MISSING_S = 0.25  # at the end, of what a header says; coders have blocks of up to 0.2 s
_BLOCK = 1 << 15  # samples of each channel that are averaged and resampled together
_MAX_FRAMES = 1 << 12  # that are kept for that
_OPTIONS = {
    "protocol_whitelist": "none",
    "codec_whitelist": ",".join(_DECODERS),
    "probesize": str(5 << 20),
}

# The child can open no module later: what PyAV imports when it first meets a stream of a kind, and the resampler.
for _kind in ("audio", "subtitles", "video"):
    for _part in ("stream", "codeccontext"):
        importlib.import_module(f"av.{_kind}.{_part}")
library("soxr")


def waveform_bytes(content: bytes, order: dict[str, Any]) -> memoryview:
    """Bytes of the waveform, float32 [samples]. order: the file's `kind`, the `rate` that is wanted, the `bounds`."""
    bounds = SoundBounds(**order["bounds"])
    waveform = None
    with _opened(content, order) as container:
        for rate, samples in _samples(container, bounds):
            waveform = waveform or Waveform(rate, wanted=order["rate"], bounds=bounds)
            waveform.add(samples)
    if waveform is None:
        raise SoundRefused("the sound has no samples")
    return waveform.finished().data.cast("B")


def said_bytes(content: bytes, order: dict[str, Any]) -> bytes:
    """JSON of the length that the container says, [samples, rate] or null. order: as of `waveform_bytes`."""
    with _opened(content, order) as container:
        stream = _stream(container)
        said = _said(stream)
        if said is None and container.duration:  # of all its streams, in microseconds
            said = _length(stream, Fraction(container.duration, av.time_base))
        if said is not None:
            SoundBounds(**order["bounds"]).check(said.rate, stream.codec_context.channels, said.num_samples)
    is_told = order["kind"] != "AAC"  # it has no header: FFmpeg guesses from the bits of its first second
    return json.dumps(said if is_told else None).encode()


@contextlib.contextmanager
def _opened(content: bytes, order: dict[str, Any]) -> Iterator[Any]:
    """The container. What is raised while it is read is a ValueError."""
    how: dict[str, Any] = {"format": _FORMATS[order["kind"]], "options": _OPTIONS, "io_open": _open_nothing}
    try:
        with av.open(io.BytesIO(content), "r", metadata_errors="replace", **how) as container:
            yield container
    except (SoundRefused, MemoryError):
        raise
    except Exception as error:  # PyAV raises more than its own errors for damaged files
        said = getattr(error, "strerror", None) or type(error).__name__
        raise SoundRefused(f"the sound is damaged and cannot be decoded: {said}") from error


def _stream(container: Any) -> Any:
    """The first sound. Raises SoundRefused where there is none, or none of a known coder."""
    if not container.streams.audio:
        raise SoundRefused("the file has no sound in it")
    stream = container.streams.audio[0]
    codec = stream.codec_context
    if codec is None or codec.name not in _DECODERS:
        name = codec.name if codec else "something unknown"
        raise SoundRefused(f"the sound is coded as {name}; known are {', '.join(_DECODERS)}")
    return stream


def _said(stream: Any) -> SaidLength | None:
    """The length that the stream says; None where it does not."""
    return _length(stream, stream.duration * stream.time_base) if stream.duration and stream.time_base else None


def _length(stream: Any, seconds: Fraction) -> SaidLength | None:
    rate = stream.codec_context.sample_rate
    return SaidLength(int(seconds * rate), rate) if rate and seconds > 0 else None


def _samples(container: Any, bounds: SoundBounds) -> Iterator[tuple[int, np.ndarray]]:
    """The rate and the samples, float32 [n, channels], of a second or so of the first sound after another."""
    stream = _stream(container)
    codec = stream.codec_context
    codec.thread_count = 1
    if codec.sample_rate:  # else each frame says it
        said = _said(stream)
        bounds.check(codec.sample_rate, codec.channels, said.num_samples if said else 0)
    found: list[np.ndarray] = []
    first, count, end_s = None, 0, None
    for frame in container.decode(stream):
        first = first or (frame.sample_rate, frame.layout.nb_channels)
        if (frame.sample_rate, frame.layout.nb_channels) != first:
            raise SoundRefused(
                f"the sound changes from {first[0]:,} samples a second in {first[1]} channels to {frame.sample_rate:,} "
                f"in {frame.layout.nb_channels}"
            )
        bounds.check(*first, frame.samples)
        found.append(_floats(frame))
        end_s = None if frame.time is None else frame.time + frame.samples / frame.sample_rate
        count += frame.samples
        if count >= _BLOCK or len(found) >= _MAX_FRAMES:
            yield first[0], np.concatenate(found)
            found, count = [], 0
    if first and found:
        yield first[0], np.concatenate(found)
    said_s = _end_s(container, stream)
    if end_s is not None and said_s is not None and end_s + _MAX_MISSING_S < said_s:
        raise SoundRefused(
            f"the sound is cut off: it ends at {said_s:.1f} s by its header, and can be decoded up to {end_s:.1f} s; "
            "get the whole file, or save what there is anew"
        )


def _end_s(container: Any, stream: Any) -> float | None:
    """When the sound ends by its header; None where that says nothing of this stream."""
    if stream.duration and stream.time_base:
        return float(((stream.start_time or 0) + stream.duration) * stream.time_base)
    tag = _CLOCK.fullmatch(stream.metadata.get("DURATION", ""))
    if tag:
        return 3600 * int(tag[1]) + 60 * int(tag[2]) + float(tag[3])
    return container.duration / av.time_base if container.duration and len(container.streams) == 1 else None


def _floats(frame: Any) -> np.ndarray:
    """float32 [n, channels] of a frame's samples, whole numbers scaled to -1 .. 1."""
    values = frame.to_ndarray()
    values = values.T if frame.format.is_planar else values.reshape(-1, frame.layout.nb_channels)
    if values.dtype == np.uint8:
        return (values.astype(np.float32) - (1 << 7)) / (1 << 7)
    if values.dtype.kind == "i":
        return (values / (1 << 8 * values.itemsize - 1)).astype(np.float32)
    return values.astype(np.float32)


def _open_nothing(url: str, flags: int, options: dict[str, str]) -> None:
    raise PermissionError("a sound may name no other file")
