"""Recurrences of published models compile for TPUs that are not here, and leave their states where they are."""

from __future__ import annotations

import zlib

import pytest

from tests.aot.described import described

pytestmark = pytest.mark.aot
GENERATIONS = ("v5e", "v5p", "v6e", "v7x")
NAMES = (
    *("qwen3_next", "qwen3_next_tp4", "qwen3_next_tp16", "qwen3_next_mixed", "qwen3_next_float32", "qwen35_48_heads"),
    *("kimi", "kimi_tp8", "granite_small", "granite_small_tp8", "granite_tiny_mixed"),
    *("qwen3_next_tp16_mixed", "qwen35_48_heads_mixed", "falcon_h1_34b_mixed", "nemotron_h_8b_mixed"),
    *("falcon_h1_34b", "falcon_h1_1b", "nemotron_h_8b", "nemotron_h_47b"),
)


def names_of(generation: str, *, in_turn: bool) -> list[str]:
    """Sizes for which it is the generation's turn, which follows from the name, or all the others."""
    turn = {name: GENERATIONS[zlib.crc32(name.encode()) % len(GENERATIONS)] for name in NAMES}
    return [name for name in NAMES if (turn[name] == generation) == in_turn]


@pytest.mark.parametrize("in_turn", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["turn", "rest"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_states_are_changed_in_place_and_a_turn_fits_vector_memory(generation: str, in_turn: bool) -> None:
    names = names_of(generation, in_turn=in_turn)
    found = described("recurrence_program", generation, names)
    assert {name: program["error"] for name, program in found.items() if "error" in program} == {}
    assert list(found) == names
    for name, program in found.items():
        tiles = {"row_recurrence_tiles"} if name.endswith("_mixed") else set()
        assert program["kernels"].keys() == {"row_recurrence"} | tiles, name
        assert max(program["kernels"].values()) < 12 * 2**20, name
        assert program["aliased_bytes"] >= program["pool_bytes"], name
        assert program["pool_copies"] == [], name
