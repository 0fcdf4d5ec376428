"""Keys of blocks: stable, chained, and separated by everything that makes KV differ.

Pinned prefixes stay for prompts that begin with them, in every kind of cache group, until they are unpinned.
"""

from array import array
from collections.abc import Iterable

import pytest

from ferrum_jax.core.kv_cache.keys import extend_keys, root_key
from ferrum_jax.core.request import Request
from ferrum_jax.inputs.prompt import MediaSpan
from tests.forked import call
from tests.scheduling.fake_device import Engine

_ROOT = {"fingerprint": b"model", "kv_dtype": "float32", "block_size": 4}
_TOKENS = array("i", [5, 3, 70000, 1, 0, 2, 9, 4, 8, 8, 8, 8, 1])


def _keys(tokens: Iterable[int], num_blocks: int = 3, media=(), **root) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key(**(_ROOT | root)), array("i", tokens), num_blocks, 4, media)
    return keys


def test_the_same_prefix_gives_the_same_keys_in_another_process() -> None:
    assert call(_keys, _TOKENS) == _keys(_TOKENS)


def test_the_keys_of_this_version_are_these() -> None:
    # They are written into saved caches: a change here makes every saved prefix a miss.
    assert [key.hex() for key in _keys(_TOKENS)] == [
        "34409d0c12f252acf19bcf2edf9e47aa",
        "5387978155cea7c84400732240e80a9b",
        "9be4c4dd5ae90db660fa8fa737d6c377",
    ]


@pytest.mark.parametrize("place", range(12))
def test_a_change_in_one_block_changes_that_key_and_all_after_it(place: int) -> None:
    changed = list(_TOKENS)
    changed[place] += 1
    same = [a == b for a, b in zip(_keys(_TOKENS), _keys(changed), strict=True)]
    assert same == [index < place // 4 for index in range(3)]


def test_a_partial_tail_has_no_key() -> None:
    with pytest.raises(AssertionError, match="4 blocks of 4 exceed 13 tokens"):
        _keys(_TOKENS, num_blocks=4)


def test_model_dtype_block_size_adapter_and_salt_each_separate() -> None:
    roots = [
        root_key(**(_ROOT | change))
        for change in (
            *({}, {"fingerprint": b"other"}, {"kv_dtype": "bfloat16"}, {"block_size": 8}, {"adapter": "a"}),
            *({"salt": b"a"}, {"adapter": "aa"}, {"adapter": "a", "salt": b"a"}),
        )
    ]
    assert len(set(roots)) == len(roots)
    assert len({_keys(_TOKENS, salt=salt)[0] for salt in (b"", b"x", b"y")}) == 3


def _span(start: int, length: int, digest: bytes = b"cat", kind: str = "image") -> MediaSpan:
    return MediaSpan(kind=kind, digest=digest, start=start, length=length)


def test_media_digest_kind_span_and_place_each_change_the_keys() -> None:
    plain = _keys(_TOKENS)
    variants = [
        _keys(_TOKENS, media=[span])
        for span in (_span(5, 2), _span(5, 2, b"dog"), _span(5, 2, kind="audio"), _span(5, 3), _span(6, 2), _span(5, 6))
    ]
    assert all(keys[0] == plain[0] for keys in variants), "the text before is the same"
    assert all(len({keys[i] for keys in [plain, *variants]}) == 7 for i in (1, 2))


def test_the_same_media_at_the_same_place_gives_the_same_keys() -> None:
    spans = [_span(i % 12, 1 + i % 5, bytes([i + 1])) for i in range(100)]
    keys = _keys(_TOKENS, media=spans)
    assert keys == _keys(_TOKENS, media=spans[::-1])
    assert all(_keys(_TOKENS, media=spans[:i] + spans[i + 1 :])[2] != keys[2] for i in range(100))


@pytest.mark.parametrize("spans", [(), (_span(2, 4), _span(8, 5, b"dog"))], ids=["text", "media"])
def test_keys_grown_token_by_token_equal_keys_made_at_once(spans) -> None:
    grown: list[bytes] = []
    for length in range(len(_TOKENS) + 1):
        extend_keys(grown, root_key(**_ROOT), _TOKENS[:length], length // 4, 4, spans)
    assert grown == _keys(_TOKENS, media=spans)


def test_media_behind_a_block_or_before_it_do_not_touch_its_own_content() -> None:
    assert _keys(_TOKENS, media=[_span(12, 1)]) == _keys(_TOKENS)
    first = _keys(_TOKENS, media=[_span(0, 4)])
    extend = [first[0]]
    extend_keys(extend, b"", _TOKENS, 3, 4)
    assert extend == first


PREFIX = [(i * i + i // 5) % 5 for i in range(40)]
KINDS = {"plain": {}, "windows": {"windows": (None, 6)}, "recurrent": {"max_snapshots": 4}}


def _engine(**sizes) -> Engine:
    return Engine(**({"num_blocks": 24, "max_num_seqs": 2, "max_cached_prompts": 2} | sizes))


def _cached(engine: Engine, prompt: list[int], max_tokens: int = 2) -> int:
    request = engine.add(prompt, max_tokens)
    while request.finish_reason is None:
        engine.step()
    return request.num_cached_tokens


def _pin(engine: Engine, prompt: list[int]) -> None:
    length = len(prompt)
    engine.scheduler.pin_prefix(
        Request(id=-1, token_ids=array("i", prompt), num_prompt_tokens=length, max_total_tokens=length + 1)
    )


def _others(engine: Engine) -> None:
    """A dozen prompts, more than any pool holds."""
    for stem in range(12):
        _cached(engine, [stem % 5, stem // 5, *[stem % 3] * 30], 6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [18, 16])
def test_a_pinned_prefix_is_hit_by_what_begins_with_it_and_by_itself_whatever_ran(kind: str, length: int) -> None:
    engine = _engine(**KINDS[kind])
    _cached(engine, PREFIX[:length], 1)
    _pin(engine, PREFIX[:length])
    _others(engine)
    assert _cached(engine, [*PREFIX[:length], 4, 4]) == 16
    assert _cached(engine, PREFIX[:length]) >= 16
    engine.scheduler.unpin()
    _others(engine)
    assert _cached(engine, PREFIX[:length]) == 0
    engine.drain()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_cached_as_a_whole_is_not_pinned(kind: str) -> None:
    engine = _engine(**KINDS[kind])
    _cached(engine, PREFIX[:18], 1)
    _others(engine)
    with pytest.raises(ValueError, match="the prefix is not cached as a whole, so it cannot be pinned"):
        _pin(engine, PREFIX[:18])
    engine.drain()


def test_more_snapshots_than_are_kept_beside_the_rows_are_not_pinned() -> None:
    engine = _engine(max_snapshots=2, num_blocks=40, max_cached_prompts=0)
    for stem in range(2):
        _cached(engine, [stem, *PREFIX[:17]], 1)
        _pin(engine, [stem, *PREFIX[:17]])
    _cached(engine, [2, *PREFIX[:17]], 1)
    with pytest.raises(ValueError, match="1 more state snapshots pinned make 3, more than max_state_snapshots, 2"):
        _pin(engine, [2, *PREFIX[:17]])
    assert len(engine.cache.pins.ids(engine.cache.states.pool)) == 2 and engine.cache.metrics().pinned == 8
    _pin(engine, [1, *PREFIX[:17]])  # it is pinned already
    rows = [engine.add([stem, *PREFIX[:17]], 6) for stem in range(3, 5)]
    engine.step()
    assert all(row.slot for row in rows), "a pin takes the state of no row"
    engine.scheduler.unpin()
    engine.drain()


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_forgets_pinned_prefixes_too(kind: str) -> None:
    engine = _engine(**KINDS[kind])
    _cached(engine, PREFIX[:18], 1)
    _pin(engine, PREFIX[:18])
    engine.scheduler.reset()
    assert engine.cache.metrics().pinned == engine.cache.metrics().entries == 0
    assert _cached(engine, [*PREFIX[:18], 4]) == 0
    engine.drain()
