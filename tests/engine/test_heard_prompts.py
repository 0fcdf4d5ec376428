"""Sounds in prompts, alone and beside images: any length, kept by content, and refused by their kind."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ferrum_jax.inputs.audio.clip import ProcessedClip
from ferrum_jax.io.ints import ceil_div
from tests.engine.golden_media import (
    BOTH,
    END,
    FAMILIES,
    PLACE,
    QWEN,
    START,
    asked,
    assert_golden,
    check_compiles_nothing,
    engine_of,
    run,
)

CONFIG = FAMILIES[QWEN].config


def test_no_step_compiles_whatever_lengths_sounds_have():
    rng, requests = np.random.default_rng(3), []
    for number in range(40):
        length = int(rng.integers(1, 400))
        frames = rng.normal(size=(ceil_div(length, 100) * 100, 10)).astype(np.float32)
        count = length // 100 * 13 + ceil_div(length % 100, 8)
        clip = ProcessedClip(
            features=frames,
            grid=(1, len(frames), 1),
            num_frames=length,
            num_tokens=count,
            seconds=1.0,
            digest=b"%d" % number,
        )
        requests.append(([7, START, *[PLACE] * count, END], clip, "audio"))
    check_compiles_nothing(engine_of(folder=QWEN, enable_prefix_caching=False), requests)


def test_what_is_no_sound_of_the_model_is_refused_by_name():
    engine = engine_of(folder=QWEN)
    ids, params, options = asked(1, folder=QWEN)
    (clip,) = options.images

    def refused(said: str, **changes) -> None:
        with pytest.raises(ValueError, match=said):
            engine.add(ids, params, dataclasses.replace(options, **changes))

    refused("media spans of kind 'audio' and no sounds, .* give the sounds", images=[])
    refused("not those of the sounds; give one for each", images=[dataclasses.replace(clip, digest=b"other")])
    span = options.media[0]
    few = dataclasses.replace(clip, num_tokens=13)
    refused(
        "sound 0 has 13 tokens and 400 frames, and the model makes up to 13 tokens of 100 frames",
        images=[few],
        media=[dataclasses.replace(span, length=13)],
    )
    with pytest.raises(ValueError, match="sound 0 has 400 frames, and max_image_patches is 200; give a shorter sound"):
        engine_of(dataclasses.replace(CONFIG, max_image_patches=200), folder=QWEN).add(ids, params, options)
    small = dataclasses.replace(CONFIG, max_image_tokens=32)
    with pytest.raises(
        ValueError, match="sounds take 48 tokens, and the engine keeps those of 32; give fewer or short"
    ):
        engine_of(small, folder=QWEN).add(ids, params, options)


def test_both_are_kept_and_hit_and_another_sound_hits_nothing_behind_it():
    engine = engine_of(folder=BOTH)
    run(engine, asked(4, folder=BOTH))
    before = engine.counts()
    (again,) = run(engine, asked(4, folder=BOTH))
    assert_golden(again, 4, BOTH)
    assert engine.counts()["encoder_calls"] == before["encoder_calls"]
    assert again.num_cached_tokens == len(again.prompt_token_ids) and again.num_cached_media == 4
    (other,) = run(engine, asked(4, folder=BOTH, louder=0.5))
    assert engine.counts()["images_encoded"] == before["images_encoded"], "its images are the same"
    assert engine.counts()["sounds_encoded"] == before["sounds_encoded"] + 2 and other.token_ids != again.token_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": []}, "the prompt has media spans of kind 'image' and no images"),
        ({"drop": "audio"}, "the prompt has media spans of kind 'audio' and no sounds"),
        ({"tokens": 1}, "media spans of kind 'audio' are not those of the sounds"),
    ],
)
def test_media_that_are_not_the_spans_are_refused_by_their_kind(change, message):
    ids, params, options = asked(3, folder=BOTH)
    given = list(options.images)
    if "images" in change:
        given = []
    elif "drop" in change:
        given = [each for each in given if each.kind != change["drop"]]
    else:
        given = [dataclasses.replace(each, num_tokens=1) if each.kind == "audio" else each for each in given]
    with pytest.raises(ValueError, match=message):
        engine_of(folder=BOTH).add(ids, params, dataclasses.replace(options, images=given))


def test_more_than_the_pool_holds_is_refused_for_both_together():
    ids, params, options = asked(4, folder=BOTH)
    engine = engine_of(dataclasses.replace(FAMILIES[BOTH].config, max_image_tokens=48), folder=BOTH)
    with pytest.raises(
        ValueError, match=r"the prompt's images and sounds take 64 tokens, and the engine keeps those of 48"
    ):
        engine.add(ids, params, options)
