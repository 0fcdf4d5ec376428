"""Films are decoded in a child within bounds, and a damaged or hostile file is refused with what is wrong with it."""

import contextlib
import http.server
import importlib.util
import json
import threading
import time

import numpy as np
import pytest

from ferrum_jax.inputs.images import films
from ferrum_jax.inputs.images.decoding import Stopped
from ferrum_jax.inputs.images.films import VideoSources
from scripts.goldens.video_folder import film
from tests.marks import few
from tests.rows import rows_beside
from tests.support import raising
from tests.vision.film_files import KINDS, TURNED, UPRIGHT, film_file, head_first, steps

ROWS = rows_beside(__file__)

SOURCES = VideoSources()
FRAMES = steps(30)


@pytest.fixture(scope="module")
def mp4() -> bytes:
    return head_first(film_file(FRAMES))


def seen(content: bytes, indices, size=(48, 64), sources: VideoSources = SOURCES) -> np.ndarray:
    return sources.frames(sources.found(content), np.array(indices), size, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_film_has_its_frames_and_clock(kind):
    content = film_file(FRAMES, kind)
    found = SOURCES.found(content)
    assert (found.count, round(found.fps, 3), found.height, found.width) == (30, 10.0, 48, 64)
    frames = SOURCES.frames(found, np.array([0, 7, 29]), (48, 64), 3)
    wanted = FRAMES[[0, 7, 29], :, 40:].mean(axis=(1, 2, 3))
    np.testing.assert_allclose(frames[:, :, 40:].mean(axis=(1, 2, 3)), wanted, rtol=0, atol=16 if kind == "gif" else 3)
    assert frames[:, :, :24].max() < 20


def test_frames_are_resized_where_they_are_decoded(mp4):
    whole = seen(mp4, [3, 5])
    by_frames = SOURCES.found({"frames": whole, "fps": 1})
    np.testing.assert_array_equal(seen(mp4, [3, 5], (30, 20)), SOURCES.frames(by_frames, np.arange(2), (30, 20), 3))


@pytest.mark.parametrize("kind", few(KINDS, 2))
def test_frames_are_the_same_where_others_before_them_are_passed_over(kind):
    content = film_file(film(60, 48, 64, 4), kind, begins=8)
    whole = seen(content, range(60))
    assert len({frame.tobytes() for frame in whole}) > 30
    for indices in ([59], [3, 30, 31, 57], range(0, 60, 7)):
        np.testing.assert_array_equal(seen(content, indices), whole[list(indices)])


def test_a_film_is_turned_as_players_turn_it(mp4):
    assert mp4.count(UPRIGHT) >= 2  # of the film and of its track
    at = mp4.index(UPRIGHT, mp4.index(b"tkhd"))
    turned = mp4[:at] + TURNED + mp4[at + len(TURNED) :]
    found = SOURCES.found(turned)
    assert (found.height, found.width) == (64, 48)
    (frame,) = SOURCES.frames(found, np.array([20]), (64, 48), 3)
    assert frame[:24].max() < 20 and frame[40:].min() > 100  # what was left is above


def test_frames_may_be_arrays_pictures_and_lists_of_these():
    from PIL import Image

    pictures = [Image.fromarray(frame) for frame in FRAMES[:4]]
    for given in (FRAMES[:4], list(FRAMES[:4]), pictures, tuple(pictures), {"frames": pictures, "fps": 24}):
        found = SOURCES.found(given)
        assert (found.count, found.fps) == (4, 24.0)
        np.testing.assert_array_equal(SOURCES.frames(found, np.array([1, 3]), (48, 64), 3), FRAMES[[1, 3]])


@pytest.mark.parametrize(("name", "said"), ROWS["a file that is none or is damaged is refused"])
def test_a_file_that_is_none_or_is_damaged_is_refused(mp4, name, said):
    inside = mp4.index(b"mdat") + 4
    files = {
        "empty": b"",
        "text": b"no film at all, but a text of some length",
        "picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
        "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        "concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
        "head alone": mp4[:40],
        "no head": mp4[inside - 8 :],
        "half": mp4[: inside + (len(mp4) - inside) // 2],
        "lying": mp4[:inside],
        "noise": mp4[:32] + np.random.default_rng(1).bytes(4000),
    }
    with pytest.raises(ValueError, match=said):
        seen(files[name], [0, 29])


def test_every_truncation_and_flipped_byte_is_decoded_or_refused_in_words(mp4):
    random = np.random.default_rng(5)
    for number in range(6):
        damaged = bytearray(mp4)
        for at in random.integers(8, len(mp4), 12):
            damaged[at] = random.integers(256)
        content = bytes(damaged[: random.integers(100, len(mp4))] if number % 2 else damaged)
        try:
            assert seen(content, [0]).shape == (1, 48, 64, 3)
        except ValueError as error:
            assert str(error).startswith("the video"), error


def test_a_size_that_a_header_claims_is_not_believed(mp4):
    own, huge = (b"\0\x40\0\x30\0\x48", b"\xff\xff\xff\xff\0\x48")
    assert mp4.count(own) == 1
    np.testing.assert_array_equal(seen(mp4.replace(own, huge), [0, 9]), seen(mp4, [0, 9]))


@pytest.mark.parametrize(
    ("side", "said"),
    [
        (8000, "the video is 8000 x 8000, 64,000,000 pixels; at most 16,777,216"),
        (65535, "the video .* cannot be decoded"),
    ],
)
def test_a_film_of_huge_pictures_is_refused_before_one_is_decoded(side, said):
    small = film_file(FRAMES, "gif")
    with pytest.raises(ValueError, match=said):
        SOURCES.found(small[:6] + side.to_bytes(2, "little") * 2 + small[10:])


@pytest.mark.parametrize(("bounds", "said"), ROWS["a film has bounds"])
def test_a_film_has_bounds(mp4, bounds, said):
    with pytest.raises(ValueError, match=said):
        seen(mp4, [0, 29], sources=VideoSources(**bounds))


def test_a_film_that_takes_too_long_is_ended():
    content = film_file(np.zeros((600, 480, 640, 3), np.uint8))
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"the video cannot be decoded: it took more than 0\.1 s; cut it shorter"):
        VideoSources(decode_s=0.1).frames(SOURCES.found(content), np.arange(600), (48, 64), 3)
    assert time.monotonic() - start < 30


def test_a_decoder_that_wants_too_much_memory_is_ended(monkeypatch):
    monkeypatch.setattr(films, "_OWN_MEMORY", 1 << 20)
    monkeypatch.setattr(films, "_BYTES_OF_PIXEL", 0)
    content = film_file(np.random.default_rng(0).integers(0, 256, (3, 1080, 1920, 3), np.uint8))
    with pytest.raises(ValueError, match=r"the video cannot be decoded: it took more than \d MiB of memory"):
        SOURCES.found(content)


def test_who_has_left_is_decoded_for_no_further(mp4):

    with pytest.raises(Stopped):
        SOURCES.found(mp4, raising(Stopped))


def test_what_a_film_names_is_not_opened(mp4, tmp_path):
    """A film whose data lie in another file, as a QuickTime reference says, makes nobody open that."""
    (tmp_path / "other.mp4").write_bytes(mp4)
    with open_elsewhere() as (asked, port):
        for url in (f"http://127.0.0.1:{port}/a.mp4", f"file://{tmp_path}/other.mp4"):
            with pytest.raises(ValueError, match="the video is damaged"):
                seen(with_data_elsewhere(mp4, url.encode()), [0])
    assert asked == []


@contextlib.contextmanager
def open_elsewhere():
    """(paths that a server was asked for, its port)."""
    asked = []

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield asked, server.server_port
        server.shutdown()


def with_data_elsewhere(content: bytes, url: bytes) -> bytes:
    """The film with a URL for its data, which it then has not itself."""
    own = b"\0\0\0\x0curl \0\0\0\x01"
    at, new = content.index(own), (13 + len(url)).to_bytes(4, "big") + b"url " + bytes(4) + url + b"\0"
    grown = bytearray(content[:at] + new + content[at + len(own) :])
    for name in (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"):
        start = content.rindex(name, 0, at) - 4
        size = int.from_bytes(grown[start : start + 4], "big") + len(new) - len(own)
        grown[start : start + 4] = size.to_bytes(4, "big")
    return bytes(grown[: grown.index(b"mdat") + 4])


def test_a_video_without_pyav_names_the_extra(monkeypatch, mp4):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"videos need PyAV; pip install -e .*\[video\]"):
        SOURCES.found(mp4)


def test_facts_are_small_and_plain(mp4):
    found = SOURCES.found(mp4)
    assert json.loads(json.dumps([found.count, found.fps])) == [30, 10.0] and type(found.count) is int
