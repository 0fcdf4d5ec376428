"""Images whose tokens stand in rows with a token of text between: cached, cut anywhere, preempted and encoded once."""

from __future__ import annotations

import dataclasses

import pytest

from ferrum_jax import LLM, SamplingParams
from tests.engine.image_folder import picture
from tests.engine.mistral3_folder import write_mistral3_folder
from tests.engine.test_images import CONFIG, GREEDY, LADDER, asked, assert_golden, engine_of, run

FOLDER = "vision/mistral3_vision"


def prompt_of(number: int, **options):
    return asked(number, folder=FOLDER, breaks=True, **options)


def test_tokens_after_images_are_the_reference_s_and_what_was_there_hits():
    engine = engine_of(folder=FOLDER)
    for number, output in enumerate(run(engine, *(prompt_of(number) for number in range(3)))):
        assert_golden(output, number, FOLDER)
    before = engine.counts()
    assert before["images_encoded"] == 4 and before["image_runs_live"] == 0
    (again,) = run(engine, prompt_of(2))
    assert_golden(again, 2, FOLDER)
    after = engine.counts()
    assert after["encoder_calls"] == before["encoder_calls"] and again.num_cached_media == 3
    assert again.num_cached_tokens == len(again.prompt_token_ids)
    (other,) = run(engine, prompt_of(1, brighter=0.5))
    assert other.num_cached_tokens <= prompt_of(1)[2].media[0].start
    assert engine.counts()["images_encoded"] == 5


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_num_batched_tokens": 4},
        pytest.param({"max_num_batched_tokens": 5, "enable_prefix_caching": False}, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 7}, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 11, "enable_prefix_caching": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_image_may_be_cut_by_a_chunk_anywhere(sizes):
    engine = engine_of(folder=FOLDER, **sizes)
    for number, output in zip((2, 1), run(engine, prompt_of(2), prompt_of(1)), strict=True):
        assert_golden(output, number, FOLDER)


@pytest.mark.slow
@pytest.mark.parametrize("caches", [True, False])
def test_a_prompt_that_is_preempted_around_its_images_gives_the_same_tokens(caches):
    engine = engine_of(folder=FOLDER, num_blocks=9, enable_prefix_caching=caches)
    outputs = run(engine, *(prompt_of(number) for number in (1, 2, 0)))
    assert engine.scheduler.metrics().preemptions > 0
    for number, output in zip((1, 2, 0), outputs, strict=True):
        assert_golden(output, number, FOLDER)


@pytest.mark.slow
def test_a_ladder_of_buckets_gives_the_reference_s_tokens():
    engine = engine_of(LADDER, folder=FOLDER)
    for number, output in enumerate(run(engine, *(prompt_of(number) for number in range(3)))):
        assert_golden(output, number, FOLDER)


@pytest.mark.slow
def test_bits_do_not_depend_on_companions_chunks_preemption_or_found_images():
    def said(numbers, **sizes):
        engine = engine_of(folder=FOLDER, **sizes)
        params = dataclasses.replace(GREEDY, logprobs=1, max_tokens=24)
        requests = [(ids, params, options) for ids, _, options in map(prompt_of, numbers)]
        outputs = [*run(engine, *requests), *run(engine, *requests)]
        return [[next(iter(entry.values())).logprob for entry in o.outputs[0].logprobs] for o in outputs]

    alone, again = said([2])
    assert alone == again
    for sizes in ({}, {"max_num_batched_tokens": 7}, {"num_blocks": 9}, {"enable_prefix_caching": False}):
        together = said([1, 2, 0], **sizes)
        assert together[1] == together[4] == alone, sizes


def test_an_image_without_the_tokens_between_its_rows_is_refused():
    ids, params, options = prompt_of(1)
    image = dataclasses.replace(options.images[0], num_tokens=6)
    media = [dataclasses.replace(options.media[0], length=6)]
    with pytest.raises(ValueError, match=r"has 6 tokens and 24 patches, .* of 2 x 2, with one more between rows;"):
        engine_of(folder=FOLDER).add(ids, params, dataclasses.replace(options, images=[image], media=media))


def test_a_picture_becomes_rows_of_tokens_and_another_one_another_answer(tmp_path):
    llm = LLM(str(write_mistral3_folder(tmp_path / "model")), CONFIG)
    prompts = [{"prompt": "t7 [IMG] t9 t5", "images": [picture(seed)]} for seed in (1, 2)]
    first, other = llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0.0))
    row = [150] * 6  # 30 x 44 pixels become 8 x 12 patches
    assert first.prompt_token_ids == (7, *row, 151, *row, 151, *row, 151, *row, 153, 9, 5)
    assert first.token_ids != other.token_ids
