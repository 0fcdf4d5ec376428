"""Images of any size whose tokens see each other in windows alone: cached, preempted, whole in one step."""

from __future__ import annotations

import dataclasses

import pytest

from tests.engine.test_gemma3_images import chunks_of
from tests.engine.test_images import GREEDY, asked, assert_golden, engine_of, run
from tests.support import SMALL

FOLDER = "vision/gemma4_vision"
CAUSAL = "vision/gemma4_vision_causal"  # whose tokens see the past alone
CONFIG = dataclasses.replace(
    SMALL, max_num_seqs=4, max_num_batched_tokens=32, max_image_tokens=64, max_image_patches=90
)
INVARIANT = dataclasses.replace(CONFIG, max_num_batched_tokens=64, invariant=True)


def prompt_of(number: int, folder: str = FOLDER, **options):
    return asked(number, folder=folder, per_token=9, **options)


@pytest.mark.slow
@pytest.mark.parametrize("folder", [FOLDER, pytest.param(CAUSAL, marks=pytest.mark.long)])
def test_tokens_after_images_are_the_reference_s_and_what_was_there_hits(folder):
    engine = engine_of(CONFIG, folder=folder)
    for number, output in enumerate(run(engine, *(prompt_of(number, folder) for number in range(3)))):
        assert_golden(output, number, folder)
    before = engine.counts()
    assert before["images_encoded"] == 4 and before["image_runs_live"] == 0
    (again,) = run(engine, prompt_of(2, folder))
    assert_golden(again, 2, folder)
    after = engine.counts()
    assert after["encoder_calls"] == before["encoder_calls"] and again.num_cached_media == 3
    assert again.num_cached_tokens == len(again.prompt_token_ids)
    (other,) = run(engine, prompt_of(1, folder, brighter=0.5))
    assert other.num_cached_tokens <= prompt_of(1, folder)[2].media[0].start
    assert engine.counts()["images_encoded"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("caches", [True, False])
def test_a_prompt_that_is_preempted_around_its_images_gives_the_same_tokens(caches):
    engine = engine_of(CONFIG, folder=FOLDER, num_blocks=13, enable_prefix_caching=caches)
    outputs = run(engine, *(prompt_of(number) for number in (1, 2, 0)))
    assert engine.scheduler.metrics().preemptions > 0
    for number, output in zip((1, 2, 0), outputs, strict=True):
        assert_golden(output, number, FOLDER)


@pytest.mark.slow
def test_bits_do_not_depend_on_companions_chunks_preemption_or_found_images():
    def said(numbers, **sizes):
        engine = engine_of(INVARIANT, folder=FOLDER, **sizes)
        params = dataclasses.replace(GREEDY, logprobs=1, max_tokens=24)
        requests = [(ids, params, options) for ids, _, options in map(prompt_of, numbers)]
        outputs = [*run(engine, *requests), *run(engine, *requests)]
        return [[next(iter(entry.values())).logprob for entry in o.outputs[0].logprobs] for o in outputs]

    alone, again = said([2])
    assert alone == again
    for sizes in ({}, {"max_num_batched_tokens": 16}, {"num_blocks": 13}, {"enable_prefix_caching": False}):
        together = said([1, 2, 0], **sizes)
        assert together[1] == together[4] == alone, sizes


@pytest.mark.slow
def test_no_chunk_ends_inside_an_image_and_one_that_no_step_holds_is_refused():
    engine = engine_of(CONFIG, folder=FOLDER, max_num_batched_tokens=13)
    ends = chunks_of(engine)
    for number, output in zip((2, 1), run(engine, prompt_of(2), prompt_of(1)), strict=True):
        assert_golden(output, number, FOLDER)
    assert not [end for r, end in ends if any(image.start < end < image.end for image in r.images)]
    narrow = engine_of(CONFIG, folder=FOLDER, max_num_batched_tokens=12)
    with pytest.raises(ValueError, match=r"image 2 has 10 tokens, which see each other .* room for 9"):
        narrow.add(*prompt_of(2))
