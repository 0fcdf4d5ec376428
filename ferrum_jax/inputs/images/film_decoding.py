"""A video's bytes decoded by FFmpeg: what a child process of `films` does, and nothing else.

FFmpeg is given bytes, the one format that they begin as, and a list of codecs. No protocol is allowed, so nothing that
a file names is opened. What a header says is never believed: packets are counted, and the size is that of a frame.
"""

import bisect
import contextlib
import fractions
import importlib
import io
import json
from collections.abc import Iterator
from typing import Any

import av  # pyright: ignore[reportMissingImports]
import numpy as np

from ferrum_jax.inputs.images.resizing import resized_frame
from ferrum_jax.inputs.media.kinds import MediaRefused

_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mpeg1video", "mpeg2video", "mjpeg", "gif")
_OPTIONS = {"protocol_whitelist": "none", "codec_whitelist": ",".join(_CODECS), "probesize": str(5 << 20)}
_SLOWEST, _FASTEST = fractions.Fraction(1, 1000), 1000  # frames of a second

# The child can open no module later: what PyAV imports when it first meets a stream of a kind, or a frame's colours.
for _kind in ("audio", "subtitles", "video"):
    for _part in ("stream", "codeccontext"):
        importlib.import_module(f"av.{_kind}.{_part}")
importlib.import_module("av.video.reformatter")


def facts(content: bytes, order: dict[str, Any]) -> bytes:
    """JSON of count, fps, height and width: of a film's frames, as its packets and its first frame have them.

    Raises ValueError for a film that is damaged, or larger than `max_frames` and `max_pixels` of the order.
    """
    with _opened(content, order["format"], order["max_pixels"]) as (film, stream):
        count, fps = _counted(film, stream, order["max_frames"])
        if not _SLOWEST <= fps <= _FASTEST:
            raise MediaRefused(f"the video has {float(fps):g} frames a second by its clock; save it anew")
        film.seek(0)
        first = next(film.decode(stream), None)
        if first is None:
            raise MediaRefused("the video is damaged: none of its frames can be decoded")
        height, width = _upright(first, order["max_pixels"]).shape[:2]
    return json.dumps({"count": count, "fps": float(fps), "height": height, "width": width}).encode()


def frames(content: bytes, order: dict[str, Any]) -> bytes:
    """The frames `indices`, which rise, resized to `height` and `width`: uint8 [N, height, width, 3].

    shape: height and width of every frame, as `facts` said. Raises ValueError for a film that ends before the last of
    them, or that has another shape.
    """
    wanted = order["indices"]
    found = np.empty((len(wanted), order["height"], order["width"], 3), np.uint8)
    with _opened(content, order["format"], order["max_pixels"]) as (film, stream):
        for place, frame in enumerate(_taken(film, stream, wanted)):
            pixels = _upright(frame, order["max_pixels"])
            if list(pixels.shape[:2]) != order["shape"]:
                raise MediaRefused("the video has frames of several sizes; save it with one")
            found[place] = resized_frame(pixels, order["height"], order["width"], order["resample"])
    return found.data.cast("B")  # type: ignore[return-value]


def _taken(film: Any, stream: Any, wanted: list[int]) -> Iterator[Any]:
    """The frames `wanted`. What no later frame is made from is passed over where the film's clock says where it is."""
    shown = [(packet.pts, packet.is_keyframe) for packet in film.demux(stream) if packet.size and not packet.is_discard]
    times = sorted(time for time, _ in shown if time is not None)
    begins = sorted(time for time, is_key in shown if is_key and time is not None)
    has_clock = len(set(times)) == len(shown) and len(begins) > 0
    film.seek(0)
    decoded, at = film.decode(stream), -1
    for index in wanted:
        begin = bisect.bisect_right(begins, times[index]) - 1 if has_clock else 0
        if has_clock and begin >= 0 and bisect.bisect_left(times, begins[begin]) > at + 1:
            film.seek(begins[begin], stream=stream)
            decoded, at = film.decode(stream), bisect.bisect_left(times, begins[begin]) - 1
        for frame in decoded:
            at = at + 1 if not has_clock else bisect.bisect_left(times, frame.pts or 0)
            if at == index:
                yield frame
                break
        if at != index:
            raise MediaRefused(f"the video is damaged: frame {index:,} of {len(shown):,} cannot be decoded")


@contextlib.contextmanager
def _opened(content: bytes, name: str, max_pixels: int) -> Iterator[tuple[Any, Any]]:
    """The film and its stream of pictures. Raises ValueError for whatever FFmpeg raises inside."""
    how: dict[str, Any] = {"format": name, "options": _OPTIONS, "io_open": _open_nothing, "metadata_errors": "replace"}
    try:
        with av.open(io.BytesIO(content), "r", **how) as film:
            if not film.streams.video:
                raise MediaRefused("the video has no pictures, only other streams")
            stream = film.streams.video[0]
            if stream.codec_context is None or stream.codec_context.name not in _CODECS:
                named = stream.codec_context and stream.codec_context.name
                raise MediaRefused(f"the video's codec is {named}; read are {', '.join(_CODECS)}")
            stream.codec_context.options = {"max_pixels": str(max_pixels), "codec_whitelist": ",".join(_CODECS)}
            stream.codec_context.thread_count = 1  # each would take memory of its own
            _check_size(stream.height, stream.width, max_pixels)
            yield film, stream
    except (MediaRefused, MemoryError):
        raise
    except Exception as error:  # PyAV raises more than its own errors for damaged files
        said = getattr(error, "strerror", None) or type(error).__name__
        raise MediaRefused(f"the video is damaged and cannot be decoded: {said}") from error


def _open_nothing(*_: Any) -> Any:
    """Refuses files that a video names."""
    raise MediaRefused("the video names another file")


def _counted(film: Any, stream: Any, most: int) -> tuple[int, fractions.Fraction]:
    """How many frames a film shows, and how many of them in a second: 0 where it has no clock."""
    packets = shown = 0
    begins, ends, last = None, None, 0
    for packet in film.demux(stream):
        if not packet.size:
            continue
        packets, shown = packets + 1, shown + (not packet.is_discard)
        if packets > most:
            raise MediaRefused(f"the video has more than {most:,} frames; cut it shorter")
        if packet.pts is not None and not packet.is_discard:
            begins = packet.pts if begins is None else min(begins, packet.pts)
            if ends is None or packet.pts >= ends:
                ends, last = packet.pts, packet.duration or 0
    if packets < stream.frames:
        raise MediaRefused(f"the video is damaged: its header has {stream.frames:,} frames, and it has {packets:,}")
    if begins is None or ends is None or ends + last <= begins:
        return shown, fractions.Fraction(stream.average_rate or 0)
    return shown, (shown if last else shown - 1) / ((ends - begins + last) * stream.time_base)


def _upright(frame: Any, max_pixels: int) -> np.ndarray:
    """A frame's pixels, uint8 [H, W, 3], as its display matrix says that it is to be seen."""
    _check_size(frame.height, frame.width, max_pixels)
    pixels = frame.to_ndarray(format="rgb24")
    return np.rot90(pixels, round(frame.rotation / 90) % 4)


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise MediaRefused(
            f"the video is {width} x {height}, {height * width:,} pixels; at most {max_pixels:,} are taken: make it "
            "smaller"
        )
