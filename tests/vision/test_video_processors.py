"""Frames of a film are chosen, resized and cut as the reference does, and a processor's file is honoured by key."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from ferrum_jax.inputs.images.films import VideoSources
from ferrum_jax.inputs.images.processor_files import read_video_processor, video_processor_of
from ferrum_jax.inputs.images.processors import Gemma4Videos
from ferrum_jax.inputs.images.resizing import resized_frame
from scripts.goldens.pictures import sampled
from scripts.goldens.video_folder import film
from tests.rows import rows_beside
from tests.support import GOLDENS

FOLDER = GOLDENS / "videos"
CASES = json.loads((FOLDER / "cases.json").read_text())


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / f"{name}.npz"))


def processed(name: str, given=None):
    """(processor, indices, what it makes) of a case's film."""
    case = CASES[name]
    processor, (count, height, width, fps) = video_processor_of(case["settings"], {}), case["film"]
    found = VideoSources().found({"frames": film(count, height, width, 0) if given is None else given, "fps": fps})
    indices = processor.indices(found.count, found.fps)
    size = processor.size(len(indices), found.height, found.width)
    frames = VideoSources().frames(found, indices, size, processor.resample)
    return processor, indices, processor.process(frames, indices, fps)


@pytest.mark.parametrize("index", range(len(golden("resized")) // 3))
def test_a_frame_is_resized_to_the_reference_s_bytes(index):
    arrays = golden("resized")
    given, wanted = arrays[f"film_{index}"], arrays[f"resized_{index}"]
    found = resized_frame(given, *wanted.shape[:2], int(arrays[f"resample_{index}"]))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", CASES)
def test_values_of_frames_are_the_reference_s(name):
    processor, indices, video = processed(name)
    case = CASES[name]
    assert indices.tolist() == case["indices"]
    assert [len(video.groups), *video.groups[0].grid[1:]] == case["grid"]
    values = np.stack([group.patches for group in video.groups])
    if isinstance(processor, Gemma4Videos):  # the reference has patches row by row, and a pixel's channels last
        side, merge, (_, rows, columns) = processor.frame.patch_size, processor.frame.pooling, video.groups[0].grid
        squares = values.reshape(-1, rows // merge, columns // merge, merge, merge, 3, side, side)
        values = squares.transpose(0, 1, 3, 2, 4, 6, 7, 5).reshape(len(values), rows * columns, -1)
    np.testing.assert_allclose(sampled(values, 4000), golden("frames")[f"patches_{name}"], rtol=0, atol=2e-7)


@pytest.mark.parametrize("name", CASES)
def test_tokens_of_a_video_are_known_from_its_size_alone(name):
    processor, indices, video = processed(name)
    _, height, width, _ = CASES[name]["film"]
    assert processor.num_tokens(len(indices), height, width) == sum(group.num_tokens for group in video.groups)
    assert len(video.seconds) == len(video.groups)


def test_a_longer_cut_has_the_groups_of_the_shorter_and_a_changed_frame_others():
    long = film(9, 120, 201, 0)
    _, _, whole = processed("qwen3", long)
    _, _, short = processed("qwen3", long[:6])
    other = long.copy()
    other[3, 5, 7] ^= 64
    _, _, changed = processed("qwen3", other)
    digests = [[group.digest for group in video.groups] for video in (whole, short, changed)]
    assert digests[1] == digests[0][:3] and len(set(digests[0])) == 5
    assert [a == b for a, b in zip(digests[0], digests[2], strict=True)] == [True, False, True, True, True]
    assert short.seconds == whole.seconds[:3] == (0.25, 1.25, 2.25)


def test_a_digest_follows_the_settings():
    processor, indices, _ = processed("gemma4_long")
    frames = np.zeros((1, 48, 48, 3), np.uint8)
    brighter = dataclasses.replace(processor.frame.normalising, scale=0.5)
    others = [
        processor,
        *(
            dataclasses.replace(processor, frame=dataclasses.replace(processor.frame, **change))
            for change in ({"normalising": brighter}, {"pooling": 1}, {"patch_size": 8})
        ),
    ]
    assert len({each.process(frames, indices[:1], 1.0).groups[0].digest for each in others}) == 4


def test_films_that_cannot_be_are_refused_with_their_size():
    qwen = video_processor_of(CASES["qwen3"]["settings"], {})
    with pytest.raises(ValueError, match="the video has 1 frame; this model takes 2 or more"):
        qwen.size(1, 90, 90)
    with pytest.raises(ValueError, match="the video is 40000 x 90; its longer side may be 200 times the shorter"):
        qwen.size(4, 90, 40_000)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *rows_beside(__file__)["a setting that is not honoured is refused by name"],
        ({"size": {"shortest_edge": 1 << 40, "longest_edge": 1 << 41}}, "a shortest_edge of at most"),
    ],
)
def test_a_setting_that_is_not_honoured_is_refused_by_name(tmp_path, change, said):
    path = tmp_path / "video_preprocessor_config.json"
    path.write_text(json.dumps(CASES["qwen3"]["settings"] | change))
    with pytest.raises(ValueError, match=f"video_preprocessor_config.json: .*{said}"):
        read_video_processor(tmp_path)


def test_files_as_the_reference_saves_them_are_read():
    """All that transformers 5.24 writes of either processor, beside the checkpoint's own keys."""
    saved = {f"do_{verb}": True for verb in ("convert_rgb", "normalize", "rescale", "resize", "sample_frames")}
    saved |= {"rescale_factor": 1 / 255, "resample": 3, "return_metadata": False, "data_format": "channels_first"}
    saved |= dict.fromkeys(("crop_size", "device", "do_center_crop", "pad_size", "return_tensors", "video_metadata"))
    qwen = CASES["qwen3"]["settings"]
    more = {"fps": 2, "min_frames": 4, "max_frames": 768, "max_video_tokens": 768, "num_frames": None}
    more |= {"cap_pixels_per_frame": None, "default_to_square": True}
    assert video_processor_of(saved | qwen | more, {}) == video_processor_of(qwen, {})
    gemma = CASES["gemma4"]["settings"]
    more = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "patch_size": 16, "pooling_kernel_size": 3, "fps": None}
    assert video_processor_of(saved | gemma | more | {"size": None}, {}) == video_processor_of(gemma, {})


def test_a_folder_names_its_video_processor_in_either_file_and_others_are_none(tmp_path):
    assert read_video_processor(tmp_path) is None
    settings = CASES["gemma4"]["settings"]
    (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": settings}))
    found = read_video_processor(tmp_path)
    assert found == video_processor_of(settings, {}) and found.kind == "gemma4"
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {}}))
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(CASES["qwen3"]["settings"]))
    found = read_video_processor(tmp_path)
    assert found is not None and found.kind == "qwen"
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {"patch_size": 14}}))
    with pytest.raises(ValueError, match=r"patch_size is 16, and config\.json's vision_config has patch_size 14"):
        read_video_processor(tmp_path)
    others = {"video_processor_type": "Glm4vVideoProcessor", "anything": 1}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(others))
    assert read_video_processor(tmp_path) is None
