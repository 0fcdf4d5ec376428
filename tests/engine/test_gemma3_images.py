"""Images whose tokens see each other: computed whole, cached, preempted and evicted without a trace in the tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.asked.options import RequestOptions
from ferrum_jax.executables.compile import CompileCounter
from ferrum_jax.prompt import MediaSpan
from tests.engine.gemma3_folder import PROCESSOR, write_gemma3_folder
from tests.engine.image_folder import picture
from tests.engine.test_images import GREEDY, Picture, asked, assert_golden, engine_of, golden, run
from tests.support import GOLDENS, SMALL, finish, small_llm

FOLDER = "vision/gemma3_vision"
TOKENS, PATCHES = 16, 144
LADDER = dataclasses.replace(SMALL, max_num_batched_tokens=32, max_image_tokens=64, max_image_patches=PATCHES)
CONFIG = dataclasses.replace(LADDER, max_num_batched_tokens=64, invariant=True)  # one bucket
EACH_CONFIG = pytest.mark.parametrize(
    "config", [CONFIG, pytest.param(LADDER, marks=pytest.mark.slow)], ids=["", "ladder"]
)


def prompt_of(number: int, **options):
    return asked(number, folder=FOLDER, per_token=9, **options)


def chunks_of(engine):
    """(request, where the chunk ends) of all chunks that the engine plans from now on."""
    seen = []
    schedule = engine.scheduler.schedule

    def watched():
        plan = schedule()
        for part in () if plan is None else engine.scheduler._in_flight[-1][1]:
            seen.extend(zip(part.requests, (part.plan.starts + part.plan.counts).tolist(), strict=True))
        return plan

    engine.scheduler.schedule = watched
    return seen


@EACH_CONFIG
def test_tokens_after_images_are_the_reference_s(config):
    engine = engine_of(config, folder=FOLDER)
    for number, output in enumerate(run(engine, *(prompt_of(number) for number in range(3)))):
        assert_golden(output, number, FOLDER)
    counts = engine.counts()
    assert counts["images_encoded"] == counts["encoder_calls"] == 4 and counts["image_runs_live"] == 0


@pytest.mark.parametrize(
    ("budget", "rows"),
    [(19, 4), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((16, 1), (17, 2), (23, 4), (32, 4)))],
)
def test_no_chunk_ends_inside_an_image_and_tokens_are_the_reference_s(budget, rows):
    engine = engine_of(CONFIG, folder=FOLDER, max_num_batched_tokens=budget, max_num_seqs=rows)
    ends = chunks_of(engine)
    numbers = (2, 1, 0, 2)
    for number, output in zip(numbers, run(engine, *(prompt_of(n) for n in numbers)), strict=True):
        assert_golden(output, number, FOLDER)
    cut = [(r.id, end) for r, end in ends if any(image.start < end < image.end for image in r.images)]
    assert not cut and sum(len(r.images) > 0 for r, _ in ends) > 0


def test_an_image_that_was_there_before_is_not_encoded_again_and_its_blocks_hit():
    engine = engine_of(CONFIG, folder=FOLDER)
    run(engine, prompt_of(2))
    before = engine.counts()
    (output,) = run(engine, prompt_of(2))
    assert_golden(output, 2, FOLDER)
    after = engine.counts()
    assert after["encoder_calls"] == before["encoder_calls"] and after["images_encoded"] == before["images_encoded"]
    assert output.num_cached_tokens == len(output.prompt_token_ids) and output.num_cached_media == 3


@pytest.mark.slow
def test_another_question_about_an_image_hits_as_a_text_would():
    """The last block of the image holds the question too; the rest of its blocks hit."""
    engine = engine_of(CONFIG, folder=FOLDER, max_cached_prompts=0)
    ids, params, options = prompt_of(1)
    run(engine, (ids, params, options))
    calls = engine.counts()["encoder_calls"]
    end = options.media[0].end
    other = [*ids[: end + 1], *[7, 8, 9, 10, 11]]
    (found,) = run(engine, (other, params, options))
    (wanted,) = run(engine_of(CONFIG, folder=FOLDER, enable_prefix_caching=False), (other, params, options))
    assert found.num_cached_tokens == (end + 1) // SMALL.block_size * SMALL.block_size
    assert options.media[0].start < found.num_cached_tokens
    assert found.token_ids == wanted.token_ids and engine.counts()["encoder_calls"] == calls


def test_a_hit_may_end_inside_an_image_whose_last_tokens_see_what_was_cached():
    engine = engine_of(CONFIG, folder=FOLDER, max_cached_prompts=0)
    ids, params, options = prompt_of(1)
    shifted = [dataclasses.replace(span, start=span.start + 1) for span in options.media]
    longer = (([3, *ids]), params, dataclasses.replace(options, media=shifted))
    inside = (shifted[0].end // SMALL.block_size) * SMALL.block_size
    assert shifted[0].start < inside < shifted[0].end
    run(engine, longer)
    other = ([3, *ids[: options.media[0].end], 9, 9, 9], params, longer[2])
    (found,) = run(engine, other)
    (wanted,) = run(engine_of(CONFIG, folder=FOLDER, enable_prefix_caching=False), other)
    assert found.num_cached_tokens == inside and found.token_ids == wanted.token_ids


@pytest.mark.slow
def test_the_same_text_with_another_image_hits_nothing_behind_it():
    engine = engine_of(CONFIG, folder=FOLDER)
    (first,) = run(engine, prompt_of(1))
    (other,) = run(engine, prompt_of(1, brighter=0.5))
    start = prompt_of(1)[2].media[0].start
    assert other.num_cached_tokens <= start and other.token_ids != first.token_ids
    assert engine.counts()["images_encoded"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("caches", [True, False])
def test_a_prompt_that_is_preempted_around_its_images_gives_the_same_tokens(caches):
    engine = engine_of(CONFIG, folder=FOLDER, num_blocks=11, enable_prefix_caching=caches)
    outputs = run(engine, *(prompt_of(number) for number in (1, 2, 0)))
    assert engine.scheduler.metrics().preemptions > 0
    for number, output in zip((1, 2, 0), outputs, strict=True):
        assert_golden(output, number, FOLDER)


@pytest.mark.slow
def test_an_image_that_was_evicted_is_encoded_again():
    engine = engine_of(CONFIG, folder=FOLDER, enable_prefix_caching=False)
    for brighter in (0.0, 0.1, 0.2):
        run(engine, prompt_of(2, brighter=brighter))
    assert engine.counts()["image_evictions"] > 0
    before = engine.counts()["images_encoded"]
    assert_golden(run(engine, prompt_of(2))[0], 2, FOLDER)
    assert engine.counts()["images_encoded"] == before + 3


@pytest.mark.slow
def test_bits_do_not_depend_on_companions_chunks_preemption_or_found_images():
    def said(numbers, **sizes):
        engine = engine_of(CONFIG, folder=FOLDER, **sizes)
        params = dataclasses.replace(GREEDY, logprobs=1, max_tokens=24)
        requests = [(ids, params, options) for ids, _, options in map(prompt_of, numbers)]
        outputs = [*run(engine, *requests), *run(engine, *requests)]
        return [[next(iter(entry.values())).logprob for entry in o.outputs[0].logprobs] for o in outputs]

    alone, again = said([2])
    assert alone == again
    for sizes in ({}, {"max_num_batched_tokens": 20}, {"num_blocks": 11}, {"enable_prefix_caching": False}):
        together = said([1, 2, 0], **sizes)
        assert together[1] == together[4] == alone, sizes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"max_num_batched_tokens": 18},
            "max_num_batched_tokens is 18, and a step must hold the 16 tokens .* raise it to 19",
        ),
        ({"max_image_patches": 143}, "max_image_patches is 143, and an image of this model has 144 patches"),
        ({"max_image_tokens": 15}, "max_image_tokens is 15, and an image of this model has 16 tokens"),
    ],
)
def test_sizes_that_hold_no_image_are_refused_at_the_start(change, said):
    with pytest.raises(ValueError, match=said):
        LLM(str(GOLDENS / FOLDER), dataclasses.replace(CONFIG, **change))


def test_an_image_of_another_grid_is_refused():
    ids, params, options = prompt_of(1)
    image = dataclasses.replace(options.images[0], grid=(1, 8, 18))
    with pytest.raises(ValueError, match=r"image 0 has a grid of \(1, 8, 18\) patches"):
        engine_of(CONFIG, folder=FOLDER).add(ids, params, dataclasses.replace(options, images=[image]))


@pytest.mark.slow
def test_a_picture_in_a_chat_has_the_tokens_that_the_reference_gives_it(tmp_path):
    llm = LLM(str(write_gemma3_folder(tmp_path / "model")), CONFIG)
    content = [{"type": "text", "text": "t7 "}, {"type": "image", "image": picture(1)}, {"type": "text", "text": " t9"}]
    params = SamplingParams(max_tokens=6, temperature=0.0)
    (first,) = llm.chat([{"role": "user", "content": content}], params)
    assert first.prompt_token_ids == (7, 152, *[150] * TOKENS, 153, 9, 5)
    before = llm.stats()["encoder_calls"]
    (again,) = llm.generate({"prompt": "t7 <start_of_image> t9 t5", "images": [picture(1)]}, params)
    assert again.token_ids == first.token_ids and llm.stats()["encoder_calls"] == before
    assert PROCESSOR["image_seq_length"] == TOKENS


@pytest.mark.slow
def test_text_alone_through_the_same_folder_is_what_it_is_without_a_tower():
    ids, params, _ = prompt_of(0)
    text = (ids, params, RequestOptions(key="0"))
    (sees,) = run(engine_of(CONFIG, folder=FOLDER), text)
    blind = LLM(str(GOLDENS / FOLDER), dataclasses.replace(CONFIG, max_image_tokens=0))
    (output,) = blind.generate([ids], params)
    assert output.token_ids == sees.token_ids == tuple(golden(FOLDER)["tokens_0"].tolist())


@pytest.mark.slow
@EACH_CONFIG
def test_no_step_compiles_whatever_stands_beside_images(config):
    engine, rng = engine_of(config, folder=FOLDER, enable_prefix_caching=False), np.random.default_rng(3)
    for number in range(40):
        pixels = rng.uniform(-1, 1, (PATCHES, 48)).astype(np.float32)
        image = Picture(patches=pixels, grid=(1, 12, 12), num_tokens=TOKENS, digest=b"%d" % number)
        before, after = (rng.integers(6, 150, int(n)).tolist() for n in rng.integers(1, 9, 2))
        span = MediaSpan(kind="image", digest=image.digest, start=len(before) + 1, length=TOKENS)
        prompt = [*before, 152, *[150] * TOKENS, 153, *after]
        options = RequestOptions(media=[span], images=[image], key=str(number))
        engine.add(prompt, SamplingParams(max_tokens=2, temperature=0.0), options)
    counter, before = CompileCounter(), small_llm(FOLDER, config).stats()["compiles_after_ready"]
    finish(engine)
    assert counter.count == 0 and small_llm(FOLDER, config).stats()["compiles_after_ready"] == before
    assert engine.counts()["images_encoded"] == 40
