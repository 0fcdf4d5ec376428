"""A processor's file that contradicts its tower, or says nothing that can be read, is refused before any image."""

from __future__ import annotations

import json

import pytest

from ferrum_jax.config import EngineConfig
from ferrum_jax.vision.processor_files import processor_of, read_processor
from ferrum_jax.vision.sources import ImageSources
from tests.engine.image_folder import PROCESSOR

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
        ImageSources.of_config(EngineConfig(image_root=root))


@pytest.mark.parametrize("name", ["max_image_tokens", "max_image_patches"])
def test_more_than_can_be_counted_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 1000000000000; it must be at most 1073741824"):
        EngineConfig(**{name: 10**12})
