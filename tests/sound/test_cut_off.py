"""A sound that was cut off, or stands behind another in one file, is refused; one whose length is not known is read."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ferrum_jax.inputs.audio.sound_decoding import decoded_sound
from scripts.goldens.sounds import wav
from tests.sound import hostile_sounds as hostile
from tests.sound.hostile_sounds import muxed, stereo, written

RATE, SECONDS = 16_000, 3.0
SAMPLES = stereo(SECONDS, 48_000)
OTHERS = [("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III"), ("AIFF", "PCM_16"), ("WAV", "PCM_16")]


def file_of(kind: str, subtype: str | None = None) -> bytes:
    """Three seconds in a file of a kind."""
    if kind in hostile.CODECS:
        return muxed(SAMPLES, 48_000, *hostile.CODECS[kind])
    return written(SAMPLES, 48_000, kind, subtype or hostile.SUBTYPES[kind][0])


@pytest.mark.parametrize("share", [0.4, 0.9])
@pytest.mark.parametrize(("kind", "subtype"), [*OTHERS, ("FLAC", "PCM_16"), ("WEBM", None), ("MP4", None)])
def test_a_file_that_was_cut_off_is_refused(kind, subtype, share):
    content = file_of(kind, subtype)
    assert len(decoded_sound(content, RATE)) == pytest.approx(SECONDS * RATE, abs=0.1 * RATE)
    with pytest.raises(ValueError, match=r"the sound is (cut off: .*; get the whole file|damaged)"):
        decoded_sound(content[: int(share * len(content))], RATE)


def test_an_mp3_may_lack_a_frame_and_no_more():
    content = file_of("MP3")
    decoded_sound(content[:-10], RATE)
    with pytest.raises(ValueError, match=r"the sound is cut off: it has .* bytes by its first frame, and .* are there"):
        decoded_sound(content[: -3 * 1152 // 2], RATE)


def test_an_ogg_without_its_last_page_is_refused():
    content = file_of("OGG")
    with pytest.raises(ValueError, match=r"the sound is cut off: none of its pages, up to byte .*, is its last"):
        decoded_sound(content[: content.rindex(b"OggS")], RATE)


@pytest.mark.parametrize("kind", ["OGG", "MP3"])
def test_two_sounds_in_one_file_are_refused(kind):
    with pytest.raises(ValueError, match=f"the sound is several files of {kind} behind one another"):
        decoded_sound(file_of(kind) * 2, RATE)


@pytest.mark.parametrize("size", [0, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_recorder_that_did_not_know_the_length_is_read(size):
    content = bytearray(wav(1.0, RATE, 1))
    place = bytes(content).index(b"data") + 4
    content[place : place + 4] = struct.pack("<I", size)
    content[4:8] = struct.pack("<I", 0xFFFFFFFF)
    if size == 0:  # libsndfile takes it by its word
        with pytest.raises(ValueError, match="the sound has no samples"):
            decoded_sound(bytes(content), RATE)
    else:
        np.testing.assert_array_equal(decoded_sound(bytes(content), RATE), decoded_sound(wav(1.0, RATE, 1), RATE))


@pytest.mark.parametrize(
    ("kind", "behind"), [("WAV", b"LIST\4\0\0\0INFO"), ("OGG", b"\0" * 100), ("MP3", b"TAG" + b"a" * 125)]
)
def test_what_is_no_sound_may_stand_behind_one(kind, behind):
    content = file_of(kind)
    np.testing.assert_array_equal(decoded_sound(content + behind, RATE), decoded_sound(content, RATE))
