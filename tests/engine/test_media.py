"""Images and sounds in prompts: encoded once, cached by content, cut anywhere, and gone again without a trace."""

import dataclasses

import pytest

from tests.engine.golden_media import (
    BOTH,
    CAUSAL,
    FAMILIES,
    FOLDER,
    GEMMA3,
    GEMMA4,
    GLM,
    GREEDY,
    HYBRID,
    MISTRAL3,
    QWEN,
    VOXTRAL,
    WHISPER,
    asked,
    assert_golden,
    assert_goldens,
    engine_of,
    run,
)
from tests.marks import slow
from tests.support import SMALL


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
