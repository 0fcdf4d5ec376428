"""Cache groups with sliding windows: which blocks a row keeps, which a hit needs, and which prefix is whole."""

import pytest

from ferrum_jax.io.ints import most_held, pool_blocks
from tests.scheduling.fake_device import Engine


def _engine(*windows: int | None, **sizes) -> Engine:
    return Engine(windows=windows, **({"num_blocks": 16, "max_num_seqs": 2} | sizes))


def _lose(engine: Engine, group: int, prompt: list[int], *indices: int) -> None:
    """Evict blocks of a prompt from one group, as use by other requests does."""
    pool, request = engine.cache.pools[group], engine.add(prompt, 1)
    keys = engine.cache.keys_of(request)
    engine.scheduler.abort(request.id)
    others = [id for id, key in pool.keyed() if key not in [keys[index] for index in indices]]
    for id in others:
        pool.retain(id)
    for index in indices:
        assert pool.find(keys[index])
    taken = pool.take(pool.num_free)
    pool.release(taken)
    pool.release(others)


@pytest.mark.parametrize("enabled", [True, False])
def test_blocks_behind_a_window_go_back_while_the_request_runs(enabled: bool) -> None:
    """A window of 6 needs 3 blocks of 40 tokens at most; one more is being filled."""
    engine = _engine(None, 6, enabled=enabled, max_num_batched_tokens=4)
    engine.add([1] * 20, 21)
    most = 0
    while not engine.is_idle:
        engine.step()
        running = engine.scheduler.running()
        if running and running[0].num_computed > 20:
            most = max(most, engine.cache.pools[1].num_live)
    assert engine.cache.pools[0].peak_live == 10 and most == 3
    assert engine.cache.metrics().left_behind_blocks == 8
    engine.drain()


@pytest.mark.parametrize(
    ("length", "lost", "hit"),
    [
        (20, (0, 1), 20),  # only the blocks of the window are needed
        (28, (5,), 20),  # blocks 5 and 6 need block 5, the first five do not
        (16, (0, 2), 0),  # blocks 1 and 3 are there, and the window reaches behind each
    ],
)
def test_a_hit_ends_where_the_blocks_of_the_window_are_whole(length: int, lost: tuple[int, ...], hit: int) -> None:
    engine = _engine(None, 6)
    prompt = [i % 5 for i in range(length)]
    engine.hit(prompt, 1)
    _lose(engine, 1, prompt, *lost)
    assert engine.hit([*prompt, 3], 1) == hit


def test_a_rolled_over_prefix_may_be_extended_or_rewound_within_the_window() -> None:
    engine = _engine(None, 9)
    prompt = [i % 5 for i in range(24)]
    engine.hit(prompt, 1)
    _lose(engine, 1, prompt, 0, 1, 2)
    assert engine.hit([*prompt, 1, 2, 3], 1) == 24
    assert engine.hit([*prompt[:22], 9], 1) == 20, "12 to 19 is all that a query at 20 sees"
    assert engine.hit([*prompt[:17], 9], 1) == 0, "a query at 16 sees token 8, which has rolled over"


def test_groups_with_different_windows_resume_where_all_of_them_do() -> None:
    engine = _engine(5, None, 9)
    prompt = [i % 5 for i in range(36)]
    engine.hit(prompt, 1)
    _lose(engine, 2, prompt, 7)
    assert engine.hit([*prompt, 3], 1) == 28
    _lose(engine, 0, prompt, 6)
    assert engine.hit([*prompt[:30], 3], 1) == 24


def test_a_repeat_of_a_cached_prompt_computes_nothing_with_windows_too() -> None:
    engine = _engine(None, 6, max_cached_prompts=4)
    for length in (19, 20):
        prompt = [i % 5 for i in range(length)]
        engine.hit(prompt, 1)
        before = engine.device.num_computed
        assert engine.hit(prompt, 1) == length and engine.device.num_computed == before


def test_a_long_request_runs_beside_others_in_a_small_window_pool() -> None:
    engine = _engine(6, num_blocks=14, max_num_batched_tokens=8)
    first = engine.add([1] * 8, 46)
    for stem in (2, 3, 4):
        engine.add([stem] * 20, 10)
    engine.drain()
    assert engine.cache.metrics().preemptions == 0 and len(first.token_ids) == 54


@pytest.mark.parametrize(("window", "budget", "block_size"), [(6, 4, 4), (1, 2, 1), (9, 16, 4), (5, 7, 2)])
def test_a_row_holds_no_more_of_a_window_than_the_bound_whatever_its_length(window, budget, block_size) -> None:
    most = most_held(window, budget, block_size)
    sizes = {"num_blocks": 64 // block_size, "window_blocks": most, "block_size": block_size, "max_num_seqs": 1}
    engine = _engine(None, window, max_num_batched_tokens=budget, **sizes)
    engine.add([1] * 40, 24)
    engine.drain()
    assert engine.cache.metrics().preemptions == 0 and engine.cache.pools[1].peak_live <= most < 64 // block_size + 8


def test_rows_of_any_length_neither_wait_nor_are_preempted_for_a_windows_pool() -> None:
    sizes = {"block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 8}
    held = pool_blocks(6, 1000, keeps_cache=False, **sizes)
    engine = _engine(None, 6, num_blocks=60, window_blocks=held, **sizes)
    for stem in range(5):
        engine.add([stem] * 40, 20)
    engine.drain()
    metrics = engine.cache.metrics()
    assert (metrics.preemptions, metrics.refusals) == (0, 0) and held < 3 * 15
    assert pool_blocks(6, 1000, keeps_cache=True, **sizes) == 2 * held, "as much again for prefixes that are kept"
    assert (
        pool_blocks(None, 1000, keeps_cache=True, **sizes) == 1000 and pool_blocks(6, 9, keeps_cache=True, **sizes) == 9
    )


def test_a_chunk_that_lacks_window_blocks_waits_for_others_or_preempts_them() -> None:
    """Three long prompts in a pool for one: nothing overtakes the first, and all end."""
    most = most_held(9, 12, 4)
    engine = _engine(None, 9, num_blocks=48, window_blocks=most, max_num_seqs=3, max_num_batched_tokens=12)
    for stem in range(4):
        engine.add([stem] * 40, 20)
    engine.drain()
    assert engine.cache.metrics().preemptions + engine.cache.metrics().refusals > 0
