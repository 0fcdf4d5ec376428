"""Whether a file has all that it says it has, by its own counts of bytes, before anything is decoded.

libsndfile decodes what there is of a file that was cut off, and the first of several that stand behind one another.
What is lost is a part of what was said, so such a file is refused. A count that a program writes which does not know
the length, as one that records into a pipe, is no count.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ferrum_jax.inputs.audio.waveform import SoundRefused

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


def check_whole(content: bytes, kind: str) -> None:
    """Raises ValueError for a file that was cut off, and for several sounds in one. kind: one of COUNTED."""
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
