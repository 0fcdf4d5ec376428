"""Keys of blocks: stable, chained, and separated by everything that makes KV differ."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ferrum_jax.scheduling.prefix import extend_keys, root_key

_ROOT = {"fingerprint": b"model", "kv_dtype": "float32", "block_size": 4}
_TOKENS = [5, 3, 70000, 1, 0, 2, 9, 4, 8, 8, 8, 8, 1]


def _keys(tokens: list[int], num_blocks: int = 3, extra=None, **root) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key(**(_ROOT | root)), tokens, num_blocks, 4, extra)
    return keys


def test_the_same_prefix_gives_the_same_keys_in_another_process() -> None:
    program = (
        "from ferrum_jax.scheduling.prefix import *\n"
        f"keys = []\nextend_keys(keys, root_key(**{_ROOT!r}), {_TOKENS!r}, 3, 4)\nprint(*(k.hex() for k in keys))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.split() == [key.hex() for key in _keys(_TOKENS)]


def test_the_keys_of_this_version_are_these() -> None:
    # They are written into saved caches: a change here makes every saved prefix a miss.
    assert [key.hex() for key in _keys(_TOKENS)] == [
        "11ad3cd2c47dbd2cf368b4897aa45a05",
        "aef47c06039e418b415bf80f09e1fcb2",
        "fedcebea9d530417ff6a023f420d81ae",
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


def test_keys_grown_token_by_token_equal_keys_made_at_once() -> None:
    grown: list[bytes] = []
    for length in range(len(_TOKENS) + 1):
        extend_keys(grown, root_key(**_ROOT), _TOKENS[:length], length // 4, 4)
    assert grown == _keys(_TOKENS)


def test_model_dtype_block_size_adapter_and_salt_each_separate() -> None:
    roots = [
        root_key(**(_ROOT | change))
        for change in (
            {},
            {"fingerprint": b"other"},
            {"kv_dtype": "bfloat16"},
            {"block_size": 8},
            {"adapter": "a"},
            {"salt": b"a"},
            {"adapter": "aa"},
            {"adapter": "a", "salt": b"a"},
        )
    ]
    assert len(set(roots)) == len(roots)
    assert len({_keys(_TOKENS, salt=salt)[0] for salt in (b"", b"x", b"y")}) == 3


def test_extra_keys_their_number_and_their_block_each_change_the_key_from_there_on() -> None:
    plain = _keys(_TOKENS)
    variants = [
        _keys(_TOKENS, extra=extra)
        for extra in ({1: (b"image",)}, {1: (b"imag", b"e")}, {1: (b"image", b"")}, {1: (b"video",)}, {2: (b"image",)})
    ]
    assert all(keys[0] == plain[0] for keys in variants)
    assert len({keys[2] for keys in [plain, *variants]}) == 6
    assert variants[4][1] == plain[1] and len({keys[1] for keys in [plain, *variants[:4]]}) == 5
