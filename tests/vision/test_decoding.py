"""A file becomes the picture that it shows, or an error that says why not; whatever it is, memory stays bounded."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ferrum_jax.inputs.images.decoding import MAX_PIXELS, decoded_image, pixels_of, pixels_of_array
from scripts.goldens.pictures import picture
from tests.support import ROOT
from tests.vision import hostile
from tests.vision.hostile import BOMBS, hostile_file, in_mode, saved

PIXELS = picture(21, 34, 0)
WHITE = 255


def over_white(pixels: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[:, :, None] / 255
    return pixels * share + WHITE * (1 - share)


@pytest.mark.parametrize("kind", [kind for kind in hostile.KINDS if kind not in ("JPEG", "GIF")])
def test_a_file_without_loss_gives_its_pixels(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    np.testing.assert_array_equal(decoded_image(saved(Image.fromarray(PIXELS), kind, **options)), PIXELS)


def test_a_jpeg_is_near_its_picture():
    smooth = np.full((40, 40, 3), (10, 200, 90), np.uint8)
    found = decoded_image(saved(Image.fromarray(smooth), "JPEG", quality=95)).astype(int)
    assert np.abs(found - smooth).max() <= 3


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_transparent_pixels_show_white(kind):
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    found = decoded_image(saved(in_mode(PIXELS, "RGBA"), kind, **options))
    assert np.abs(found - over_white(PIXELS, PIXELS[:, :, 1])).max() <= 1.01


def test_a_palette_s_transparent_colour_shows_white():
    image = Image.fromarray(np.array([[0, 1], [1, 0]], np.uint8), "P")
    image.putpalette([255, 0, 0, 0, 0, 255])
    for kind in ("PNG", "GIF"):
        found = decoded_image(saved(image, kind, transparency=0))
        np.testing.assert_array_equal(found, [[[255] * 3, [0, 0, 255]], [[0, 0, 255], [255] * 3]])


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_a_channel_are_cut_to_the_upper_8(kind):
    found = decoded_image(saved(in_mode(PIXELS, "I;16"), kind))
    np.testing.assert_array_equal(found, np.repeat(PIXELS[:, :, :1], 3, axis=2))


def test_16_bits_of_colour_are_cut_to_the_upper_8():
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in PIXELS.astype(np.uint16) * 256 + 77)
    import zlib

    file = hostile.png(34, 21, zlib.compress(rows), depth=16)
    np.testing.assert_array_equal(decoded_image(file), PIXELS)


def test_cmyk_is_shown_as_rgb():
    flat = np.full((16, 16, 3), (40, 160, 220), np.uint8)
    found = decoded_image(saved(Image.fromarray(flat).convert("CMYK"), "JPEG", quality=100)).astype(int)
    assert np.abs(found - flat).max() <= 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_rotated_photograph_is_shown_upright(orientation):
    """As the reference shows one that it loads; its own definition of the eight values is the oracle."""
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    content = saved(Image.fromarray(PIXELS), "PNG", exif=exif)
    with Image.open(io.BytesIO(content)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    np.testing.assert_array_equal(decoded_image(content), expected)
    assert expected.shape[:2] == ((34, 21) if orientation > 4 else (21, 34))


def test_a_pillow_image_is_taken_as_it_lies_in_memory():
    image = Image.fromarray(PIXELS)
    image.getexif()[0x0112] = 6
    np.testing.assert_array_equal(pixels_of(image), PIXELS)
    np.testing.assert_array_equal(pixels_of(image.convert("L")), np.asarray(image.convert("L").convert("RGB")))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_an_animation_shows_its_first_frame(kind):
    frames = [Image.new("RGB", (9, 7), colour) for colour in ("red", "green", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    found = decoded_image(saved(frames[0], kind, save_all=True, append_images=frames[1:], **options))
    np.testing.assert_array_equal(found, np.full((7, 9, 3), (255, 0, 0)))


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 1), (3, 4, 3), (3, 4, 4)])
def test_an_array_has_one_channel_three_or_four(shape):
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    found = pixels_of_array(array)
    assert found.shape == (3, 4, 3) and found.dtype == np.uint8
    if shape[2:] != (4,):
        np.testing.assert_array_equal(found, np.broadcast_to(array if array.ndim == 3 else array[..., None], (3, 4, 3)))


SHAPE = r"the image is an array \w+\[.*; it must be uint8 \[height, width, 3\]"
SIZE = r"the image is \d x \d pixels; it must have at least one"


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        *(((3, 4, 3), np.float32, SHAPE), ((3, 4, 2), np.uint8, SHAPE), ((4,), np.uint8, SHAPE)),
        *(((0, 4, 3), np.uint8, SIZE), ((4, 0), np.uint8, SIZE)),
    ],
)
def test_another_array_is_refused_with_its_shape(shape, dtype, said):
    with pytest.raises(ValueError, match=said):
        pixels_of_array(np.zeros(shape, dtype))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the image is empty"),
        (b"<svg/>", "not a file of a kind that is read here: PNG, JPEG, WEBP, GIF, BMP, TIFF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a file of a kind"),
        (saved(Image.fromarray(PIXELS), "PNG")[:-40], "the image is damaged and cannot be decoded: .*truncated"),
        (saved(Image.fromarray(PIXELS), "JPEG")[:-40], "the image is damaged and cannot be decoded: .*truncated"),
        (saved(in_mode(PIXELS, "F"), "TIFF"), "the image has floating-point pixels"),
        (hostile.png(0, 0, b""), "the image"),
        (hostile.png(5, 0, b""), "the image"),
    ],
)
def test_a_file_that_is_no_sound_image_is_refused_with_the_reason(content, said):
    with pytest.raises(ValueError, match=said):
        decoded_image(content)


def test_pixels_are_bounded_before_they_are_decoded():
    content = saved(Image.new("L", (100, 100)), "PNG")
    assert decoded_image(content, max_pixels=10000).shape == (100, 100, 3)
    with pytest.raises(ValueError, match=r"the image is 100 x 100, 10,000 pixels; at most 9,999 are taken"):
        decoded_image(content, max_pixels=9999)
    with pytest.raises(ValueError, match="at most 9,999 are taken"):
        pixels_of_array(np.zeros((100, 100), np.uint8), max_pixels=9999)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name):
    with pytest.raises(ValueError, match="the image"):
        decoded_image(BOMBS[name])


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_a_hostile_file_is_refused_or_shows_the_right_picture(seed):
    content, pixels = hostile_file(np.random.default_rng(seed))
    try:
        found = decoded_image(content)
    except ValueError as error:
        assert str(error).startswith("the image ") and len(str(error)) < 400
        assert pixels is None, f"a sound file was refused: {error}"
    else:
        assert found.dtype == np.uint8 and found.ndim == 3 and found.shape[2] == 3
        assert pixels is None or np.array_equal(found, pixels)


MANY = """
import json, resource, sys, time, warnings
import numpy as np
from PIL import Image
from ferrum_jax.inputs.images.decoding import decoded_image
from tests.vision.hostile import BOMBS, hostile_file, saved
warnings.simplefilter("ignore", Image.DecompressionBombWarning)
decoded_image(saved(Image.new("RGB", (64, 64)), "WEBP"))
before, refused, wrong, slowest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0, [], 0.0
for seed in range(int(sys.argv[1])):
    content, pixels = hostile_file(np.random.default_rng(seed))
    start = time.process_time()
    try:
        found = decoded_image(content)
        if found.dtype != np.uint8 or found.ndim != 3 or (pixels is not None and not np.array_equal(found, pixels)):
            wrong.append(seed)
    except ValueError as error:
        refused += 1
        if pixels is not None or not str(error).startswith("the image "):
            wrong.append(seed)
    slowest = max(slowest, time.process_time() - start)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"refused": refused, "wrong": wrong, "grown_kib": after - before, "slowest_s": slowest}))
"""


@pytest.mark.slow
def test_a_thousand_hostile_files_crash_nothing_and_memory_stays_bounded():
    """In a process of its own, whose largest memory the system counts: what C libraries take is in it."""
    command = [sys.executable, "-c", MANY, "1000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert counted["wrong"] == [] and 400 < counted["refused"] < 950
    assert counted["grown_kib"] < 16 * MAX_PIXELS // 1024, counted
    assert counted["slowest_s"] < 10, counted


LARGE = """
import resource, sys
from ferrum_jax.inputs.images.decoding import decoded_image
content = sys.stdin.buffer.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
shape = decoded_image(content).shape
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, *shape)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode"), [("PNG", "RGBA"), ("WEBP", "RGBA"), ("TIFF", "CMYK"), ("GIF", "P")])
def test_decoding_takes_at_most_sixteen_bytes_a_pixel(kind, mode):
    side = 3000
    exif = Image.Exif()
    exif[0x0112] = 6  # turned, which is a copy
    options = {"lossless": True, "method": 0} if kind == "WEBP" else {}
    options |= {"exif": exif} if kind in ("PNG", "WEBP") else {}
    content = saved(Image.new(mode, (side, side)), kind, **options)
    done = subprocess.run([sys.executable, "-c", LARGE], cwd=ROOT, input=content, capture_output=True, check=True)
    grown_kib, *shape = map(int, done.stdout.split())
    assert shape == [side, side, 3] and grown_kib * 1024 < 16.5 * side * side, grown_kib * 1024 / side**2
