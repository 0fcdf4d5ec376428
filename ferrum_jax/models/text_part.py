"""The text part of a model that sees images: served as a text model, under the architecture of the whole.

Its config stands under `text_config`, its tensors have a prefix of their own, and what concerns images alone is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models import decoder
from ferrum_jax.models.config_reader import ConfigReader
from ferrum_jax.spec import ModelSpec

_PREFIX = "language_model."
IMAGES = ("vision_tower.*", "multi_modal_projector.*", "mm_projector.*")  # tensors that concern images alone
_INHERITED = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")


def text_part_from(
    config: Mapping[str, Any], of_images: Iterable[str], spec_from_text: Callable[[Mapping[str, Any]], ModelSpec]
) -> ModelSpec:
    """ModelSpec of the text part. of_images: keys beside `text_config` that concern images alone.

    Raises ValueError naming what is missing or not understood.
    """
    reader = ConfigReader(config)
    for key in of_images:
        reader.get(key, None)
    inherited = {key: reader.get(key, None) for key in _INHERITED}
    known = {key: value for key, value in inherited.items() if value is not None}
    text = known | reader.require("text_config", like={})
    reader.finish()
    if inherited["eos_token_id"] is not None:  # that of the part names no end of turn
        text["eos_token_id"] = inherited["eos_token_id"]
    (architecture,) = config["architectures"]
    return dataclasses.replace(spec_from_text(text), architecture=architecture)


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of the text part, and the Hugging Face tensor it comes from."""
    return of_text(decoder.weight_rules(spec))


def of_text(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Rules of a text model as those of a text part."""
    return tuple(rule.renamed(lambda name: _PREFIX + name) for rule in rules)


def harmless_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """Patterns of tensors that the text part does not need: those of images, and what a Decoder may leave over."""
    return left_over(decoder.harmless_tensors(spec))


def left_over(patterns: Iterable[str]) -> tuple[str, ...]:
    """Tensors of images, and of a text part what a text model may leave over."""
    return (*IMAGES, *(_PREFIX + pattern for pattern in patterns))
