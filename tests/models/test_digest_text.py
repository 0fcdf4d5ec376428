"""The texts of specs stay as earlier versions wrote them, so that journals and saved prefixes go on."""

import dataclasses
import hashlib
import json
from typing import Any

import pytest

from checkpoints import open_checkpoint
from ferrum_jax.engine.startup.model_source import ModelSource
from ferrum_jax.models.spec.digest_text import encoder_text, model_text
from tests.golden_table import GOLDENS

# Made with 958aa87 for models that it knew, and with d4cd2b56 where it wrote another text. See decision 0121.
RECORDED: dict[str, list[str]] = json.loads((GOLDENS / "spec_digests.json").read_text())


def spec_of(golden: str) -> Any:
    return ModelSource.of_checkpoint(open_checkpoint(str(GOLDENS / golden))).spec


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def test_every_golden_has_the_texts_that_are_recorded():
    found = {}
    for name in RECORDED:
        spec = spec_of(name)
        found[name] = list(dict.fromkeys((digest(spec.digest_text()), digest(spec.digest_text(once=True)))))
    assert found == RECORDED


def test_every_golden_of_a_family_has_recorded_texts():
    folders = {str(path.parent.relative_to(GOLDENS)) for path in GOLDENS.rglob("config.json")}
    parts = {name for name in folders if name.rpartition("/")[2][0].isdigit()}  # layers behind an encoder
    assert folders - parts == set(RECORDED)


def grown(value: Any) -> Any:
    """The spec as a later version has it, in which every class of it has a field more."""
    if isinstance(value, tuple):
        return tuple(map(grown, value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    later = dataclasses.make_dataclass(
        type(value).__name__, [("added", int, 7)], bases=(type(value),), frozen=True, kw_only=True
    )
    copy = object.__new__(later)  # checks of the first class know its own types alone
    for field in dataclasses.fields(value):
        object.__setattr__(copy, field.name, grown(getattr(value, field.name)))
    object.__setattr__(copy, "added", 7)
    return copy


@pytest.mark.parametrize("golden", ["gemma4", "kimi_linear", "quantised/w8a8", "vision/qwen3_vl"])
def test_a_new_field_at_its_default_is_in_no_text(golden):
    spec = spec_of(golden)
    later = grown(spec)
    assert model_text(later) == model_text(spec)
    object.__setattr__(later.attention, "added", 8)
    assert model_text(later) != model_text(spec)


def test_a_new_field_of_an_encoder_at_its_default_is_in_no_text():
    spec = spec_of("encoders/modernbert")
    assert encoder_text(grown(spec)) == encoder_text(spec)


def test_labels_of_a_cross_encoder_are_names_alone():
    spec = spec_of("scorers/bert")
    assert dataclasses.replace(spec, labels=None).digest_text() == spec.digest_text()
