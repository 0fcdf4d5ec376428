"""Images and sounds in prompts that wait, are given back, shared, refused by their kind, and of any size.

Images whose tokens stand in rows with a token of text between.
"""

import dataclasses

import numpy as np
import pytest

from ferrum_jax import LLM
from ferrum_jax.engine.image_intake import ImageLimits, placed_images
from ferrum_jax.inputs.audio.clip import ProcessedClip
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.sampling_params import SamplingParams
from tests.engine.golden_media import (
    BOTH,
    CONFIG,
    END,
    FAMILIES,
    FOLDER,
    GLM,
    HYBRID,
    LADDER,
    MISTRAL3,
    PLACE,
    QWEN,
    START,
    Picture,
    asked,
    assert_golden,
    assert_goldens,
    check_compiles_nothing,
    engine_of,
    golden,
    run,
)
from tests.engine.image_folder import picture, write_folder
from tests.support import small_llm, step


def test_prompts_whose_images_wait_do_not_hold_up_others():
    engine = engine_of(enable_prefix_caching=False, max_num_batched_tokens=8)
    waiting = [engine.add(*asked(2, brighter=0.1 * k)) for k in range(1, 4)]
    text, last = engine.add(*asked(0)), engine.add(*asked(2))
    outputs, order = {}, []
    while engine.has_unfinished:
        for output in step(engine):
            outputs[output.request_id] = output
            order.append(output.request_id)
        engine.scheduler.check_invariants()
    assert_golden(outputs[text], 0)
    assert_golden(outputs[last], 2)
    assert order.index(text) < order.index(waiting[-1]), "a prompt of text passed one whose images waited"


def test_a_request_that_is_aborted_gives_its_images_back():
    engine = engine_of(max_num_batched_tokens=4)
    ids = [engine.add(*asked(2, brighter=0.1 * k)) for k in range(4)]
    for steps in range(6):
        engine.step()
        engine.scheduler.check_invariants()
        if steps % 2:
            engine.abort(ids.pop())
    for submission in ids:
        engine.abort(submission)
    engine.drain()
    engine.scheduler.check_invariants()
    assert engine.counts()["image_runs_live"] == 0
    assert_golden(run(engine, asked(2))[0], 2)


@pytest.mark.slow
@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize(
    ("folder", "budget", "num_blocks"),
    [*((HYBRID, *sizes) for sizes in ((5, 80), (16, 80), (11, 9))), (GLM[0], 5, 80), (GLM[0], 11, 9), (GLM[1], 7, 9)],
)
def test_images_of_other_families_are_cut_hit_and_preempted(folder, budget, num_blocks, caches):
    sizes = {"max_num_batched_tokens": budget, "num_blocks": num_blocks, "enable_prefix_caching": caches}
    engine = engine_of(folder=folder, **sizes)
    for _ in range(2):
        assert_goldens(engine, (2, 1, 0), folder)
    other = run(engine, asked(2, brighter=0.5, folder=folder))
    again = run(engine_of(folder=folder), asked(2, brighter=0.5, folder=folder))
    assert other[0].token_ids == again[0].token_ids


def test_choices_of_a_prompt_share_its_images():
    engine = engine_of()
    ids, params, options = asked(1)
    (output,) = run(engine, (ids, dataclasses.replace(params, n=3), options))
    assert {choice.token_ids for choice in output.outputs} == {tuple(golden()["tokens_1"].tolist())}
    assert engine.counts()["images_encoded"] == 1


def test_images_and_spans_that_do_not_belong_together_are_refused():
    ids, params, options = asked(2)
    engine = engine_of()
    swapped = [options.images[1], options.images[0], options.images[2]]
    for changed in ({"images": swapped}, {"images": options.images[:2]}, {"images": []}):
        with pytest.raises(ValueError, match="media spans of kind 'image'"):
            engine.add(ids, params, dataclasses.replace(options, **changed))
    assert not engine.has_unfinished


def test_a_prompt_whose_images_are_cut_off_runs_without_them():
    ids, params, options = asked(2)
    engine = engine_of()
    run(engine, (ids, dataclasses.replace(params, truncate_prompt_tokens=27), options))
    assert engine.counts()["images_encoded"] == 1, "the last image alone is left"


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_tokens": 32}, "take 48 tokens, and the engine keeps those of 32; .* raise max_image_tokens"),
        ({"max_patches": 40}, "image 2 has 60 patches, and max_image_patches is 40"),
        ({"max_tokens": 0}, "this model takes none"),
    ],
)
def test_what_there_is_no_room_for_is_refused_with_both_numbers(limits, said):
    _, _, options = asked(2)
    room = ImageLimits(**({"max_tokens": 48, "max_patches": 60, "merge": 2, "chunk": (4, 1)} | limits))
    with pytest.raises(ValueError, match=said):
        placed_images(options.images, options.media, room)


@pytest.mark.parametrize("config", [CONFIG, pytest.param(LADDER, marks=pytest.mark.slow)], ids=["", "ladder"])
def test_no_step_compiles_whatever_sizes_images_have(config):
    rng, requests, before = np.random.default_rng(3), [], small_llm(FOLDER, config).stats()["compiles_after_ready"]
    for number in range(200):
        rows, columns = (2 * int(n) for n in rng.integers(1, 7, 2))
        pixels = rng.uniform(-1, 1, (rows * columns, 96)).astype(np.float32)
        image = Picture(patches=pixels, grid=(1, rows, columns), num_tokens=rows * columns // 4, digest=b"%d" % number)
        text = rng.integers(6, 150, int(rng.integers(1, 9))).tolist()
        requests.append(([*text, START, *[PLACE] * image.num_tokens, 153], image, "image"))
    check_compiles_nothing(engine_of(config, enable_prefix_caching=False), requests)
    assert small_llm(FOLDER, config).stats()["compiles_after_ready"] == before


def test_an_image_without_the_tokens_between_its_rows_is_refused():
    ids, params, options = asked(1, folder=MISTRAL3)
    image = dataclasses.replace(options.images[0], num_tokens=6)
    media = [dataclasses.replace(options.media[0], length=6)]
    with pytest.raises(ValueError, match=r"has 6 tokens and 24 patches, .* of 2 x 2, with one more between rows;"):
        engine_of(folder=MISTRAL3).add(ids, params, dataclasses.replace(options, images=[image], media=media))


def test_a_picture_becomes_rows_of_tokens_and_another_one_another_answer(tmp_path):
    llm = LLM(str(write_folder(tmp_path / "model", "mistral3_vision")), CONFIG)
    prompts = [{"prompt": "t7 [IMG] t9 t5", "images": [picture(seed)]} for seed in (1, 2)]
    first, other = llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0.0))
    row = [150] * 6  # 30 x 44 pixels become 8 x 12 patches
    assert first.prompt_token_ids == (7, *row, 151, *row, 151, *row, 151, *row, 153, 9, 5)
    assert first.token_ids != other.token_ids


HEARD = FAMILIES[QWEN].config


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


@pytest.mark.slow
def test_sounds_that_there_is_no_room_for_are_refused():
    ids, params, options = asked(1, folder=QWEN)
    with pytest.raises(ValueError, match="sound 0 has 400 frames, and max_image_patches is 200; give a shorter sound"):
        engine_of(dataclasses.replace(HEARD, max_image_patches=200), folder=QWEN).add(ids, params, options)
    small = dataclasses.replace(HEARD, max_image_tokens=32)
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


@pytest.mark.slow
def test_more_than_the_pool_holds_is_refused_for_both_together():
    ids, params, options = asked(4, folder=BOTH)
    engine = engine_of(dataclasses.replace(FAMILIES[BOTH].config, max_image_tokens=48), folder=BOTH)
    with pytest.raises(
        ValueError, match=r"the prompt's images and sounds take 64 tokens, and the engine keeps those of 48"
    ):
        engine.add(ids, params, options)
