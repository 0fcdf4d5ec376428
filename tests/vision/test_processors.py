"""Patches are those of the reference's Pillow processors, and a processor's file is honoured or refused by key.

A processor's file that contradicts its tower, or says nothing that can be read, is refused before any image.

A processed image says what it is, or is refused.
"""

import dataclasses
import functools
import json

import numpy as np
import pytest

from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.images.image import Normalising, ProcessedImage
from ferrum_jax.inputs.images.processor_files import processor_of, read_processor
from ferrum_jax.inputs.images.processors import Gemma3Images, Gemma4Images, GlmImages, PixtralImages, QwenImages
from ferrum_jax.inputs.images.sources import ImageSources
from scripts.goldens.pictures import picture, sampled
from tests.engine.image_folder import PROCESSOR
from tests.rows import rows_beside
from tests.support import GOLDENS

FOLDER = GOLDENS / "images"
CASES = json.loads((FOLDER / "cases.json").read_text())
STEP = 1 / 255  # of a channel before it is normalised


@functools.cache
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / "pixels.npz"))


def process(name):
    case = CASES[name]
    return (processor := processor_of(case["settings"], {})), processor.process(picture(*case["size"], 0))


@pytest.mark.parametrize("name", CASES)
def test_patches_are_the_reference_s_to_one_step_of_a_channel(name):
    processor, image = process(name)
    values = image.patches
    if isinstance(processor, Gemma3Images):  # the reference leaves it to the tower to cut patches
        side = processor.patch_size
        values = values.reshape(*image.grid, 3, side, side).transpose(0, 3, 1, 4, 2, 5)
        values = values.reshape(image.grid[0], 3, processor.height, processor.width)
    if isinstance(processor, PixtralImages):  # likewise, of patches by squares
        side, (_, rows, columns) = processor.patch_size, image.grid
        squares = values.reshape(rows // 2, columns // 2, 2, 2, 3, side, side)
        values = squares.transpose(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, rows * side, columns * side)
    if isinstance(processor, Gemma4Images):  # the reference has patches row by row, and a pixel's channels last
        side, merge = processor.patch_size, processor.pooling
        squares = values.reshape(image.grid[1] // merge, image.grid[2] // merge, merge, merge, 3, side, side)
        values = squares.transpose(0, 2, 1, 3, 5, 6, 4).reshape(*image.grid[1:], -1)
    assert list(image.grid) == CASES[name]["grid"]
    least = min(processor.normalising.std)
    np.testing.assert_allclose(sampled(values), golden()[f"patches_{name}"], rtol=0, atol=STEP / least + 1e-6)
    # with the Pillow that made them, not even a rounding apart
    assert np.mean(sampled(values) == golden()[f"patches_{name}"]) > 0.99


@pytest.mark.parametrize("name", CASES)
def test_the_number_of_tokens_is_known_from_a_size_alone(name):
    processor, image = process(name)
    assert processor.num_tokens(*CASES[name]["size"]) == image.num_tokens
    if isinstance(processor, Gemma3Images):
        merged, each = image.grid[1] * image.grid[2], processor.tokens_per_crop
    else:
        merged, each = (processor.pooling if isinstance(processor, Gemma4Images) else processor.merge_size) ** 2, 1
    assert image.num_tokens == len(image.patches) // merged * each + image.token_rows - 1
    assert image.token_rows == (image.grid[1] // 2 if isinstance(processor, PixtralImages) else 1)


def test_a_digest_follows_pixels_and_settings_and_nothing_else():
    processor = processor_of(CASES["small_equal"]["settings"], {})
    pixels = picture(40, 50, 1)
    one = processor.process(pixels).digest
    other = pixels.copy()
    other[3, 4, 2] ^= 1
    digests = {
        one,
        processor.process(other).digest,
        processor.process(pixels.reshape(50, 40, 3)).digest,
        dataclasses.replace(processor, max_pixels=processor.max_pixels - 1).process(pixels).digest,
        dataclasses.replace(processor, merge_size=1).process(pixels).digest,
    }
    assert len(digests) == 5 and processor.process(np.asfortranarray(pixels)).digest == one


def test_an_image_too_narrow_for_qwen_is_refused_with_its_size():
    processor = processor_of(CASES["qwen3"]["settings"], {})
    with pytest.raises(ValueError, match="the image is 4 x 900; its longer side may be 200 times the shorter at most"):
        processor.process(np.zeros((900, 4, 3), np.uint8))


def test_an_image_too_narrow_for_pixtral_is_refused_with_its_size():
    processor = processor_of(CASES["pixtral_long"]["settings"], {})
    assert processor.num_tokens(1, 160) == 5
    with pytest.raises(ValueError, match="the image is 4 x 900; its longer side may be 160 times the shorter at most"):
        processor.process(np.zeros((900, 4, 3), np.uint8))


def test_glm_s_bounds_count_the_pixels_of_all_frames():
    processor = processor_of(CASES["glm"]["settings"], {})
    assert isinstance(processor, GlmImages) and (processor.min_pixels, processor.max_pixels) == (6272, 4816896)
    assert (
        processor_of(CASES["glm"]["settings"] | {"image_processor_type": "Glm46VImageProcessorFast"}, {}) == processor
    )


def test_a_tower_says_the_size_of_pixtral_s_patches(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(CASES["pixtral"]["settings"]))
    config = {"vision_config": {"patch_size": 14}, "spatial_merge_size": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    processor = read_processor(tmp_path)
    assert isinstance(processor, PixtralImages)
    assert (processor.patch_size, processor.merge_size, processor.longest_edge) == (14, 3, 1540)


KIND = "image_processor_type is 'ViTImageProcessor'; known are Gemma3"
NUMBERS = "is .*; it must be three numbers"
DIVISOR = "image_std is .*; pixels are divided by it, so it must be three numbers of at least 1e-06"
CROPS = "pan_and_scan_max_num_crops is 4, more than pan_and_scan_min_crop_size, 3"
EDGES = "size is .*; it must have a shortest_edge and a longest_edge"


@pytest.mark.parametrize(
    ("family", "change", "tower", "said"),
    [
        *rows_beside(__file__)["what no image is processed by is refused by name"],
        ("qwen3", {"image_processor_type": "ViTImageProcessor"}, {}, KIND),
        ("qwen3", {"size": {"height": 3, "width": 4}}, {}, EDGES),
        (
            "qwen3",
            {"size": {"shortest_edge": 10**9, "longest_edge": 10**10}},
            {},
            "size.shortest_edge is 1000000000, and every",
        ),
        ("qwen3", {"image_mean": [0.5, float("inf"), 0.5]}, {}, f"image_mean {NUMBERS}"),
        ("qwen3", {"image_mean": [0.5, float("nan"), 0.5]}, {}, f"image_mean {NUMBERS}"),
        ("qwen3", {"image_std": [0.5, 0.5, float("inf")]}, {}, f"image_std {NUMBERS}"),
        ("qwen3", {"image_std": [0, 0, 0]}, {}, DIVISOR),
        ("gemma_scan_wide", {"pan_and_scan_min_crop_size": 3}, {}, CROPS),
    ],
)
def test_what_no_image_is_processed_by_is_refused_by_name(family, change, tower, said):
    with pytest.raises(ValueError, match=said):
        processor_of(CASES[family]["settings"] | change, tower)


def test_an_image_of_any_shape_has_between_one_token_and_the_limit():
    processor, rng = processor_of(CASES["gemma4"]["settings"], {}), np.random.default_rng(5)
    sizes = np.exp(rng.uniform(0, np.log(30_000), (5_000, 2))).astype(int).tolist()
    for height, width in [*sizes, (1, 1), (1, 30_000), (30_000, 1), (48, 48 * 70), (48 * 7, 48 * 10)]:
        rows, columns = processor.size(height, width)
        assert rows % 48 == columns % 48 == 0 and rows >= 48 and columns >= 48
        assert processor.num_tokens(height, width) == rows * columns // 48**2 <= 70


def test_bounds_that_qwen_s_older_files_name_are_those_of_size():
    older = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056}
    processor = processor_of(older | {"size": {"min_pixels": 1, "max_pixels": 2}}, {})
    assert isinstance(processor, QwenImages)
    assert (processor.min_pixels, processor.max_pixels) == (3136, 12845056)


def test_a_folder_s_processor_is_read_from_either_file(tmp_path):
    assert read_processor(tmp_path) is None
    settings = CASES["gemma"]["settings"]
    plain = {key: value for key, value in settings.items() if key != "image_seq_length"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {"patch_size": 28}}))
    first = read_processor(tmp_path)
    assert isinstance(first, Gemma3Images) and (first.patch_size, first.tokens_per_crop) == (28, 256)
    whole = {"processor_class": "Gemma3Processor", "image_seq_length": 64, "image_processor": plain}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    second = read_processor(tmp_path)
    assert second == dataclasses.replace(first, tokens_per_crop=64)
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"processor_config.json cannot be read as JSON"):
        read_processor(tmp_path)


TOWER = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}


KEYS = {"patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size", "merge_size": "spatial_merge_size"}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [1, 3, 8, 10**9])
def test_patches_that_the_tower_does_not_take_are_refused_with_both_values(key, value):
    its_key = KEYS[key]
    said = f"{key} is {value}, and config.json's vision_config has {its_key} {TOWER[its_key]}; make them equal"
    with pytest.raises(ValueError, match=said):
        processor_of(PROCESSOR | {key: value}, TOWER)
    assert processor_of(PROCESSOR, TOWER) == processor_of(PROCESSOR, {})


@pytest.mark.parametrize("value", ["x", [1], 3])
def test_a_processor_that_is_no_object_is_refused_with_its_file(tmp_path, value):
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": value}))
    with pytest.raises(ValueError, match=r"processor_config\.json: image_processor is .*; it must be an object"):
        read_processor(tmp_path)


@pytest.mark.parametrize("root", ["", "  "])
def test_an_empty_root_is_not_the_working_directory(root):
    with pytest.raises(ValueError, match="image_root is empty; name the folder"):
        ImageSources.allowed("", root)


@pytest.mark.parametrize("name", ["max_image_tokens", "max_image_patches"])
def test_more_than_can_be_counted_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 1000000000000; it must be at most 1073741824"):
        EngineConfig(**{name: 10**12})


HALVES = Normalising(scale=1 / 255, mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2))


def image(pixels: np.ndarray, temporal: int = 1) -> ProcessedImage:
    return ProcessedImage(
        pixels=pixels, normalising=HALVES, temporal=temporal, grid=(1, 2, 4), num_tokens=2, digest=b"cat"
    )


def test_patches_fill_their_grid():
    assert image(np.zeros((8, 3, 2, 2), np.uint8)).num_tokens == 2
    for pixels in (np.zeros((7, 3, 2, 2), np.uint8), np.zeros((8, 3, 2, 2)), np.zeros((8, 12), np.uint8)):
        with pytest.raises(AssertionError, match="patches"):
            image(pixels)


def test_values_are_normalised_bytes_in_the_order_channel_time_row_column():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 3, 2, 2), np.uint8)
    mean, std = (np.array(values)[:, None, None] for values in (HALVES.mean, HALVES.std))
    values = image(pixels, temporal=2).patches
    assert values.dtype == np.float32 and values.shape == (8, 24)
    wanted = ((pixels / 255 - mean) / std)[:, :, None].repeat(2, axis=2).reshape(8, -1)
    np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-6)
