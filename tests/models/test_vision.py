"""Models that see images against the reference: tower, merged embeddings, every layer, greedy tokens."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import open_checkpoint
from ferrum_jax.layers.attention import ForwardContext
from ferrum_jax.layers.image_tokens import ImageTokens
from ferrum_jax.models import registry
from ferrum_jax.models.vision_tower import ImagePatches
from ferrum_jax.prompt import PlacedImage, rope_positions
from tests.models.test_goldens import GOLDENS, NEAR_TIE, assert_close

VISION = GOLDENS / "vision"
NAMES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5_vision", "qwen3_5_moe_vision")
IMAGE = 150
LONGEST = 128  # one shape for all prompts, padding behind


@functools.cache
def load(name: str):
    """(spec, parameters, golden arrays)."""
    checkpoint = open_checkpoint(VISION / name)
    spec = registry.spec_of(checkpoint.config)
    family, targets = registry.family_of(spec.architecture), registry.abstract_parts(spec)[1]
    parameters = checkpoint.load(rules=family.weight_rules(spec), harmless=family.harmless(spec), targets=targets)
    return spec, parameters, dict(np.load(VISION / name / "golden.npz"))


def bound(graph, parameters, prefix: str):
    return registry.bind(graph, {name.removeprefix(prefix): x for name, x in parameters.items()})


def packed(grids, pixels, num_patches: int) -> ImagePatches:
    """Patches of images, one image after the other, padded."""
    places = [np.zeros((5, 0), np.int32)]
    for segment, (_, height, width) in enumerate(grids.tolist(), 1):
        within = np.arange(height * width)
        rows = within // (2 * width) * 2 + within // 2 % 2
        columns = within // 4 % (width // 2) * 2 + within % 2
        same = np.ones_like(rows)
        places.append(np.stack([rows, columns, same * height, same * width, same * segment]))
    joined = np.concatenate(places, axis=1).astype(np.int32)
    rows, columns, heights, widths, segments = np.pad(joined, ((0, 0), (0, num_patches - joined.shape[1])))
    pixels = np.pad(pixels, ((0, num_patches - len(pixels)), (0, 0)))
    return ImagePatches(pixels=pixels, rows=rows, columns=columns, heights=heights, widths=widths, segments=segments)


@functools.cache
def tower(name: str):
    spec, parameters, _ = load(name)
    graph, names = registry.abstract_tower(spec)

    @jax.jit
    def encode(weights, *arrays):
        return bound(graph, weights, "vision.")(ImagePatches(**dict(zip(FIELDS, arrays, strict=True))))

    return lambda patches: np.asarray(
        encode({n: parameters[n] for n in names}, *(getattr(patches, field) for field in FIELDS))
    )


FIELDS = ("pixels", "rows", "columns", "heights", "widths", "segments")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", [1, 2])
@pytest.mark.parametrize("num_patches", [512, 300])  # the second is not a multiple of a tile
def test_the_tower_gives_the_reference_embeddings_of_images_that_are_packed(name, prompt, num_patches):
    golden = load(name)[2]
    wanted = golden[f"tower_{prompt}"]
    found = tower(name)(packed(golden[f"grids_{prompt}"], golden[f"patches_{prompt}"], num_patches))
    assert len(found) == num_patches // 4
    assert_close("tower", found[: len(wanted)], wanted)


@functools.cache
def text(name: str):
    spec, parameters, _ = load(name)
    graph, _ = registry.abstract_parts(spec)
    weights = {name: x for name, x in parameters.items() if not registry.of_tower(name)}

    @jax.jit
    def forward(weights, ids, positions, images):
        seen = {}
        model = registry.bind(graph, weights)
        tokens = ImageTokens(are_here=ids == IMAGE, embeddings=images)
        hidden = model(ids, positions, ForwardContext(observe=seen.__setitem__, images=tokens))
        return seen, model.logits(hidden)

    def run(ids, positions, images):
        rest = LONGEST - len(ids)
        arrays = np.pad(ids, (0, rest)), np.pad(positions, ((0, 0), (0, rest))), np.pad(images, ((0, rest), (0, 0)))
        seen, logits = forward(weights, *arrays)
        return {key: np.asarray(x)[: len(ids)] for key, x in seen.items()}, np.asarray(logits)[: len(ids)]

    return run


def case(name: str, prompt: int, more: np.ndarray | None = None):
    """(ids, positions, embeddings of images) of a golden prompt and the tokens after it."""
    spec, _, golden = load(name)
    ids = golden[f"prompt_{prompt}"]
    positions = rope_positions(placed(name, prompt), 0, len(ids) + (0 if more is None else len(more)))
    ids = ids if more is None else np.concatenate([ids, more])
    assert spec.vision is not None
    images = np.zeros((len(ids), spec.vision.embedding_size), np.float32)
    if f"tower_{prompt}" in golden:
        images[ids == IMAGE] = golden[f"tower_{prompt}"]
    return ids, positions, images


def placed(name: str, prompt: int) -> tuple[PlacedImage, ...]:
    """The images of a golden prompt."""
    golden = load(name)[2]
    starts = np.flatnonzero(golden[f"prompt_{prompt}"] == 152) + 1
    return tuple(
        PlacedImage(start=int(start), length=h * w // 4, digest=b"-", grid=(t, h, w), rope_grid=(t, h // 2, w // 2))
        for start, (t, h, w) in zip(starts, golden[f"grids_{prompt}"].tolist(), strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_positions_are_the_reference_s(name, prompt):
    golden = load(name)[2]
    length = len(golden[f"prompt_{prompt}"])
    wanted = golden.get(f"rope_{prompt}", np.broadcast_to(np.arange(length), (3, length)))
    np.testing.assert_array_equal(rope_positions(placed(name, prompt), 0, length), wanted)
    np.testing.assert_array_equal(rope_positions(placed(name, prompt), 7, length - 3), wanted[:, 7:-3])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_every_layer_gives_the_reference_output(name, prompt):
    golden = load(name)[2]
    seen, logits = text(name)(*case(name, prompt))
    assert_close("embed", seen["embed"], golden[f"embed_{prompt}"])
    for layer, wanted in enumerate(golden[f"layers_{prompt}"]):
        found = seen[f"layers.{layer}"]
        assert_close(f"layer {layer}", found, wanted)
    assert_close("norm", seen["norm"], golden[f"norm_{prompt}"])
    assert_close("logits", logits, golden[f"logits_{prompt}"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_greedy_tokens_are_the_reference_s(name, prompt):
    golden = load(name)[2]
    tokens, best = golden[f"tokens_{prompt}"], golden[f"best_{prompt}"]
    _, logits = text(name)(*case(name, prompt, tokens[:-1]))
    after = logits[-len(tokens) :, :IMAGE]
    clear = best[:, 0] - best[:, 1] >= NEAR_TIE
    np.testing.assert_array_equal(after.argmax(axis=-1)[clear], tokens[clear])
    assert_close("best logits", after.max(axis=-1), best[:, 0])


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_is_served_for_text_alone_leaves_the_tower_out(name):
    config = json.loads((VISION / name / "config.json").read_text())
    spec = registry.spec_of(config)
    assert spec.vision is not None and spec.vision.embedding_size == (3 if "_vl" in name else 1) * spec.hidden_size
    text = registry.without_tower(spec)
    assert not any(registry.of_tower(name) for name in registry.abstract_parts(text)[1])
    family = registry.family_of(spec.architecture)
    parameters = open_checkpoint(VISION / name).load(
        rules=family.weight_rules(text), harmless=family.harmless(text), targets=registry.abstract_parts(text)[1]
    )
    whole = load(name)[1]
    assert all(np.array_equal(x, whole[parameter]) for parameter, x in parameters.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"depth": 2}, "deepstack_visual_indexes"),
        ({"out_hidden_size": 40}, "out_hidden_size is 40"),
        ({"num_position_embeddings": 35}, "must be a square"),
        ({"window_size": 112}, "window_size"),
        ({"num_heads": 8}, "multiple of 4"),
    ],
)
def test_a_tower_that_cannot_be_is_refused_by_name(change, said):
    config = json.loads((VISION / "qwen3_vl" / "config.json").read_text())
    config["vision_config"] |= change
    with pytest.raises(ValueError, match=said):
        registry.spec_of(config)


@pytest.mark.parametrize("name", NAMES)
def test_segments_are_computed_as_if_alone(name):
    golden = load(name)[2]
    grids, pixels = golden["grids_2"], golden["patches_2"]
    whole = tower(name)(packed(grids, pixels, 512))
    start = 0
    for grid in grids:
        count = int(grid.prod())
        alone = tower(name)(packed(grid[None], pixels[start : start + count], 512))[: count // 4]
        np.testing.assert_allclose(whole[start // 4 : (start + count) // 4], alone, rtol=1e-4, atol=1e-5)
        start += count
    assert jnp.isfinite(whole).all()
