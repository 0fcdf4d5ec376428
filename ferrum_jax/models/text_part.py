"""Models whose config has its text model under `text_config`: that part of them, or a tower beside it.

The text part alone is served as a text model, under the architecture of the whole. Its tensors have a prefix of their
own, and what concerns images alone is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from checkpoints.rules import Rule
from ferrum_jax.models import tensors
from ferrum_jax.models.config_reader import ConfigReader
from ferrum_jax.models.family import Family
from ferrum_jax.spec import ModelSpec

_PREFIX = "language_model."
IMAGES = ("vision_tower.*", "multi_modal_projector.*", "mm_projector.*")  # tensors that concern images alone
_INHERITED = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")


def text_part_from(reader: ConfigReader, of_images: Iterable[str], text: Family) -> ModelSpec:
    """ModelSpec of the text part. of_images: keys beside `text_config` that concern images alone.

    Raises ValueError naming what is missing or not understood.
    """
    reader.leave(*of_images)
    inherited = {key: reader.get(key, None) for key in _INHERITED}
    known = {key: value for key, value in inherited.items() if value is not None}
    config = known | reader.require("text_config", like={})
    reader.finish()
    if inherited["eos_token_id"] is not None:  # that of the part names no end of turn
        config["eos_token_id"] = inherited["eos_token_id"]
    return text.spec_from_config(config, reader.architecture)


def text_part_of(text: Family, of_images: Iterable[str], *, models: str, notes: str) -> Family:
    """The architecture that sees images, of which the text part alone is served."""
    return dataclasses.replace(
        text,
        read=lambda reader: text_part_from(reader, of_images, text),
        defaults={},
        respell=dict,
        weight_rules=lambda spec: of_text(text.weight_rules(spec)),
        harmless=lambda spec: left_over(text.harmless(spec)),
        models=models,
        notes=notes,
    )


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of the text part, and the Hugging Face tensor it comes from."""
    return of_text(tensors.weight_rules(spec))


def of_text(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Rules of a text model as those of a text part."""
    return tuple(rule.renamed(lambda name: _PREFIX + name) for rule in rules)


def left_over(patterns: Iterable[str]) -> tuple[str, ...]:
    """Tensors of images, and of a text part what a text model may leave over."""
    return (*IMAGES, *(_PREFIX + pattern for pattern in patterns))


def beside_a_tower(name: str) -> str:
    """The name that a tensor of a text model has beside those of images."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
