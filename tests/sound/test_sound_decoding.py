"""A file becomes the sound that it holds, or an error that says why not; whatever it is, memory stays bounded."""

import dataclasses
import json
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.inputs.audio.containers import waveform_bytes
from ferrum_jax.inputs.audio.sound_decoding import KINDS, decoded_sound, kind_of, said_length, waveform_of_array
from ferrum_jax.inputs.audio.waveform import SoundBounds, Waveform
from scripts.goldens.pictures import sampled
from scripts.goldens.sounds import sound, wav
from tests.marks import few
from tests.rows import rows_beside
from tests.sound import hostile_sounds as hostile
from tests.sound.hostile_sounds import flac_of_silence, flac_saying, muxed, sound_file, stereo, wav_saying, written
from tests.sound.test_features import FOLDER, golden
from tests.support import ROOT, raising

FILES = json.loads((FOLDER / "cases.json").read_text())["files"]
RATE = 16_000


def likeness(one: np.ndarray, other: np.ndarray) -> float:
    """Correlation at the delay, up to that of AAC's coders, at which it is greatest."""
    return max(np.corrcoef(one[d : d + 6000], other[:6000])[0, 1] for d in range(0, 1200, 1) if len(one) > d + 6000)


@pytest.mark.parametrize("name", FILES)
def test_a_file_s_waveform_is_the_reference_s(name):
    case = FILES[name]
    found = decoded_sound(wav(2.1, case["rate"], case["channels"]), RATE)
    assert found.dtype == np.float32 and found.shape == (case["samples"],)
    np.testing.assert_allclose(sampled(found), golden()[f"file_{name}"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in hostile.CODECS])
def test_a_file_of_every_subtype_holds_its_sound(kind):
    expected = decoded_sound(written(stereo(0.5, 48_000), 48_000, "WAV", "FLOAT"), RATE)
    for which, subtype in enumerate(hostile.SUBTYPES[kind]):
        content = sound_file(kind, which)
        found = decoded_sound(content, RATE)
        assert kind_of(content) == kind and len(expected) == 8000, subtype
        assert 0 <= len(found) - len(expected) < (400 if "ADPCM" in subtype else 1), subtype  # those have whole blocks
        assert likeness(found, expected) > (0.9 if subtype in ("OPUS", "VORBIS", "MPEG_LAYER_III") else 0.99), subtype


@pytest.mark.parametrize("kind", hostile.CODECS)
def test_a_container_holds_its_sound(kind):
    expected = decoded_sound(written(stereo(0.5, 48_000), 48_000, "WAV", "FLOAT"), RATE)
    content = sound_file(kind)
    found = decoded_sound(content, RATE)
    assert kind_of(content) == kind and found.dtype == np.float32
    assert 0 <= len(found) - len(expected) < 700  # AAC has whole frames of 1,024 samples, and begins with silence
    assert likeness(found, expected) > 0.9


def test_the_sound_of_a_moving_picture_is_read():
    expected = decoded_sound(written(stereo(0.5, 48_000), 48_000, "WAV", "FLOAT"), RATE)
    found = decoded_sound(muxed(stereo(0.5, 48_000), 48_000, "mp4", "aac", picture=True), RATE)
    assert likeness(found, expected) > 0.9


def test_a_sound_of_many_blocks_is_whole():
    """Frames are averaged and resampled together, a second of them or so."""
    samples = np.tile(stereo(0.5, 48_000), (12, 1))
    found = decoded_sound(muxed(samples, 48_000, "matroska", "pcm_s16le"), RATE)
    expected = waveform_of_array((samples * 32767).round().astype(np.int16), 48_000, RATE)
    assert len(found) == len(expected) == 6 * RATE
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_whole_numbers_are_scaled_and_channels_averaged():
    samples = np.array([[-32768, 0], [16384, 16384], [32767, -32767]], np.int16)
    expected = np.array([-0.5, 0.5, 0.0], np.float32)
    np.testing.assert_array_equal(waveform_of_array(samples, RATE, RATE), expected)
    floats = samples.astype(np.float32) / 32768
    np.testing.assert_array_equal(waveform_of_array(floats, RATE, RATE), expected)
    np.testing.assert_array_equal(waveform_of_array(floats[:, 0], RATE, RATE), floats[:, 0])


@pytest.mark.parametrize("channels", [1, 2, 3, 7, 8, 16])
def test_channels_are_averaged_to_the_bits_of_the_reference(channels):
    samples = np.random.default_rng(0).standard_normal((5000, channels)).astype(np.float32)
    np.testing.assert_array_equal(waveform_of_array(samples, RATE, RATE), samples.T.mean(axis=0))


@pytest.mark.parametrize("rate", [8000, 22_050, 44_100, 96_000])
def test_an_array_is_resampled_as_a_file_is(rate):
    samples = stereo(1.3, rate)
    found = waveform_of_array(samples, rate, RATE)
    np.testing.assert_array_equal(found, decoded_sound(written(samples, rate, "WAV", "FLOAT"), RATE))
    assert len(found) == -(-len(samples) * RATE // rate)


@pytest.mark.parametrize("step", [1000, 4096, 70_000])
def test_pieces_do_not_show_in_what_is_resampled(step):
    samples = stereo(1.5, 44_100)
    waveform = Waveform(44_100, wanted=RATE, bounds=SoundBounds())
    for start in range(0, len(samples), step):
        waveform.add(samples[start : start + step])
    np.testing.assert_array_equal(waveform.finished(), waveform_of_array(samples, 44_100, RATE))


def test_a_waveform_is_its_own_and_not_the_array_it_came_from():
    samples = sound(0.1, seed=0)
    found = waveform_of_array(samples, RATE, RATE)
    samples[:] = 0
    assert np.any(found)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "AAC"])
@pytest.mark.parametrize("seconds", few([1, 31, 95]))
def test_a_header_says_how_long_its_sound_is(kind, seconds):
    samples = sound(seconds, seed=0, rate=48_000)[:, None]
    if kind in hostile.CODECS:
        content = muxed(samples, 48_000, *hostile.CODECS[kind])
    else:
        content = written(samples, 48_000, kind, hostile.SUBTYPES[kind][0])
    found = said_length(content)
    assert found is not None and found.rate == 48_000
    assert 0 <= found.num_samples - len(samples) < (480 if kind == "WEBM" else 1)  # whose clock has milliseconds
    assert found.samples_at(RATE) == -(-found.num_samples // 3)


def test_what_says_no_length_has_none_until_it_is_decoded():
    assert said_length(sound_file("AAC")) is None
    assert said_length(flac_saying(0)) is None


def test_what_a_header_says_is_checked_though_nothing_is_decoded():
    bounds = SoundBounds(max_seconds=0.4)
    for kind in KINDS:
        if kind != "AAC":
            with pytest.raises(ValueError, match=r"the sound is 0\.5\d?\d? s long or more; at most 0\.4 s are taken"):
                said_length(sound_file(kind), bounds=bounds)
    with pytest.raises(ValueError, match="not a file of a kind that is read here"):
        said_length(b"#EXTM3U")
    with pytest.raises(ValueError, match="the sound is 99 bytes; at most 50 are taken"):
        said_length(bytes(99), bounds=SoundBounds(max_bytes=50))


@pytest.mark.parametrize("seed", few(range(40), 10))
def test_a_hostile_header_is_a_length_or_a_refusal(seed):
    content, is_whole = hostile.hostile_file(np.random.default_rng(seed))
    try:
        found = said_length(content)
    except ValueError as error:
        assert (not is_whole and "the sound" in str(error)) or "the file has no sound" in str(error)
    else:
        assert found is None or 0 < found.num_samples <= 3600 * found.rate


ARRAY = r"the sound is an array \w+\[.*; it must be float32 or int16, \[samples\] or \[samples, channels\]"
NUMBERS = "the sound has a sample of (nan|inf|1e.30); samples are numbers, mostly between -1 and 1"


@pytest.mark.parametrize(
    ("array", "rate", "said"),
    [
        (np.zeros(9), RATE, ARRAY),
        (np.zeros((3, 3, 3), np.float32), RATE, ARRAY),
        (np.zeros(9, np.int32), RATE, ARRAY),
        (np.zeros((0, 2), np.float32), RATE, "the sound has no samples"),
        (np.zeros((9, 0), np.float32), RATE, "the sound has 0 channels; it must have 1 to 16"),
        (np.zeros((1, 100), np.int16), RATE, "the sound has 100 channels; it must have 1 to 16"),
        (np.zeros(9, np.int16), 0, "the sound has 0 samples a second; it must have 2,000 to 384,000"),
        (np.zeros(9, np.int16), 10**9, "the sound has 1,000,000,000 samples a second; it must have 2,000"),
        (np.zeros(9, np.int16), 16e3, "sampling_rate is 16000.0; it must be a whole number"),
        (np.array([0, np.nan], np.float32), RATE, NUMBERS),
        (np.array([0, -np.inf], np.float32), RATE, NUMBERS),
        (np.array([0, 1e30], np.float32), RATE, NUMBERS),
    ],
)
def test_another_array_is_refused_with_what_is_wrong_about_it(array, rate, said):
    with pytest.raises(ValueError, match=said):
        waveform_of_array(array, rate, RATE)


NO_KIND = "the sound is not a file of a kind that is read here: WAV, AIFF, FLAC, OGG, MP3, MP4, WEBM, AAC"
CANNOT = "the sound (is damaged|cannot be decoded|has no samples)"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the sound is empty: it has no bytes"),
        *((content, NO_KIND) for content in hostile.LISTS.values()),
        (wav_saying(channels=0), "the sound"),
        (wav_saying(channels=17), "the sound has 17 channels; it must have 1 to 16"),
        (wav_saying(channels=65_535), "the sound"),
        (wav_saying(rate=0), "the sound"),
        (wav_saying(rate=10**9), "the sound has 1,000,000,000 samples a second; it must have 2,000 to 384,000"),
        (wav_saying(rate=1), "the sound has 1 samples a second; it must have 2,000 to 384,000"),
        (wav(0.1, RATE, 1)[:44], "the sound is cut off: its samples have 3,200 bytes by its header, and 0 are there"),
        (wav(0.1, RATE, 1)[:30], CANNOT),
        (sound_file("FLAC")[:-4000], "the sound is damaged"),
        (flac_saying(10**9), "the sound is 62,500.0 s long or more; at most 3600 s are taken: cut it"),
        (flac_saying(16_001), "the sound is damaged: its header has 16,001 samples, and 8,000 can be decoded"),
        (written(np.full((9, 1), np.nan), RATE, "WAV", "FLOAT"), NUMBERS),
        (sound_file("MP4")[:-3000], CANNOT),
        (sound_file("MP4")[:40], CANNOT),
        (sound_file("WEBM")[:60], CANNOT),
        (b"\xff\xf1" + bytes(500), CANNOT),
        (b"\x1a\x45\xdf\xa3" + bytes(500), CANNOT),
        (bytes(4) + b"ftyp" + bytes(500), CANNOT),
    ],
)
def test_a_file_that_is_no_whole_sound_is_refused_with_the_reason(content, said):
    with pytest.raises(ValueError, match=said):
        decoded_sound(content, RATE)


def test_a_header_that_says_too_much_costs_nothing():
    """A WAV has as many samples as its file has room for, and those of a FLAC are counted as they come."""
    expected = decoded_sound(wav(0.1, RATE, 1), RATE)
    np.testing.assert_array_equal(decoded_sound(wav_saying(data_bytes=0xFFFFFFFF), RATE), expected)
    assert len(decoded_sound(flac_saying(0), RATE)) == 8000
    bomb, bounds = flac_saying(0, flac_of_silence(100)), SoundBounds(max_seconds=60)
    assert len(bomb) < 20_000
    with pytest.raises(ValueError, match=r"the sound is \d+\.\d s long or more; at most 60 s are taken: cut it"):
        decoded_sound(bomb, RATE, bounds=bounds)
    with pytest.raises(ValueError, match="at most 60 s are taken"):
        decoded_sound(flac_of_silence(100), RATE, bounds=bounds)


@pytest.mark.parametrize("kind", ["WAV", "MP4", "WEBM", "AAC"])
@pytest.mark.parametrize(("bounds", "said"), rows_beside(__file__)["a sound larger than its bounds is refused"])
def test_a_sound_larger_than_its_bounds_is_refused(kind, bounds, said):
    with pytest.raises(ValueError, match=said):
        decoded_sound(sound_file(kind), RATE, bounds=SoundBounds(**bounds))


@pytest.mark.parametrize("kind", hostile.CODECS)
@pytest.mark.parametrize("name", hostile.LISTS)
def test_a_list_of_other_files_is_no_container_whatever_it_is_called(name, kind):
    """FFmpeg is told the kind, so it never asks itself whether a file is a list that it should follow."""
    order = {"kind": kind, "rate": RATE, "bounds": dataclasses.asdict(SoundBounds())}
    with pytest.raises(ValueError, match=r"the (sound is damaged and cannot be decoded|file has no sound in it)"):
        waveform_bytes(hostile.LISTS[name] * 50, order)


def test_a_bound_that_is_none_is_refused():
    for value in (0, -1, float("inf"), float("nan"), "3", True):
        with pytest.raises(ValueError, match=r"max_seconds is .*; it must be a number over 0"):
            SoundBounds(max_seconds=value)


def test_a_container_that_takes_too_long_is_given_up():
    with pytest.raises(ValueError, match=r"the sound cannot be decoded: it took more than 0.001 s"):
        decoded_sound(sound_file("MP4"), RATE, bounds=SoundBounds(decode_seconds=0.001))


@pytest.mark.parametrize("kind", ["WAV", "MP4"])
def test_whoever_waits_can_leave_while_a_sound_is_decoded(kind):
    class Gone(Exception):
        pass

    with pytest.raises(Gone):
        decoded_sound(sound_file(kind), RATE, look=raising(Gone))


@pytest.mark.parametrize(("name", "kind"), [("soundfile", "WAV"), ("soxr", "WAV"), ("av", "MP4")])
def test_a_library_that_is_not_installed_is_named_with_its_extra(name, kind):
    """In a process of its own, where nothing has imported it."""
    program = (
        f"import sys; sys.modules[{name!r}] = None; from ferrum_jax.inputs.audio.sound_decoding import decoded_sound\n"
        "try: decoded_sound(sys.stdin.buffer.read(), 16000)\nexcept ValueError as error: print(error)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, input=sound_file(kind), capture_output=True, check=True)
    assert done.stdout.decode().startswith(f"sounds need {name}; pip install -e ")
    assert "[audio]" in done.stdout.decode()


def check(content: bytes, is_whole: bool) -> None:
    try:
        found = decoded_sound(content, RATE, bounds=SoundBounds(max_seconds=60, decode_seconds=20))
    except ValueError as error:
        assert str(error).startswith("the ") and "sound" in str(error) and len(str(error)) < 400
        assert not is_whole, f"a whole file was refused: {error}"
    else:
        assert found.dtype == np.float32 and found.ndim == 1 and 0 < len(found) <= 60 * RATE
        assert np.isfinite(found).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_hostile_file_is_refused_or_gives_a_waveform(seed):
    check(*hostile.hostile_file(np.random.default_rng(seed), ("WAV", "AIFF", "FLAC")))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32))
def test_a_hostile_file_is_refused_or_decoded_in_a_child(seed):
    check(*hostile.hostile_file(np.random.default_rng(seed), ("OGG", "MP3", *hostile.CODECS)))


MANY = """
import json, resource, sys, time
import numpy as np
from ferrum_jax.inputs.audio.sound_decoding import decoded_sound
from ferrum_jax.inputs.audio.waveform import SoundBounds
from tests.sound.hostile_sounds import KINDS, SUBTYPES, flac_of_silence, flac_saying, hostile_file, sound_file
for kind in KINDS:
    for which in range(8):
        decoded_sound(sound_file(kind, which), 16_000)
before, refused, wrong, slowest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0, [], 0.0
bounds = SoundBounds(max_seconds=60, decode_seconds=20)
bomb = flac_saying(0, flac_of_silence(3000))
for seed in range(int(sys.argv[1])):
    kinds = ("WAV", "AIFF", "FLAC") if seed % 8 else KINDS
    content, is_whole = (bomb, False) if seed % 50 == 0 else hostile_file(np.random.default_rng(seed), kinds)
    start = time.process_time()
    try:
        found = decoded_sound(content, 16_000, bounds=bounds)
        if not np.isfinite(found).all() or len(found) > 60 * 16_000:
            wrong.append(seed)
    except ValueError as error:
        refused += 1
        if is_whole or "sound" not in str(error):
            wrong.append(seed)
    slowest = max(slowest, time.process_time() - start)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"refused": refused, "wrong": wrong, "grown_kib": after - before, "slowest_s": slowest}))
"""


@pytest.mark.slow
def test_a_thousand_hostile_files_crash_nothing_and_memory_stays_bounded():
    """In a process of its own, whose largest memory the system counts; and nothing is written to the terminal."""
    command = [sys.executable, "-c", MANY, "1000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    counted = json.loads(done.stdout)
    assert counted["wrong"] == [] and 300 < counted["refused"] < 900
    assert counted["grown_kib"] < 64 << 10, counted  # 60 s of sound at 48 kHz take 11 MiB
    assert counted["slowest_s"] < 5, counted


SECONDS = 3.0
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
