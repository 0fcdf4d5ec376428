"""Models whose config has its text model under `text_config`: that part of them, or a tower beside it.

The text part alone is served as a text model, under the architecture of the whole. Its tensors have a prefix of their
own, and what concerns images alone is left.
"""

from collections.abc import Callable, Iterable

from checkpoints.rules import Rule
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.spec import ModelSpec, SoundSpec, VisionSpec

IMAGES = ("vision_tower.*", "multi_modal_projector.*", "mm_projector.*")  # tensors that concern images alone
_IN_ALL = (*IMAGES, *(f"model.{name}" for name in IMAGES))  # in published files, and in the reference's
_INHERITED = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")


def in_language_model(name: str) -> str:
    """The name that a tensor of a text model has in a part of the whole."""
    return f"language_model.{name}"


def beside_a_tower(name: str) -> str:
    """The name that a tensor of a text model has beside those of images, in later families."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def text_part_from(reader: ConfigReader, of_images: Iterable[str], text: Family, *, may_tie: bool = False) -> ModelSpec:
    """ModelSpec of the text part. of_images: keys beside `text_config` that concern images alone.

    The whole says whether the head is tied; the part may where it is silent, and else only where no head is stored.
    may_tie: it may say so of a stored one too.

    Raises ValueError naming what is missing or not understood.
    """
    reader.leave(*of_images)
    inherited = {key: reader.get(key, None) for key in _INHERITED}
    known = {key: value for key, value in inherited.items() if value is not None}
    config = known | reader.require("text_config", like={})
    tied = inherited["tie_word_embeddings"]
    if tied is not None:
        config["tie_word_embeddings"] = tied
    elif not may_tie and config.get("tie_word_embeddings") is True:
        del config["tie_word_embeddings"]
    reader.finish()
    if inherited["eos_token_id"] is not None:  # that of the part names no end of turn
        config["eos_token_id"] = inherited["eos_token_id"]
    return text.spec_from_config(config, reader.architecture)


def text_part_of(text: Family, of_images: Iterable[str], *, models: str, notes: str) -> Family:
    """The architecture that sees images, served by its text part alone."""
    return with_towers(
        text,
        lambda reader: text_part_from(reader, of_images, text),
        of_tower=_IN_ALL,
        rename=in_language_model,
        models=models,
        notes=notes,
    )


def with_towers(
    text: Family,
    read: Callable[[ConfigReader], ModelSpec],
    tower_rules: Callable[[VisionSpec], tuple[Rule, ...]] = lambda spec: (),
    *,
    of_tower: tuple[str, ...] = (),
    sound_rules: Callable[[SoundSpec], tuple[Rule, ...]] = lambda spec: (),
    of_sounds: tuple[str, ...] = (),
    beside_tower: tuple[str, ...] = (),
    rename: Callable[[str], str] = beside_a_tower,
    models: str,
    notes: str,
) -> Family:
    """The architecture that sees images by a tower, if its spec has one, and hears by another. read: the spec of the
    whole.

    of_tower, of_sounds: patterns of the towers' tensors, which a model that is served without them leaves over.
    beside_tower: what those that have a tower leave over. rename: from a name in the text model.
    """

    def rules(spec: ModelSpec) -> tuple[Rule, ...]:
        seen = () if spec.vision is None else tower_rules(spec.vision)
        heard = () if spec.sound is None else sound_rules(spec.sound)
        return (*(rule.renamed(rename) for rule in text.weight_rules(spec)), *seen, *heard)

    def harmless(spec: ModelSpec) -> tuple[str, ...]:
        left = (*(of_tower if spec.vision is None else beside_tower), *(of_sounds if spec.sound is None else ()))
        return (*map(rename, text.harmless(spec)), *left)

    return Family(read=read, weight_rules=rules, harmless=harmless, mtp=text.mtp, models=models, notes=notes)
