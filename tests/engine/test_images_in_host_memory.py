"""Images with the host tier: blocks of prompts with images come back from host memory under their own keys alone."""

import dataclasses

import pytest

from tests.engine.golden_media import CONFIG, FOLDER, HYBRID, asked, assert_golden, engine_of, run
from tests.marks import few
from tests.support import small_llm


def tiered(num_host_blocks: int, *, folder: str = FOLDER, **overrides):
    """An engine whose device has room for one prompt at a time, and host memory for so many blocks."""
    host_cache_bytes = (num_host_blocks + 1) * small_llm(folder, CONFIG).ledger.host_block_bytes
    return engine_of(folder=folder, **{"num_blocks": 8, "host_cache_bytes": host_cache_bytes, **overrides})


@pytest.mark.parametrize("folder", few([FOLDER, HYBRID]))
@pytest.mark.parametrize(
    "overrides",
    few([{}, {"max_num_batched_tokens": 5}, {"max_cached_prompts": 0}, {"num_host_blocks": 6}], 2),
    ids=["", "small chunks", "no prompts", "host memory evicts"],
)
def test_prompts_with_images_that_were_evicted_come_back_with_the_same_tokens(folder, overrides):
    engine = tiered(**{"num_host_blocks": 60, **overrides}, folder=folder)
    for _ in range(3):
        for prompt in (0, 1, 2):
            assert_golden(run(engine, asked(prompt, folder=folder))[0], prompt, folder)
    metrics = engine.scheduler.metrics()
    assert metrics.spilled_blocks and (metrics.host_hits or overrides.get("num_host_blocks"))
    for prompt, output in enumerate(run(engine, *(asked(prompt, folder=folder) for prompt in range(3)))):
        assert_golden(output, prompt, folder)
    engine.scheduler.check_invariants()


def test_another_image_under_the_same_text_finds_nothing_in_host_memory():
    engine, alone = tiered(60), engine_of()
    wanted = {brighter: run(alone, asked(1, brighter=brighter))[0].token_ids for brighter in (0.0, 0.5)}
    assert wanted[0.0] != wanted[0.5]
    for brighter in (0.0, 0.5, 0.0, 0.5):
        run(engine, asked(2))  # evicts
        (output,) = run(engine, asked(1, brighter=brighter))
        assert output.token_ids == wanted[brighter]


def test_salts_keep_images_apart_in_host_memory():
    engine = tiered(60)
    for salt in ("a", "b"):
        run(engine, asked(2))
        ids, params, options = asked(1)
        (output,) = run(engine, (ids, params, dataclasses.replace(options, cache_salt=salt)))
        assert_golden(output, 1)
        assert output.num_cached_tokens == 0


def test_a_request_that_is_aborted_while_its_blocks_come_back_leaves_nothing():
    engine = tiered(60)
    for prompt in (1, 2):
        run(engine, asked(prompt))
    submission = engine.add(*asked(1))
    engine.step()
    engine.abort(submission)
    assert_golden(run(engine, asked(1))[0], 1)
    engine.scheduler.check_invariants()
    assert engine.counts()["image_runs_live"] == 0
