"""Cached prefixes that outlive their pool (saved, loaded, pinned), and what keeps them apart: salts and media."""

import dataclasses
import shutil

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.engine.prefixes.saved_prefixes import PrefixCache
from ferrum_jax.inputs.prompt import MediaSpan
from tests.forked import call
from tests.support import INVARIANT, fresh_engine, small_llm

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def prompt(seed: int, length: int = 70) -> list[int]:
    return np.random.default_rng(seed).integers(6, 250, length).tolist()


@pytest.fixture
def llm(monkeypatch):
    llm = small_llm("qwen3")
    fresh(llm, monkeypatch)
    return llm


def fresh(llm, monkeypatch, **overrides):
    """Give the LLM an engine with empty pools, as another process has."""
    monkeypatch.setattr(llm.calls, "_engine", fresh_engine(llm, **overrides))


def answer(llm, ids, **fields):
    (output,) = llm.generate({"prompt_token_ids": ids, **fields}, GREEDY, progress=False)
    llm.engine.scheduler.check_invariants()
    return output


def test_a_saved_prefix_is_hit_by_another_engine_with_the_same_tokens(llm, monkeypatch, tmp_path):
    compiles = llm.stats()["compiles_after_ready"]  # other engines of this process may have compiled
    cold = [answer(llm, prompt(1)), answer(llm, prompt(1), cache_salt="a"), answer(llm, prompt(2))]
    assert llm.save_prefix_cache(tmp_path / "saved") == 3 * 5, "four full blocks and the copy of the tail"
    fresh(llm, monkeypatch)
    assert llm.load_prefix_cache(tmp_path / "saved") == 15
    warm = [answer(llm, prompt(1)), answer(llm, prompt(1), cache_salt="a"), answer(llm, prompt(2))]
    assert [o.num_cached_tokens for o in warm] == [70] * 3 and [o.token_ids for o in warm] == [
        o.token_ids for o in cold
    ]
    assert llm.stats()["computed_tokens"] == 3 * 5, "nothing but what follows the first token is computed"
    assert llm.stats()["compiles_after_ready"] == compiles


def test_prefixes_may_be_selected(llm, monkeypatch, tmp_path):
    for seed in (1, 2, 3):
        answer(llm, prompt(seed))
    assert llm.save_prefix_cache(tmp_path / "saved", [prompt(1), prompt(3, 40)]) == 7, "of the first its tail too"
    fresh(llm, monkeypatch)
    llm.load_prefix_cache(tmp_path / "saved")
    assert [answer(llm, prompt(seed)).num_cached_tokens for seed in (1, 2, 3)] == [70, 0, 32]


def test_where_no_hidden_states_are_kept_a_saved_prompt_is_hit_up_to_its_last_token(llm, monkeypatch, tmp_path):
    cold = answer(llm, prompt(1))
    llm.save_prefix_cache(tmp_path / "saved")
    fresh(llm, monkeypatch, max_cached_prompts=0)
    llm.load_prefix_cache(tmp_path / "saved")
    warm = answer(llm, prompt(1))
    assert (warm.num_cached_tokens, warm.token_ids) == (64, cold.token_ids)


def test_what_is_here_already_is_not_loaded_again(llm, tmp_path):
    answer(llm, prompt(1))
    llm.save_prefix_cache(tmp_path / "saved")
    before = llm.engine.scheduler.metrics().snapshot()
    assert llm.load_prefix_cache(tmp_path / "saved") == 5
    assert llm.engine.scheduler.metrics().snapshot() == before


def test_where_not_all_fits_the_heads_of_the_most_recent_prefixes_are_loaded(llm, monkeypatch, tmp_path):
    for seed in (1, 2, 3):
        answer(llm, prompt(seed))
    llm.save_prefix_cache(tmp_path / "saved")
    fresh(llm, monkeypatch, num_blocks=7)
    assert llm.load_prefix_cache(tmp_path / "saved") == 7
    llm.engine.scheduler.check_invariants()
    assert [answer(llm, prompt(seed)).num_cached_tokens for seed in (3, 2)] == [70, 16]


def test_a_foreign_folder_is_refused_by_name_and_changes_nothing(llm, tmp_path):
    answer(llm, prompt(1))
    llm.save_prefix_cache(tmp_path / "saved")
    other = PrefixCache(
        spec=llm.spec,
        fingerprint=b"other",
        invariant=False,
        caches=llm.engine.scheduler.caches,
        runner=llm.engine.runner,
        copies=llm.loaded.copies,
    )
    with pytest.raises(ValueError, match=r"saved holds prefixes of another engine: model is '.*' there and '6f74"):
        other.read(tmp_path / "saved")


def test_invariant_prefixes_load_anywhere_and_others_not_where_bits_count(llm, monkeypatch, tmp_path):
    exact = small_llm("qwen3", INVARIANT)
    for engine in (llm, exact):
        fresh(engine, monkeypatch)
        answer(engine, prompt(1))
        engine.save_prefix_cache(tmp_path / str(engine.config.invariant))
        fresh(engine, monkeypatch)
    with pytest.raises(ValueError, match="False holds prefixes that were computed without invariant mode"):
        exact.load_prefix_cache(tmp_path / "False")
    for engine in (llm, exact):
        assert engine.load_prefix_cache(tmp_path / "True") == 5
        assert answer(engine, prompt(1)).num_cached_tokens == 70


def test_a_damaged_folder_is_refused_by_name_and_changes_nothing(llm, tmp_path):
    answer(llm, prompt(1))
    llm.save_prefix_cache(tmp_path / "saved")
    damaged = shutil.copytree(tmp_path / "saved", tmp_path / "damaged")
    largest = max((p for p in damaged.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = largest.read_bytes()
    largest.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    engine, before = llm.engine, llm.stats()
    with pytest.raises(ValueError, match="damaged"):
        llm.load_prefix_cache(damaged)
    assert llm.engine is engine and llm.stats() == before


def test_an_empty_cache_is_not_saved(llm, tmp_path):
    with pytest.raises(ValueError, match="no full block is cached, so there is nothing to save"):
        llm.save_prefix_cache(tmp_path / "saved")


def test_a_pinned_prefix_stays_whatever_runs_and_goes_when_it_is_unpinned(llm, monkeypatch, tmp_path):
    fresh(llm, monkeypatch, num_blocks=12)
    assert llm.cache_prefix(prompt(1), pin=True) == 64
    for seed in range(10, 16):
        answer(llm, prompt(seed, 100))
    assert llm.stats()["pinned"] == llm.stats()["live"] == 4
    assert answer(llm, prompt(1)).num_cached_tokens == 64
    llm.unpin_prefixes()
    for seed in range(10, 14):
        answer(llm, prompt(seed, 150))
    assert answer(llm, prompt(1)).num_cached_tokens == 0 and llm.stats()["pinned"] == 0


def test_a_loaded_prefix_may_be_pinned(llm, monkeypatch, tmp_path):
    answer(llm, prompt(1))
    llm.save_prefix_cache(tmp_path / "saved")
    fresh(llm, monkeypatch, num_blocks=13)
    llm.load_prefix_cache(tmp_path / "saved", pin=True)
    answer(llm, prompt(2, 120))
    assert llm.stats()["pinned"] == 5 and answer(llm, prompt(1)).num_cached_tokens == 70
    llm.unpin_prefixes()


def test_what_pins_leave_no_room_for_is_refused(llm, monkeypatch):
    fresh(llm, monkeypatch, num_blocks=6)
    with pytest.raises(ValueError, match="6 more blocks pinned leave 0 of 6, and 1 are needed"):
        llm.cache_prefix([*prompt(1, 95), 7], pin=True)
    llm.cache_prefix(prompt(1), pin=True)
    with pytest.raises(ValueError, match=r"the whole pool has 2 that are not pinned \(4 are\); shorten it"):
        answer(llm, prompt(2, 40))
    assert answer(llm, [*prompt(1)[:64], *prompt(2, 20)]).num_cached_tokens == 64, "beside its own pinned prefix"


def test_a_reset_forgets_all_that_is_cached_and_is_refused_while_a_request_runs(llm, monkeypatch):
    fresh(llm, monkeypatch, num_blocks=20)
    llm.cache_prefix(prompt(1), pin=True)
    stream = llm.stream(prompt(2), GREEDY)
    next(stream)
    assert llm.reset_prefix_cache() is False and llm.stats()["pinned"] == 4
    stream.close()
    assert llm.reset_prefix_cache() is True
    stats = llm.stats()
    assert (stats["entries"], stats["pinned"], stats["live"], stats["cached_prompts"]) == (0, 0, 0, 0)
    assert answer(llm, prompt(1)).num_cached_tokens == 0 and answer(llm, prompt(1)).num_cached_tokens == 70


@pytest.mark.slow
def test_another_process_restores_what_this_one_saved(llm, tmp_path):
    tokens = answer(llm, prompt(1)).token_ids
    llm.save_prefix_cache(tmp_path / "saved")
    assert call(restored, tmp_path / "saved") == (70, tokens)


def restored(folder) -> tuple[int, tuple[int, ...]]:
    llm = small_llm("qwen3")
    llm.load_prefix_cache(folder)
    (output,) = llm.generate([prompt(1)], GREEDY, progress=False)
    return output.num_cached_tokens, output.token_ids


TWO = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
IDS = np.random.default_rng(5).integers(6, 250, 70).tolist()


def cached(llm, params=TWO, **fields) -> tuple[int, int]:
    (output,) = llm.generate({"prompt_token_ids": IDS, **fields}, params, progress=False)
    assert output.prompt_token_ids == tuple(IDS[-(params.truncate_prompt_tokens or 0) :])
    return output.num_cached_tokens, output.num_cached_media


def test_prompts_of_different_salts_share_nothing_and_those_of_one_salt_share(llm):
    salts = ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
    assert [cached(llm, **salt) for salt in salts] == [(0, 0)] * 3
    assert [cached(llm, **salt) for salt in salts] == [(70, 0)] * 3


def span(digest: bytes, start: int, length: int) -> MediaSpan:
    return MediaSpan(kind="image", digest=digest, start=start, length=length)


def test_an_item_counts_as_cached_only_if_it_lies_wholly_inside(llm):
    items = [span(b"a", 0, 10), span(b"b", 10, 22), span(b"c", 40, 30)]
    assert cached(llm, media=items) == (0, 0)
    assert cached(llm, media=items) == (70, 3), "the prompt is cached as a whole"
    assert cached(llm, media=[*items[:2], span(b"d", 40, 30)]) == (32, 2)
    assert cached(llm, media=[items[0], span(b"e", 10, 22), items[2]]) == (0, 0)
    assert cached(llm) == (0, 0), "text alone is other content"


def test_an_item_that_ends_in_a_partial_tail_is_computed_where_prompts_are_not_kept(llm, monkeypatch):
    monkeypatch.setattr(llm.calls, "_engine", fresh_engine(llm, max_cached_prompts=0))
    items = [span(b"a", 0, 10), span(b"b", 10, 22), span(b"c", 40, 30)]
    assert [cached(llm, media=items) for _ in range(2)] == [(0, 0), (64, 2)]


def test_spans_move_with_a_prompt_that_is_cut_at_its_start(llm):
    cut = dataclasses.replace(TWO, truncate_prompt_tokens=50)
    assert cached(llm, cut, media=[span(b"a", 0, 20), span(b"b", 25, 10)]) == (0, 0)
    assert cached(llm, cut, media=[span(b"b", 25, 10)]) == (50, 1)


@pytest.mark.parametrize(
    ("media", "message"),
    [
        (span(b"a", 65, 6), "the image at tokens 65 to 70 ends beyond the prompt of 70 tokens"),
        (span(b"a", 18, 6), "truncate_prompt_tokens cuts the image at tokens 18 to 23 in two"),
    ],
)
def test_a_span_that_does_not_fit_is_refused_and_nothing_is_left(llm, media, message):
    with pytest.raises(ValueError, match=message):
        cached(llm, dataclasses.replace(TWO, truncate_prompt_tokens=50), media=[media])
    assert not llm.engine.has_unfinished
