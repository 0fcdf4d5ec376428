"""Keys of blocks: stable, chained, and separated by everything that makes KV differ."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import pytest

from ferrum_jax.prefix_cache.keys import extend_keys, root_key
from ferrum_jax.prompt import MediaSpan
from tests.forked import call

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
