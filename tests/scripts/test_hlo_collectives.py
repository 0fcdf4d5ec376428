"""Collectives are counted, with their bytes, and named in the text of a program."""

from scripts.hlo_collectives import count_collectives, unexpected_collectives

TEXT = """
  %all-reduce.1 = f32[16,512]{1,0} all-reduce(%dot), channel_id=1
  ROOT %x = (s32[4]{0}, bf16[2,8]{1,0:T(8,128)(2,1)}) all-to-all(%a, %b), channel_id=2
  %all-gather-start.3 = (bf16[2,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%c), channel_id=3
  %all-gather-done.3 = bf16[8,8]{1,0} all-gather-done(%all-gather-start.3)
  %fusion = f32[4]{0} fusion(%all-reduce.1), calls=%all-reduce-computation
  %reduce-scatter = f8e4m3fn[64]{0} reduce-scatter(%d), channel_id=4
"""


def test_each_is_counted_once_with_the_bytes_that_it_gives():
    counts, total = count_collectives(TEXT)
    assert counts == {"all-reduce": 1, "all-to-all": 1, "all-gather": 1, "reduce-scatter": 1}
    assert total == 16 * 512 * 4 + (4 * 4 + 2 * 8 * 2) + 8 * 8 * 2 + 64


def test_those_of_a_kind_of_which_there_are_too_many_or_too_few_are_named():
    expected = {"all-reduce": 1, "all-to-all": 1, "all-gather": 1, "reduce-scatter": 1}
    assert unexpected_collectives(TEXT, expected) == []
    assert unexpected_collectives(TEXT, expected | {"all-to-all": 0, "collective-permute": 1}) == [
        "1 all-to-all, expected 0",
        "ROOT %x = (s32[4]{0}, bf16[2,8]{1,0:T(8,128)(2,1)}) all-to-all(%a, %b)",
        "0 collective-permute, expected 1",
    ]
