"""From a file's bytes or an array to a waveform: float32 [samples], mono, at the rate that a processor wants.

A file is hostile until it is decoded. What it is, is read from its first bytes, and its readers are never asked to
guess: a playlist, or a file that names others, is of no kind that is read here. What a header says is checked before
anything is decoded, and what comes is counted, since a header may lie.

WAV, AIFF and FLAC are decoded here by libsndfile, in blocks. The others are decoded in a process of their own, since
their decoders are large and may crash or hang: OGG (Vorbis, Opus) and MP3 by libsndfile too, and by FFmpeg bare AAC and
what may also hold moving pictures: MP4 with M4A, WEBM with Matroska.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from ferrum_jax.inputs.audio.cut_off import COUNTED, check_whole
from ferrum_jax.inputs.audio.plain_files import said_of_file, waveform_of_file
from ferrum_jax.inputs.audio.waveform import Look, SaidLength, SoundBounds, SoundRefused, Waveform, do_not_look, library
from ferrum_jax.io.sandbox.in_child import ChildBounds, NoAnswer, in_child

_PLAIN = ("WAV", "AIFF", "FLAC")
CONTAINERS = ("MP4", "WEBM", "AAC")
KINDS = (*_PLAIN, "OGG", "MP3", *CONTAINERS)
_NEEDED = {"containers": ("av", "soxr"), "compressed": ("soundfile", "soxr")}
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")  # that an MP4 may begin with
_BLOCK = 1 << 18  # samples of all channels that are decoded at once
_MOST_SAID = 1 << 10  # bytes of a length
_OWN_MEMORY = 256 << 20  # bytes that a decoder may take beside the file and what is made of it


def kind_of(content: bytes) -> str:
    """The kind of file, one of KINDS, by its first bytes. Raises ValueError for another."""
    head, name = content[:4], content[8:12]
    if head in (b"RIFF", b"RIFX", b"RF64") and name == b"WAVE":
        return "WAV"
    if head == b"FORM" and name in (b"AIFF", b"AIFC"):
        return "AIFF"
    if head in (b"fLaC", b"OggS"):
        return "FLAC" if head == b"fLaC" else "OGG"
    if head == b"\x1a\x45\xdf\xa3":
        return "WEBM"
    if content[4:8] in _BOXES:
        return "MP4"
    if head[:3] == b"ID3":
        return "MP3"
    if len(head) == 4 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        return "MP3" if head[1] & 0x06 else "AAC"  # no layer of MPEG: ADTS
    raise SoundRefused(f"the sound is not a file of a kind that is read here: {', '.join(KINDS)}")


def decoded_sound(
    content: bytes, rate: int, *, bounds: SoundBounds | None = None, look: Look = do_not_look
) -> np.ndarray:
    """The waveform of a file, float32 [samples], at `rate` samples a second.

    Channels are averaged. Raises ValueError for what is not a sound that can be read whole, and for one that is larger
    than its bounds.
    """
    bounds = bounds or SoundBounds()
    bounds.check_bytes(len(content))
    kind = kind_of(content)
    if kind in COUNTED:
        check_whole(content, kind)
    if kind in _PLAIN:
        return waveform_of_file(content, rate, bounds, look)
    return _in_child(content, kind, rate, bounds, look)


def said_length(content: bytes, *, bounds: SoundBounds | None = None) -> SaidLength | None:
    """How long a file's header says that its sound is; None where only decoding tells. Nothing is decoded.

    Raises ValueError as `decoded_sound` for what its header shows. What it says may not be so.
    """
    bounds = bounds or SoundBounds()
    bounds.check_bytes(len(content))
    kind = kind_of(content)
    if kind in _PLAIN:
        return said_of_file(content, bounds)
    found = json.loads(_answer("said_bytes", content, {"kind": kind}, bounds, answer_bytes=_MOST_SAID))
    return None if found is None else SaidLength(*found)


def waveform_of_array(
    array: np.ndarray,
    sampling_rate: int,
    rate: int,
    *,
    bounds: SoundBounds | None = None,
    look: Look = do_not_look,
) -> np.ndarray:
    """The waveform of an array [samples] or [samples, channels], float32 or int16, at `rate` samples a second.

    sampling_rate: of the array. int16 is scaled to -1 .. 1. Raises ValueError for another array.
    """
    bounds = bounds or SoundBounds()
    if array.dtype not in (np.float32, np.int16) or array.ndim not in (1, 2):
        raise SoundRefused(
            f"the sound is an array {array.dtype}{list(array.shape)}; it must be float32 or int16, [samples] or "
            "[samples, channels]"
        )
    if type(sampling_rate) is not int:
        raise SoundRefused(f"sampling_rate is {sampling_rate!r}; it must be a whole number of samples a second")
    samples = array[:, None] if array.ndim == 1 else array
    bounds.check(sampling_rate, samples.shape[1], len(samples))
    waveform = Waveform(sampling_rate, wanted=rate, bounds=bounds, look=look)
    step = _BLOCK // samples.shape[1]
    for start in range(0, len(samples), step):
        block = samples[start : start + step]
        waveform.add(block if block.dtype == np.float32 else block.astype(np.float32) / (1 << 15))
    return waveform.finished()


def _in_child(content: bytes, kind: str, rate: int, bounds: SoundBounds, look: Look) -> np.ndarray:
    """The waveform that a decoder makes in a process of its own."""
    most = 4 * (int(bounds.max_seconds * rate) + 1)
    order = {"kind": kind, "rate": rate}
    return np.frombuffer(_answer("waveform_bytes", content, order, bounds, answer_bytes=most, look=look), np.float32)


def _answer(
    function: str,
    content: bytes,
    order: dict[str, Any],
    bounds: SoundBounds,
    *,
    answer_bytes: int,
    look: Look = do_not_look,
) -> bytes:
    """The answer of a decoder's function. order: the file's kind, and further arguments of the function."""
    name = "containers" if order["kind"] in CONTAINERS else "compressed"
    for needed in _NEEDED[name]:
        library(needed)
    child = ChildBounds(
        seconds=bounds.decode_seconds,
        memory_bytes=_OWN_MEMORY + 2 * len(content) + 3 * answer_bytes,
        answer_bytes=answer_bytes,
    )
    order = order | {"bounds": dataclasses.asdict(bounds)}
    try:
        return in_child(f"ferrum_jax.inputs.audio.{name}:{function}", content, order, child, look=look)
    except NoAnswer as error:
        raise SoundRefused(f"the sound cannot be decoded: {error}") from error
    except ValueError as error:
        raise SoundRefused(str(error)) from error
