"""All images of a prompt are counted by their headers before one is decoded, and nobody decodes for who has left."""

import contextlib
import dataclasses
import io
import json

import numpy as np
import pytest
from PIL import Image

from ferrum_jax.inputs.images import decoding, sources
from ferrum_jax.inputs.images.decoding import Stopped, decoded_image, header_size
from ferrum_jax.inputs.images.placeholders import QWEN
from ferrum_jax.inputs.images.processor_files import read_processor
from ferrum_jax.inputs.images.prompt_images import PromptImages
from ferrum_jax.inputs.images.sources import ImageSources
from scripts.goldens.pictures import picture
from tests.engine.image_folder import PROCESSOR
from tests.histories import seeded
from tests.vision.hostile import BOMBS, KINDS, hostile_file, in_mode, saved

PLACE = QWEN.placeholder


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    """The length of each file that is decoded."""
    found: list[int] = []

    def noted(content, **how):
        found.append(len(content))
        return decoded_image(content, **how)

    monkeypatch.setattr(sources.decoding, "decoded_image", noted)
    return found


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> PromptImages:
    folder = tmp_path_factory.mktemp("processor")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    processor = read_processor(folder)
    assert processor is not None
    return PromptImages(processor=processor, folder=folder, sources=ImageSources())


def expanded(images: PromptImages, files, **how):
    place = {PLACE: 1}

    def encode(text: str, adds: bool) -> list[int]:
        return [place.get(word, 0) for word in text.replace(PLACE, f" {PLACE} ").split()]

    return images.expanded(f"{PLACE} x " * len(files), files, encode, adds=False, **how)


FILES = [saved(Image.fromarray(picture(40, 60, seed)), "PNG") for seed in range(6)]


@pytest.mark.parametrize(
    ("change", "how", "said"),
    [
        ({}, {"most": 20}, r"the first \d images of the prompt have \d+ tokens, and 20 fit, the model's max_model_len"),
        ({"max_prompt_pixels": 6000}, {}, "the first 3 images of the prompt have 7,200 pixels, and 6,000 may be"),
        ({"max_prompt_bytes": 10_000}, {}, r"the first 2 images of the prompt have [\d,]+ bytes, and 10,000 may be"),
    ],
)
def test_images_that_are_too_many_together_are_refused_before_one_is_decoded(images, decoded, change, how, said):
    images = dataclasses.replace(images, sources=ImageSources(**change))
    with pytest.raises(ValueError, match=said):
        expanded(images, FILES, **how)
    assert decoded == []


def test_a_later_image_that_is_none_is_refused_before_the_first_is_decoded(images, decoded):
    with pytest.raises(ValueError, match="image 6: the image is not a file of a kind"):
        expanded(images, [*FILES, b"no image"])
    assert decoded == []


def test_what_is_in_memory_already_has_no_bound_of_pixels(images):
    images = dataclasses.replace(images, sources=ImageSources(max_prompt_pixels=100))
    given = [picture(40, 60, 1), Image.fromarray(picture(40, 60, 2))]
    assert len(expanded(images, given).parts) == 2


def test_no_further_image_is_decoded_for_who_has_left(images, decoded):
    def look() -> None:
        if len(decoded) == 2:
            raise Stopped

    with pytest.raises(Stopped):
        expanded(images, FILES, look=look)
    assert len(decoded) == 2


def test_a_file_is_read_no_further_for_who_has_left():
    content = saved(Image.fromarray(picture(700, 700, 3)), "PNG")
    looks = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 12:
            raise Stopped

    with pytest.raises(Stopped):
        decoded_image(content, look=look)
    assert len(looks) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_a_header_has_the_size_that_decoding_gives(monkeypatch, kind):
    content = saved(in_mode(picture(30, 44, 5), "RGB") if kind != "GIF" else in_mode(picture(30, 44, 5), "P"), kind)
    assert header_size(content) == decoded_image(content).shape[1::-1] == (44, 30)
    monkeypatch.setattr(decoding, "_rgb", None)
    monkeypatch.setattr(Image.Image, "load", None)
    assert header_size(content) == (44, 30), "nothing is decoded"
    with pytest.raises(ValueError, match="at most 100 are taken"):
        header_size(content, max_pixels=100)


def test_a_turned_image_has_as_many_tokens_as_its_header_says(images):
    turned = Image.fromarray(picture(40, 90, 7))
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    turned.save(file, "JPEG", exif=exif)
    (part,) = expanded(images, [file.getvalue()]).parts
    width, height = header_size(file.getvalue())
    assert part.num_tokens == images.processor.num_tokens(height, width)
    assert np.shape(decoded_image(file.getvalue()))[:2] == (width, height)


@pytest.mark.parametrize("seed", range(150))
def test_a_hostile_header_has_the_size_that_is_decoded_or_is_refused(seed):
    """A file that is one thing to who counts and another to who decodes would get around the bounds."""
    content, _ = hostile_file(np.random.default_rng(seeded(seed)))
    try:
        pixels = decoded_image(content)
    except ValueError:
        with contextlib.suppress(ValueError):
            header_size(content)
        return
    assert sorted(header_size(content)) == sorted(pixels.shape[:2])


@pytest.mark.parametrize("name", [name for name in BOMBS if not name.startswith(("png_text", "png_profile"))])
def test_a_bomb_is_refused_by_its_header_or_when_it_is_decoded(name):
    with pytest.raises(ValueError, match="the image "):
        width, height = header_size(BOMBS[name])
        assert width * height <= decoding.MAX_PIXELS
        decoded_image(BOMBS[name])


@pytest.mark.parametrize("one", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_a_file_with_another_behind_it_is_counted_and_decoded_as_the_first(one, other):
    first, second = (
        saved(in_mode(picture(*size, 3), "RGB"), kind) for size, kind in (((20, 30), one), ((90, 80), other))
    )
    try:
        shape = decoded_image(first + second).shape[:2]
    except ValueError:
        return
    assert header_size(first + second) == shape[::-1] == (30, 20)
