"""From a file's bytes or an array to a waveform: float32 [samples], mono, at the rate that a processor wants.

A file is hostile until it is decoded. What it is, is read from its first bytes, and its readers are never asked to
guess: a playlist, or a file that names others, is of no kind that is read here. What a header says is checked before
anything is decoded, and what comes is counted, since a header may lie.

WAV, AIFF and FLAC are decoded here by libsndfile, in blocks. The others are decoded in a process of their own, since
their decoders are large and may crash or hang: OGG (Vorbis, Opus) and MP3 by libsndfile too, and by FFmpeg bare AAC and
what may also hold moving pictures: MP4 with M4A, WEBM with Matroska.
"""

import dataclasses
import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from ferrum_jax.inputs.audio.plain_files import said_of_file, waveform_of_file
from ferrum_jax.inputs.audio.waveform import Look, SaidLength, SoundBounds, SoundRefused, Waveform, do_not_look, library
from ferrum_jax.io.sandbox.in_child import ChildBounds, NoAnswer, in_child

_PLAIN = ("WAV", "AIFF", "FLAC")
CONTAINERS = ("MP4", "WEBM", "AAC")
KINDS = (*_PLAIN, "OGG", "MP3", *CONTAINERS)
_NEEDED = {"containers": ("av", "soxr"), "compressed": ("soundfile", "soxr")}
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")  # that an MP4 may begin with
_BLOCK = 1 << 18  # samples of all channels that are decoded at once
_MAX_SAID = 1 << 10  # bytes of a length
_OWN_MEMORY = 256 << 20  # bytes that a decoder may take beside the file and what is made of it
COUNTED = ("WAV", "AIFF", "OGG", "MP3")  # that libsndfile decodes though they are cut off
_NO_COUNT = 0x7FFF0000  # and more, or 0: sizes that recorders write before they know it
_OGG_HEADER = 27
_BEGINS, _ENDS = 2, 4  # flags of an OGG page
_KBITS = {  # a second of an MP3's frame, by its version
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES, _SLOWER = (44_100, 48_000, 32_000), {3: 1, 2: 2, 0: 4}  # samples a second, and a version's part of them
_ID3V1 = 128


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
    found = json.loads(_answer("said_bytes", content, {"kind": kind}, bounds, answer_bytes=_MAX_SAID))
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


def check_whole(content: bytes, kind: str) -> None:
    """Raises ValueError for a file that was cut off, and for several sounds in one. kind: one of COUNTED.

    libsndfile decodes the start of such a file, and a part of what was said would be lost. A count that a recorder
    writes before it knows the length, as into a pipe, is no count.
    """
    if kind == "OGG":
        _check_pages(content)
    elif kind == "MP3":
        _check_frames(content)
    else:
        _check_chunks(content)


def _check_chunks(content: bytes) -> None:
    """Reads the size of the chunk that holds the samples."""
    order = ">" if content[:4] in (b"FORM", b"RIFX") else "<"
    long_size = None  # of the samples of an RF64, whose chunks are too long for 32 bits
    for name, start, size in _chunks(content, order):
        if name == b"ds64" and len(content) >= start + 16:
            (long_size,) = struct.unpack_from("<Q", content, start + 8)
        if name not in (b"data", b"SSND"):
            continue
        size = long_size if size == 0xFFFFFFFF and long_size is not None else size
        if size > len(content) - start and (size < _NO_COUNT or long_size == size):
            raise _cut_off(f"its samples have {size:,} bytes by its header, and {len(content) - start:,} are there")
        return


def _chunks(content: bytes, order: str) -> Iterator[tuple[bytes, int, int]]:
    """Name, place and size of each chunk's content."""
    at = 12
    while at + 8 <= len(content):
        name, size = struct.unpack_from(f"{order}4sI", content, at)
        yield name, at + 8, size
        at += 8 + size + size % 2


def _check_pages(content: bytes) -> None:
    """Reads the pages of an OGG: the last of them says so."""
    at, has_ended = 0, False
    while content[at : at + 4] == b"OggS":
        head = content[at : at + _OGG_HEADER]
        sizes = content[at + _OGG_HEADER : at + _OGG_HEADER + head[-1]]
        end = at + len(head) + len(sizes) + sum(sizes)
        if len(head) < _OGG_HEADER or len(sizes) < head[-1] or end > len(content):
            raise _cut_off(f"its last page, from byte {at:,} on, is not whole")
        if has_ended and head[5] & _BEGINS:
            raise _several("OGG")
        has_ended = has_ended or bool(head[5] & _ENDS)
        at = end
    if not has_ended and at < len(content):
        raise SoundRefused(f"the sound is damaged: no page begins at byte {at:,}, where one ended")
    if not has_ended:
        raise _cut_off(f"none of its pages, up to byte {at:,}, is its last")


def _check_frames(content: bytes) -> None:
    """Reads an MP3's first frame, where it says how many bytes there are."""
    start = _after_id3(content, 0)
    said, own = _said_by_first_frame(content, start), _frame_bytes(content[start : start + 4])
    if said is None:
        return
    there = len(content) - start
    if said > there + own:  # writers differ in whether the frame that counts is counted
        raise _cut_off(f"it has {said:,} bytes by its first frame, and {there:,} are there")
    behind = start + said
    behind += _ID3V1 if content[behind : behind + 3] == b"TAG" else 0
    following = content[behind : behind + 3]
    if following == b"ID3" or (len(following) == 3 and following[:2] == content[start : start + 2]):
        raise _several("MP3")


def _after_id3(content: bytes, at: int) -> int:
    """Where a tag that begins here ends."""
    if content[at : at + 3] != b"ID3" or len(content) < at + 10:
        return at
    size = 0
    for byte in content[at + 6 : at + 10]:
        size = size << 7 | byte & 0x7F
    return at + 10 + size


def _said_by_first_frame(content: bytes, start: int) -> int | None:
    """Bytes of the sound, from its first frame on; None where that frame says nothing of them."""
    if content[start + 36 : start + 40] == b"VBRI" and len(content) >= start + 50:
        return struct.unpack_from(">I", content, start + 46)[0] or None
    for beside in (13, 21, 36):  # bytes of the header and of what is beside the coded bands
        name, flags = content[start + beside : start + beside + 4], content[start + beside + 4 : start + beside + 8]
        if name in (b"Xing", b"Info") and len(flags) == 4 and flags[3] & 2:
            place = start + beside + 8 + (4 if flags[3] & 1 else 0)
            return struct.unpack_from(">I", content, place)[0] or None if place + 4 <= len(content) else None
    return None


def _frame_bytes(head: bytes) -> int:
    """Bytes of a layer III frame by its header; 0 for an invalid header."""
    if len(head) < 4 or (head[2] >> 2 & 3) == 3 or head[2] >> 4 == 15 or (head[1] >> 3 & 3) == 1:
        return 0
    version = head[1] >> 3 & 3
    rate = _RATES[head[2] >> 2 & 3] // _SLOWER[version]
    return (144 if version == 3 else 72) * 1000 * _KBITS[version == 3][head[2] >> 4] // rate + (head[2] >> 1 & 1)


def _cut_off(how: str) -> SoundRefused:
    return SoundRefused(f"the sound is cut off: {how}; get the whole file, or save what there is anew")


def _several(kind: str) -> SoundRefused:
    return SoundRefused(
        f"the sound is several files of {kind} behind one another; give each alone, or save them as one"
    )
