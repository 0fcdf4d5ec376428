"""Why a model with a tower cannot be served as a config says."""

from __future__ import annotations

from ferrum_jax.config import EngineConfig
from ferrum_jax.models.spec import ModelSpec, VisionSpec


def tower_refusals(spec: ModelSpec, config: EngineConfig, *, kv_dtype: str, num_rows: int) -> list[str]:
    """The reasons; none for a model that reads text alone. num_rows: max_num_seqs."""
    found = []
    if spec.vision is not None and config.max_adapters:
        found.append(
            f"max_adapters is {config.max_adapters}, and a model that sees images takes no adapters yet; set "
            "max_image_tokens=0 to serve it for text alone"
        )
    if spec.sound is not None and config.max_adapters:
        found.append(
            f"max_adapters is {config.max_adapters}, and a model that hears takes no adapters yet; set it to 0"
        )
    if spec.cross_layers and kv_dtype == "int8":
        found.append(
            "kv_dtype is 'int8', and this model's layers attend to a clip, whose keys are kept without scales; take "
            "'auto' or an fp8"
        )
    if spec.vision is not None:
        found += _image_refusals(config, spec.vision, num_rows)
    return found


def _image_refusals(config: EngineConfig, vision: VisionSpec, num_rows: int) -> list[str]:
    """Why images of one size have no room, or none in one step where their tokens see each other."""
    patches, tokens = vision.patches_of_all, vision.tokens_of_all
    if patches is None or tokens is None:
        return []
    least = tokens + num_rows - 1  # beside the tokens of all other rows
    found = [
        f"{name} is {value}, and an image of this model has {count} {what}; raise it to {count} or more, or set "
        "max_image_tokens=0 to serve the text alone"
        for name, value, count, what in (
            ("max_image_patches", config.max_image_patches, patches, "patches"),
            ("max_image_tokens", config.max_image_tokens, tokens, "tokens"),
        )
        if value < count
    ]
    if vision.sees_both_ways and config.max_num_batched_tokens < least:
        found.append(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}, and a step must hold the {tokens} tokens of "
            f"an image, which see each other, beside those of {num_rows - 1} other rows; raise it to {least} or "
            "more, lower max_num_seqs, or set max_image_tokens=0 to serve the text alone"
        )
    return found
