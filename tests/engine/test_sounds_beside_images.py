"""Sounds and images in one prompt: each by its own encoder, in one pool, kept by content and cut anywhere."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest

from ferrum_jax.asked.options import RequestOptions
from ferrum_jax.asked.sampling import SamplingParams
from ferrum_jax.prompt import MediaSpan
from tests.engine import test_images as images
from tests.engine.test_images import Picture, engine_of, golden, run
from tests.models.sound_goldens import GEMMA, clips_of

FOLDER = "hearing/gemma4_sound"
AUDIO, IMAGE = 150, 151
PER_IMAGE_TOKEN = 9  # patches
LADDER = dataclasses.replace(images.LADDER, max_image_tokens=256, max_image_patches=1024, max_model_len=512)
CONFIG = dataclasses.replace(LADDER, max_num_batched_tokens=64, invariant=True)
EACH_CONFIG = pytest.mark.parametrize(
    "config", [CONFIG, pytest.param(LADDER, marks=pytest.mark.slow)], ids=["", "ladder"]
)
GREEDY = SamplingParams(
    max_tokens=64, temperature=0.0, ignore_eos=True, logit_bias=dict.fromkeys(range(AUDIO, 154), float("-inf"))
)
PROMPTS = range(6)


def pictures_of(arrays: dict[str, np.ndarray], prompt: int) -> list[Picture]:
    found, at = [], 0
    for grid in arrays[f"grids_{prompt}"].tolist():
        count = grid[1] * grid[2]
        patches = arrays[f"patches_{prompt}"][at : at + count]
        digest = hashlib.blake2b(patches.tobytes()).digest()
        found.append(Picture(patches=patches, grid=tuple(grid), num_tokens=count // PER_IMAGE_TOKEN, digest=digest))
        at += count
    return found


def asked(prompt: int, *, louder: float = 0.0, **options: Any) -> tuple[list[int], SamplingParams, RequestOptions]:
    """A golden prompt with its sounds and images. louder: than the golden's, which makes others of its sounds."""
    arrays = golden(FOLDER)
    ids = arrays[f"prompt_{prompt}"].tolist()
    kinds = {AUDIO: iter(clips_of(prompt, louder=louder, name=GEMMA)), IMAGE: iter(pictures_of(arrays, prompt))}
    given, media, start = [], [], 0
    while start < len(ids):
        if (token := ids[start]) not in kinds:
            start += 1
            continue
        own = next(kinds[token])
        kind = "audio" if token == AUDIO else "image"
        assert ids[start : start + own.num_tokens] == [token] * own.num_tokens, "the golden's run is as long"
        given.append(own)
        media.append(MediaSpan(kind=kind, digest=own.digest, start=start, length=own.num_tokens))
        start += own.num_tokens
    return ids, GREEDY, RequestOptions(media=media, images=given, key=str(prompt), **options)


def assert_golden(output, prompt: int) -> None:
    assert list(output.token_ids) == golden(FOLDER)[f"tokens_{prompt}"].tolist()


@EACH_CONFIG
def test_tokens_after_sounds_and_images_are_the_reference_s(config):
    engine = engine_of(config, folder=FOLDER)
    for prompt, output in enumerate(run(engine, *map(asked, PROMPTS))):
        assert_golden(output, prompt)
    counts = engine.counts()
    assert (counts["sounds_encoded"], counts["images_encoded"]) == (7, 3) and counts["image_runs_live"] == 0


def test_both_are_kept_and_hit_and_another_sound_hits_nothing_behind_it():
    engine = engine_of(CONFIG, folder=FOLDER)
    run(engine, asked(4))
    before = engine.counts()
    (again,) = run(engine, asked(4))
    assert_golden(again, 4)
    assert engine.counts()["encoder_calls"] == before["encoder_calls"]
    assert again.num_cached_tokens == len(again.prompt_token_ids) and again.num_cached_media == 4
    (other,) = run(engine, asked(4, louder=0.5))
    assert engine.counts()["images_encoded"] == before["images_encoded"], "its images are the same"
    assert engine.counts()["sounds_encoded"] == before["sounds_encoded"] + 2 and other.token_ids != again.token_ids


@pytest.mark.parametrize("budget", [5, 9])
def test_a_chunk_may_cut_either_anywhere(budget):
    engine = engine_of(CONFIG, folder=FOLDER, max_num_batched_tokens=budget)
    for prompt, output in zip((3, 4), run(engine, asked(3), asked(4)), strict=True):
        assert_golden(output, prompt)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": []}, "the prompt has media spans of kind 'image' and no images"),
        ({"drop": "audio"}, "the prompt has media spans of kind 'audio' and no sounds"),
        ({"tokens": 1}, "media spans of kind 'audio' are not those of the sounds"),
    ],
)
def test_media_that_are_not_the_spans_are_refused_by_their_kind(change, message):
    ids, params, options = asked(3)
    given = list(options.images)
    if "images" in change:
        given = []
    elif "drop" in change:
        given = [each for each in given if each.kind != change["drop"]]
    else:
        given = [dataclasses.replace(each, num_tokens=1) if each.kind == "audio" else each for each in given]
    with pytest.raises(ValueError, match=message):
        engine_of(CONFIG, folder=FOLDER).add(ids, params, dataclasses.replace(options, images=given))


def test_more_than_the_pool_holds_is_refused_for_both_together():
    ids, params, options = asked(4)
    engine = engine_of(dataclasses.replace(CONFIG, max_image_tokens=48), folder=FOLDER)
    with pytest.raises(
        ValueError, match=r"the prompt's images and sounds take 64 tokens, and the engine keeps those of 48"
    ):
        engine.add(ids, params, options)
