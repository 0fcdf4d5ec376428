"""The table of published models and what is rented: each plans with defaults, or says in a sentence what it lacks.

By shapes alone. The fast tests have one model of each kind on one TPU and on four; slow ones have the smallest of every
family, and one has all.
"""

import itertools
import re

import pytest

from scripts import csv_tables
from scripts import slices_page as slices
from tests.marks import slow

TELLING = ("v6e-1", "v6e-4")
# Dense, experts, states, images, sounds, an encoder, and one that fits nowhere.
KINDS = ("Qwen3-0.6B", "gpt-oss-20b", "LFM2-1.2B", "Qwen3-VL-2B", "Whisper-tiny", "all-MiniLM-L6", "DeepSeek-V3")
TOO_SMALL = r"it does not fit these \d+ devices: the nearest mesh, [\w=,]+, is [\d.]+ GiB too small a device, .*"


def on_page(model: str) -> dict[str, str]:
    """The tables' cells of a model, by target."""
    for head, *rows in map(csv_tables.read, ("slices", "encoder_slices")):
        for row in rows:
            if row[0] == model:
                return dict(zip(head[1:], row[1:], strict=True))
    return {}


@pytest.mark.parametrize("model", [model if model in KINDS else slow(model) for model in slices.smallest_of_families()])
def test_every_family_plans_with_defaults_or_is_too_large_as_the_page_says(model):
    page = on_page(model)
    assert set(page) == set(slices.TARGETS)
    for target in TELLING:
        assert page[target] == slices.cell(model, target), "run python -m scripts.slices_page"
        refusal = slices.refusal(model, target)
        assert (refusal == "") == (page[target] != "–") and (not refusal or re.fullmatch(TOO_SMALL, refusal))


@pytest.mark.slow
@pytest.mark.long
def test_every_published_model_plans_on_every_slice_or_says_that_memory_is_too_small():
    csv_tables.write(slices.tables(), "slices_page", check=True)
    models = [*slices.models(), *slices.PUBLISHED_ENCODERS]
    for model, target in itertools.product(models, slices.TARGETS):
        refusal = slices.refusal(model, target)
        assert not refusal or re.fullmatch(TOO_SMALL, refusal), (model, target)
