"""Files that a stranger may send as a sound, drawn from a seed; sound ones of every kind among them."""

import functools
import io
import struct
from fractions import Fraction

import av
import numpy as np
import soundfile

from scripts.goldens.sounds import sound, wav
from tests.hostile_bytes import flipped, spliced

SUBTYPES = {  # of libsndfile's kinds
    "WAV": ("PCM_16", "PCM_U8", "PCM_24", "FLOAT", "DOUBLE", "ULAW", "IMA_ADPCM", "MS_ADPCM"),
    "AIFF": ("PCM_16", "FLOAT"),
    "FLAC": ("PCM_16", "PCM_24"),
    "OGG": ("VORBIS", "OPUS"),
    "MP3": ("MPEG_LAYER_III",),
}
CODECS = {"MP4": ("mp4", "aac"), "WEBM": ("webm", "libopus"), "AAC": ("adts", "aac")}  # FFmpeg's format and coder
KINDS = (*SUBTYPES, *CODECS)


def stereo(seconds: float, rate: int) -> np.ndarray:
    """float32 [samples, 2]."""
    return np.stack([sound(seconds, seed, rate) for seed in (0, 1)], axis=1)


def written(samples: np.ndarray, rate: int, kind: str, subtype: str) -> bytes:
    """A file by libsndfile, which takes a whole OGG at once only where it is short."""
    buffer = io.BytesIO()
    with soundfile.SoundFile(buffer, "w", rate, samples.shape[1], format=kind, subtype=subtype) as file:
        for start in range(0, len(samples), 4096):
            file.write(samples[start : start + 4096])
    return buffer.getvalue()


def muxed(samples: np.ndarray, rate: int, container: str, codec: str, *, picture: bool = False) -> bytes:
    """A file by FFmpeg. picture: with a stream of moving pictures before the sound."""
    buffer = io.BytesIO()
    layout = "stereo" if samples.shape[1] == 2 else "mono"
    with av.open(buffer, "w", format=container) as file:
        pictures = file.add_stream("mpeg4", rate=5, width=32, height=32) if picture else None
        stream = file.add_stream(codec, rate=rate, layout=layout)
        for i in range(5 if pictures else 0):
            shown = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 40 * i, np.uint8))
            shown.pts, shown.time_base = i, Fraction(1, 5)
            file.mux(pictures.encode(shown))
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.T), format="fltp", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
        if pictures:
            file.mux(pictures.encode(None))
    return buffer.getvalue()


@functools.cache
def sound_file(kind: str, which: int = 0) -> bytes:
    """A file of half a second in two channels. which: of the kind's subtypes."""
    if kind in CODECS:
        return muxed(stereo(0.5, 48_000), 48_000, *CODECS[kind])
    subtypes = SUBTYPES[kind]
    return written(stereo(0.5, 48_000), 48_000, kind, subtypes[which % len(subtypes)])


def hostile_file(random: np.random.Generator, kinds: tuple[str, ...] = KINDS) -> tuple[bytes, bool]:
    """A file, and whether it is as it was written."""
    content = sound_file(str(random.choice(kinds)), int(random.integers(8)))
    what = random.integers(5)
    if what == 0:
        return content[: int(random.integers(len(content)))], False
    if what == 1:
        return flipped(content, random, 100), False
    if what == 2:
        return spliced(content, random), False
    if what == 3:
        return content[:16] + bytes(random.integers(0, 256, 400, dtype=np.uint8)), False
    return content, True


def wav_saying(*, channels: int = 1, rate: int = 16_000, data_bytes: int | None = None) -> bytes:
    """A WAV of a tenth of a second whose header says something else."""
    content = bytearray(wav(0.1, 16_000, 1))
    content[22:28] = struct.pack("<HI", channels, rate & 0xFFFFFFFF)
    content[32:34] = struct.pack("<H", max(2 * channels & 0xFFFF, 1))
    if data_bytes is not None:
        content[40:44] = struct.pack("<I", data_bytes)
    return bytes(content)


def flac_saying(samples: int, content: bytes | None = None) -> bytes:
    """A FLAC whose header says that it has so many samples; 0 is that nobody knows.

    Source: RFC 9639, section 8.2: 36 bits from the 108th of STREAMINFO.
    """
    changed = bytearray(content or written(stereo(0.5, 16_000), 16_000, "FLAC", "PCM_16"))
    place = 8 + 13
    changed[place] = changed[place] & 0xF0 | samples >> 32
    changed[place + 1 : place + 5] = struct.pack(">I", samples & 0xFFFFFFFF)
    return bytes(changed)


@functools.cache
def flac_of_silence(seconds: int) -> bytes:
    """A few kilobytes that become megabytes."""
    return written(np.zeros((seconds * 16_000, 1), np.float32), 16_000, "FLAC", "PCM_16")


# What names other files or addresses, for players that follow them
LISTS = {
    "hls": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:9,\nhttp://127.0.0.1:9/secret.ts\n#EXT-X-ENDLIST\n",
    "concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "dash": b'<?xml version="1.0"?><MPD><Period><BaseURL>http://127.0.0.1:9/</BaseURL></Period></MPD>',
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=audio 9 RTP/AVP 0\n",
    "text": b"this is no sound at all, but it is long enough to be looked at",
}
