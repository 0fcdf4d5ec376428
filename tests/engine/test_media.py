"""Images and sounds in prompts: encoded once, cached by content, cut anywhere, refused by kind, and gone again."""

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
    CAUSAL,
    CONFIG,
    END,
    FAMILIES,
    FOLDER,
    GEMMA3,
    GEMMA4,
    GLM,
    GREEDY,
    HYBRID,
    LADDER,
    MISTRAL3,
    PLACE,
    QWEN,
    START,
    VOXTRAL,
    WHISPER,
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
from tests.marks import slow
from tests.support import SMALL, small_llm, step


def long(*values):
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.long])


def encoded(engine) -> tuple[int, int]:
    """Sounds and images that the engine has encoded."""
    counts = engine.counts()
    return counts["sounds_encoded"], counts["images_encoded"]


@pytest.mark.parametrize(
    ("folder", "sizes"),
    [
        *((folder, "config") for folder in (FOLDER, GEMMA3, MISTRAL3, QWEN, BOTH)),
        *(slow(folder, "ladder") for folder in (FOLDER, GEMMA3, GEMMA4, MISTRAL3, QWEN, BOTH)),
        *(slow(folder, sizes) for folder in (HYBRID, *GLM, VOXTRAL) for sizes in ("config", "ladder")),
        long(CAUSAL, "ladder"),
    ],
)
def test_tokens_after_media_are_the_reference_s(folder, sizes):
    family = FAMILIES[folder]
    engine = engine_of(getattr(family, sizes), folder=folder)
    assert_goldens(engine, range(family.num_prompts), folder)
    counts = engine.counts()
    assert encoded(engine) == family.encoded and counts["image_runs_live"] == 0
    assert counts["encoder_calls"] <= sum(family.encoded)
    if folder == GEMMA3:
        assert counts["encoder_calls"] == 4, "a call has room for one image"
    if folder != BOTH:
        assert counts["image_hits"] == counts["sound_hits"] == 0


@pytest.mark.parametrize("folder", [FOLDER, QWEN, WHISPER, slow(GEMMA3), slow(MISTRAL3), slow(GEMMA4), long(CAUSAL)])
def test_media_that_were_there_before_are_not_encoded_again_and_their_blocks_hit(folder):
    engine = engine_of(folder=folder)
    run(engine, asked(2, folder=folder))
    before = engine.counts()["encoder_calls"], encoded(engine)
    (output,) = run(engine, asked(2, folder=folder))
    assert_golden(output, 2, folder)
    assert (engine.counts()["encoder_calls"], encoded(engine)) == before
    assert output.num_cached_tokens == len(output.prompt_token_ids)
    assert output.num_cached_media == len(asked(2, folder=folder)[2].media) > 0


@pytest.mark.parametrize("folder", [FOLDER, QWEN, slow(MISTRAL3), slow(GEMMA3), slow(GEMMA4), long(CAUSAL)])
def test_the_same_text_with_other_media_hits_nothing_behind_them(folder):
    engine = engine_of(folder=folder)
    (first,) = run(engine, asked(1, folder=folder))
    (other,) = run(engine, asked(1, brighter=0.5, louder=0.5, folder=folder))
    start = asked(1, folder=folder)[2].media[0].start
    assert other.num_cached_tokens <= start // SMALL.block_size * SMALL.block_size
    assert other.token_ids != first.token_ids and sum(encoded(engine)) == 2


@pytest.mark.parametrize("folder", [FOLDER, QWEN])
def test_kept_media_are_not_encoded_again_for_another_prompt(folder):
    engine = engine_of(folder=folder, enable_prefix_caching=False)
    run(engine, asked(1, folder=folder))
    ids, params, options = asked(1, folder=folder)
    shifted = [dataclasses.replace(span, start=span.start + 1) for span in options.media]
    run(engine, ([7, *ids], params, dataclasses.replace(options, media=shifted)))
    counts = engine.counts()
    assert sum(encoded(engine)) == counts["image_hits"] + counts["sound_hits"] == counts["encoder_calls"] == 1


@pytest.mark.parametrize(
    ("folder", "budget", "caches"),
    [
        *((FOLDER, budget, True) for budget in (4, 5, 7, 11)),
        (MISTRAL3, 4, True),
        *(slow(MISTRAL3, *sizes) for sizes in ((5, False), (7, True), (11, False))),
        *((QWEN, budget, True) for budget in (4, 7)),
        *((BOTH, budget, True) for budget in (5, 9)),
    ],
)
def test_media_may_be_cut_by_a_chunk_anywhere(folder, budget, caches):
    engine = engine_of(folder=folder, max_num_batched_tokens=budget, enable_prefix_caching=caches)
    assert_goldens(engine, (3, 4) if folder == BOTH else (2, 1), folder)


@pytest.mark.parametrize(
    ("folder", "caches"),
    [
        *((folder, True) for folder in (FOLDER, QWEN)),
        (FOLDER, False),
        *(slow(folder, caches) for folder in (GEMMA3, GEMMA4, MISTRAL3) for caches in (True, False)),
    ],
)
def test_a_prompt_that_is_preempted_around_its_media_gives_the_same_tokens(folder, caches):
    engine = engine_of(folder=folder, num_blocks=FAMILIES[folder].few_blocks, enable_prefix_caching=caches)
    assert_goldens(engine, (1, 2, 0), folder)
    assert engine.scheduler.metrics().preemptions > 0


@pytest.mark.parametrize(("folder", "prompt"), [(FOLDER, 2), (QWEN, 1), slow(GEMMA3, 2)])
def test_media_that_were_evicted_are_encoded_again(folder, prompt):
    engine = engine_of(folder=folder, enable_prefix_caching=False)
    for change in (0.0, 0.1, 0.2):
        run(engine, asked(prompt, brighter=change, louder=change, folder=folder))
    assert engine.counts()["image_evictions"] > 0
    before = sum(encoded(engine))
    assert_goldens(engine, [prompt], folder)
    assert sum(encoded(engine)) == before + len(asked(prompt, folder=folder)[2].media)


@pytest.mark.slow
@pytest.mark.parametrize("folder", [FOLDER, HYBRID, GLM[0], GEMMA3, GEMMA4, MISTRAL3])
def test_bits_do_not_depend_on_companions_chunks_preemption_or_found_images(folder):
    family = FAMILIES[folder]
    config = dataclasses.replace(family.config, max_num_batched_tokens=64, invariant=True)

    def said(prompts, **sizes):
        engine = engine_of(config, folder=folder, **sizes)
        params = dataclasses.replace(GREEDY, logprobs=1, max_tokens=24)
        requests = [(ids, params, options) for ids, _, options in (asked(p, folder=folder) for p in prompts)]
        outputs = [*run(engine, *requests), *run(engine, *requests)]
        return [[next(iter(entry.values())).logprob for entry in o.outputs[0].logprobs] for o in outputs]

    alone, again = said([2])
    assert alone == again
    few, small = {"num_blocks": family.few_blocks}, {"max_num_batched_tokens": family.budget}
    for sizes in ({}, small, few, {"enable_prefix_caching": False}):
        together = said([1, 2, 0], **sizes)
        assert together[1] == together[4] == alone, sizes


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
